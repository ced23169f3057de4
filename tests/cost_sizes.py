"""Llama-3.1-8B's dimensions, which the tests of the count and of the search share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from longctx.cost.dims import LayerKind
from longctx.cost.kept import NOTHING, ORDER, WORDS, Keep
from longctx.cost.sizes import Sizes, kinds_of
from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.mlp import MLP

LLAMA_LAYER = LayerKind(
    blocks=(SelfAttention, MLP), intermediate=14336, heads=32, kv_heads=8, head_dim=128
)
MATRICES = 218_103_808
"""Elements of its matrices."""


def of_layers(layers: Iterable[LayerKind], **changes: Any) -> Sizes:
    """Returns the sizes of a model of Llama-3.1-8B's with these layers."""
    sizes: dict[str, Any] = dict(hidden=4096, vocab=128256, itemsize=2, trained=8_030_261_248)
    return Sizes(**kinds_of(layers), **sizes | changes)


def llama_8b(layers: int = 32, **changes: Any) -> Sizes:
    """Returns Llama-3.1-8B's sizes with changes, of its layers or of the model."""
    of_kind = {field.name for field in fields(LayerKind)}
    kind = replace(LLAMA_LAYER, **{k: v for k, v in changes.items() if k in of_kind})
    return of_layers(layers * [kind], **{k: v for k, v in changes.items() if k not in of_kind})


LLAMA_8B = llama_8b()
SETS = {word: frozenset(ORDER[: i + 1]) for i, word in enumerate(WORDS)}
"""The sets that the words of --keep stand for in such a layer."""


def keep_of(kept: str, hosted: str | None = None) -> Keep:
    """Returns a Keep from the words of --keep."""
    return Keep(SETS[kept], NOTHING if hosted is None else SETS[hosted])
