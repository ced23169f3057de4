"""The rows in which parts of a model declare their cost: `Work`, `Buffer` and `Keepable`, summed in
a `Table`.

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
    "attention forward",
    "mlp forward",
    "loss",
    "mlp backward",
    "attention backward",
    "projections backward",
    "embedding",
]
"""The moments of a step. In each, one part of the model computes and its buffers exist."""
ALIGN = 512
"""torch's allocator starts each tensor at a multiple of so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A computation: FLOPs at one of the rates of a machine, and bytes that it reads and writes."""

    name: str
    flops: float = 0.0
    rate: Rate = "matmul"
    nbytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """GPU memory that a part needs while it computes."""

    name: str
    nbytes: int
    during: Moment
    spared_by: str | None = None
    """The keepable that makes it unnecessary when kept."""


@dataclass(frozen=True, kw_only=True)
class Keepable:
    """Saved activations of a layer, which forward may keep and backward else recomputes."""

    name: str
    nbytes: int
    tensors: int = 1
    spares: tuple[Work, ...] = ()
    """What backward does not recompute if this is kept."""
    needs: frozenset[str] = frozenset()
    """Other keepables without which this one is not kept."""
    of_tiles: bool = False
    """Whether it is made tile by tile. Its last tile is copied down beside no computation."""
    read_first: bool = False
    """Whether backward reads it first and to its end. It is copied up beside the layer above."""
    always: bool = False
    """Whether it must be kept, since nothing can recompute it."""
    buffered: bool = False
    """Whether backward recomputes all of it before anything else, if it was not kept."""

    @property
    def aligned(self) -> int:
        return self.nbytes + ALIGN * self.tensors


class Load(NamedTuple):
    """Works summed by rate: FLOPs, and bytes. Each field is a number, or an array with an entry for
    each candidate."""

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
    """The rows of a part, of a layer, or of something that a step runs once. Tables add up."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    """Backward's works, without what it recomputes."""
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

    @cached_property
    def always(self) -> frozenset[str]:
        """The names of the keepables that must be kept."""
        return frozenset(keepable.name for keepable in self.keepables if keepable.always)

    def work(self, name: str) -> Work:
        """Returns the work of forward that has this name."""
        return next(work for work in self.forward if work.name == name)

    def kept_bytes(self, kept: frozenset[str]) -> int:
        return sum(keepable.aligned for keepable in self.keepables if keepable.name in kept)

    def again(self, kept: frozenset[str]) -> tuple[Work, ...]:
        """Returns what backward recomputes if only `kept` was kept."""
        spared = (k.spares for k in self.keepables if k.name not in kept)
        return tuple(chain.from_iterable(spared))

    def again_bytes(self, kept: frozenset[str]) -> int:
        """Returns the bytes of what backward recomputes of the whole row before it begins."""
        return sum(k.aligned for k in self.keepables if k.buffered and k.name not in kept)

    def during(self, moment: Moment, kept: frozenset[str] = frozenset()) -> dict[str, int]:
        """Returns the bytes of a moment's buffers, by their names."""
        found: dict[str, int] = {}
        for buffer in self.buffers:
            if buffer.during == moment and buffer.spared_by not in kept:
                found[buffer.name] = found.get(buffer.name, 0) + buffer.nbytes
        return found
