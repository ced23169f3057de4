"""Any model of transformers, by the seams that transformers leaves: its layers stay Hugging Face's.

    patch.py       what of a model is ours, tried on a specimen of it, and said in one line
    seam.py        each layer as a checkpoint whose input waits on the GPU or on the host
    attention.py   our attention behind transformers' AttentionInterface: no (S, S) mask
    masks.py       the documents and the window that a mask of transformers means
    loss.py        lm_head and cross-entropy in chunks, inside the model's own forward
    probe.py       our attention and our loss beside the model's own, on two short rows
    measured.py    what a layer of each kind takes, forward and backward, at two lengths
    runtime.py     what a patched model carries: options, store, loss

A model that longctx has a family for runs faster with the schedule: here a layer computes what
Hugging Face's does, twice, and holds what that holds. What is promised is memory.
"""
