"""Llama-3.1-8B's dimensions, which the tests of the count and of the search share."""

from longctx.cost.sizes import Sizes

LLAMA_8B = Sizes(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    itemsize=2,
    trained=8_030_261_248,
)
