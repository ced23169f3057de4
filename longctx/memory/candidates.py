"""The ladders that the search scores, and their bytes, FLOPs and copies: an array entry for each.

In these ladders the first layers' activations wait on the host, since backward needs them last, and
the last layers keep everything. For four layers the best of these ladders takes at most 5% longer
than the best of all ladders, which is a part of one layer's work (tests/memory/test_ladder.py).
Which ladders are scored does not depend on the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from longctx.cost.kept import Keep, Ladder, Names
from longctx.cost.peak import BACKWARD, FORWARD, Tables, made_bytes, working
from longctx.cost.rates import Rates
from longctx.cost.seconds import Hosted, priced
from longctx.cost.table import Keepable, Load, Moment, Table, load, stacked
from longctx.memory.levels import Activity
from longctx.options import Offload

MOST = 32
"""At most so many counts of layers are tried: all of them, else every second, third, and so on."""


Stretch = tuple[Keep, int]
"""What layers keep, and how many consecutive layers keep it."""


class Candidates(NamedTuple):
    """C ladders. What each layer keeps is an index into `keeps`."""

    keeps: list[Keep]
    layers: Any  # (C, layers)
    numbers: Any  # (C, keeps)
    """How many layers of a ladder have each Keep."""

    @classmethod
    def of(cls, ladders: Iterable[Iterable[Stretch]]) -> Candidates:
        """Makes candidates of ladders. Equal ladders become one candidate."""
        ids: dict[Keep, int] = {}
        rows = {
            b"".join(bytes([ids.setdefault(keep, len(ids))]) * n for keep, n in runs if n > 0): None
            for runs in ladders
        }
        layers = np.array([[*row] for row in rows], np.uint8)
        numbers = np.stack([(layers == k).sum(axis=1) for k in range(len(ids))], axis=1)
        return cls([*ids], layers, numbers)

    def ladder(self, i: int) -> Ladder:
        return tuple(self.keeps[k] for k in self.layers[i])

    def some(self, which: Any) -> Candidates:
        return Candidates(self.keeps, self.layers[which], self.numbers[which])


def sets(layer: Table, rates: Rates) -> tuple[Names, ...]:
    """Returns the sets that a layer may keep, the smallest first. Each adds to the one before the
    keepable that spares most seconds per byte. A keepable that spares nothing is in no set."""

    def worth(name: str) -> float:
        keepable = layer.by_name[name]
        return float(priced(load(keepable.spares), rates).step) / keepable.aligned

    found = [layer.always]
    while True:
        kept = found[-1]
        able = [k.name for k in layer.keepables if k.name not in kept and k.needs <= kept]
        able = [name for name in able if worth(name) > 0]
        if not able:
            return tuple(found)
        found.append(kept | {max(able, key=worth)})


@lru_cache(maxsize=16)
def candidates(
    layers: int, kept: tuple[Names, ...], offload: Offload, asked: Names | None = None
) -> Candidates:
    """Returns all ladders that are scored: of the sets `kept`, or with one set if that was asked
    for."""
    every = {"none": [0], "all": [layers - 1], "auto": [*range(layers)]}[offload]
    counts = every[:: -(-len(every) // MOST)]
    if asked is None:
        return Candidates.of(_free(layers, kept, counts, offload))
    return Candidates.of(_asked(layers, asked, counts))


def _asked(layers: int, kept: Names, counts: Iterable[int]) -> Iterator[list[Stretch]]:
    for n in counts:
        yield [(Keep(kept, kept), n), (Keep(kept), layers - n)]


def _free(
    layers: int, kept: tuple[Names, ...], counts: Iterable[int], offload: Offload
) -> Iterator[list[Stretch]]:
    """Yields the ladders of --keep auto. `kept` are sets, each with one keepable more than the one
    before."""
    least, usual, most = kept[0], kept[min(1, len(kept) - 1)], kept[-1]
    step = -(-layers // MOST)
    for n in counts:
        hosts: Sequence[int | None] = [None]
        if n:
            hosts = range(len(kept))[: 2 if offload == "all" else None]
        tops = [0] if offload == "all" else range(0, layers + 1, step)
        for host in hosts:
            hosted = frozenset[str]() if host is None else kept[host]
            for top in tops:
                for base in {usual} if n else {usual, least}:
                    below, above = sorted((n, layers - top))
                    first = Keep(base if host is None else hosted, hosted)
                    both = n > layers - top  # some layers keep all, and a part of it on the host
                    between = Keep(most, hosted) if both else Keep(base)
                    runs = [(first, below), (between, above - below)]
                    yield [*runs, (Keep(most), layers - above)]
            yield from _between(layers, n, host, kept, step)


def _between(
    layers: int, n: int, host: int | None, kept: tuple[Names, ...], step: int
) -> Iterator[list[Stretch]]:
    """Yields ladders for a GPU or a host that is full between two sets: the first of the `n` hosted
    layers keep one keepable less, or the first of the other layers keep the least."""
    usual = kept[min(1, len(kept) - 1)]
    if host:
        fewer, hosted = kept[host - 1], kept[host]
        for first in range(1, n, step):
            runs = [(Keep(fewer, fewer), first), (Keep(hosted, hosted), n - first)]
            yield [*runs, (Keep(usual), layers - n)]
        return
    hosted = frozenset() if host is None else kept[host]
    for first in range(1, layers - n + 1, step):
        runs = [(Keep(kept[0], hosted), n), (Keep(kept[0]), first)]
        yield [*runs, (Keep(usual), layers - n - first)]


# --- counted -----------------------------------------------------------------------------------


class EachKeep:
    """The bytes and FLOPs of one layer, an entry for each Keep of the candidates. They are counted
    once for a cut of the work: 40 placements of the states are scored with the same numbers."""

    def __init__(self, keeps: Sequence[Keep], layer: Table) -> None:
        self.keeps, self.layer = keeps, layer

    def count(self, of: Callable[[Keep], float]) -> Any:  # (keeps,)
        return np.array([of(keep) for keep in self.keeps])

    @cached_property
    def on_gpu(self) -> Any:  # (keeps,)
        return self.count(lambda keep: self.layer.kept_bytes(keep.on_gpu))

    @cached_property
    def on_host(self) -> Any:  # (keeps,)
        return self.count(lambda keep: self.layer.kept_bytes(keep.hosted))

    @cached_property
    def forward(self) -> Any:  # (keeps,)
        return self._working(FORWARD)

    @cached_property
    def backward(self) -> Any:  # (keeps,)
        return self._working(BACKWARD)

    def _working(self, moments: tuple[Moment, ...]) -> Any:
        """Returns the bytes that a layer adds while it computes, less what it keeps on the GPU."""

        def added(keep: Keep) -> float:
            buffers = working(self.layer, moments, keep.kept)
            return sum(buffers.values()) + made_bytes(self.layer, keep)

        return self.count(added) - self.on_gpu

    @cached_property
    def again(self) -> Load:
        """What backward of the layer recomputes."""
        return stacked([load(self.layer.again(keep.kept)) for keep in self.keeps])

    @cached_property
    def hosted(self) -> Hosted:
        """What the layer keeps on the host."""

        def total(which: Callable[[Keepable], bool]) -> Any:
            of = [k for k in self.layer.keepables if which(k)]
            return self.count(lambda keep: sum(k.aligned for k in of if k.name in keep.hosted))

        return Hosted(
            nbytes=total(lambda _: True),
            layers=self.count(lambda keep: bool(keep.hosted)),
            first=total(lambda k: k.read_first),
            late=total(lambda k: k.of_tiles),
        )


class Counted:
    """The bytes and FLOPs of candidates, of one model, batch and cut."""

    def __init__(self, found: Candidates, tables: Tables, each: EachKeep | None = None) -> None:
        self.found, self.tables = found, tables
        self.each = each or EachKeep(found.keeps, tables.layer)

    def some(self, which: Any) -> Counted:
        if len(which) == len(self.found.layers):
            return self
        return Counted(self.found.some(which), self.tables, self.each)

    @cached_property
    def on_gpu(self) -> Any:  # (C,)
        """Saved activations of all layers, when forward ends."""
        return self.found.numbers @ self.each.on_gpu

    @cached_property
    def loss_bytes(self) -> int:
        return sum(self.tables.loss.during("loss").values())

    @cached_property
    def activity(self) -> Activity:
        end = np.cumsum(self.each.on_gpu[self.found.layers], axis=1)
        return Activity(
            forward=end + self.each.forward[self.found.layers],
            backward=end + self.each.backward[self.found.layers],
            loss=end[:, -1] + self.loss_bytes,
            embedding=sum(self.tables.embedding.during("embedding").values()),
        )

    @cached_property
    def below(self) -> Any:  # (C, layers + 1)
        """Bytes that the layers below each layer keep on the host."""
        hosted = self.each.on_host
        found = np.zeros((len(self.found.layers), self.found.layers.shape[1] + 1), np.int64)
        np.cumsum(hosted[self.found.layers], axis=1, out=found[:, 1:])
        return found

    @cached_property
    def again(self) -> Load:
        """What backward of all layers recomputes."""
        return self.each.again.each(lambda numbers: self.found.numbers @ numbers)

    @cached_property
    def hosted(self) -> Hosted:
        """The totals of all layers."""
        return Hosted(*(self.found.numbers @ of for of in self.each.hosted))
