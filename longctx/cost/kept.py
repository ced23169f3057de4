"""Which saved activations layers keep, and where: a `Keep` for each layer makes a `Ladder`.

    name      keeps                                 a token of Llama-3.1-8B   spares backward
    x         the layer's input                     1 unit (2 D bytes)
    o         attention's output, its log-sum-exp   1                         attention; q k v once
    h         the residual stream after attention   1                         the matmul of o
    q k v     q, k, v, rotated (*)                  1.5                       their matmuls
    gate up   gate and up                           7                         their matmuls
    down      what a norm after the MLP reads (**)  1                         the matmul of down

(*) where each head of q and k has a norm, as they were projected: the norms' gradients need them
    so. Norms over all heads (wide_norms.py) keep rstd with o instead, 8 bytes a token.
(**) only in layers with such norms; there h is what the norm after attention reads.

Layers whose MLP stands beside attention keep no h, which nothing reads in their backward. An MLP
without a gate keeps up alone under the name "gate up".

No result depends on the ladder: what is recomputed comes from the same kernels and the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from longctx.cost.table import Table
from longctx.options import Keeping, Offload

Names = frozenset[str]
ORDER = ("x", "o", "h", "q k v", "gate up", "down")
"""The order in which they are written, and in which a layer's backward needs them."""
SETS: dict[str, Names] = {
    keep: frozenset(ORDER[: i + 1]) for i, keep in enumerate(("x", "o", "h", "qkv", "all"))
}
"""The choices that the words of --keep name. What a layer must keep besides, and which of these
names it has, says its table: `asked`."""
NOTHING: Names = frozenset()


class Keep(NamedTuple):
    """What a layer keeps, and which part of it waits on the host."""

    kept: Names
    hosted: Names = NOTHING

    @classmethod
    def of(cls, kept: str, hosted: str | None = None) -> Keep:
        """Returns a Keep from the words that --keep has for sets."""
        return cls(SETS[kept], NOTHING if hosted is None else SETS[hosted])

    @property
    def on_gpu(self) -> Names:
        return self.kept - self.hosted


Ladder = tuple[Keep, ...]
"""A Keep for each layer, in their order. If there are fewer than layers, the first one is also that
of all layers below."""


def in_order(names: Names) -> list[str]:
    known = {name: i for i, name in enumerate(ORDER)}
    return sorted(names, key=lambda name: (known.get(name, len(known)), name))


def asked(keep: Keeping, layer: Table) -> Names:
    """Returns the set that a word of --keep stands for in a layer of this table: what must be kept,
    and what the word names of the rest. "all" is everything that spares backward something."""
    named = SETS["o" if keep == "auto" else keep]
    if keep == "all":
        named |= {k.name for k in layer.keepables if any(w.flops or w.nbytes for w in k.spares)}
    return layer.always | (named & layer.by_name.keys())


def uniform(layer: Table, layers: int, keep: Keeping, offload: Offload) -> Ladder:
    """Returns a ladder that ignores how much memory there is: each layer keeps x and o, or what was
    asked for; with `offload` "all" it waits on the host, but for the last layer's."""
    kept = asked(keep, layer)
    hosted = layers - 1 if offload == "all" else 0
    return hosted * (Keep(kept, kept),) + (layers - hosted) * (Keep(kept),)


def runs(ladder: Ladder) -> Iterator[tuple[Keep, int]]:
    """Yields each Keep with the number of consecutive layers that have it."""
    for keep, layers in groupby(ladder):
        yield keep, len(list(layers))


def describe(ladder: Ladder, *, on_gpu: bool = True) -> str:
    """Returns one line that says what is kept, where, and by which layers. Without a GPU there is
    one memory."""
    parts, first = [], 0
    for keep, n in runs(ladder if on_gpu else tuple(Keep(keep.kept) for keep in ladder)):
        places = {" on the host": keep.hosted, " on the GPU" if on_gpu else "": keep.on_gpu}
        what = [f"{' '.join(in_order(names))}{where}" for where, names in places.items() if names]
        layers = f"layer {first}" if n == 1 else f"layers {first} to {first + n - 1}"
        parts.append(f"{layers}: {', '.join(what)}")
        first += n
    return "kept for backward: " + "; ".join(parts)
