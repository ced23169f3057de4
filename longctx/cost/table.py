"""What parts of a model declare of themselves: `Work`, `Buffer`, `Keepable`, summed in a `Table`.

A row stands in the file that computes what it counts. All rows are of one batch on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

Rate = Literal["matmul", "attention", "attention backward"]
Moment = Literal[
    "attention forward", "mlp forward", "loss", "mlp backward", "attention backward", "embedding"
]
"""The parts of a step in which one part of the model works, and most of its buffers exist."""
ALIGN = 512
"""Each tensor starts at a multiple of so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A computation: FLOPs at one of the machine's rates, then bytes read and written."""

    name: str
    flops: float = 0.0
    rate: Rate = "matmul"
    nbytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """GPU memory that a part works with."""

    name: str
    nbytes: int
    during: Moment
    spared_by: str | None = None
    """The keepable with which it is not needed."""


@dataclass(frozen=True, kw_only=True)
class Keepable:
    """Saved activations of a layer: forward may keep them, or backward computes them again."""

    name: str
    nbytes: int
    tensors: int = 1
    spares: tuple[Work, ...] = ()
    """What backward need not compute again if this is kept."""
    needs: frozenset[str] = frozenset()
    """Other keepables without which it would spare nothing."""
    of_tiles: bool = False
    """The MLP makes it tile by tile: the last tile goes to the host with nothing beside it."""
    read_first: bool = False
    """Backward reads it first and needs it to the end: it comes up beside the layer above."""
    always: bool = False
    """Nothing else can stand for it."""
    buffered: bool = False
    """Where it is not kept, backward makes all of it again before it begins."""

    @property
    def aligned(self) -> int:
        return self.nbytes + ALIGN * self.tensors


class Load(NamedTuple):
    """Works by rate: FLOPs, and bytes. Each is a number, or an array with one of each candidate."""

    matmul: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0
    nbytes: float = 0.0

    def plus(self, other: Load, times: float = 1.0) -> Load:
        return Load(*(a + times * b for a, b in zip(self, other, strict=True)))

    def times(self, n: float) -> Load:
        return Load(*(n * a for a in self))


def load(works: Iterable[Work]) -> Load:
    total = Load()._asdict()
    for work in works:
        total[work.rate.replace(" ", "_")] += work.flops
        total["nbytes"] += work.nbytes
    return Load(**total)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of a part, of a layer or of what else a step runs once. Tables of parts add up."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    """Besides what is computed again."""
    keepables: tuple[Keepable, ...] = ()
    buffers: tuple[Buffer, ...] = ()

    def __add__(self, other: Table) -> Table:
        return Table(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            keepables=self.keepables + other.keepables,
            buffers=self.buffers + other.buffers,
        )

    @cached_property
    def by_name(self) -> dict[str, Keepable]:
        return {keepable.name: keepable for keepable in self.keepables}

    def work(self, name: str) -> Work:
        """Of forward, by its name."""
        return next(work for work in self.forward if work.name == name)

    def kept_bytes(self, kept: frozenset[str]) -> int:
        return sum(keepable.aligned for keepable in self.keepables if keepable.name in kept)

    def again(self, kept: frozenset[str]) -> tuple[Work, ...]:
        """What a backward computes again that found only `kept`."""
        spared = (k.spares for k in self.keepables if k.name not in kept)
        return tuple(chain.from_iterable(spared))

    def again_bytes(self, kept: frozenset[str]) -> int:
        """What it makes again before it begins, of the whole row."""
        return sum(k.aligned for k in self.keepables if k.buffered and k.name not in kept)

    def during(self, moment: Moment, kept: frozenset[str] = frozenset()) -> dict[str, int]:
        """The buffers of a moment by their names, in bytes."""
        found: dict[str, int] = {}
        for buffer in self.buffers:
            if buffer.during == moment and buffer.spared_by not in kept:
                found[buffer.name] = found.get(buffer.name, 0) + buffer.nbytes
        return found
