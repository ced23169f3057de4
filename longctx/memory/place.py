"""Where a model's states live between uses, and which of their bytes a step has on the GPU.

A block's weights, gradients and states (remainder and moments) each live as a whole on the GPU or
on the host: this is the block's `Place`. What lives on the host moves through buffers, which are
counted here too. levels.py chooses the places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longctx.cost.fitted import GPU_MOST_SPARED, GPU_SPARE, GPU_SPARE_BYTES
from longctx.cost.peak import LIBRARY_BYTES, Buffers, Phase


def usable_bytes(free: int) -> int:
    """Returns the part of free GPU memory that a plan may fill."""
    return free - int(max(GPU_SPARE * free, min(GPU_SPARE_BYTES, GPU_MOST_SPARED * free)))


PIECE = 2**24
"""Elements that move at a time: 64 MB of a moment, 1.4 ms on the link, long beside a launch."""
RING = 3
"""Pieces on the GPU at a time: one arrives, one is updated, one leaves."""
AHEAD = 2
"""Blocks whose weights are on their way while one computes."""
MOVING = 4
"""Blocks that may be on their way at all, since the queues of launched work are not endless."""
IN_FLIGHT_BYTES = 2**28
"""Bytes of gradients that may be on their way to the host or to other processes before backward
waits for them. More would hold back memory that the next layer needs."""
Placement = Literal["auto", "gpu", "host"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which tensors of a block are on the GPU between its uses. The others wait on the host."""

    weight: bool = True
    states: bool = True
    """The remainder and AdamW's two moments."""
    grad: bool = True

    @property
    def all_on_gpu(self) -> bool:
        return self.weight and self.states and self.grad


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The bytes of a block, and which of its tensors may leave the GPU."""

    weight: int
    states: int
    grad: int
    movable: bool
    """Whether its weights may leave."""
    frozen: int = 0
    """Bytes among the weights that are never updated, so that nothing copies them down."""
    fixed: bool = False
    """Whether nothing may leave."""
    layer: int | None = None
    """The number of a decoder layer; None for any other block."""
    first: bool = False
    """Whether it computes before all layers, as the embedding does."""
    tied: bool = False
    """Whether this is an embedding that lm_head shares."""
    tower: bool = False
    """Whether it is all that sees images, frozen. Where its weights wait on the host, they are on
    the GPU while it runs, and no layer does: cost/images.py counts them then."""

    def on_gpu(self, place: Place) -> int:
        return sum(getattr(self, kind) for kind in KINDS if getattr(place, kind))

    def on_host(self, place: Place) -> int:
        return self.weight + self.states + self.grad - self.on_gpu(place)


KINDS = ("weight", "grad", "states")
"""The kinds of tensors, in the order in which they get GPU memory. A byte of weights on the host is
copied up twice and down once per step, a byte of gradients or states once each way."""


def ring_bytes() -> int:
    """Returns the bytes of the ring, whose pieces have room for two moments, a remainder and a
    gradient of 4 bytes each."""
    return RING * PIECE * 4 * 4


def window_bytes(blocks: Sequence[BlockSizes]) -> int:
    """Returns the largest bytes of streamed weights that are on the GPU while a layer, the
    embedding or lm_head computes."""
    sizes = [block.weight for block in blocks if block.movable and not block.tower]
    return max((sum(sizes[i : i + AHEAD + 1]) for i in range(len(sizes))), default=0)


def moved_ring_bytes(places: Iterable[Place]) -> int:
    """Returns the bytes of the ring, if states or gradients move. Weights need none."""
    return ring_bytes() if any(not (p.states and p.grad) for p in places) else 0


# --- what a step has of them on the GPU --------------------------------------------------------


class PlacedStates:
    """The weights, states and gradients of a run without an engine on the GPU, in the course of a
    step (a `cost.peak.Standing`)."""

    def __init__(
        self, blocks: Sequence[BlockSizes], places: Sequence[Place], *, accumulates: bool
    ) -> None:
        self.accumulates = accumulates
        placed = [*zip(blocks, places, strict=True)]
        here = [block for block, place in placed if place.weight]
        streamed = [b for b, place in placed if not place.weight]
        self._window = window_bytes(streamed)
        self._last_window = window_bytes(streamed[-AHEAD - 1 :])
        self._layers_window = window_bytes(
            [b for b, place in placed if not place.weight and b.layer is not None]
        )
        self._always = {
            "weights": sum(block.weight for block in here if not block.tower),
            "AdamW's states": sum(block.states for block, place in placed if place.states),
            "buffers of the update": moved_ring_bytes(places),
            "libraries": LIBRARY_BYTES,
        }
        if any(block.tower for block in here):
            self._always["vision tower"] = sum(block.weight for block in here if block.tower)
        layers = count_layers(blocks)
        self._stay, self._wait, self._leave = (np.zeros(layers + 2, np.int64) for _ in range(3))
        """Bytes of gradients by moment: those that stay on the GPU, those among them that the next
        forward's update reads, and those that leave."""
        for block, place in placed:
            at = moment_of(block, blocks, layers)
            (self._stay if place.grad else self._leave)[at] += block.grad
            self._wait[at] += block.grad if place.grad and not place.all_on_gpu else 0
        self._embedding = blocks[0].grad
        self._tied = blocks[0].tied

    def forward(self) -> Buffers:
        return {**self._always, "weights on their way": self._window}

    def loss(self) -> Buffers:
        """The loss runs where forward turns into backward: the blocks on their way are the last."""
        return {**self._always, "weights on their way": self._last_window}

    def backward(self, layer: int) -> Buffers:
        return {**self._always, "weights on their way": self._layers_window}

    def update(self) -> Buffers:
        return self.forward()

    def others(self, kept: int, unit: int) -> list[Phase]:
        return []

    def all_gradients(self) -> int:
        return int(self._stay.sum())

    def old_gradients(self, layer: int) -> int:
        return self.all_gradients() if self.accumulates else int(self._wait[layer + 1 :].sum())

    def loss_gradients(self) -> int:
        return self.all_gradients() if self.accumulates else 0

    def embedding(self, made: Buffers) -> Buffers:
        """All gradients while the embedding's is made. A frozen embedding has none."""
        if not self._embedding:
            return {"gradients": self.all_gradients()}
        return {
            "gradients": self.all_gradients() - int(self._stay[0]),
            "the embedding's gradient": (1 + self._tied) * self._embedding,
            **made,
        }

    def new_gradients(self, layer: int) -> int:
        """The gradients that stay, and one that leaves."""
        if self.accumulates:
            return self.all_gradients()
        leaving = min(IN_FLIGHT_BYTES, int(self._leave[layer + 2]))
        tied = int(self._stay[0]) if self._tied else 0
        return leaving + int(self._stay[layer + 2 :].sum()) + tied


def count_layers(blocks: Sequence[BlockSizes]) -> int:
    """Returns the number of decoder layers, at least 1: a model without a list of layers counts as
    one."""
    return max(1, sum(block.layer is not None for block in blocks))


def moment_of(block: BlockSizes, blocks: Sequence[BlockSizes], layers: int) -> int:
    """Returns when a block's gradient comes: i + 1 for layer i, `layers` + 1 if before all layers,
    0 (the embedding's, and a tower's) if after all."""
    if block is blocks[0] or block.first:
        return 0
    return layers + 1 if block.layer is None else block.layer + 1
