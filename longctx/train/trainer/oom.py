"""What to say when the GPU's memory runs out: in which phase, what holds it, what would shrink it.

    error: out of memory in step 3, backward, MLP of a layer: 2.33 GiB more did not fit
      131.20 GiB in use: activations and working buffers 67.1, optimizer 32.0, gradients 16.0, ...
      to need less:
        --offload_activations all: kept activations wait in host memory, about 60.0 GiB less
        ...

The phase is read off the error's traceback. Weights, gradients, optimizer states and the kept
activations of `custom` are counted, tensor by tensor; the rest is what torch's message says was
allocated, less those. With `--memory_snapshot_on_oom` the allocator records who asked for memory,
and its snapshot is written when an allocation fails, before anything is freed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations import sdpa_attention
from transformers.loss import loss_utils

from longctx.attention import backends, cross, flash4, prefixes, protocol, sharded
from longctx.constants import GIB
from longctx.cost.kept import asked
from longctx.cost.sizes import Batch
from longctx.errors import UserError
from longctx.head import distillation, log_probs, loss, pieces
from longctx.head import stream as head
from longctx.kernels import cross_entropy, divergence, log_softmax
from longctx.layer import parts
from longctx.loop.collectives import local_shard
from longctx.memory import slab, store
from longctx.memory.held import HeldGradient
from longctx.runtime.costs import StepTable
from longctx.runtime.runtime import patched_part
from longctx.settings import Keeping
from longctx.train.engines import Engine
from longctx.train.options.config import ModelArguments
from longctx.train.trainer.trainer import LongTrainer

_RECORDED = 100_000
"""Allocations and frees the allocator remembers; a step of 32 layers in 16 tiles has about 20,000.
A record takes about 1 KB of host memory."""

_UNITS = {"MiB": 1 / 1024, "GiB": 1.0}
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (MiB|GiB)")
_ALLOCATED = re.compile(r"([\d.]+) (MiB|GiB) is allocated by PyTorch")
_FRAGMENTED = re.compile(r"([\d.]+) (MiB|GiB) is reserved by PyTorch but unallocated")

REST = "activations and working buffers"


class OutOfMemory(UserError):
    """Several lines: where, what holds the memory, what would shrink it."""


@contextmanager
def explained_oom(trainer: LongTrainer, model_args: ModelArguments) -> Iterator[None]:
    """Turns torch.OutOfMemoryError into OutOfMemory, and writes the snapshot that
    `--memory_snapshot_on_oom` asks for. Everything else passes."""
    snapshot = None
    if trainer.args.memory_snapshot_on_oom:
        name = f"oom_rank{trainer.args.process_index}.pickle"
        snapshot = Path(str(trainer.args.output_dir)) / name
        _snapshot_on_oom(snapshot)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(*explain(error, trainer, model_args, snapshot)) from error


@contextmanager
def explained_oom_of_weights(engine: Engine, model_args: ModelArguments) -> Iterator[None]:
    """Turns torch.OutOfMemoryError into OutOfMemory where the weights alone do not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = _asked(str(error)) or "the weights"
        lines = [f"out of memory while the model is loaded: {asked} did not fit"]
        if not engine.shards_states:
            lines.append("  --place host: weights wait in host memory (class_type custom)")
        if model_args.dtype == "float32":
            lines.append("  --dtype bfloat16: weights of half the size")
        lines.append("  nvidia-smi shows whether other processes hold the GPU's memory")
        raise OutOfMemory(*lines) from error


def _snapshot_on_oom(path: Path) -> None:
    path.unlink(missing_ok=True)
    torch.cuda.memory._record_memory_history(
        max_entries=_RECORDED, context="alloc", stacks="python"
    )

    def observe(device: int, asked: int, allocated: int, free: int) -> None:
        with path.open("wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)

    torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]


def explain(
    error: torch.OutOfMemoryError,
    trainer: LongTrainer,
    model_args: ModelArguments,
    snapshot: Path | None = None,
) -> list[str]:
    """Returns the message: lines as in the module's docstring."""
    text = str(error)
    held = holders(trainer)
    allocated_gib = _gib(_ALLOCATED, text)
    if allocated_gib is not None:
        rest = f"the engine's states, {REST}" if trainer.engine.shards_states else REST
        held[rest] = max(0, int(allocated_gib * GIB) - sum(held.values()))
    asked = _asked(text) or "an allocation"
    step = trainer.state.global_step + 1
    first = f"out of memory in step {step}, {phase_of(error.__traceback__)}: {asked} did not fit"
    largest = sorted(((n, b) for n, b in held.items() if b), key=lambda item: -item[1])
    in_use = f"{sum(held.values()) / GIB:.2f} GiB in use"
    if allocated_gib is None:
        in_use = f"{in_use} by what can be counted"
    lines = [
        first,
        f"  {in_use}: " + ", ".join(f"{name} {b / GIB:.2f}" for name, b in largest),
        "  to need less:",
        *(f"    {line}" for line in advice(held, trainer, model_args, _gib(_FRAGMENTED, text))),
    ]
    if snapshot is None:
        lines.append("  to see who asked for it: --memory_snapshot_on_oom true")
    elif snapshot.exists():
        lines.append(f"  snapshot: {snapshot}; open it at https://pytorch.org/memory_viz")
    return lines


def _activations_spared(trainer: LongTrainer) -> dict[str, int]:
    """Returns the bytes of the GPU by which layers would keep less, at most, of the longest batch
    so far: all but the last on the host, and with less kept."""
    patched: Any = patched_part(trainer.model)  # type: ignore[arg-type]
    runtime = patched.longctx
    tokens = runtime.adopted.tokens
    layers = StepTable.of(runtime.sizes(patched), Batch(tokens, tokens)).layers
    ladder = runtime.store.ladder
    ladder = (len(layers) - len(ladder)) * ladder[:1] + ladder
    placed = [(layer, keep.on_gpu) for layer, keep in zip(layers, ladder, strict=True)]
    here = [layer.kept_bytes(kept) for layer, kept in placed]

    def less(word: Keeping) -> int:
        return sum(here) - sum(
            layer.kept_bytes(kept & asked(word, layer)) for layer, kept in placed
        )

    return {"host": sum(here[:-1]), "o": less("o"), "x": less("x")}


def _asked(text: str) -> str | None:
    """Returns the size that did not fit, as torch's message says it."""
    found = _ASKED.search(text)
    return f"{found[1]} {found[2]} more" if found else None


def _gib(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


# --- in which phase --------------------------------------------------------------------------

LOSS = (distillation, head, log_probs, loss, loss_utils, pieces)
"""The modules that make logits and what is computed from them."""

_FILES = {
    str(module.__file__): part
    for part, modules in {
        "lm_head and loss": (*LOSS, cross_entropy, divergence, log_softmax),
        "attention of a layer": (
            *(backends, cross, flash4, prefixes, protocol, sharded),
            sdpa_attention,
        ),
        "projections of a layer": (parts.attention, parts.heads),
        "MLP of a layer": (parts.mlp,),
        "the activation store": (store, slab),
    }.items()
    for module in modules
}
_MODULES = {
    "MLP": "MLP of a layer",
    "Attention": "attention of a layer",
    "RMSNorm": "a norm",
    "Embedding": "embedding",
}


def phase_of(traceback: TracebackType | None) -> str:
    """Returns phase and part of the step in which the error was raised, `backward, MLP of a
    layer`."""
    phase, part = "forward", None
    while traceback is not None:
        frame = traceback.tb_frame
        file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        traceback = traceback.tb_next
        if name == "evaluation_loop":
            phase = "evaluation"
        elif "backward" in name and phase == "forward":
            phase = "backward"
        elif "clip_grad_norm" in name:
            phase = "gradient clipping"
        elif "/optim/" in file or (name == "step" and "optimizer" in file):
            phase = "optimizer"
        part = _part(frame) or part
    return phase if part is None else f"{phase}, {part}"


def _part(frame: FrameType) -> str | None:
    code = frame.f_code
    if part := _FILES.get(code.co_filename):
        return part
    kind = type(frame.f_locals.get("self")).__name__
    return next((part for end, part in _MODULES.items() if kind.endswith(end)), None)


# --- what holds it ---------------------------------------------------------------------------


def holders(trainer: LongTrainer) -> dict[str, int]:
    """Returns the bytes on the run's device by what they are for, as far as tensors can be
    counted."""
    device = trainer.args.device.type
    model: Any = trainer.model
    parameters = list(model.parameters())
    optimizer: Any = trainer.optimizer
    gradients: list[Any] = [p.grad for p in parameters if not isinstance(p.grad, HeldGradient)]
    if trainer.exact:
        gradients += trainer.exact.gradients.tensors()
        values = [tensor for block in trainer.exact.stream.blocks for tensor in block.tensors()]
    else:
        states = getattr(optimizer, "state", None) or {}
        values = [value for state in states.values() for value in state.values()]
    held = {
        "weights": _bytes([*parameters, *model.buffers()], device),
        "gradients": _bytes(gradients, device),
        "optimizer": _bytes(values, device),
    }
    if patched := patched_part(model):
        held["kept activations"] = _bytes(patched.longctx.store.tensors_on_gpu(), device)
    return held


def _bytes(tensors: Iterable[Any], device: str) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    storages = {}
    for tensor in map(local_shard, tensors):
        if isinstance(tensor, Tensor) and tensor.device.type == device:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# --- what would shrink it --------------------------------------------------------------------


def advice(
    held: dict[str, int],
    trainer: LongTrainer,
    model_args: ModelArguments,
    fragmented_gib: float | None = None,
) -> list[str]:
    """Returns the settings that would need less, with their saving where it is known; the largest
    first."""
    found = [
        *_of_allocator(fragmented_gib),
        *_of_layers(trainer, model_args),
        *_of_states(held, trainer, model_args),
    ]
    lines = [setting.line() for setting in sorted(found, key=lambda s: -(s.saved_bytes or 0))]
    return [*lines, f"--seq_len below {model_args.seq_len}: last of all, for it changes the data"]


class _Setting(NamedTuple):
    """A setting that would need less memory."""

    words: str
    """The setting, as it is written."""
    does: str
    saved_bytes: float | None = None
    """The memory that it saves; None where that is unknown."""

    def line(self) -> str:
        bytes_ = self.saved_bytes
        saved = "" if bytes_ is None else f", about {bytes_ / GIB:.2f} GiB less"
        return f"{self.words}: {self.does}{saved}"


def _of_allocator(fragmented_gib: float | None) -> Iterator[_Setting]:
    if fragmented_gib and fragmented_gib > 0.5:
        yield _Setting(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (in the environment)",
            "what the allocator has reserved and cannot use is used",
            fragmented_gib * GIB,
        )


def _of_layers(trainer: LongTrainer, model_args: ModelArguments) -> Iterator[_Setting]:
    """Yields settings by which layers keep or hold less."""
    if not model_args.schedules:
        ours = "without --parts" if model_args.class_type == "custom" else "--class_type custom"
        yield _Setting(ours, "no logits as a whole, a layer's work in tiles")
        if not trainer.args.gradient_checkpointing:
            yield _Setting(
                "--gradient_checkpointing true", "a layer's activations are computed again"
            )
        elif model_args.offload_activations != "all":
            yield _Setting("--offload_activations all", "the layers' inputs wait in host memory")
        return
    spares = _activations_spared(trainer)
    if model_args.offload_activations != "all" and spares["host"]:
        waits = "kept activations wait in host memory"
        yield _Setting("--offload_activations all", waits, spares["host"])
    if model_args.keep not in ("x", "o") and spares["o"]:
        yield _Setting("--keep o", "all but attention is computed again", spares["o"])
    if model_args.keep != "x":
        yield _Setting("--keep x", "attention runs once more in backward", spares["x"] or None)
    model: Any = trainer.model
    groups = model.config.get_text_config().num_key_value_heads
    if model_args.head_groups != groups and groups > 1:
        yield _Setting(f"--head_groups {groups}", "q, k, v of one group of heads at a time")
    if model_args.tile_tokens is None or model_args.tile_tokens > 2048:
        yield _Setting("--tile_tokens 2048", "the MLP in smaller tiles")


def _of_states(
    held: dict[str, int], trainer: LongTrainer, model_args: ModelArguments
) -> Iterator[_Setting]:
    """Yields settings by which weights, gradients and optimizer states take less of the GPU."""
    states = sum(held.get(name, 0) for name in ("weights", "gradients", "optimizer"))
    if trainer.exact and trainer.args.place != "host":
        waits = f"{'weights and states' if model_args.schedules else 'states'} wait in host memory"
        yield _Setting("--place host, or a lower --gpu_memory_gib", waits, states)
    elif not trainer.engine.shards_states and not trainer.exact:
        waits = "states wait in host memory"
        yield _Setting("--optimizer_states fp32 --place host", waits, states)
    if model_args.dtype == "float32":
        half = "weights, gradients and states of half the size"
        yield _Setting("--dtype bfloat16", half, states / 2)
    if trainer.args.per_device_train_batch_size > 1:
        more = "with more --gradient_accumulation_steps"
        yield _Setting("--per_device_train_batch_size 1", more)
