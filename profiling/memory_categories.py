"""What each allocation of a recorded step is for: torch's memory snapshot -> changes by category.

A snapshot (`torch.cuda.memory._snapshot()`) holds the trace of all allocations and frees since
recording began and the blocks that are alive at its end. Memory that is freed in the trace, or is
alive at its end, without having been allocated in it was there before. An allocation's category:

    weights, optimizer    there before, or seen later, at the address of a parameter, a buffer, an
                          optimizer state; weights also what the stream of states brings from the
                          host
    gradients             at the address that a parameter's gradient has when backward is over
    loss                  asked for by lm_head or the loss (Python frames), or of the size of such a
                          tensor in a part of backward that has no Python frames: its gradient
    kept activations      made in forward and alive when it ends, or read back by the offload store
    optimizer             asked for while the optimizer runs
    working buffers       everything else the step makes: what lives only within forward or backward
    other                 everything else that was there before, or is when the first forward begins
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

CATEGORIES = [
    "weights", "optimizer", "gradients", "kept activations", "loss", "working buffers", "other"
]  # fmt: skip


@dataclass(kw_only=True)
class Marks:
    """What the run knows about its step that a snapshot does not. Times as in the snapshot:
    microseconds since 1970."""

    phases: list[tuple[str, int]]
    """(name, start): `forward`, `backward`, `optimizer`, in order, repeated per micro-batch; of a
    recording from the beginning `loading` and `engine` before them."""
    before: dict[int, str] = field(default_factory=dict)
    """Address -> category of what was there when the step began."""
    gradients: dict[int, int] = field(default_factory=dict)
    """Address of each gradient when the optimizer starts -> that time."""
    seen: list[tuple[int, dict[int, str]]] = field(default_factory=list)
    """(time, address -> category): what lived from step to step when it was looked at."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Memory that begins (positive) or ends (negative) at a moment."""

    time_us: int
    category: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(kw_only=True)
class _Block:
    size: int
    start_us: int | None
    """None: there before the step."""
    address: int
    frames: list[dict[str, Any]]
    end_us: float = float("inf")
    category: str = ""


def categorise(snapshot: dict[str, Any], marks: Marks, device: int = 0) -> list[Change]:
    """All changes of the step in order; the first ones are what was there when it began."""
    trace = snapshot["device_traces"][device]
    if not trace:
        raise ValueError(f"the snapshot recorded nothing on GPU {device}")
    segments = [s for s in snapshot["segments"] if s.get("device", 0) == device]
    blocks = list(_blocks(trace, segments))
    phases = _Phases(marks)
    for block in blocks:
        block.category = _category(block, marks, phases)
    _loss_gradients(blocks, phases)
    begin = trace[0]["time_us"]
    changes = [_reserved_before(trace, segments, begin)]
    for block in blocks:
        start = begin if block.start_us is None else block.start_us
        changes.append(_change(start, block.category, block.size))
        if block.end_us != float("inf"):
            changes.append(_change(int(block.end_us), block.category, -block.size))
    for event in trace:
        size = _reserves(event)
        if size:
            changes.append(_change(event["time_us"], "other", 0, size))
    return sorted(changes, key=lambda change: change.time_us)


def _change(time_us: int, category: str, allocated: int, reserved: int = 0) -> Change:
    return Change(
        time_us=time_us, category=category, allocated_bytes=allocated, reserved_bytes=reserved
    )


# --- the trace -------------------------------------------------------------------------------


def _blocks(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> Iterator[_Block]:
    """Every allocation that lived during the trace, also those from before it."""
    live: dict[int, _Block] = {}
    for event in trace:
        address = event.get("addr", 0)
        if event["action"] == "alloc":
            live[address] = _Block(
                size=event["size"],
                start_us=event["time_us"],
                address=address,
                frames=event.get("frames", []),
            )
        elif event["action"] == "free_completed":
            block = live.pop(address, None) or _Block(
                size=event["size"], start_us=None, address=address, frames=[]
            )
            block.end_us = event["time_us"]
            yield block
    yield from live.values()
    for segment in segments:
        for address, block in _active(segment):
            if address not in live:
                yield _Block(size=block["size"], start_us=None, address=address, frames=[])


def _active(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"].startswith("active"):
            yield block.get("address", address), block
        address += block["size"]


_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _reserves(event: dict[str, Any]) -> int:
    """Bytes by which the event changes what the allocator has reserved."""
    return _RESERVES.get(event["action"], 0) * event["size"]


def _reserved_before(
    trace: list[dict[str, Any]], segments: list[dict[str, Any]], begin_us: int
) -> Change:
    at_end = sum(segment["total_size"] for segment in segments)
    return _change(begin_us, "other", 0, at_end - sum(map(_reserves, trace)))


# --- what it is for --------------------------------------------------------------------------


class _Phases:
    """Which phase a moment belongs to, and when the forward pass around it ended."""

    def __init__(self, marks: Marks) -> None:
        self.names = [name for name, _ in marks.phases]
        self.starts = [start for _, start in marks.phases]

    def at(self, time_us: float) -> str:
        i = bisect_right(self.starts, time_us) - 1
        return self.names[i] if i >= 0 else "before"

    def first(self, name: str) -> float:
        """When a phase of this name begins for the first time."""
        return next((t for n, t in zip(self.names, self.starts, strict=True) if n == name), 0)

    def end(self, time_us: float) -> float:
        """When the phase around this moment ends."""
        i = bisect_right(self.starts, time_us)
        return self.starts[i] if i < len(self.starts) else float("inf")


def _category(block: _Block, marks: Marks, phases: _Phases) -> str:
    if block.start_us is None:
        return marks.before.get(block.address, "other")
    for time_us, held in marks.seen:
        if block.start_us <= time_us <= block.end_us and block.address in held:
            return held[block.address]
    complete_us = marks.gradients.get(block.address)
    if complete_us is not None and block.start_us <= complete_us <= block.end_us:
        return "gradients"
    if _called_from(block.frames, "stream"):
        return "weights"
    if _is_loss(block.frames):
        return "loss"
    phase = phases.at(block.start_us)
    if phase in ("loading", "engine") and block.end_us > phases.first("forward"):
        return "other"
    if phase == "optimizer":
        return "optimizer"
    if phase == "forward" and block.end_us > phases.end(block.start_us):
        return "kept activations"
    if phase == "backward" and _called_from(block.frames, "store"):
        return "kept activations"
    return "working buffers"


def _is_loss(frames: list[dict[str, Any]]) -> bool:
    """Asked for by the loss, or by a linear map outside every decoder layer: lm_head."""
    if _called_from(frames, "loss") or any(_LIGER_LOSS.search(_path(f)) for f in frames):
        return True
    return _called_from(frames, "linear") and not _called_from(frames, "layer")


_LIGER_LOSS = re.compile(r"/liger_kernel/.*(cross_entropy|loss_utils)\.py$")
"""Liger-Kernel is optional and moves its files between releases: any of them with such a name."""


@cache
def _sources() -> dict[str, tuple[str, ...]]:
    """Part of a step -> the ends of its files' paths. Imported here: to draw takes none of them."""
    from torch.nn.modules import linear
    from torch.utils import checkpoint
    from transformers import modeling_layers

    from longctx.memory import store, stream
    from longctx.train.trainer.oom import LOSS

    modules = {
        "loss": LOSS,
        # Hugging Face's: longctx's own layers call no nn.Linear. Recomputation in backward enters
        # them through torch's checkpoint, not through their class.
        "layer": (modeling_layers, checkpoint),
        "store": (store,),
        "stream": (stream,),
        "linear": (linear,),
    }
    return {part: tuple(map(source, of_part)) for part, of_part in modules.items()}


def source(module: ModuleType) -> str:
    """`/longctx/head/loss.py`: a module's file from its top package on. A snapshot may be recorded
    on another machine, where only what stands before it differs."""
    file = Path(str(module.__file__))
    depth = module.__name__.count(".") + (2 if file.stem == "__init__" else 1)
    return "/" + "/".join(file.parts[-depth:])


def _called_from(frames: list[dict[str, Any]], part: str) -> bool:
    return any(_path(frame).endswith(_sources()[part]) for frame in frames)


def _path(frame: dict[str, Any]) -> str:
    return "/" + str(frame["filename"]).replace("\\", "/")


def _loss_gradients(blocks: list[_Block], phases: _Phases) -> None:
    """autograd's own backward has no Python frames: there a tensor of exactly the size of a large
    loss tensor (logits in bf16 or fp32) is its gradient."""
    sizes = {b.size for b in blocks if b.category == "loss" and b.size >= 2**20}
    for block in blocks:
        if block.category == "working buffers" and block.size in sizes and not block.frames:
            if block.start_us is not None and phases.at(block.start_us) == "backward":
                block.category = "loss"
