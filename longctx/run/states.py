"""The optimizer of a run without an engine: exact AdamW, its states placed by the run's budgets.

GPU memory is given, in this order, to what a step works with, to weights, gradients and states
(memory/plan.py) and to kept activations; the host holds the rest in one slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from longctx.config import TrainArguments
from longctx.errors import UserError, print_rank0
from longctx.memory.ladder import Ladder, States, describe, gpu_bytes, host_bytes
from longctx.memory.machine import host_share_bytes
from longctx.memory.plan import (
    GIB,
    BlockSizes,
    Place,
    Placement,
    buffer_bytes,
    place_blocks,
    ring_bytes,
    window_bytes,
)
from longctx.memory.settle import HostRoom
from longctx.memory.store import free_gpu_bytes
from longctx.memory.stream import StateStream
from longctx.model.blocks import decoder_layers, state_blocks
from longctx.model.runtime import patched_part

ADAMW = ("adamw_torch", "adamw_torch_fused")
SPARE = 0.015
"""Of GPU memory: the allocator's rounding and gaps."""
HOST_SPARE, HOST_SPARE_GIB = 0.1, 4
"""Of what the host has free, and at most: for the process itself, compilers, and the block that is
copied when states are saved."""


def uses_exact_states(args: TrainArguments, dtype: torch.dtype) -> bool:
    """Whether a run without an engine trains with longctx's optimizer: by default where weights
    have 16 bits, else where something is to live on the host.

    Raises UserError for options that contradict each other.
    """
    asks = args.optimizer_states == "fp32" or args.place == "host" or args.gpu_memory_gib
    if args.optimizer_states == "as_weights":
        if args.place == "host" or args.save_fp32:
            raise UserError(
                "--place host and --save_fp32 are of exact states: leave out "
                "--optimizer_states as_weights"
            )
        return False
    if args.optim not in ADAMW or args.fp16 or args.optim_args:
        if asks or (args.save_fp32 and dtype != torch.float32):
            raise UserError(
                "--optimizer_states fp32, --place host, --gpu_memory_gib and --save_fp32 are for "
                "AdamW in bfloat16 or float32: leave out --optim, --optim_args and --fp16"
            )
        return False
    return bool(asks) or dtype == torch.bfloat16


class Placing(Protocol):
    """What of a run's arguments says where its states live."""

    place: Placement
    gpu_memory_gib: float | None
    gradient_accumulation_steps: int

    @property
    def device(self) -> torch.device: ...

    @property
    def world_size(self) -> int: ...


def place_states(model: Any, args: Placing, tokens: int) -> StateStream:
    """Moves the model's weights and new AdamW states to where the options put them; the longest
    batch has `tokens`. Raises UserError where GPU or host have too little memory."""
    patched = patched_part(model)
    several, accumulates = args.world_size > 1, args.gradient_accumulation_steps > 1
    specs = state_blocks(model, movable=patched is not None and not several)
    sizes = [spec.sizes(accumulates=accumulates) for spec in specs]
    budget, host_budget = _gpu_budget(model, args), _host_budget(patched)
    work = step_work(model, tokens)
    kept = _keep(patched, args, sizes, tokens, budget, host_budget)
    # Gradients come as activations go, unless they outlive a forward.
    early_bytes = 0 if accumulates else work.early_bytes + kept.gpu_bytes
    places = place_blocks(
        sizes,
        budget - work.nbytes - kept.gpu_bytes,
        args.place,
        keeps_gradients=several,
        before_gradients=early_bytes,
    )
    gradients = sum(s.grad for s, place in zip(sizes, places, strict=True) if place.grad)
    states = buffer_bytes(sizes, places) - gradients
    states += sum(size.on_gpu(place) for size, place in zip(sizes, places, strict=True))
    needed = states + max(0, gradients - early_bytes)
    if patched:
        needed += work.nbytes + kept.gpu_bytes
    if args.place != "gpu" and needed > budget:
        raise UserError(_too_small(budget, needed, patched is not None))
    host = HostRoom(
        specs,
        places,
        accumulates=accumulates,
        activation_bytes=kept.host_bytes,
        layer_bytes=kept.layer_bytes,
    )
    _check_host(host.nbytes, host_budget)
    print_rank0(_line(sizes, places, host, model.dtype))
    if kept.ladder:
        print_rank0(describe(kept.ladder))
    if several:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)
    host.settle(args.device, patched.longctx.store if patched else None, kept.ladder)
    _limit_gpu(args)
    stream = StateStream(host.blocks, args.device)
    model.register_state_dict_pre_hook(lambda *_: stream.flush())
    return stream


class Work(NamedTuple):
    """What a step needs on the GPU besides states and the activations of other layers."""

    nbytes: int
    early_bytes: int
    """Of them what is needed only until the first layers' gradients are there."""


def step_work(model: Any, tokens: int) -> Work:
    """By count for a patched model, an estimate for any other."""
    patched = patched_part(model)
    if patched is not None:
        sizes = patched.longctx.sizes(patched)
        nbytes = sizes.working_bytes(tokens)
        return Work(nbytes, nbytes - sizes.layer_bytes(tokens))
    # Checkpoints of all layers, one layer's activations and gradients, and, but for Liger-Kernel,
    # logits in bf16 and fp32 with their gradient.
    config = model.config.get_text_config()
    layer = 2 * (12 * config.hidden_size + 6 * config.intermediate_size) * model.dtype.itemsize
    kept = len(list(decoder_layers(model))) * config.hidden_size * model.dtype.itemsize
    is_liger = str(getattr(model.forward, "__module__", "")).startswith("liger_kernel")
    return Work(tokens * (layer + kept + (0 if is_liger else 10 * config.vocab_size)), 0)


class Kept(NamedTuple):
    """What layers keep from forward to backward, and the bytes of it; nothing by a model that is
    not patched."""

    ladder: Ladder = ()
    gpu_bytes: int = 0
    host_bytes: int = 0
    layer_bytes: int = 0
    """Of one layer's on the host."""


def _keep(
    patched: Any | None,
    args: Placing,
    blocks: Sequence[BlockSizes],
    tokens: int,
    budget: int,
    host_budget: int,
) -> Kept:
    if patched is None:
        return Kept()
    runtime, several = patched.longctx, args.world_size > 1
    sizes = runtime.sizes(patched)
    states = States(
        weights=sum(block.weight for block in blocks),
        gradients=sum(block.grad for block in blocks),
        moments=sum(block.states for block in blocks),
        placement=args.place,
        weights_move=not several,
        gradients_move=not several,
        ring=ring_bytes(),
        window=window_bytes(blocks),
    )
    ladder = runtime.choose(sizes, tokens, budget, host_budget, states)
    runtime.reserved_tokens = tokens
    hosted = host_bytes(sizes, tokens, ladder)
    layers = sum(keep.host is not None for keep in ladder)
    return Kept(ladder, gpu_bytes(sizes, tokens, ladder), hosted, hosted // max(1, layers))


def _limit_gpu(args: Placing) -> None:
    if args.device.type != "cuda":
        return
    torch.cuda.empty_cache()
    if args.gpu_memory_gib:
        total_bytes = torch.cuda.get_device_properties(args.device).total_memory
        share = min(1.0, args.gpu_memory_gib * GIB / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, args.device)


def _gpu_budget(model: nn.Module, args: Placing) -> int:
    """What weights, states, gradients and activations may take together."""
    if args.device.type != "cuda":
        return 2**62
    weights = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    total = torch.cuda.get_device_properties(args.device).total_memory
    free = free_gpu_bytes(args.device) + weights
    if args.gpu_memory_gib:
        free = min(free, int(args.gpu_memory_gib * GIB))
        total = min(total, free)
    return free - int(SPARE * total)


def _too_small(budget: int, needed: int, custom: bool) -> str:
    fix = "a shorter --seq_len or smaller --per_device_train_batch_size"
    if not custom:
        fix = f"--class_type custom, whose weights can wait on the host, or {fix}"
    return (
        f"{needed / GIB:.1f} GiB of GPU memory are needed at least and {budget / GIB:.1f} GiB may "
        f"be used: raise --gpu_memory_gib, or use {fix}"
    )


def _host_budget(patched: Any | None) -> int:
    available = host_share_bytes()
    available -= int(min(HOST_SPARE * available, HOST_SPARE_GIB * GIB))
    limit_gib = patched.longctx.args.host_memory_gib if patched else None
    return available if limit_gib is None else min(available, int(limit_gib * GIB))


def _check_host(needed: int, budget: int) -> None:
    if needed > budget:
        raise UserError(
            f"{needed / GIB:.1f} GiB of host memory are needed for states and activations and "
            f"{budget / GIB:.1f} GiB may be used: set --keep x or auto, --offload_activations auto "
            "(GPU memory first), a higher --gpu_memory_gib, or a shorter --seq_len"
        )


def _line(
    sizes: Sequence[BlockSizes],
    places: Sequence[Place],
    host: HostRoom,
    dtype: torch.dtype,
) -> str:
    parts = "fp32 weights"
    if dtype == torch.bfloat16:
        parts = "bfloat16 weights with the rest of their fp32 masters"

    def gib(on_gpu: bool) -> str:
        found = {
            name: sum(
                getattr(size, kind)
                for size, place in zip(sizes, places, strict=True)
                if getattr(place, kind) == on_gpu
            )
            for kind, name in (("weight", "weights"), ("states", "states"), ("grad", "gradients"))
        }
        shown = [f"{name} {nbytes / GIB:.2f}" for name, nbytes in found.items() if nbytes]
        return ", ".join(shown) or "nothing"

    line = f"states: exact fp32 AdamW, {parts}; on the GPU: {gib(True)} GiB"
    if host.nbytes:
        line += f"; on the host: {gib(False)} GiB" if host.states_bytes else ""
        line += f"; {host.nbytes / GIB:.2f} GiB of host memory locked"
    return line
