"""The path of x: what happens to a batch between its tokens and the gradients of every weight.

    patch.py        what one instance of a transformers model gets
      forwards.py     its forwards, in the places of Hugging Face's         input_ids -> loss
      logits.py       logits that are computed when they are read
      families.py     what a family's layers do, and where their weights are
      strangers.py    finds what the schedule would pass by
      adapters.py     what PEFT's LoRA layers hold
      runtime.py      what the instance carries: backend, activation store -> a batch's Schedule
      longctx/layer   one decoder layer, forward and backward by hand       x -> y, dy -> dx
      loss.py         lm_head and cross-entropy in chunks                   x -> loss, dx

    embed   layer 0            layer 1                        norm    lm_head + cross-entropy
    ids -> x ---------> x -----------------> ... ----------> x ---> n -----------> loss
                 |            |                                                     |
                 v keep x, o  v keep x, o: GPU or pinned host (longctx/memory)      |
                 |            |                                                     |
           <-------- dx <----------- dx <------- ... <------- dx <-- dn <-----------+

docs/schedule.md walks through a layer in ten minutes, with a picture of what exists when.
Letters, here and in kernels/: T tokens of a batch (B rows of S), D hidden size, F intermediate
size, H query heads, K key/value heads, d head size, V vocabulary, L tokens of one document.
"""
