"""GPUs by name: their memory, and the rates that training steps reach on them.

The rates of `h100` and `h200` were measured in profiling/results (h200_layer.json,
h200_kernels.json, h200_adamw.json, *_states_step.json). Those of all other names come from
datasheets (cards.py), and so do those of a card given by its numbers (`gib=24,flops=165e12`). These
are estimates, and their `spread` says how far the seconds may be off.

The rates measured on the machine of this process (measure.py) are a `Machine` too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from longctx.constants import GIB
from longctx.cost.cards import CARDS, LINK_SHARE, MEMORY_SHARE, SPREAD, Card
from longctx.cost.fitted import CONTEXT_BYTES, NVLINK, PROCESS_BYTES, SHARED_LINK
from longctx.cost.rates import AttentionRates, Rates, of_heads


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU on its link to a host: its memory, and its rates in a training step."""

    name: str
    device: str
    """A pattern that matches CUDA's names of the GPU."""
    gpu_gib: float
    """GiB of GPU memory as CUDA counts it."""
    flops: float
    """FLOP/s of large bf16 matmuls."""
    attention: Mapping[str, AttentionRates]
    """Attention's rates by backend; `--attn_backend auto` takes the first."""
    memory_bytes: float
    """Bytes per second that the GPU reads from or writes to its memory."""
    link_bytes: float
    """Bytes per second copied to the host, with equal traffic back."""
    peak_flops: float | None = None
    """The datasheet's dense bf16 FLOP/s, with sums in fp32; None: not known."""
    peer_bytes: float | None = None
    """Bytes per second to another GPU of the host, with equal traffic back; None: through the
    host's link."""
    shared_link: float = 1.0
    """The share of `link_bytes` that each process gets if more than two of a host copy at once; 1
    where it was not measured."""
    measured: bool = False
    """Whether the rates were measured; otherwise they are estimates from a datasheet."""
    here: bool = False
    """Whether it is the machine that this process runs on."""
    spread: tuple[float, float] = (1.0, 1.0)
    """A step may take between the first and the second number times the predicted seconds."""
    assumed: str = ""
    """Names the numbers that a user did not give and that were assumed; otherwise empty."""
    held_bytes: int = CONTEXT_BYTES
    """GPU bytes that CUDA, the kernels' code and other processes take."""
    started_bytes: int = PROCESS_BYTES
    """Host bytes of the process before it measures free memory; 0 if measured here."""
    lockable_bytes: int | None = None
    """The most host memory that can be page-locked; None without a limit."""
    by_length: Mapping[str, Mapping[int, AttentionRates]] = field(default_factory=dict)
    """Maps backends to document lengths in tokens to rates, where these were measured."""

    def attention_at(self, backend: str, document: int) -> AttentionRates:
        """Returns a backend's attention rates for documents of a length in tokens."""
        lengths = self.by_length.get(backend)
        return between(lengths, document) if lengths else self.attention[backend]

    @property
    def exchange_bytes(self) -> float:
        """Bytes per second that a GPU receives in collectives of a layer's size."""
        return self.peer_bytes or self.link_bytes

    def among(self, processes: int) -> Machine:
        """Returns the machine as each of several processes on one host sees it."""
        share = self.shared_link if processes > 2 else 1.0
        return replace(self, link_bytes=share * self.link_bytes, shared_link=1.0)

    @property
    def gpu_bytes(self) -> int:
        return int(self.gpu_gib * GIB)

    def rates(self, backend: str, document: int, head_dim: int, capped: bool = False) -> Rates:
        """Returns the rates with a backend's attention, for documents of this length and heads of
        this size, whose scores may have a softcap."""
        attention = of_heads(self.attention_at(backend, document), backend, head_dim, capped)
        return Rates(self.flops, self.link_bytes, self.memory_bytes, attention)


def between(lengths: Mapping[int, AttentionRates], document: int) -> AttentionRates:
    """Returns the rates at a document's length, interpolated between two measured lengths on a
    logarithmic scale."""
    known = sorted(lengths)
    document = min(max(document, known[0]), known[-1])
    above = next(i for i, length in enumerate(known) if length >= document)
    a, b = known[max(0, above - 1)], known[above]
    share = math.log(document / a) / math.log(b / a) if b > a else 0.0
    pairs = zip(lengths[a], lengths[b], strict=True)
    return AttentionRates(*(x + share * (y - x) for x, y in pairs))


_HOPPER = {
    "fa4": AttentionRates(665e12, 610e12),
    "cudnn": AttentionRates(575e12, 550e12),
    "flash": AttentionRates(400e12, 330e12),
}
_MEASURED = tuple(
    Machine(
        name=name,
        device=name.upper(),
        gpu_gib=gib,
        peak_flops=989e12,
        flops=665e12,
        attention=_HOPPER,
        memory_bytes=memory_bytes,
        link_bytes=link_bytes,
        peer_bytes=NVLINK,
        shared_link=shared_link,
        measured=True,
    )
    for name, gib, memory_bytes, link_bytes, shared_link in (
        ("h100", 79.18, 2.95e12, 50e9, SHARED_LINK),
        ("h200", 139.80, 4.25e12, 52e9, 1.0),
    )
)


def estimated(card: Card, spread: tuple[float, float] = SPREAD, assumed: str = "") -> Machine:
    """Returns the machine of a card of which the datasheet alone is known: each rate is the
    datasheet's, times the share of it that steps reach."""
    attention = {
        backend: AttentionRates(*(share * card.peak_flops for share in shares))
        for backend, shares in card.shares.attention.items()
    }
    return Machine(
        name=card.name,
        device=card.device,
        gpu_gib=card.gpu_gib,
        peak_flops=card.peak_flops,
        flops=card.shares.matmul * card.peak_flops,
        attention=attention,
        memory_bytes=MEMORY_SHARE * card.memory_bytes,
        link_bytes=LINK_SHARE * card.link_bytes,
        peer_bytes=card.nvlinks * NVLINK or None,
        spread=spread,
        assumed=assumed,
    )


MACHINES = {machine.name: machine for machine in (*_MEASURED, *(estimated(card) for card in CARDS))}


def machine_like(gpu: str) -> Machine | None:
    """Returns the machine whose pattern matches CUDA's name of a GPU; None if none does, and for
    the chips of laptops, which have the names of larger ones."""
    if "laptop" in gpu.lower():
        return None
    found = [m for m in MACHINES.values() if re.search(rf"\b(?:{m.device})\b", gpu, re.I)]
    # Of "RTX 4060 Ti" and "RTX 4060 Ti.*8GB" the longer pattern is the more exact one.
    return max(found, key=lambda machine: len(machine.device), default=None)


def peak_flops(gpu: str) -> float | None:
    """Returns the dense bf16 peak, in FLOP/s, of a GPU by CUDA's name; None for an unknown one."""
    machine = machine_like(gpu)
    return None if machine is None else machine.peak_flops
