"""Where a run puts its bytes: budgets in, places out. No tensor is made and no device asked.

GPU memory is given, in this order, to what a step works with, to weights, gradients and states
(memory/plan.py) and to kept activations (memory/ladder.py); the host holds the rest in one slab. A
run without an engine does what `decide` says (run/states.py), and its prediction asks the same
function, with the parameters of a model that has no storage (`meta`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longctx.memory.ladder import Chosen, Ladder, States, gpu_bytes, host_bytes, lasting_bytes
from longctx.memory.plan import (
    GIB,
    BlockSizes,
    Place,
    Placement,
    Sizes,
    buffer_bytes,
    may_update_away,
    place_blocks,
    ring_bytes,
    usable_bytes,
    window_bytes,
)
from longctx.memory.settle import HostRoom
from longctx.memory.states import BlockSpec

Choose = Callable[[int, int, States], Chosen]
"""The ladder and cut of a model that keeps activations, beside states, in bytes of GPU and host."""


class Budget(NamedTuple):
    """Bytes that a run may take."""

    gpu: int
    host: int


def gpu_budget(free: int, limit_gib: float | None) -> int:
    """What weights, states, gradients and activations may take together."""
    return usable_bytes(min(free, int(limit_gib * GIB)) if limit_gib else free)


class Work(NamedTuple):
    """What a step needs on the GPU besides states and the activations of other layers."""

    nbytes: int
    early_bytes: int
    """Of them what is needed only until the first layers' gradients are there."""


def scheduled_work(sizes: Sizes, tokens: int, accumulates: bool) -> Work:
    """By count, for a patched model."""
    early = sizes.early_bytes(tokens, accumulates)
    return Work(sizes.layer_bytes(tokens) + early, early)


def estimated_work(
    tokens: int,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    itemsize: int,
    liger: bool,
) -> Work:
    """For any other: checkpoints of all layers, one layer's activations and gradients, and, but for
    Liger-Kernel, logits in bf16 and fp32 with their gradient."""
    layer = 2 * (12 * hidden + 6 * intermediate) * itemsize
    kept = layers * hidden * itemsize
    return Work(tokens * (layer + kept + (0 if liger else 10 * vocab)), 0)


class Kept(NamedTuple):
    """What layers keep from forward to backward, and the bytes of it; nothing by a model that is
    not patched."""

    ladder: Ladder = ()
    gpu_bytes: int = 0
    lasting_bytes: int = 0
    """Of them what is there until all gradients are."""
    hosted: tuple[int, ...] = ()
    """Each layer's bytes on the host."""

    @property
    def host_bytes(self) -> int:
        return sum(self.hosted)


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
    """Of the GPU, at least."""
    sizes: Sizes | None
    """Of a patched model, whose needs are known, with how its work is cut."""

    @property
    def over(self) -> Budget:
        """What is needed beyond the budgets; negative: what is left."""
        gpu, host = self.budget
        return Budget(self.needed_bytes - gpu, self.host.nbytes - host)

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


ATTEMPTS, STEP = 6, 2**26
"""States live in whole blocks, so that a ladder chosen by bytes may need some more than it counted:
another is chosen in as much less, and a step, of 64 MiB to 64 GiB."""


def decide(
    specs: Sequence[BlockSpec],
    budget: Budget,
    *,
    tokens: int,
    placement: Placement,
    accumulates: bool,
    several: bool = False,
    needs: Choose | Work,
) -> Decision:
    """For exact states, of batches of at most `tokens`. `accumulates`: a step has several of them;
    `several`: so many processes average gradients. `needs`: how a patched model chooses, or what
    any other works with."""
    blocks = [spec.sizes(accumulates=accumulates) for spec in specs]

    def arranged(kept: Kept, sizes: Sizes | None, work: Work) -> Decision:
        # Gradients come as activations go, unless they outlive a forward.
        early_bytes = work.early_bytes + kept.gpu_bytes - kept.lasting_bytes
        early_bytes = 0 if accumulates else early_bytes
        places = place_blocks(
            blocks,
            budget.gpu - work.nbytes - kept.gpu_bytes,
            placement,
            keeps_gradients=several,
            before_gradients=early_bytes,
        )
        gradients = sum(b.grad for b, place in zip(blocks, places, strict=True) if place.grad)
        needed = buffer_bytes(blocks, places) - gradients
        needed += sum(block.on_gpu(place) for block, place in zip(blocks, places, strict=True))
        needed += max(0, gradients - early_bytes)
        if sizes is not None:
            needed += work.nbytes + kept.gpu_bytes
        host = HostRoom(
            specs,
            places,
            accumulates=accumulates,
            kept_bytes=kept.hosted,
        )
        return Decision(
            specs=specs,
            blocks=blocks,
            places=places,
            kept=kept,
            host=host,
            budget=budget,
            needed_bytes=needed,
            sizes=sizes,
        )

    if isinstance(needs, Work):
        return arranged(Kept(), None, needs)
    free = [block for block in blocks if not block.fixed]
    fixed_bytes = sum(block.on_gpu(Place()) for block in blocks if block.fixed)
    states = States(
        weights=sum(block.weight for block in free),
        gradients=sum(block.grad for block in free),
        moments=sum(block.states for block in free),
        placement=placement,
        weights_move=not several,
        gradients_move=not several,
        ring=ring_bytes() if any(map(may_update_away, blocks)) else 0,
        window=window_bytes(blocks),
    )
    asked, tried = budget, list[Decision]()
    for i in range(ATTEMPTS):
        ladder, sizes = needs(asked.gpu - fixed_bytes, asked.host, states)
        work = scheduled_work(sizes, tokens, accumulates)
        tried.append(arranged(keeping(sizes, tokens, ladder), sizes, work))
        over = tried[-1].over
        if max(over) <= 0:
            return tried[-1]
        less = [nbytes + (STEP << 2 * i) if nbytes > 0 else 0 for nbytes in over]
        asked = Budget(asked.gpu - less[0], asked.host - less[1])
    return min(tried, key=lambda decision: max(decision.over))


def keeping(sizes: Sizes, tokens: int, ladder: Ladder) -> Kept:
    """The bytes of a ladder."""
    lasting = lasting_bytes(sizes, tokens, ladder)
    hosted = tuple(host_bytes(sizes, tokens, (keep,)) for keep in ladder)
    return Kept(ladder, gpu_bytes(sizes, tokens, ladder), lasting, hosted)
