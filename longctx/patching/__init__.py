"""The doors to a patched model: one instance, every instance of a class, and kernels as modules.

    patch.py        patches one instance of a transformers model
      forwards        the forwards that replace Hugging Face's              input_ids -> loss
      families        how a family's layers differ, and where their weights are
      runtime         the instance's backend and activation store, and a batch's Schedule
      layer           one decoder layer, forward and backward by hand       x -> y, dy -> dx
      head            lm_head and cross-entropy in chunks                   x -> loss, dx

    embed   layer 0            layer 1                        norm    lm_head + cross-entropy
    ids -> x ---------> x -----------------> ... ----------> x ---> n -----------> loss
                 |            |                                                     |
                 v keep x, o  v keep x, o: GPU or pinned host (longctx/memory)      |
                 |            |                                                     |
           <-------- dx <----------- dx <------- ... <------- dx <-- dn <-----------+

docs/schedule.md explains a layer in ten minutes, with a picture of which tensors exist when.
Letters, here and in kernels/: T tokens of a batch (B rows of S), D hidden size, F intermediate
size, H query heads, K key/value heads, d head size, V vocabulary, L tokens of one document.
"""
