"""Moves a model's weights and the states of exact AdamW to their places (memory/decide.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from longctx.any_model.runtime import AnyRuntime, any_part, any_runtime_of
from longctx.constants import GIB
from longctx.cost.sizes import Batch
from longctx.errors import UserError, print_rank0
from longctx.families.blocks import language_models, state_blocks
from longctx.families.families import base_of
from longctx.families.strangers import why_not_scheduled
from longctx.loop.collectives import all_reduce_min
from longctx.loop.host_link import shared_link_bytes
from longctx.memory.decide import Decision, decide, decide_as_given, gpu_budget
from longctx.memory.ladder import Budget, Step
from longctx.memory.machine import host_budget, host_share_bytes
from longctx.memory.place import Place, Placement
from longctx.memory.rates import gpu_rates
from longctx.memory.settle import leaving_bytes
from longctx.memory.states import BlockSpec
from longctx.memory.store import free_gpu_bytes
from longctx.memory.stream import StateStream
from longctx.runtime.costs import StepTable
from longctx.runtime.peers import peer_backend, peer_kind_of, peer_sizes
from longctx.runtime.runtime import NO_RATES, chunks_loss, patched_part
from longctx.settings import TaskName, scored_tokens


class GivenPlan(Protocol):
    """A plan that was made before, whose places a run uses."""

    @property
    def path(self) -> Path: ...

    def places_of(self, specs: Sequence[BlockSpec]) -> list[Place]:
        """Returns the places of these blocks."""

    def step(self, step: Step) -> Step:
        """Returns the step with the ladder and the cut of the plan."""


class Placing(Protocol):
    """The arguments of a run that decide where its states live."""

    place: Placement
    gpu_memory_gib: float | None
    gradient_accumulation_steps: int

    @property
    def device(self) -> torch.device: ...

    @property
    def world_size(self) -> int: ...


def place_states(
    model: Any,
    args: Placing,
    tokens: int,
    given: GivenPlan | None = None,
    *,
    task: TaskName = "sft",
    head_movable: bool = True,
    host_memory_gib: float | None = None,
) -> StateStream:
    """Moves the model's weights and new AdamW states to the places that the options, or a given
    plan, ask for. `tokens` are those of the longest batch; `head_movable` is that of
    `state_blocks`. `host_memory_gib` limits the host memory of a model that is not patched. Raises
    UserError if GPU or host have too little memory."""
    patched, several = _scheduled(model), args.world_size > 1
    movable = patched is not None and not several
    specs = state_blocks(model, movable=movable, head_movable=head_movable)
    if any_patched := patched_part(model):
        host_memory_gib = any_patched.longctx.args.host_memory_gib
    if (inputs := _keeps_inputs(model)) is not None:
        host_memory_gib = inputs.args.host_memory_gib
    budget = Budget(_gpu_budget(specs, args), _host_budget(specs, host_memory_gib, args))
    link_bytes = shared_link_bytes(args.device) if args.device.type == "cuda" else None
    decided = _decided(model, patched, specs, budget, args, tokens, given, task, link_bytes)
    problem = decided.gpu_problem() if args.place != "gpu" else None
    if problem := problem or decided.host_problem():
        raise UserError(problem if given is None else f"--plan {given.path}: {problem}")
    if problem := decided.placement_problem(args.place):
        raise UserError(problem)
    dtype, on_gpu = next(model.parameters()).dtype, args.device.type == "cuda"
    print_rank0(describe_states(decided, dtype, on_gpu=on_gpu))
    if several:
        # This replaces DDP, which also makes all processes begin with the first one's weights.
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)
    store = patched.longctx.store if patched else inputs.store if inputs else None
    decided.host.settle(args.device, store, decided.kept.ladder if store else ())
    if patched is not None:
        patched.longctx.adopt(decided.chosen, tokens)
        print_rank0(patched.longctx.describe(decided.sizes.vocab))
    if inputs is not None:
        inputs.adopt(tokens)
        print_rank0(inputs.describe())
    limit_gpu(args.device, args.gpu_memory_gib)
    return StateStream(decided.host.blocks, args.device)


def _decided(
    model: Any,
    patched: Any | None,
    specs: Sequence[BlockSpec],
    budget: Budget,
    args: Placing,
    tokens: int,
    given: GivenPlan | None,
    task: TaskName,
    link_bytes: float | None = None,
) -> Decision:
    """Returns the decision, by the count of the layers that run."""
    accumulates = args.gradient_accumulation_steps > 1
    if patched is None and (inputs := _keeps_inputs(model)) is not None:
        inputs.surround(link_bytes=link_bytes, passes=args.gradient_accumulation_steps, task=task)
        step = inputs.step(any_part(model), tokens)
    elif patched is None:
        step = _peer_step(model, args, tokens, task, link_bytes)
    else:
        patched.longctx.surround(link_bytes=link_bytes)
        step = patched.longctx.step(patched.longctx.sizes(patched), tokens)
        step = replace(step, again=patched.longctx.can_run_again(patched))
    if given is not None:
        places = given.places_of(specs)
        return decide_as_given(
            specs, budget, accumulates=accumulates, step=given.step(step), places=places
        )
    return decide(
        specs,
        budget,
        placement=args.place,
        accumulates=accumulates,
        several=args.world_size > 1,
        step=step,
    )


def _scheduled(model: Any) -> Any | None:
    """Returns the patched model whose layers the schedule runs in training; None if Hugging Face's
    layers run, and for a module of several models, whose activations share no budget."""
    patched = patched_part(model)
    if patched is None or len(language_models(model)) != 1:
        return None
    base = base_of(patched)
    return None if base is None or why_not_scheduled(base, training=True) else patched


def _keeps_inputs(model: Any) -> AnyRuntime | None:
    """Returns the runtime of a model that was patched as any model, which holds its layers'
    inputs."""
    found = any_part(model) if len(language_models(model)) == 1 else None
    return None if found is None else any_runtime_of(found)


def _peer_step(
    model: Any, args: Placing, tokens: int, task: TaskName, link_bytes: float | None
) -> Step:
    """Returns the step of a model whose layers are not longctx's, as its plan counts it."""
    patched = patched_part(model) if len(language_models(model)) == 1 else None
    dtype = next(model.parameters()).dtype
    class_type, chunks = peer_kind_of(model)
    if patched is not None:
        class_type, chunks = "vanilla", chunks_loss(patched)
    sizes = peer_sizes(model, class_type, dtype.itemsize, chunks_loss=chunks)
    rates, document = NO_RATES, tokens
    if args.device.type == "cuda":
        how = dtype, peer_backend(model), document, *sizes.scores
        rates = gpu_rates(args.device, *how, link_bytes=link_bytes)
    return Step(
        count=StepTable.of,
        sizes=sizes,
        batch=Batch(
            *(tokens, document, args.gradient_accumulation_steps), scored_tokens(task, tokens)
        ),
        rates=rates,
        offload="none",
    )


def limit_gpu(device: torch.device, gib: float | None) -> None:
    """Limits torch's allocator to --gpu_memory_gib."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    if gib:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total_bytes), device)


def _gpu_budget(specs: Sequence[BlockSpec], args: Placing) -> int:
    """Returns the bytes that the run may take of the GPU, with those of the weights there."""
    if args.device.type != "cuda":
        return 2**62  # a CPU has one memory, the host's
    tensors = (part.tensor for spec in specs for part in spec.parts)
    weights = sum(x.nbytes for x in tensors if x.is_cuda)
    return gpu_budget(free_gpu_bytes(args.device) + weights, args.gpu_memory_gib)


def _host_budget(specs: Sequence[BlockSpec], limit_gib: float | None, args: Placing) -> int:
    """Returns this process's share of the host, with the bytes that weights hold until they have
    moved. Processes of one host ask before any of them takes its share."""
    free = host_share_bytes() + leaving_bytes(specs, args.device)
    return all_reduce_min(host_budget(free, limit_gib), args.device)


def describe_states(decided: Decision, dtype: torch.dtype, *, on_gpu: bool = True) -> str:
    """Returns a line that says what a run without an engine trains, and where it lives. `on_gpu`
    False: the process has no GPU, so it has one memory."""
    host = decided.host
    trained = {p.dtype for spec in decided.specs for p in spec.trained}
    parts = "fp32 weights"
    if torch.bfloat16 in trained:
        parts = "bfloat16 weights with the rest of their fp32 masters"
    elif dtype == torch.bfloat16:
        parts = "fp32 adapters over frozen weights"

    def gib(on_gpu: bool) -> str:
        found = {
            name: sum(
                getattr(size, kind)
                for size, place in zip(decided.blocks, decided.places, strict=True)
                if getattr(place, kind) == on_gpu
            )
            for kind, name in (("weight", "weights"), ("states", "states"), ("grad", "gradients"))
        }
        shown = [f"{name} {nbytes / GIB:.2f}" for name, nbytes in found.items() if nbytes]
        return ", ".join(shown) or "nothing"

    where = "on the GPU" if on_gpu else "in memory"
    line = f"states: exact fp32 AdamW, {parts}; {where}: {gib(True)} GiB"
    if host.nbytes:
        line += f"; on the host: {gib(False)} GiB" if host.states_bytes else ""
        line += f"; {host.nbytes / GIB:.2f} GiB of host memory locked"
    return line
