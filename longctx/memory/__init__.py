"""What lives where, and when it moves. Knows tensors, sizes and rates, not models.

plan.py    arithmetic: how a batch is cut, what a layer keeps, how much of it fits on the GPU
slab.py    page-locked host memory of an exact size
store.py   what layers keep from forward to backward, in the slab or on the GPU
"""
