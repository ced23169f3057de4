"""Where a run puts its bytes: budgets in, places out. No tensor is made and no device asked.

GPU memory goes to what a step works with, to weights, gradients and states (memory/place.py) and to
saved activations (memory/ladder.py), all chosen together; the host holds the rest in one slab. A
run without an engine does what `decide` says (run/states.py), and its prediction asks the same
function, with the parameters of a model that has no storage (`meta`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longctx.constants import GIB
from longctx.cost.kept import Ladder
from longctx.cost.peak import peak, phases
from longctx.cost.seconds import NO_TRAFFIC
from longctx.cost.sizes import Sizes
from longctx.memory.ladder import Budget, Chosen, Step, choose, gaps
from longctx.memory.levels import ORDERS, Activity, Levels
from longctx.memory.place import BlockSizes, Place, PlacedStates, Placement, usable_bytes
from longctx.memory.settle import HostRoom
from longctx.memory.states import BlockSpec


def gpu_budget(free: int, limit_gib: float | None) -> int:
    """What weights, states, gradients and activations may take together."""
    return usable_bytes(min(free, int(limit_gib * GIB)) if limit_gib else free)


def estimated_work(
    tokens: int,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    itemsize: int,
    liger: bool,
) -> int:
    """Bytes that a step of a model that is not patched needs besides its states: checkpoints of all
    layers, one layer's activations and gradients, and, but for Liger-Kernel, logits in bf16 and
    fp32 with their gradient."""
    layer = 2 * (12 * hidden + 6 * intermediate) * itemsize
    kept = layers * hidden * itemsize
    return tokens * (layer + kept + (0 if liger else 10 * vocab))


class Kept(NamedTuple):
    """What layers keep from forward to backward; nothing by a model that is not patched."""

    ladder: Ladder = ()
    hosted: tuple[int, ...] = ()
    """Each layer's bytes on the host."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where everything lives."""

    specs: Sequence[BlockSpec]
    blocks: Sequence[BlockSizes]
    places: Sequence[Place]
    kept: Kept
    host: HostRoom
    budget: Budget
    needed_bytes: int
    """Of the GPU: the budget, if that is enough, else what is needed at least."""
    chosen: Chosen | None
    """Of a patched model, whose needs are known."""

    @property
    def sizes(self) -> Sizes | None:
        """With how the work of a patched model is cut."""
        return None if self.chosen is None else self.chosen.sizes

    def placement_problem(self, asked: Placement) -> str | None:
        """Why nothing can wait on the host where that was asked for."""
        if asked != "host" or not all(place.all_on_gpu for place in self.places):
            return None
        return (
            "--place host: nothing of this run can wait on the host. Frozen weights can with "
            "--class_type custom on one GPU; adapters and what they train with stay on the GPU"
        )

    def gpu_problem(self) -> str | None:
        """Why the GPU is too small, and what to do, in one line."""
        if self.needed_bytes <= self.budget.gpu:
            return None
        fix = "a shorter --seq_len or smaller --per_device_train_batch_size"
        if self.sizes is None:
            fix = f"--class_type custom, whose weights can wait on the host, or {fix}"
        return (
            f"{self.needed_bytes / GIB:.1f} GiB of GPU memory are needed at least and "
            f"{self.budget.gpu / GIB:.1f} GiB may be used: raise --gpu_memory_gib, or use {fix}"
        )

    def host_problem(self) -> str | None:
        if self.host.nbytes <= self.budget.host:
            return None
        return (
            f"{self.host.nbytes / GIB:.1f} GiB of host memory are needed for states and "
            f"activations and {self.budget.host / GIB:.1f} GiB may be used: set --keep x or auto, "
            "--offload_activations auto (GPU memory first), a higher --gpu_memory_gib, or a "
            "shorter --seq_len"
        )


def decide(
    specs: Sequence[BlockSpec],
    budget: Budget,
    *,
    placement: Placement,
    accumulates: bool,
    several: bool = False,
    needs: Step | int,
) -> Decision:
    """For exact states. `accumulates`: a step has several batches; `several`: so many processes
    average gradients. `needs`: the step of a patched model, or the bytes that any other works
    with."""
    blocks = [spec.sizes(accumulates=accumulates) for spec in specs]
    levels = [
        Levels(
            blocks,
            placement,
            accumulates=accumulates,
            keeps_gradients=several,
            order=order,
            embedding_first=first,
        )
        for order in ORDERS
        for first in (False, True)
    ]
    if isinstance(needs, Step):
        chosen = choose(needs, levels, budget)
        return decided(specs, blocks, chosen, budget, keeping(needs, chosen), accumulates)
    level, missing = levels[0].lowest(_constant(needs, levels[0].layers), budget.gpu)
    places = levels[0].places(int(level[0]))
    return Decision(
        specs=specs,
        blocks=blocks,
        places=places,
        kept=Kept(),
        host=HostRoom(specs, places, accumulates=accumulates),
        budget=budget,
        needed_bytes=budget.gpu + int(missing[0]),
        chosen=None,
    )


def decide_as_given(
    specs: Sequence[BlockSpec],
    budget: Budget,
    *,
    accumulates: bool,
    step: Step,
    places: list[Place],
) -> Decision:
    """What another run of `decide` found, with what it needs here."""
    blocks = [spec.sizes(accumulates=accumulates) for spec in specs]
    assert step.given is not None
    ladder, sizes = step.given
    standing = PlacedStates(blocks, places, accumulates=accumulates)
    most = peak(phases(step.count(sizes, step.batch), ladder, standing))
    chosen = Chosen(
        ladder=ladder,
        sizes=sizes,
        places=places,
        traffic=NO_TRAFFIC,
        needed=Budget(most.nbytes + gaps(step), 0),
        seconds=math.nan,
    )
    return decided(specs, blocks, chosen, budget, keeping(step, chosen), accumulates)


def decided(
    specs: Sequence[BlockSpec],
    blocks: Sequence[BlockSizes],
    chosen: Chosen,
    budget: Budget,
    kept: Kept,
    accumulates: bool,
) -> Decision:
    """What was chosen, with the host's room for it."""
    return Decision(
        specs=specs,
        blocks=blocks,
        places=chosen.places,
        kept=kept,
        host=HostRoom(specs, chosen.places, accumulates=accumulates, kept_bytes=kept.hosted),
        budget=budget,
        needed_bytes=chosen.needed.gpu,
        chosen=chosen,
    )


def keeping(step: Step, chosen: Chosen) -> Kept:
    """The bytes of a ladder."""
    layer = step.count(chosen.sizes, step.batch).layer
    return Kept(chosen.ladder, tuple(layer.kept_bytes(keep.hosted) for keep in chosen.ladder))


def _constant(nbytes: int, layers: int) -> Activity:
    """The same at each moment."""
    each = np.full((1, layers), nbytes)
    return Activity(forward=each, loss=each[:, 0], backward=each, embedding=nbytes)
