"""GPUs by name: bytes, and the rates that steps really reach.

`h100` and `h200` hold what profiling/results measured (h200_layer.json, h200_kernels.json,
h200_adamw.json, *_states_step.json), the others what their datasheets let expect: of dense bf16
FLOP/s with fp32 sums 65 to 91% in large products, less in attention, of the memory's rate 88%, of
the link's 80%. They are estimates, and said to be.

Attention is timed by backend, the one that `--attn_backend auto` takes first.

What is measured on this machine (measure.py) is a `Machine` too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from longctx.constants import GIB
from longctx.cost.fitted import CONTEXT_BYTES, NVLINK, PROCESS_BYTES
from longctx.cost.rates import AttentionRates, Rates, of_heads
from longctx.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU on its link to a host."""

    name: str
    device: str
    """What CUDA's name of it holds."""
    gpu_gib: float
    """As CUDA counts it."""
    flops: float
    """Of large products in bf16, in a second."""
    attention: Mapping[str, AttentionRates]
    """By --attn_backend; the first is what `auto` takes."""
    memory_bytes: float
    """Read or written in a second."""
    link_bytes: float
    """Copied to the host in a second while as much comes from it."""
    peak_flops: float | None = None
    """The datasheet's dense bf16 FLOP/s, with sums in fp32; None: not known."""
    other_peaks: Mapping[str, float] = field(default_factory=dict)
    """The same of cards whose name for CUDA holds `device` too, and which are other chips."""
    peer_bytes: float | None = None
    """To another GPU of the host in a second, while as much comes from it; None: over the link."""
    measured: bool = False
    here: bool = False
    """On this very machine."""
    held_bytes: int = CONTEXT_BYTES
    """Of the GPU: what CUDA, kernels' code and others have."""
    started_bytes: int = PROCESS_BYTES
    """Of the host: what a run takes before it asks what is free; 0 where that was asked here."""
    lockable_bytes: int | None = None
    """Of the host, where more is refused."""
    by_length: Mapping[str, Mapping[int, AttentionRates]] = field(default_factory=dict)
    """Backend -> tokens of a document -> rates, where they were measured."""

    def attention_at(self, backend: str, document: int) -> AttentionRates:
        """For documents of so many tokens."""
        lengths = self.by_length.get(backend)
        return between(lengths, document) if lengths else self.attention[backend]

    @property
    def exchange_bytes(self) -> float:
        """What a GPU gets from others in a second, in collectives of a layer's size."""
        return self.peer_bytes or self.link_bytes

    @property
    def gpu_bytes(self) -> int:
        return int(self.gpu_gib * GIB)

    def rates(self, backend: str, document: int, head_dim: int, capped: bool = False) -> Rates:
        """With a backend's attention, of documents of so many tokens and heads of that size, whose
        scores may have a softcap."""
        attention = of_heads(self.attention_at(backend, document), backend, head_dim, capped)
        return Rates(self.flops, self.link_bytes, self.memory_bytes, attention)


def between(lengths: Mapping[int, AttentionRates], document: int) -> AttentionRates:
    """The rates at a document's length: between two measured ones by their logarithms."""
    known = sorted(lengths)
    document = min(max(document, known[0]), known[-1])
    above = next(i for i, length in enumerate(known) if length >= document)
    a, b = known[max(0, above - 1)], known[above]
    share = math.log(document / a) / math.log(b / a) if b > a else 0.0
    pairs = zip(lengths[a], lengths[b], strict=True)
    return AttentionRates(*(x + share * (y - x) for x, y in pairs))


def _flash(forward: float, backward: float) -> dict[str, AttentionRates]:
    return {"flash": AttentionRates(forward, backward), "cudnn": AttentionRates(forward, backward)}


_HOPPER = {
    "fa4": AttentionRates(665e12, 610e12),
    "cudnn": AttentionRates(575e12, 550e12),
    "flash": AttentionRates(400e12, 330e12),
}
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            name="h100",
            device="H100",
            gpu_gib=79.18,
            peak_flops=989e12,
            other_peaks={"H100 PCIe": 756e12},
            flops=665e12,
            attention=_HOPPER,
            memory_bytes=2.95e12,
            link_bytes=50e9,
            peer_bytes=NVLINK,
            measured=True,
        ),
        Machine(
            name="h200",
            device="H200",
            gpu_gib=139.80,
            peak_flops=989e12,
            flops=665e12,
            attention=_HOPPER,
            memory_bytes=4.25e12,
            link_bytes=52e9,
            peer_bytes=NVLINK,
            measured=True,
        ),
        Machine(
            name="a100",
            device="A100",
            gpu_gib=79.25,
            peak_flops=312e12,
            flops=255e12,
            attention=_flash(190e12, 165e12),
            memory_bytes=1.75e12,
            link_bytes=21e9,
            peer_bytes=0.6 * NVLINK,
        ),
        Machine(
            name="l40s",
            device="L40S",
            gpu_gib=44.4,
            peak_flops=362e12,
            flops=235e12,
            attention=_flash(160e12, 140e12),
            memory_bytes=0.76e12,
            link_bytes=21e9,
        ),
        Machine(
            name="rtx-3090",
            device="RTX 3090",
            gpu_gib=23.6,
            peak_flops=71e12,
            flops=63e12,
            attention=_flash(58e12, 52e12),
            memory_bytes=0.82e12,
            link_bytes=21e9,
        ),
        Machine(
            name="rtx-4090",
            device="RTX 4090",
            gpu_gib=23.5,
            peak_flops=165.2e12,
            flops=148e12,
            attention=_flash(135e12, 120e12),
            memory_bytes=0.89e12,
            link_bytes=21e9,
        ),
        Machine(
            name="rtx-5090",
            device="RTX 5090",
            gpu_gib=31.3,
            peak_flops=209.5e12,
            flops=190e12,
            attention=_flash(170e12, 150e12),
            memory_bytes=1.58e12,
            link_bytes=45e9,
        ),
        Machine(
            name="b200",
            device="B200",
            gpu_gib=178.3,
            peak_flops=2250e12,
            other_peaks={"GB200": 2500e12},
            flops=1500e12,
            attention={
                "fa4": AttentionRates(1300e12, 950e12),
                "cudnn": AttentionRates(1250e12, 900e12),
                "flash": AttentionRates(400e12, 330e12),
            },
            memory_bytes=7.0e12,
            link_bytes=50e9,
            peer_bytes=2 * NVLINK,
        ),
    )
}


def machine_named(name: str) -> Machine:
    """Raises UserError for one that nobody knows."""
    known = name.lower().replace("_", "-").replace(" ", "-")
    if known in MACHINES:
        return MACHINES[known]
    close = difflib.get_close_matches(known, MACHINES, n=1, cutoff=0.0)[0]
    raise UserError(f"--gpu {name}: no such machine is known; did you mean {close}?")


def machine_like(gpu: str) -> Machine | None:
    """The profile of a GPU that CUDA calls so; None for one that has no name here."""
    return next((machine for machine in MACHINES.values() if machine.device in gpu), None)


def peak_flops(gpu: str) -> float | None:
    """The dense bf16 peak, in FLOP/s, of a GPU that CUDA calls so; None for one that has no name
    here."""
    machine = machine_like(gpu)
    if machine is None:
        return None
    others = (peak for name, peak in machine.other_peaks.items() if name in gpu)
    return next(others, machine.peak_flops)
