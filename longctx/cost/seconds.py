"""How long a step takes, by part:

    products    FLOPs of the matmuls of layers, adapters and lm_head, with those that backward
                computes again
    attention   forward, backward, and forward again where its output was not kept
    memory      bytes that norms, rope, swiglu, the loss, sums of weight gradients and the update
                read and write
    waits       for the link and for other GPUs: for blocks that come later than the computation
                could use them, for gradients that hold back memory, for what takes longer than the
                computation beside it

each over the machine's rate for it. Kernel launches are not counted: below about 4096 tokens a step
takes longer than this. One function serves the search and the prediction: fields are numbers, or
arrays with one of each candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from longctx.cost.peak import Tables
from longctx.cost.rates import Rates
from longctx.cost.table import Load, load

Numbers = Any
"""A number, or an array with one of each candidate."""


class Seconds(NamedTuple):
    """Of a step."""

    products: Numbers = 0.0
    attention: Numbers = 0.0
    memory: Numbers = 0.0
    waits: Numbers = 0.0
    link: Numbers = 0.0
    """How long the link is busy, most of it beside the computation: no part of the sum."""

    @property
    def step(self) -> Numbers:
        return self.products + self.attention + self.memory + self.waits


class Exchanged(NamedTuple):
    """Seconds of a batch's exchanges with other GPUs, and of an engine's update."""

    forward: float = 0.0
    """They take so long; forward is not shorter."""
    backward: float = 0.0
    alone_forward: float = 0.0
    """Of them nothing is computed beside."""
    alone_backward: float = 0.0
    taken_forward: float = 0.0
    """From what is computed beside them."""
    taken_backward: float = 0.0
    memory_bytes: float = 0.0
    """Read and written in forward and backward."""
    update: float | None = None
    """None: by the bytes it reads and writes."""
    link: float = 0.0
    """For so long the host's link is busy."""


class Hosted(NamedTuple):
    """Saved activations that wait on the host."""

    nbytes: Numbers = 0
    layers: Numbers = 0
    first: Numbers = 0
    """Bytes of what backward reads first and needs to a layer's end."""
    late: Numbers = 0
    """Bytes of what the MLP leaves, tile by tile: it has the rest of them to go down beside."""


class Copies(NamedTuple):
    """Bytes of a backward over the link."""

    up: Numbers = 0
    down: Numbers = 0
    alone: Numbers = 0
    """Of them what nothing is computed beside."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of model states over the link in a step."""

    rising_first: Any
    """(..., blocks): up for this block's forward and those before, in a step's first batch,"""
    rising: Any
    """and in the others."""
    falls_first: Numbers
    """Down in the first forward."""
    backward: Copies
    resident: Numbers
    """Share of the states that live on the GPU: updated while the first of the others come."""
    left: Any
    """(blocks,): the share of the layers that is still to be computed when a block is used."""


NO_TRAFFIC = Traffic(
    rising_first=np.zeros(1),
    rising=np.zeros(1),
    falls_first=0,
    backward=Copies(),
    resident=1.0,
    left=np.ones(1),
)


def seconds(
    tables: Tables,
    *,
    layers: int,
    passes: int,
    again: Load,
    hosted: Hosted,
    traffic: Traffic,
    rates: Rates,
    exchanges: Sequence[Exchanged] = (),
) -> Seconds:
    """Of a step of so many batches; `again` is what backward computes again in all layers."""
    link = rates.link_bytes

    def computed(work: Load) -> Seconds:
        attention = work.attention / rates.attention.forward
        attention = attention + work.attention_backward / rates.attention.backward
        return Seconds(work.matmul / rates.flops, attention, work.nbytes / rates.memory_bytes)

    def beside(compute: Seconds, slowest: Numbers, *copies: Numbers) -> Seconds:
        most = np.maximum.reduce(np.broadcast_arrays(*copies))
        slowest = np.maximum(np.maximum(compute.step, slowest), most / link)
        waits = compute.waits + slowest - compute.step
        return compute._replace(waits=waits, link=most / link)

    layer, loss = tables.layer, computed(load(tables.loss.forward))
    forward = computed(load(layer.forward).times(layers))
    backward = computed(load(layer.backward).times(layers).plus(again))
    update = computed(load(tables.update.forward))
    waits = activation_waits(tables, hosted, rates)
    forward, backward = _waiting(forward, waits[0]), _waiting(backward, waits[1])
    for other in exchanges:
        moved_s = other.memory_bytes / rates.memory_bytes
        if other.update is not None:
            update = Seconds(memory=other.update)
        # Weights are gathered twice, gradients are summed beside the second time.
        forward = forward._replace(
            memory=forward.memory + moved_s / 3, attention=forward.attention + other.taken_forward
        )
        backward = backward._replace(
            memory=backward.memory + moved_s * 2 / 3,
            attention=backward.attention + other.taken_backward,
        )
        forward = _waiting(forward, other.alone_forward)
        backward = _waiting(backward, other.alone_backward)
    exchanged = [
        max((getattr(other, phase) for other in exchanges), default=0.0)
        for phase in ("forward", "backward")
    ]
    early_s = update.step * traffic.resident
    whole, phases = _sum(forward, loss), [update]
    for first, times in ((True, 1), (False, passes - 1)):
        rising = traffic.rising_first if first else traffic.rising
        head_start = early_s if first else 0.0
        arrived = _arrived(rising, traffic.left, forward.step, loss.step, link, head_start)
        up = rising[..., -1] - head_start * link
        down = hosted.nbytes + (traffic.falls_first if first else 0)
        phases.append(_times(beside(whole, np.maximum(arrived, exchanged[0]), up, down), times))
    slowest = np.maximum(backward.step + traffic.backward.alone / link, exchanged[1])
    up = traffic.backward.up + hosted.nbytes
    phases.append(_times(beside(backward, slowest, up, traffic.backward.down), passes))
    step = _sum(*phases)
    return step._replace(link=step.link + passes * sum(other.link for other in exchanges))


def _waiting(compute: Seconds, seconds: Numbers) -> Seconds:
    return compute._replace(waits=compute.waits + seconds)


def _sum(*parts: Seconds) -> Seconds:
    return Seconds(*map(sum, zip(*parts, strict=True)))


def _times(part: Seconds, n: int) -> Seconds:
    return Seconds(*(n * seconds for seconds in part))


def _arrived(
    rising: Any, left: Any, layers_s: Numbers, loss_s: Numbers, link: float, head_start: Numbers
) -> Numbers:
    """How long forward lasts if no block is computed before all that comes for it is there:
    computation from any block on begins when the link has brought it and those before. The link
    began `head_start` seconds before."""
    comes = np.diff(rising, prepend=0) > 0
    layers_s, head_start = np.asarray(layers_s), np.asarray(head_start)
    ends = rising / link - head_start[..., None] + left * layers_s[..., None] + loss_s
    return np.where(comes, ends, 0.0).max(axis=-1)


def activation_waits(tables: Tables, hosted: Hosted, rates: Rates) -> tuple[Numbers, Numbers]:
    """Seconds of forward and of backward in which nothing is computed while saved activations move.
    The last tile of what the MLP leaves goes down alone. Up comes the first tile of x and o while
    the layer above finishes its own later ones (the gradients of q, k, v): a single comes alone."""
    tiles, link = tables.tiles, rates.link_bytes
    beside = hosted.layers * tables.finishing_flops / rates.flops * (tiles - 1)
    return hosted.late / link / tiles, np.maximum(0, hosted.first / link - beside) / tiles
