"""Decides where everything of a step lives, and moves it. It knows tensors, sizes and rates, no
models.

    what lives where
    ladder.py      the search: what layers keep, where, and where states live
    candidates.py  the ladders that the search scores
    levels.py      the ways to place states, as a row of levels
    place.py       where a block's tensors live, and their bytes in a step
    pending.py     what torch's optimizers and engines add in the first step
    machine.py     the host memory that a run may take
    rates.py       the rates of this GPU, measured and kept on disk

    what moves
    slab.py        page-locked host memory of an exact size
    store.py       saved activations, in the slab or on the GPU
    states.py      a model's weights, AdamW states and gradients, by block
    settle.py      puts everything that waits on the host into one slab
    stream.py      copies blocks over the link, and updates them on the way
    gradients.py   what backward delivers: sums, norm, the way to the host
    held.py        a gradient on the host, as `parameter.grad`
    guard.py       tensors that nobody may touch while their values move
    optimizer.py   exact AdamW over all of that, as a torch optimizer
"""
