"""Patches any model of transformers at the hooks that transformers has; layers stay Hugging Face's.

    patch.py       patches a model with the parts that work on a specimen of it
    seam.py        each layer as a checkpoint whose input waits on the GPU or on the host
    attention.py   our attention behind transformers' AttentionInterface: no (S, S) mask
    masks.py       the documents and the window that a mask of transformers means
    loss.py        lm_head and cross-entropy in chunks, inside the model's own forward
    probe.py       compares our attention and our loss with the model's own, on two short rows
    measured.py    measures a layer of each kind, forward and backward, at two lengths
    runtime.py     the state of a patched model: options, store, loss

A model of a family that longctx knows runs faster with the schedule: here a layer runs Hugging
Face's forward twice, and holds the same activations as Hugging Face's while it runs. The gain is
memory.
"""
