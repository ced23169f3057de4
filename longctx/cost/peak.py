"""GPU memory of a step, by name, in each of its phases.

    forward      weights, states, activations kept so far, one layer's work, gradients that wait for
                 their block's update
    loss         all kept activations, the logits' workspace, lm_head's gradient in fp32
    backward     what lower layers kept, gradients of the layers above, one layer's work
    embedding    all gradients, and the sums of the embedding's
    update       weights, states, gradients

A phase stands for the moment of it at which most is allocated; the peak is that of the largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple, Protocol

from longctx.cost.kept import Keep, Ladder, Names
from longctx.cost.sizes import Sizes
from longctx.cost.table import Moment, Table

Buffers = dict[str, int]
"""Name -> bytes."""
LIBRARY_BYTES = 2**26
"""cuBLAS's workspaces, of 32 MiB for each thread that multiplies: forward's and backward's."""


class Phase(NamedTuple):
    name: str
    buffers: Buffers

    @property
    def nbytes(self) -> int:
        return sum(self.buffers.values())


def peak(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.nbytes)


class Standing(Protocol):
    """Weights, states and gradients on the GPU as a step goes on: a run's own, or an engine's."""

    def forward(self) -> Buffers:
        """Weights and states while a layer's forward runs,"""

    def loss(self) -> Buffers:
        """while the loss does,"""

    def backward(self, layer: int) -> Buffers:
        """while this layer's backward does; -1: the embedding's,"""

    def update(self) -> Buffers:
        """and while they are updated."""

    def embedding(self, made: Buffers) -> Buffers:
        """All gradients, while the embedding's is made, for which torch needs `made`."""

    def others(self, kept: int, unit: int) -> list[Phase]:
        """Moments that only an engine has; `kept` activations, a unit of (T, D), in bytes."""

    def all_gradients(self) -> int: ...

    def old_gradients(self, layer: int) -> int:
        """Of the step before, or of its batches, when forward is at this layer."""

    def loss_gradients(self) -> int:
        """Before backward."""

    def new_gradients(self, layer: int) -> int:
        """When backward is at this layer."""


class Tables(Protocol):
    """One table a model and cut."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def layer(self) -> Table: ...

    @property
    def loss(self) -> Table: ...

    @property
    def embedding(self) -> Table: ...

    @property
    def update(self) -> Table: ...

    @property
    def unit(self) -> int:
        """Bytes of a (T, D) tensor."""

    @property
    def tiles(self) -> int:
        """Of a batch."""

    @property
    def finishing_flops(self) -> float:
        """Of what a layer's backward does last, beside which the layer below's first tile comes."""


FORWARD: tuple[Moment, ...] = ("attention forward", "mlp forward")
BACKWARD: tuple[Moment, ...] = ("mlp backward", "attention backward")


def working(layer: Table, moments: tuple[Moment, ...], kept: Names) -> Buffers:
    """What a layer works with, besides what is kept, at the larger of these moments."""
    found = [layer.during(moment, kept) for moment in moments]
    return max(found, key=lambda buffers: sum(buffers.values()))


def made_bytes(layer: Table, keep: Keep) -> int:
    """Activations of a layer that its own forward has made, whether they are kept or not."""
    return layer.kept_bytes(keep.kept) + layer.again_bytes(keep.kept)


def phases(tables: Tables, ladder: Ladder, standing: Standing) -> list[Phase]:
    """Of a step, in its order."""
    layer = tables.layer
    below = [*accumulate((layer.kept_bytes(keep.on_gpu) for keep in ladder), initial=0)]

    def forward(i: int) -> Phase:
        buffers = {
            **standing.forward(),
            "gradients": standing.old_gradients(i),
            "kept activations": below[i],
            "this layer's": made_bytes(layer, ladder[i]),
            **working(layer, FORWARD, ladder[i].kept),
        }
        return Phase("forward", buffers)

    def backward(i: int) -> Phase:
        buffers = {
            **standing.backward(i),
            "gradients": standing.new_gradients(i),
            "kept activations": below[i] + made_bytes(layer, ladder[i]),
            **working(layer, BACKWARD, ladder[i].kept),
        }
        return Phase("backward", buffers)

    loss = {
        **standing.loss(),
        "gradients": standing.loss_gradients(),
        "kept activations": below[-1],
        **tables.loss.during("loss"),
    }
    made = standing.embedding(tables.embedding.during("embedding"))
    embedding = {**standing.backward(-1), **made}
    return [
        peak(forward(i) for i in range(len(ladder))),
        Phase("loss", loss),
        *standing.others(below[-1], tables.unit),
        peak(backward(i) for i in reversed(range(len(ladder)))),
        Phase("embedding", embedding),
        Phase("update", {**standing.update(), "gradients": standing.all_gradients()}),
    ]
