"""What lives where, and when it moves. Knows tensors, sizes and rates, not models.

plan.py       arithmetic: how a batch is cut, what a layer keeps, what fits on the GPU
ladder.py     what each layer keeps for backward, and where
rates.py      what this GPU multiplies and copies in a second, kept on disk
machine.py    what this machine may give
slab.py       page-locked host memory of an exact size
store.py      what layers keep from forward to backward, in the slab or on the GPU
states.py     a model's weights, AdamW states and gradients by block
settle.py     everything that waits on the host, in one slab
stream.py     blocks over the link, updated on the way
gradients.py  what backward delivers: sums, norm, the way to the host
optimizer.py  exact AdamW over all that, as a torch optimizer
"""
