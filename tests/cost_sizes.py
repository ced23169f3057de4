"""Llama-3.1-8B's dimensions, which the tests of the count and of the search share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from longctx.cost.dims import LayerKind
from longctx.cost.kept import NOTHING, ORDER, WORDS, Keep
from longctx.cost.sizes import Sizes, kinds_of
from longctx.layer.specs.attention_spec import NORM1, AttentionSpec
from longctx.layer.specs.mlp_spec import NORM2, MlpSpec

ATTENTION = AttentionSpec(hidden=4096, heads=32, kv_heads=8, head_dim=128, scale=128**-0.5)
MLP = MlpSpec(hidden=4096, width=14336)
LLAMA_LAYER = LayerKind(parts=(ATTENTION, MLP))
MATRICES = 218_103_808
"""Elements of its matrices."""


def of_layers(layers: Iterable[LayerKind], **changes: Any) -> Sizes:
    """Returns the sizes of a model of Llama-3.1-8B's with these layers."""
    sizes: dict[str, Any] = dict(hidden=4096, vocab=128256, itemsize=2, trained=8_030_261_248)
    return Sizes(**kinds_of(layers), **sizes | changes)


def llama_8b(layers: int = 32, **changes: Any) -> Sizes:
    """Returns Llama-3.1-8B's sizes with changes, of its layers or of the model."""
    of_model = {field.name for field in fields(Sizes)}
    own = {name: value for name, value in changes.items() if name not in of_model}
    return of_layers(layers * [layer(**own)], **{k: changes[k] for k in changes if k not in own})


def layer(post_norms: bool = False, **changes: Any) -> LayerKind:
    """Returns a layer of Llama-3.1-8B with changes: of the fields of its attention, of its MLP, or
    of the layer, each by its name."""
    of = {k: {f.name for f in fields(k)} for k in (AttentionSpec, MlpSpec)}
    parts = tuple(
        replace(part, **{k: v for k, v in changes.items() if k in of[type(part)]})
        for part in (ATTENTION, MLP)
    )
    if post_norms:
        norms = NORM1 | {"post1": "post"}, NORM2 | {"post2": "post"}
        parts = tuple(replace(part, norms=own) for part, own in zip(parts, norms, strict=True))
    rest = {k: v for k, v in changes.items() if not any(k in names for names in of.values())}
    return LayerKind(parts=parts, **rest)


LLAMA_8B = llama_8b()
SETS = {word: frozenset(ORDER[: i + 1]) for i, word in enumerate(WORDS)}
"""The sets that the words of --keep stand for in such a layer."""


def keep_of(kept: str, hosted: str | None = None) -> Keep:
    """Returns a Keep from the words of --keep."""
    return Keep(SETS[kept], NOTHING if hosted is None else SETS[hosted])
