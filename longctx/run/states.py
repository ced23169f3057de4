"""The optimizer of a run without an engine: exact AdamW, its states placed by the run's budgets.

GPU memory is given, in this order, to what a step works with, to weights, gradients and states
(memory/plan.py) and to kept activations; the host holds the rest in one slab.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from longctx.config import TrainArguments
from longctx.errors import UserError, print_rank0
from longctx.memory.machine import available_host_bytes
from longctx.memory.plan import GIB, BlockSizes, Place, buffer_bytes, place_blocks
from longctx.memory.settle import HostRoom
from longctx.memory.store import free_gpu_bytes
from longctx.memory.stream import StateStream
from longctx.model.blocks import decoder_layers, state_blocks
from longctx.model.loss import LOGITS_BYTES
from longctx.model.runtime import patched_part

ADAMW = ("adamw_torch", "adamw_torch_fused")
SPARE = 0.015
"""Of GPU memory: the allocator's rounding and gaps."""
HOST_SPARE_GIB = 4
"""For the process itself, compilers, and the block that is copied when states are saved."""


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


def place_states(
    model: Any, args: TrainArguments, tokens: int, *, free_bytes: int | None = None
) -> StateStream:
    """Moves the model's weights and new AdamW states to where the options put them.

    `tokens` is the longest batch. `free_bytes` stands in for what the GPU has free. Raises
    UserError where GPU or host have too little memory.
    """
    device = args.device
    patched = patched_part(model)
    several = args.world_size > 1
    accumulates = args.gradient_accumulation_steps > 1
    specs = state_blocks(model, movable=patched is not None and not several)
    sizes = [spec.sizes(accumulates=accumulates) for spec in specs]
    budget = _gpu_budget(model, args) if free_bytes is None else free_bytes
    room = budget - working_bytes(model, tokens)
    places = place_blocks(
        sizes,
        room,
        args.place,
        keeps_gradients=several,
        before_gradients=0 if accumulates else before_gradients(model, tokens),
    )
    lasting = buffer_bytes(sizes, places) + sum(
        size.on_gpu(place) for size, place in zip(sizes, places, strict=True)
    )
    fleeting = sum(s.grad for s, place in zip(sizes, places, strict=True) if place.grad)
    needed = lasting - (0 if accumulates else min(fleeting, before_gradients(model, tokens)))
    if args.place != "gpu" and needed > room:
        raise UserError(_too_small(budget, needed + budget - room, patched is not None))

    layers = len([spec for spec in specs if spec.layer is not None])
    on_gpu, layer_bytes, store = 0, 0, None
    if patched is not None:
        runtime = patched.longctx
        store, layer_bytes = runtime.store, runtime.sizes(patched).kept_bytes(tokens)
        if not accumulates:  # gradients come as activations go
            lasting -= fleeting
        on_gpu = store.count_on_gpu(layers, layer_bytes, room - lasting + layer_bytes)
        runtime.reserved_tokens = tokens
    host = HostRoom(
        specs,
        places,
        accumulates=accumulates,
        activation_bytes=(layers - on_gpu) * layer_bytes if store else 0,
        layer_bytes=layer_bytes,
    )
    limit_gib = patched.longctx.args.host_memory_gib if patched is not None else None
    _check_host(host.nbytes, limit_gib)
    if several:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)
    print_rank0(_line(sizes, places, host, layers - on_gpu if store else 0, model.dtype))
    host.settle(device, store, on_gpu)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if args.gpu_memory_gib:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, args.gpu_memory_gib * GIB / total), device
            )
    stream = StateStream(host.blocks, device)
    model.register_state_dict_pre_hook(lambda *_: stream.flush())
    return stream


def working_bytes(model: Any, tokens: int) -> int:
    """What a step needs on the GPU besides states and the activations of other layers."""
    patched = patched_part(model)
    if patched is not None:
        return patched.longctx.sizes(patched).working_bytes(tokens, LOGITS_BYTES)
    # Hugging Face's layers: checkpoints of all layers, one layer's activations and gradients, and
    # logits in fp32 with their gradient.
    config = model.config.get_text_config()
    layer = 2 * (12 * config.hidden_size + 6 * config.intermediate_size) * model.dtype.itemsize
    kept = len(list(decoder_layers(model))) * config.hidden_size * model.dtype.itemsize
    return tokens * (layer + kept + 10 * config.vocab_size)


def before_gradients(model: Any, tokens: int) -> int:
    """What of it is needed only until the first layers' gradients are there."""
    patched = patched_part(model)
    if patched is None:
        return 0
    sizes = patched.longctx.sizes(patched)
    return max(0, sizes.loss_bytes(tokens, LOGITS_BYTES) - sizes.layer_bytes(tokens))


def _gpu_budget(model: nn.Module, args: TrainArguments) -> int:
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


def _check_host(needed: int, limit_gib: float | None) -> None:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine
    available_gib = available_host_bytes() / GIB / processes - HOST_SPARE_GIB
    if limit_gib is not None:
        available_gib = min(available_gib, limit_gib)
    if needed / GIB > available_gib:
        raise UserError(
            f"{needed / GIB:.1f} GiB of host memory are needed for states and activations and "
            f"{available_gib:.1f} GiB may be used: set --keep_attention false (half the "
            "activations), --offload_activations auto, a higher --gpu_memory_gib, or a shorter "
            "--seq_len"
        )


def _line(
    sizes: Sequence[BlockSizes],
    places: Sequence[Place],
    host: HostRoom,
    offloaded: int,
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
        line += f", activations of {offloaded} layers among them" if offloaded else ""
    return line
