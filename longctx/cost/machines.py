"""GPUs by name: bytes, and the rates that steps really reach.

`h100` and `h200` hold what profiling/results measured (h200_layer.json, h200_kernels.json,
h200_adamw.json, *_states_step.json). All other names are made from their datasheet (cards.py), and
so is a card of one's own (`gib=24,flops=165e12`). These rates are estimates, and their `spread`
says how far the seconds may be off.

Attention is timed by backend, the one that `--attn_backend auto` takes first.

What is measured on this machine (measure.py) is a `Machine` too.
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
    """A GPU on its link to a host."""

    name: str
    device: str
    """A pattern of CUDA's names for it."""
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
    peer_bytes: float | None = None
    """To another GPU of the host in a second, while as much comes from it; None: over the link."""
    shared_link: float = 1.0
    """The share of `link_bytes` that each process has where more than two of a host copy at once;
    1 where it was not measured."""
    measured: bool = False
    here: bool = False
    """On this very machine."""
    spread: tuple[float, float] = (1.0, 1.0)
    """The seconds of a step may be so many times the predicted ones: at least, and at most."""
    assumed: str = ""
    """Which numbers were assumed of a card that is given by its numbers; else empty."""
    held_bytes: int = CONTEXT_BYTES
    """GPU bytes taken by CUDA, kernels' code and other processes."""
    started_bytes: int = PROCESS_BYTES
    """Host bytes of the process before it measures what is free; 0 if measured here."""
    lockable_bytes: int | None = None
    """The most host memory that can be page-locked, where more is refused."""
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

    def among(self, processes: int) -> Machine:
        """Returns the machine as each of so many processes of one host has it."""
        share = self.shared_link if processes > 2 else 1.0
        return replace(self, link_bytes=share * self.link_bytes, shared_link=1.0)

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
    """Returns a card of which only the datasheet is known: each rate is the datasheet's, times the
    share of it that steps reach."""
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
    """The profile of a GPU that CUDA calls so; None for one that has no name here. Chips of laptops
    have the names of larger ones."""
    if "laptop" in gpu.lower():
        return None
    found = [m for m in MACHINES.values() if re.search(rf"\b(?:{m.device})\b", gpu, re.I)]
    return max(found, key=lambda machine: len(machine.device), default=None)


def peak_flops(gpu: str) -> float | None:
    """The dense bf16 peak, in FLOP/s, of a GPU that CUDA calls so; None for one that has no name
    here."""
    machine = machine_like(gpu)
    return None if machine is None else machine.peak_flops
