"""Which saved activations layers keep, and where: a `Keep` for each layer makes a `Ladder`.

    name      keeps                                 a token of Llama-3.1-8B   spares backward
    x         the layer's input                     1 unit (2 D bytes)
    o         attention's output, its log-sum-exp   1                         attention; q k v once
    h         the residual stream after attention   1                         the matmul of o
    q k v     q, k, v, rotated (*)                  1.5                       their matmuls
    gate up   gate and up                           7                         their matmuls
    down      what a norm after the MLP reads (**)  1                         the matmul of down
    routing   the experts that were chosen          small; always kept        nothing
    graph     autograd's graph of a mixer (***)     -                         the mixer's forward

(*) where each head of q and k has a norm, as they were projected: the norms' gradients need them
    so. Norms over all heads (wide_norms.py) keep rstd with o instead, 8 bytes a token.
(**) only in layers with such norms; there h is what the norm after attention reads.
(***) only in layers that run as CUDA graphs.

A mixer that replaces attention keeps its output as o, with the states at the start of its segments,
and no h, which is the sum of x and o then. Where a layer has attention and a mixer, both keep o.

Layers whose MLP runs in parallel to attention keep no h, which their backward does not read. An MLP
without a gate keeps up alone under the name "gate up".

A layer above others may keep nothing, not even x. Before its backward the layers below it run
forward again from the nearest one that keeps x. This recomputes the input of each, and each keeps o
until its own backward. Of k consecutive layers the lowest keeps x, the others nothing.

No result depends on the ladder: what is recomputed comes from the same kernels and the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from longctx.cost.table import INPUT, Table
from longctx.settings import Keeping, Offload

Names = frozenset[str]
ORDER = ("x", "o", "h", "q k v", "gate up", "down", "routing", "graph")
"""The names of keepables, in the order in which they are written and in which a layer's backward
needs them."""
WORDS: tuple[Keeping, ...] = ("x", "o", "h", "qkv", "all")
"""The words of --keep. Each asks for the keepables that are declared with it (`Keepable.word`) and
for those of the words before it."""
NOTHING: Names = frozenset()


class Keep(NamedTuple):
    """The saved activations that a layer keeps, and which of them wait on the host."""

    kept: Names
    hosted: Names = NOTHING

    @property
    def on_gpu(self) -> Names:
        return self.kept - self.hosted


Ladder = tuple[Keep, ...]
"""One Keep per layer, in the order of layers. If shorter than the model, its first entry also
serves all earlier layers."""


def in_order(names: Names) -> list[str]:
    known = {name: i for i, name in enumerate(ORDER)}
    return sorted(names, key=lambda name: (known.get(name, len(known)), name))


def asked(keep: Keeping, layer: Table, *, recorded: bool = False) -> Names:
    """Returns the keepables that a word of --keep stands for in a layer of this table: those that
    must be kept, and of the word's own those that spare backward something. `recorded`: the layer
    runs as a CUDA graph."""
    words = WORDS[: 1 + WORDS.index("o" if keep == "auto" else keep)]
    useful = (k for k in layer.keepables if any(w.flops or w.nbytes for w in k.spares))
    able = (k for k in useful if k.word in words and (recorded or not k.recorded))
    return layer.always | {k.name for k in able}


def uniform(layers: Sequence[Table], keep: Keeping, offload: Offload) -> Ladder:
    """Returns a ladder that ignores how much memory there is: each layer keeps x and o, or what
    `keep` asks for. With `offload` "all" this waits on the host for all layers but the last."""
    kept = [asked(keep, layer) for layer in layers]
    # The last layer's activations are read right after the loss: backward would wait for them.
    hosted = len(kept) - 1 if offload == "all" else 0
    return (*(Keep(names, names) for names in kept[:hosted]), *map(Keep, kept[hosted:]))


def runs(ladder: Ladder) -> Iterator[tuple[Keep, int]]:
    """Yields each Keep with the number of consecutive layers that have it."""
    for keep, layers in groupby(ladder):
        yield keep, len(list(layers))


def run_again(ladder: Ladder) -> list[bool]:
    """Returns for each layer whether it runs forward again in backward, since the layer above keeps
    no input."""
    return [*(INPUT not in above.kept for above in ladder[1:]), False]


def lowest(ladder: Ladder, at: int) -> Keep:
    """Returns the Keep of the layer from which layers run forward again for the backward of layer
    `at`: the nearest below that keeps its input."""
    below = (keep for keep in reversed(ladder[:at]) if INPUT in keep.kept)
    return next(below, Keep(frozenset({INPUT})))


def hosts(ladder: Ladder) -> bool:
    """Whether any saved activations wait on the host."""
    return any(keep.hosted for keep in ladder)


def describe(ladder: Ladder, *, on_gpu: bool = True) -> str:
    """Returns one line that says which activations are kept, where, and by which layers. `on_gpu`
    False: the process has no GPU, so it has one memory."""
    of: dict[tuple[Keep, int], list[int]] = {}
    for i, keep, n in _parts(ladder):
        shown = keep if on_gpu else Keep(keep.kept)
        of.setdefault((shown, n), []).extend(range(i, i + n))
    parts = []
    for (keep, k), layers in of.items():
        first, last, n = layers[0], layers[-1], len(layers)
        which = f"layer {first}" if n == 1 else f"layers {first} to {last}"
        if n <= last - first:  # between them are layers of other kinds, which keep something else
            which = f"{n} of {which}"
        places = {" on the host": keep.hosted, " on the GPU" if on_gpu else "": keep.on_gpu}
        what = [f"{' '.join(in_order(names))}{where}" for where, names in places.items() if names]
        one = f", one layer in {k}" if k > 1 else ""
        parts.append(f"{which}: {', '.join(what) or 'nothing'}{one}")
    return "kept for backward: " + "; ".join(parts)


def _parts(ladder: Ladder) -> Iterator[tuple[int, Keep, int]]:
    """Yields for each layer that keeps something its index, its Keep, and the number of layers from
    it to the next one that keeps something."""
    starts = [i for i, keep in enumerate(ladder) if i == 0 or keep.kept]
    for start, stop in pairwise([*starts, len(ladder)]):
        yield start, ladder[start], stop - start
