"""The ladders that the search scores (counted.py has their bytes and FLOPs).

In these ladders the first layers' activations wait on the host, since backward reads them last, and
the last layers keep everything. Layers of several kinds may keep different sets. For four layers
the best of these ladders takes at most 5% longer than the best of all ladders, which is a part of
one layer's work (tests/memory/test_ladder.py). Which ladders are scored does not depend on the
budget.

If memory is too small for any of these, only the lowest of every k of the first layers keeps its
input (`sparse`), and all but the highest of them run forward again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from longctx.cost.kept import NOTHING, Keep, Ladder, Names, runs
from longctx.cost.rates import Rates
from longctx.cost.seconds import priced
from longctx.cost.table import INPUT, Keepable, Table, load
from longctx.settings import Offload

MOST = 32
"""At most this many counts of layers are tried: all of them, else every second, third, and so
on."""


Sets = tuple[Names, ...]
"""The sets that layers keep, by their kind."""
Stretch = tuple[tuple[Keep, ...], int]
"""The sets that consecutive layers keep, by their kind, and the number of these layers."""


class Choice(NamedTuple):
    """The set that a layer of one kind may keep, and whether it then runs forward again."""

    kind: int
    keep: Keep
    twice: bool = False
    """Whether it runs forward again, since the layer above keeps no input."""


class Candidates(NamedTuple):
    """C ladders. The choice of each layer is an index into `choices`."""

    choices: list[Choice]
    layers: Any  # (C, layers)
    numbers: Any  # (C, choices)
    """The number of a ladder's layers that have each choice."""

    @classmethod
    def of(cls, ladders: Iterable[Iterable[Stretch]], of_layer: Sequence[int]) -> Candidates:
        """Makes candidates of ladders for layers of these kinds. Equal ladders become one
        candidate."""
        ids: dict[Choice, int] = {}
        everywhere: dict[tuple[Keep, ...], bytes] = {}
        rows: dict[bytes, None] = {}
        # Rows are bytes of uint16: a dict drops equal ladders, and a stretch is a slice of the row
        # that has its choice everywhere.
        width = np.uint16().itemsize
        for ladder in ladders:
            row, at = b"", 0
            for keeps, n in ladder:
                if n > 0:
                    if keeps not in everywhere:
                        each = (Choice(k, keeps[k]) for k in of_layer)
                        choices = [ids.setdefault(choice, len(ids)) for choice in each]
                        everywhere[keeps] = np.array(choices, np.uint16).tobytes()
                    row += everywhere[keeps][width * at : width * (at + n)]
                    at += n
            rows[row] = None
        layers = np.frombuffer(b"".join(rows), np.uint16).reshape(len(rows), -1)
        made = [*ids]
        bare = np.array([INPUT not in choice.keep.kept for choice in made])
        if bare.any():
            layers = layers.copy()
            # The second half of `made` has the choices of layers that run forward again.
            layers[:, :-1] += bare[layers[:, 1:]] * np.uint16(len(ids))
            made += [choice._replace(twice=True) for choice in ids]
        numbers = np.stack([(layers == k).sum(axis=1) for k in range(len(made))], axis=1)
        return cls(made, layers, numbers)

    @classmethod
    def one(cls, ladder: Ladder, of_layer: Sequence[int]) -> Candidates:
        kinds = 1 + max(of_layer)
        return cls.of([[(kinds * (keep,), n) for keep, n in runs(ladder)]], of_layer)

    @classmethod
    def bare(cls, of_layer: Sequence[int]) -> Candidates:
        """Makes one candidate whose layers keep nothing, and of which none runs forward again. It
        takes less time and memory than any ladder."""
        kinds = [Choice(kind, Keep(NOTHING)) for kind in range(1 + max(of_layer))]
        layers = np.array([of_layer], np.uint16)
        return cls(kinds, layers, np.bincount(layers[0])[None])

    def ladder(self, i: int) -> Ladder:
        return tuple(self.choices[k].keep for k in self.layers[i])

    def some(self, which: Any) -> Candidates:
        return Candidates(self.choices, self.layers[which], self.numbers[which])


def sets(kinds: Sequence[Table], rates: Rates, *, recorded: bool = False) -> tuple[Sets, ...]:
    """Returns the sets that layers may keep, the smallest first. Each adds to the set before it the
    keepable that spares most seconds per byte. Kinds of layers take turns: none gets its second
    keepable before all have their first. A keepable that spares nothing is in no set. `recorded`:
    layers run as CUDA graphs."""

    def worth(keepable: Keepable) -> float:
        return float(priced(load(keepable.spares), rates).step) / keepable.aligned

    def next_of(layer: Table, kept: Names) -> tuple[float, Names]:
        able = (k for k in layer.keepables if k.name not in kept and k.needs <= kept)
        able = (k for k in able if recorded or not k.recorded)
        worths = ((worth(k), frozenset({k.name})) for k in able)
        return max(worths, key=itemgetter(0), default=(0.0, NOTHING))

    found: list[Sets] = [tuple(layer.always for layer in kinds)]
    while True:
        more = []
        for layer, kept in zip(kinds, found[-1], strict=True):
            spared, name = next_of(layer, kept)
            more.append((spared > 0, -len(kept - layer.always), spared, kept | name))
        best = max(of[:3] for of in more)
        if not best[0]:
            return tuple(found)
        # Kinds that differ by a window have most keepables at one worth, and add these together.
        each = zip(found[-1], more, strict=True)
        found.append(tuple(of[3] if of[:3] == best else kept for kept, of in each))


@lru_cache(maxsize=16)
def candidates(
    of_layer: tuple[int, ...], kept: tuple[Sets, ...], offload: Offload, asked: Sets | None = None
) -> Candidates:
    """Returns all ladders that are scored, for layers of these kinds: with the sets `kept`, or with
    `asked` alone."""
    layers = len(of_layer)
    every = {"none": [0], "all": [layers - 1], "auto": [*range(layers)]}[offload]
    counts = every[:: -(-len(every) // MOST)]
    if len(kept[0]) > 1 and offload == "auto":
        counts.append(layers)  # the last layer, which may be of the kind that takes longest
    if asked is None:
        return Candidates.of(_free(layers, kept, counts, offload), of_layer)
    return Candidates.of(_asked(layers, asked, counts), of_layer)


@lru_cache(maxsize=1024)
def _keep(kept: Sets, hosted: Sets | None = None) -> tuple[Keep, ...]:
    return tuple(map(Keep, kept, hosted or len(kept) * (NOTHING,)))


def _asked(layers: int, kept: Sets, counts: Iterable[int]) -> Iterator[list[Stretch]]:
    for n in counts:
        yield [(_keep(kept, kept), n), (_keep(kept), layers - n)]


def usual(kept: tuple[Sets, ...]) -> list[Sets]:
    """Returns what layers keep if memory is short: the first sets in which each kind keeps more
    than it must, if it can, and those in which one kind does."""
    ends = [*zip(kept[0], kept[-1], strict=True)]

    def more(names: Sets) -> bool:
        each = zip(names, ends, strict=True)
        return all(mine != least or mine == most for mine, (least, most) in each)

    return [*dict.fromkeys((next(filter(more, kept)), kept[min(1, len(kept) - 1)]))]


def _free(
    layers: int, kept: tuple[Sets, ...], counts: Iterable[int], offload: Offload
) -> Iterator[list[Stretch]]:
    """Yields the ladders of --keep auto. Each of the sets `kept` has one keepable more than the one
    before."""
    least, most, short = kept[0], kept[-1], usual(kept)
    step = -(-layers // MOST)
    for n in counts:
        hosts: Sequence[int | None] = [None]
        if n:
            hosts = range(len(kept))[: 1 + len(least) if offload == "all" else None]
        tops = [0] if offload == "all" else range(0, layers + 1, step)
        for host in hosts:
            hosted = None if host is None else kept[host]
            for top in tops:
                # Where some layers keep all, there is room for what the others usually keep.
                bases = short[: 1 if top else None]
                for base in bases if n else [*bases, least]:
                    below, above = sorted((n, layers - top))
                    first = _keep(hosted or base, hosted)
                    both = n > layers - top  # some layers keep all, and a part of it on the host
                    between = _keep(most, hosted) if both else _keep(base)
                    stretches = [(first, below), (between, above - below)]
                    yield [*stretches, (_keep(most), layers - above)]
            yield from _between(layers, n, host, kept, short, step)


def _between(
    layers: int, n: int, host: int | None, kept: tuple[Sets, ...], short: list[Sets], step: int
) -> Iterator[list[Stretch]]:
    """Yields ladders for a GPU or a host that is full between two sets: the first of the `n` hosted
    layers keep one keepable less, or the first of the other layers keep the least."""
    if host:
        fewer, hosted = kept[host - 1], kept[host]
        for first in range(1, n, step):
            stretches = [(_keep(fewer, fewer), first), (_keep(hosted, hosted), n - first)]
            yield [*stretches, (_keep(short[0]), layers - n)]
        return
    here = None if host is None else kept[host]
    for first, rest in product(range(1, layers - n + 1, step), short):
        stretches = [(_keep(kept[0], here), n), (_keep(kept[0]), first)]
        yield [*stretches, (_keep(rest), layers - n - first)]


PERIODS = (2, 3, 4, 6, 8, 12, 16)
"""The numbers of consecutive layers of which only the lowest keeps its input."""
FEWER = 16
"""At most this many counts of the first layers are tried for each period."""
LAST = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Counts of the last layers, which keep on the GPU what layers usually keep."""


@lru_cache(maxsize=16)
def sparse(of_layer: tuple[int, ...], kept: tuple[Sets, ...], offload: Offload) -> Candidates:
    """Returns the ladders in which only the lowest of every k of the first layers keeps its input,
    and the layers above them keep it, or their usual set. The last layers keep this on the GPU."""
    return Candidates.of(_sparse(len(of_layer), kept, offload), of_layer)


def _sparse(layers: int, kept: tuple[Sets, ...], offload: Offload) -> Iterator[list[Stretch]]:
    """Yields the ladders of `sparse`: every k-th of the first layers, those between, and the last
    ones."""
    least, most = kept[0], usual(kept)[0]
    places = {"none": (False,), "all": (True,), "auto": (True, False)}[offload]
    lasts = (1,) if offload == "all" else LAST
    for k in (*(k for k in PERIODS if k < layers), layers):
        step = k * -(-layers // (k * FEWER))
        for first, hosts in product((*range(step, layers, step), layers), places):
            lowest = _keep(least, least if hosts else None)
            some = [(lowest, 1), (_keep(len(least) * (NOTHING,)), k - 1)]
            every_kth = [*(first // k * some), *_cut(some, first % k)]
            for last in lasts if first < layers else (0,):
                between = layers - first - last
                if between < 0:
                    break
                for rest in (least, most) if between else (least,):
                    hosted = _keep(rest, rest if hosts else None)
                    yield [*every_kth, (hosted, between), (_keep(most), last)]


def _cut(stretches: Sequence[Stretch], layers: int) -> list[Stretch]:
    """Returns the first `layers` layers of two stretches, of which the first has one layer."""
    (one, _), (rest, _) = stretches
    return [(one, min(1, layers)), (rest, max(0, layers - 1))]
