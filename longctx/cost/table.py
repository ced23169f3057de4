"""The rows in which parts of a model declare their cost: `Work`, `Buffer` and `Keepable`, summed in
a `Table`.

A row stands in the file of the code whose cost it counts. All rows are for one batch on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np

from longctx.settings import Keeping

Phase = Literal["forward", "backward"]
"""The phases of a layer. A moment is the time in which one part computes; its name is that of the
part and of the phase: "mlp backward"."""
ALIGN = 512
"""torch's allocator rounds the size of each tensor up to a multiple of this many bytes."""
INPUT = "x"
"""The name of the keepable that is a layer's input."""
AGAIN = frozenset({"o"})
"""The keepables that a layer holds on the GPU, besides its input, from its second forward in
backward until its own backward ends."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A computation: FLOPs at one of the rates of a machine, and bytes that it reads and writes."""

    name: str
    flops: float = 0.0
    rate: str = "matmul"
    """A name that `Rates.of` (cost/rates.py) knows: a measured rate, or a share of one."""
    nbytes: float = 0.0
    """Bytes of GPU memory that it reads and writes."""
    finishing: bool = False
    """Whether it ends a layer's backward. The activations of the layer below are copied up
    meanwhile."""
    of_tiles: bool = False
    """Whether it ends a layer's forward, tile by tile. What the layer made before is copied down
    meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """GPU memory that a part needs while it computes, or that it holds while other parts do."""

    name: str
    nbytes: int
    during: str
    """The moment in which it exists, or a phase: all of the layer's moments in that phase."""
    span: Literal["in", "before", "after"] = "in"
    """Whether it exists in that moment, or from the start of the phase to that moment, or after it
    to the phase's end. The part that declares this does not know which parts compute then (`joined`
    does)."""
    spared_by: str | None = None
    """The keepable that makes the buffer unnecessary when it is kept."""


def buffers_during(moment: str) -> Callable[..., Buffer]:
    """Returns what makes the buffers of a moment from their names and bytes."""

    def made(name: str, nbytes: int, **how: Any) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during=moment, **how)

    return made


@dataclass(frozen=True, kw_only=True)
class Keepable:
    """Saved activations of a layer, which forward may keep and backward else recomputes."""

    name: str
    nbytes: int
    tensors: int = 1
    spares: tuple[Work, ...] = ()
    """Works that backward does not run if this is kept."""
    word: Keeping = "all"
    """The first word of --keep, in the order of kept.py, that asks for it."""
    needs: frozenset[str] = frozenset()
    """Other keepables without which it cannot be kept."""
    of_tiles: bool = False
    """Whether it is made tile by tile. The copy down of its last tile overlaps with no
    computation."""
    read_first: bool = False
    """Whether backward reads it first and until the layer's end. It is copied up while the layer
    above computes."""
    always: bool = False
    """Whether it must be kept, since no part of the layer can recompute it."""
    buffered: bool = False
    """Whether backward recomputes all of it before anything else if it was not kept."""
    recorded: bool = False
    """Whether only layers that run as CUDA graphs keep it: nothing of them leaves the GPU."""

    @property
    def aligned(self) -> int:
        """Bytes that its tensors take from torch's allocator."""
        return self.nbytes + ALIGN * self.tensors


@dataclass(frozen=True)
class Load:
    """The sum of several works. Each number is one, or an array with an entry for each
    candidate."""

    flops: Mapping[str, Any]
    """Maps names of rates to FLOPs."""
    nbytes: Any = 0.0

    def at(self, rate: str) -> Any:
        """Returns the FLOPs that run at a rate."""
        return self.flops.get(rate, 0.0)

    def each(self, function: Callable[[Any], Any]) -> Load:
        """Returns the load with `function` applied to all numbers."""
        flops = {rate: function(number) for rate, number in self.flops.items()}
        return Load(flops, function(self.nbytes))

    def plus(self, other: Load) -> Load:
        """Returns the sum of two loads."""
        # The order of rates is that in which `seconds` adds floats, so it stays that of the works.
        rates = dict.fromkeys([*self.flops, *other.flops])
        return Load(
            {rate: self.at(rate) + other.at(rate) for rate in rates}, self.nbytes + other.nbytes
        )


def load(works: Iterable[Work]) -> Load:
    """Returns the sum of works, with rates in the order in which works name them."""
    flops: dict[str, float] = {}
    nbytes = 0.0
    for work in works:
        flops[work.rate] = flops.get(work.rate, 0.0) + work.flops
        nbytes += work.nbytes
    return Load(flops, nbytes)


def stacked(loads: Sequence[Load]) -> Load:
    """Returns one load whose numbers are arrays, with an entry for each of these loads."""
    rates = dict.fromkeys(rate for of in loads for rate in of.flops)
    flops = {rate: np.array([of.at(rate) for of in loads]) for rate in rates}
    return Load(flops, np.array([of.nbytes for of in loads]))


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a part, of a layer, or of something that a step runs once. Tables can be
    added."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    """Works of backward, without those that it recomputes."""
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
        """The keepables by their names."""
        return {keepable.name: keepable for keepable in self.keepables}

    @cached_property
    def always(self) -> frozenset[str]:
        """The names of the keepables that must be kept."""
        return frozenset(keepable.name for keepable in self.keepables if keepable.always)

    def kept_bytes(self, kept: frozenset[str]) -> int:
        """Returns the bytes of the keepables with these names."""
        return sum(keepable.aligned for keepable in self.keepables if keepable.name in kept)

    def again(self, kept: frozenset[str], *, twice: bool = False) -> tuple[Work, ...]:
        """Returns the works that backward recomputes if only `kept` was kept. `twice` is for a
        layer that runs forward once more to give the layer above its input."""
        if twice:
            return (*self.forward, *self.again(kept | AGAIN))
        spared = (k.spares for k in self.keepables if k.name not in kept)
        return tuple(chain.from_iterable(spared))

    @property
    def finishing(self) -> tuple[Work, ...]:
        """The works that end backward."""
        return tuple(work for work in self.backward if work.finishing)

    @property
    def tiled(self) -> tuple[Work, ...]:
        """The works that end forward, tile by tile."""
        return tuple(work for work in self.forward if work.of_tiles)

    def in_tiles(self) -> Table:
        """Returns the table of a part whose forward runs tile by tile."""
        return replace(self, forward=tuple(replace(w, of_tiles=True) for w in self.forward))

    def again_bytes(self, kept: frozenset[str]) -> int:
        """Returns the bytes of the keepables that backward recomputes for the whole row before it
        begins, x included."""
        made = (k for k in self.keepables if k.buffered or k.name == INPUT)
        return sum(k.aligned for k in made if k.name not in kept)

    @cached_property
    def moments(self) -> dict[str, list[Buffer]]:
        """The buffers that exist in each moment."""
        found: dict[str, list[Buffer]] = {}
        for buffer in self.buffers:
            found.setdefault(buffer.during, []).append(buffer)
        return found

    def during(self, moment: str, kept: frozenset[str] = frozenset()) -> dict[str, int]:
        """Returns the bytes of the buffers of a moment, by their names."""
        found: dict[str, int] = {}
        for buffer in self.moments.get(moment, ()):
            if buffer.spared_by not in kept:
                found[buffer.name] = found.get(buffer.name, 0) + buffer.nbytes
        return found

    def working(self, phase: Phase, kept: frozenset[str] = frozenset()) -> dict[str, int]:
        """Returns the bytes of the buffers, by their names, in that moment of a phase in which they
        take most; kept activations are not among them."""
        found = (self.during(moment, kept) for moment in self.moments if moment.endswith(phase))
        return max(found, key=lambda buffers: sum(buffers.values()), default={})


def joined(blocks: Sequence[Table]) -> Table:
    """Returns the table of a layer that runs these blocks one after the other, and their backward
    in the reverse order. A buffer that exists in other moments than its part's gets a row in each.
    A keepable needs another one only if some block has it: in a layer with a mixer instead of
    attention, gate and up need no h."""
    whole = sum(blocks, Table())
    names = frozenset(whole.by_name)
    keepables = tuple(replace(k, needs=k.needs & names) for k in whole.keepables)
    moments = {
        phase: [m for block in blocks[::way] for m in block.moments if m.endswith(f" {phase}")]
        for phase, way in (("forward", 1), ("backward", -1))
    }

    def rows(buffer: Buffer) -> Iterable[Buffer]:
        order = [*dict.fromkeys(moments[buffer.during.split()[-1]])]
        if buffer.during in order:
            at = order.index(buffer.during)
            order = {"before": order[:at], "in": [order[at]], "after": order[at + 1 :]}[buffer.span]
        return (replace(buffer, during=moment, span="in") for moment in order)

    buffers = tuple(chain.from_iterable(map(rows, whole.buffers)))
    return replace(whole, keepables=keepables, buffers=buffers)
