"""Decides where a run's bytes live: budgets in, places out. It makes no tensor and asks no device.

GPU memory is shared by the buffers of a step, by weights, gradients and states (memory/place.py)
and by saved activations (memory/ladder.py), which are chosen together. The host holds the rest in
one slab. A run without an engine does what `decide` returns (loop/states.py), and its prediction
calls the same function, with the parameters of a model without storage (`meta`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from longctx.constants import GIB
from longctx.cost.kept import Ladder, run_again
from longctx.cost.launches import graph_bytes
from longctx.cost.peak import peak, phases
from longctx.cost.seconds import NO_TRAFFIC
from longctx.cost.sizes import Sizes
from longctx.memory.ladder import Budget, Chosen, Step, choose, gaps, hosted_bytes
from longctx.memory.levels import ORDERS, Levels
from longctx.memory.place import BlockSizes, Place, PlacedStates, Placement, usable_bytes
from longctx.memory.settle import HostRoom
from longctx.memory.states import BlockSpec


def gpu_budget(free: int, limit_gib: float | None) -> int:
    """Returns the bytes that weights, states, gradients and activations may take together."""
    return usable_bytes(min(free, int(limit_gib * GIB)) if limit_gib else free)


class Kept(NamedTuple):
    """What layers keep from forward to backward."""

    ladder: Ladder
    hosted: tuple[int, ...]
    """The bytes that each layer keeps on the host."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where everything of a run lives."""

    specs: Sequence[BlockSpec]
    blocks: Sequence[BlockSizes]
    places: Sequence[Place]
    kept: Kept
    host: HostRoom
    budget: Budget
    needed_bytes: int
    """Bytes of the GPU: the budget if it is enough, else the least that is needed."""
    chosen: Chosen

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model, with the cut that was chosen."""
        return self.chosen.sizes

    def placement_problem(self, asked: Placement) -> str | None:
        """Returns why nothing can wait on the host if that was asked for; None if something can."""
        if asked != "host" or not all(place.all_on_gpu for place in self.places):
            return None
        return (
            "--place host: nothing of this run can wait on the host. Frozen weights can with "
            "--class_type custom on one GPU; adapters of linear layers stay on the GPU, with their "
            "gradients and states"
        )

    def gpu_problem(self) -> str | None:
        """Returns one line that says why the GPU is too small and what to do; None if it is not."""
        if self.needed_bytes <= self.budget.gpu:
            return None
        fix = "a shorter --seq_len or smaller --per_device_train_batch_size"
        if self.sizes.class_type != "custom" and not self.sizes.chunks_loss:
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
    step: Step,
) -> Decision:
    """Returns the decision for exact states. `accumulates` says that a step has several batches,
    `several` that several processes average their gradients."""
    blocks = [spec.sizes(accumulates=accumulates) for spec in specs]
    levels = _levels(tuple(blocks), placement, accumulates, several)
    chosen = choose(step, levels, budget)
    return decided(specs, blocks, chosen, budget, keeping(step, chosen), accumulates)


@lru_cache(maxsize=2)
def _levels(
    blocks: tuple[BlockSizes, ...], placement: Placement, accumulates: bool, several: bool
) -> list[Levels]:
    """Returns the levels of each order in which states leave. The plans of one model with other
    rows or another budget share what these have counted."""
    moves_tower = any(block.tower and block.movable for block in blocks)
    return [
        Levels(
            blocks,
            placement,
            accumulates=accumulates,
            keeps_gradients=several,
            order=order,
            embedding_first=first,
            tower_first=tower_first,
        )
        for order in ORDERS
        for first in (False, True)
        for tower_first in ([False, True] if moves_tower else [False])
    ]


def decide_as_given(
    specs: Sequence[BlockSpec],
    budget: Budget,
    *,
    accumulates: bool,
    step: Step,
    places: list[Place],
) -> Decision:
    """Returns the decision that a given plan made elsewhere, with the bytes that it needs here."""
    blocks = [spec.sizes(accumulates=accumulates) for spec in specs]
    assert step.given is not None
    ladder, sizes = step.given
    standing = PlacedStates(blocks, places, accumulates=accumulates)
    tables = step.count(sizes, step.batch)
    graphs = step.graphs and not any(run_again(ladder))
    most, held = peak(phases(tables, ladder, standing)), graph_bytes(tables) if graphs else 0
    chosen = Chosen(
        ladder=ladder,
        sizes=sizes,
        places=places,
        traffic=NO_TRAFFIC,
        needed=Budget(most.nbytes + gaps(step) + step.beside_bytes + held, 0),
        seconds=math.nan,
        graph_bytes=held,
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
    """Returns a decision, with room on the host for what was chosen."""
    return Decision(
        specs=specs,
        blocks=blocks,
        places=chosen.places,
        kept=kept,
        host=HostRoom(
            specs, chosen.places, accumulates=accumulates, kept_bytes=kept.hosted, sizes=blocks
        ),
        budget=budget,
        needed_bytes=chosen.needed.gpu,
        chosen=chosen,
    )


def keeping(step: Step, chosen: Chosen) -> Kept:
    """Returns a ladder with the bytes that it keeps on the host."""
    tables = step.count(chosen.sizes, step.batch)
    return Kept(chosen.ladder, hosted_bytes(tables, chosen.ladder))
