"""The placement of model states over the tiers GPU and host.

The tensors that may wait on the host leave the GPU in a fixed order, one tensor of one block at a
time: the states of the last blocks first, then gradients and weights. The number of tensors that
have left is a *level*. The next level needs no more of the GPU and copies no less, so the lowest
level that fits is the fastest, and more memory never raises it. A third tier would add levels.

Bytes are those of whole blocks at each moment of a step; gradients come as saved activations go.
place.PlacedStates counts the same bytes by name. Where the two differ, this count is the larger
one: a tensor that leaves counts until it has left, and a gradient that waits for its update counts
until the end of the forward that updates it. tests/memory/test_levels.py compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from longctx.cost.peak import LIBRARY_BYTES
from longctx.cost.seconds import Copies, Traffic
from longctx.memory.place import (
    AHEAD,
    IN_FLIGHT_BYTES,
    KINDS,
    BlockSizes,
    Place,
    Placement,
    count_layers,
    moment_of,
    ring_bytes,
)
from longctx.memory.slab import LINE, whole_lines


@dataclass(frozen=True, kw_only=True, eq=False)
class Activity:
    """Bytes of activations and buffers on the GPU, for each of C candidates."""

    forward: Any  # (C, layers)
    loss: Any  # (C,)
    backward: Any  # (C, layers)
    embedding: int


ORDERS = (("states", "grad", "weight"), ("states", "weight", "grad"))
"""The orders in which kinds of tensors leave the GPU. A byte of weights on the host is copied up
twice and down once per step, a byte of gradients or states once each way. But gradients need no
room if they come as saved activations go."""


class Levels:
    """The levels at which a model's states may be placed, beside activations."""

    def __init__(
        self,
        blocks: Sequence[BlockSizes],
        placement: Placement,
        *,
        accumulates: bool,
        keeps_gradients: bool = False,
        order: tuple[str, str, str] = ORDERS[0],
        embedding_first: bool = False,
        tower_first: bool = False,
    ) -> None:
        """`keeps_gradients` says that no gradient may leave, since several processes average them.
        `order` is the order in which kinds of tensors leave. With `embedding_first` the embedding's
        states, the largest, are the first states to leave instead of the last. With `tower_first`
        the weights of the vision tower are the first weights: they are copied up once, a layer's
        twice, but no layer computes meanwhile."""
        self.blocks, self.accumulates = blocks, accumulates
        self.layers = count_layers(blocks)
        forward = [*range(len(blocks))]
        weights = sorted(forward, key=lambda i: tower_first and blocks[i].tower)
        late = forward[1:] + forward[:1] if embedding_first else forward
        stays = {"grad"} if keeps_gradients else set[str]()
        self._leaving = [  # the first to leave is the first
            (kind, i)
            for kind in order
            for i in reversed({"states": late, "weight": weights}.get(kind, forward))
            if kind not in stays and self._may_leave(i, kind)
        ]
        if placement == "gpu":
            self._leaving = []
        self._order = order
        self.first = len(self._leaving) if placement == "host" else 0
        """The lowest level that the placement allows."""

    def _may_leave(self, i: int, kind: str) -> bool:
        block = self.blocks[i]
        movable = block.movable or kind != "weight"
        return movable and not block.fixed and bool(getattr(block, kind))

    def __len__(self) -> int:
        return len(self._leaving) + 1

    @cached_property
    def resident(self) -> Levels:
        """The one level where nothing leaves."""
        return Levels(self.blocks, "gpu", accumulates=self.accumulates)

    def places(self, level: int) -> list[Place]:
        away = {*self._leaving[:level]}
        return [
            Place(**{kind: (kind, i) not in away for kind in KINDS})
            for i in range(len(self.blocks))
        ]

    # --- bytes -----------------------------------------------------------------------------------

    def _bytes(self, kind: str) -> Any:  # (blocks,)
        return np.array([getattr(block, kind) for block in self.blocks], np.int64)

    @cached_property
    def _away(self) -> dict[str, Any]:
        """For each kind, (levels, blocks): whether the block's tensor waits on the host."""
        away = {kind: np.zeros((len(self), len(self.blocks)), bool) for kind in KINDS}
        for level, (kind, i) in enumerate(self._leaving):
            away[kind][level + 1 :, i] = True
        return away

    def _left(self, kind: str) -> Any:  # (levels,)
        """Returns the bytes of a kind that wait on the host."""
        return self._away[kind] @ self._bytes(kind)

    @cached_property
    def _windows(self) -> tuple[Any, Any]:  # (levels,) each
        """Bytes of weights that are on their way: in the layers' forward, and in backward, where
        only layers stream."""
        movable = np.array([block.movable and not block.tower for block in self.blocks], bool)
        of_layer = np.array([block.layer is not None for block in self.blocks], bool)

        def window(which: Any) -> Any:
            columns = np.flatnonzero(which & movable & (self._bytes("weight") > 0))
            moved = (self._away["weight"] * self._bytes("weight"))[:, columns]
            if not len(columns):
                return np.zeros(len(self), np.int64)
            ahead = min(AHEAD + 1, len(columns))
            sums = np.lib.stride_tricks.sliding_window_view(moved, ahead, axis=1).sum(axis=2)
            return sums.max(axis=1)

        return window(np.ones_like(movable)), window(of_layer)

    @cached_property
    def _gradients(self) -> tuple[Any, Any, Any]:  # (layers + 2,) each
        """Bytes of gradients by the moment at which they come: of those that cannot leave, of those
        that can, and of those among the first that wait for an update in the next forward."""
        stay, leave, wait = (np.zeros(self.layers + 2, np.int64) for _ in range(3))
        leaving = {i for kind, i in self._leaving if kind == "grad"}
        moving = {i for _, i in self._leaving}
        for i, block in enumerate(self.blocks):
            at = moment_of(block, self.blocks, self.layers)
            (leave if i in leaving else stay)[at] += block.grad
            wait[at] += block.grad if i in moving - leaving else 0
        return stay, leave, wait

    def _above(self, gradients: Any) -> tuple[Any, Any]:
        """Returns two arrays (layers,) from gradients by the moment at which they come: the bytes
        that backward of layer i finds, and those of the last step that forward of layer i finds."""
        after = np.cumsum(gradients[::-1])[::-1]
        tied = gradients[0] if self.blocks[0].tied else 0
        return np.append(after[2:], 0)[: self.layers] + tied, after[1 : self.layers + 1]

    @cached_property
    def least_bytes(self) -> int:
        """The bytes at the loss that every level needs."""
        always = LIBRARY_BYTES + sum(int(self._bytes(kind).sum()) for kind in ("weight", "states"))
        away = int(self._left("states")[-1] + self._left("weight")[-1] - self._windows[0][-1])
        return always - max(0, away)

    def lowest(self, a: Activity, budget: int) -> tuple[Any, Any]:  # (C,), (C,)
        """Returns for each candidate the lowest level with which it fits, and the bytes that it
        lacks with the last level if it fits with none."""
        stay, leave, wait = self._gradients
        none, all_here = np.zeros_like(stay), stay + leave
        always = LIBRARY_BYTES + sum(int(self._bytes(kind).sum()) for kind in ("weight", "states"))
        ring = ring_bytes() if any(kind != "weight" for kind, _ in self._leaving) else 0
        left = self._left("states") + self._left("weight")
        rooms = [budget - always - ring + left - window for window in self._windows]
        gone = none if any(kind == "grad" for kind, _ in self._leaving) else leave
        least = self._needs(a, stay, leave - gone, wait)
        last = np.maximum(*(need - room[-1] for need, room in zip(least, rooms, strict=True)))
        missing, level = np.maximum(0, last), np.full(len(a.loss), len(self) - 1)
        if self.first:
            return level, missing
        some, stop = np.flatnonzero(last <= 0), len(self) - 1
        for kind in reversed(self._order):
            start = stop - sum(other == kind for other, _ in self._leaving)
            if kind == "grad":
                there = [room[start] for room in rooms]
                level[some] -= self._gradients_that_fit(a, some, *there) if stop > start else 0
            else:
                before = self._order.index("grad") < self._order.index(kind)
                needs = least if before else self._needs(a, all_here, none, wait + leave)
                found = np.maximum(
                    *(
                        np.searchsorted(room[start : stop + 1], need[some])
                        for need, room in zip(needs, rooms, strict=True)
                    )
                )
                level[some] = np.minimum(start + found, stop)
            some, stop = some[level[some] == start], start
        everything = np.maximum(*self._needs(a, all_here, none, none)) + always
        level[everything <= budget] = missing[everything <= budget] = 0
        return level, missing

    def _needs(self, a: Activity, here: Any, gone: Any, waiting: Any) -> tuple[Any, Any]:
        """Returns the bytes of activations, buffers and gradients: at the moments at which any
        weights stream, and at those at which only layers' weights do. `gone` gradients leave one
        moment after they came; `waiting` ones wait for an update in the next forward."""
        total = int(here.sum())
        if self.accumulates:
            forward = np.maximum(a.forward.max(axis=1), a.loss) + total
            backward = a.backward.max(axis=1) + total
        else:
            (new, _), (_, old) = self._above(here), self._above(waiting)
            forward = np.maximum((a.forward + old).max(axis=1), a.loss)
            leaving = np.minimum(IN_FLIGHT_BYTES, gone[2:])[: self.layers]
            backward = (a.backward + (new + leaving)).max(axis=1)
        forward = np.maximum(forward, total)
        return forward, np.maximum(backward, total - int(here[0]) + self._embedding_bytes(a))

    def _embedding_bytes(self, a: Activity) -> int:
        """Returns the bytes while the embedding's gradient is made, wherever it goes then. A frozen
        embedding has none."""
        first = self.blocks[0]
        return a.embedding + first.grad * (1 + first.tied) if first.grad else 0

    def _gradients_that_fit(self, a: Activity, some: Any, forward_room: Any, room: Any) -> Any:
        """Returns for `some` candidates how many of the gradients that may leave can stay: those of
        the first blocks, as long as there is room at each moment from theirs on, in forward and in
        backward."""
        stay, leave, wait = self._gradients
        order = [i for kind, i in reversed(self._leaving) if kind == "grad"]
        count, going = np.zeros(len(some), np.int64), np.ones(len(some), bool)
        total = int(stay.sum())
        forward: Any = np.empty((len(some), 0))
        backward = forward
        if self.accumulates:
            needs = self._needs(a, stay, leave, wait)
            left = np.minimum(forward_room - needs[0], room - needs[1])[some]
        else:
            (new, _), (_, old) = self._above(stay), self._above(wait)
            leaving = np.minimum(IN_FLIGHT_BYTES, leave[2:])[: self.layers]
            backward = room - a.backward[some] - (new + leaving)
            forward = forward_room - a.forward[some] - old
            left = np.full(len(some), forward_room - total)  # the update's
            if self.blocks[0].tied:
                left = np.minimum(left, backward.min(axis=1))
        made = np.full(len(some), room - total + int(stay[0]) - self._embedding_bytes(a))
        seen = [0, 0]
        for i in order:
            block = self.blocks[i]
            at = moment_of(block, self.blocks, self.layers)
            if at:  # the embedding's own is there while it is made, wherever it goes
                left = np.minimum(left, made)
            for k, (room, end) in enumerate(((forward, at), (backward, at - 1))):
                end = min(end, room.shape[1])
                if end > seen[k]:
                    left = np.minimum(left, room[:, seen[k] : end].min(axis=1))
                    seen[k] = end
            going &= left >= block.grad
            left = left - block.grad * going
            made = made - block.grad * going * (at > 0)
            count += going
            if not going.any():
                break
        return count

    # --- the host and the link -------------------------------------------------------------------

    def host_bytes(self, level: Any, below: Any) -> Any:  # (C,)
        """Returns the largest number of locked bytes (memory/settle.py): states, and the room that
        saved activations and layers' gradients share. `below` (C, layers + 1) are the bytes that
        the layers below keep there."""
        states, first = self._on_host
        # A layer's gradient begins where its activations do, or where the one below ends.
        grads = [whole_lines(b.grad) + LINE for b in self.blocks if b.layer is not None]
        above = np.cumsum(np.array([0, *reversed(grads)], np.int64))[::-1]  # (layers + 1,)
        ends = np.maximum.accumulate((below + above)[:, ::-1], axis=1)[:, ::-1]
        shared = np.maximum(below[:, -1], ends[np.arange(len(below)), first[level]])
        return states[level] + shared

    @cached_property
    def _on_host(self) -> tuple[Any, Any]:  # (levels,) each
        """Locked bytes of states alone, and the first layer whose gradient shares its room with
        saved activations."""
        away = self._away
        moved = sum(away[kind] * self._bytes(kind) for kind in KINDS)
        shares = np.zeros(len(self.blocks), bool)
        if not self.accumulates:
            shares = np.array([block.layer is not None for block in self.blocks], bool)
        sharing = away["grad"] & shares
        moved = moved - sharing * self._bytes("grad")
        some = np.logical_or.reduce([away[kind] for kind in KINDS])
        states = (whole_lines(moved) + some * 4 * LINE).sum(axis=1)
        return states, self.layers - sharing.sum(axis=1)

    def traffic(self, level: Any, again: Any = None) -> Traffic:
        """Returns the copies of each candidate's level. `again` (C, layers) says which layers'
        weights come up once more in backward; None: no layer's."""
        found = self._traffic
        backward = Copies(*(nbytes[level] for nbytes in found.backward))
        if again is not None:
            of_layers = [i for i, block in enumerate(self.blocks) if block.layer is not None]
            away = (self._away["weight"] * self._bytes("weight"))[:, of_layers]
            backward = backward._replace(up=backward.up + (away[level] * again).sum(axis=1))
        return Traffic(
            rising_first=found.rising_first[level],
            rising=found.rising[level],
            falls_first=found.falls_first[level],
            backward=backward,
            resident=found.resident[level],
            before=found.before,
        )

    @cached_property
    def _traffic(self) -> Traffic:
        weight, grad, states = (self._away[kind] * self._bytes(kind) for kind in KINDS)
        of_layer = np.array([block.layer is not None for block in self.blocks], bool)
        falling = weight - self._away["weight"] * self._bytes("frozen")
        alone = np.where(of_layer, np.maximum(0, grad - IN_FLIGHT_BYTES), grad)
        up = (weight * of_layer + grad * self.accumulates).sum(axis=1)
        return Traffic(
            rising_first=np.cumsum(weight + grad + states, axis=1),
            rising=np.cumsum(weight, axis=1),
            falls_first=(falling + states).sum(axis=1),
            backward=Copies(up, grad.sum(axis=1), alone.sum(axis=1)),
            resident=1 - states.sum(axis=1) / max(1, int(self._bytes("states").sum())),
            before=np.cumsum(of_layer) - of_layer,
        )


def pending_levels(layers: int, states: int, gradients: int, *, accumulates: bool) -> Levels:
    """Returns the levels of weights and states that an engine or torch's optimizer holds: none of
    them leaves, and the first step adds these bytes. Gradients come evenly."""
    share = gradients // (layers + 1)
    one = BlockSizes(weight=0, states=0, grad=share, movable=False, fixed=True)
    blocks = [replace(one, states=states), *(replace(one, layer=i) for i in range(layers))]
    return Levels(blocks, "gpu", accumulates=accumulates)
