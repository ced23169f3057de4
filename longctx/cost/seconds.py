"""The seconds of a step, by kind:

    products    the matmuls of layers, adapters and lm_head, recomputed ones included
    attention   attention in forward and backward, and in forward again if its output was not kept
    memory      reads and writes of norms, rope, swiglu, the loss, sums of weight gradients and the
                update
    waits       the GPU waits for the host's link or for other GPUs: for blocks of weights and
                states that arrive late, for gradients that hold back memory, for copies that take
                longer than the computation that runs at the same time
    images      the vision tower
    layers      layers that were measured as wholes (--class_type any)

The first three are counts of FLOPs or bytes divided by the machine's rate for them. A plan adds
launches (launches.py) and images (images.py). One function serves both the search for a ladder and
the prediction: its fields are numbers, or arrays with an entry for each candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from longctx.cost.peak import Tables
from longctx.cost.rates import SECONDS, Rates, share_of
from longctx.cost.table import Load, load

Numbers = Any
"""A number, or an array with an entry for each candidate."""


class Seconds(NamedTuple):
    """The seconds of a step."""

    products: Numbers = 0.0
    attention: Numbers = 0.0
    memory: Numbers = 0.0
    waits: Numbers = 0.0
    images: Numbers = 0.0
    """Seconds of the vision tower, all of its work (cost/images.py)."""
    layers: Numbers = 0.0
    """Seconds of layers that were measured as wholes."""
    link: Numbers = 0.0
    """Seconds in which the link is busy. Most of them overlap with computation, so they are not
    part of the sum."""

    @property
    def step(self) -> Numbers:
        """The seconds of a whole step."""
        computes = self.products + self.attention + self.memory + self.layers
        return computes + self.waits + self.images


class Exchanged(NamedTuple):
    """Seconds of a batch's exchanges with other GPUs, and of an engine's update."""

    forward: float = 0.0
    """Seconds that the exchanges of forward take; forward takes at least as long."""
    backward: float = 0.0
    """Seconds that the exchanges of backward take."""
    alone_forward: float = 0.0
    """Seconds of forward's exchanges that overlap with no computation."""
    alone_backward: float = 0.0
    """Seconds of backward's exchanges that overlap with no computation."""
    taken_forward: float = 0.0
    """Seconds by which forward's exchanges slow down the computation."""
    taken_backward: float = 0.0
    """Seconds by which backward's exchanges slow down the computation."""
    memory_bytes: float = 0.0
    """GPU bytes that the exchanges of forward and backward read and write."""
    update: float | None = None
    """Seconds of the engine's update; None: exact AdamW updates, and its bytes are counted."""
    link: float = 0.0
    """Seconds in which exchanges keep the host's link busy."""


class Falling(NamedTuple):
    """Bytes that one layer copies to the host in its forward, an entry for each choice of what
    layers keep. The next layer begins when they have arrived."""

    kinds: Any
    """(choices,): the kind of the layer."""
    early: Any
    """(choices,): bytes that exist when the layer begins: its input."""
    middle: Any
    """(choices,): bytes that the part over the whole row makes."""
    late: Any
    """(choices,): bytes that the part over tiles makes after it. Each tile is copied down while the
    next one is computed."""


class Hosted(NamedTuple):
    """Saved activations that wait on the host, in bytes, and the layers that have some."""

    nbytes: Numbers
    """Bytes of all saved activations that wait on the host."""
    layers: Any
    """(..., kinds): the number of layers of each kind that have activations on the host."""
    first: Numbers
    """Bytes that backward reads first and needs until the layer's end."""
    falling: Falling
    """The copies of a layer's forward."""
    numbers: Any
    """(..., choices): the number of layers that have each choice of `falling`."""


def nothing_hosted(tables: Tables) -> Hosted:
    none = np.zeros(0)
    return Hosted(0, np.zeros(len(tables.kinds)), 0, Falling(none.astype(int), *3 * [none]), none)


class Copies(NamedTuple):
    """Bytes that are copied over the link in a backward."""

    up: Numbers = 0
    down: Numbers = 0
    alone: Numbers = 0
    """Bytes that are copied while nothing is computed."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of model states that cross the link in a step."""

    rising_first: Any
    """(..., blocks): bytes copied up for the forward of this block and of all blocks before it, in
    a step's first batch."""
    rising: Any
    """(..., blocks): bytes copied up for this block and all before it, in each later batch."""
    falls_first: Numbers
    """Bytes copied down in the forward of a step's first batch."""
    backward: Copies
    resident: Numbers
    """The share of the states that lives on the GPU. These are updated while the first of the other
    states are copied up."""
    before: Any
    """(blocks,): the number of layers that are computed before a block is used."""


def priced(work: Load, rates: Rates) -> Seconds:
    """Returns the seconds of works that run one after the other: FLOPs divided by their rates, and
    bytes by the memory's."""
    found = {"products": 0.0, "attention": 0.0, "layers": 0.0}
    for rate, flops in work.flops.items():
        kind = "attention" if share_of(rate)[0].startswith("attention") else "products"
        kind = "layers" if rate == SECONDS else kind
        found[kind] = found[kind] + flops / rates.of(rate)
    return Seconds(**found, memory=work.nbytes / rates.memory_bytes)


NO_TRAFFIC = Traffic(
    rising_first=np.zeros(1),
    rising=np.zeros(1),
    falls_first=0,
    backward=Copies(),
    resident=1.0,
    before=np.zeros(1, int),
)


def seconds(
    tables: Tables,
    *,
    passes: int,
    again: Load,
    hosted: Hosted,
    traffic: Traffic,
    rates: Rates,
    exchanges: Sequence[Exchanged] = (),
) -> Seconds:
    """Returns the seconds of a step of `passes` batches. `again` are the works that backward
    recomputes in all layers."""
    link = rates.link_bytes

    def overlapped(compute: Seconds, slowest: Numbers, *copies: Numbers) -> Seconds:
        most = np.maximum.reduce(np.broadcast_arrays(*copies))
        slowest = np.maximum(np.maximum(compute.step, slowest), most / link)
        waits = compute.waits + slowest - compute.step
        return compute._replace(waits=waits, link=most / link)

    loss = priced(load(tables.loss.forward), rates)
    each = [load(layer.forward) for layer in tables.kinds]
    forward = priced(of_all(tables, each), rates)
    left = left_at(tables, [priced(work, rates).step for work in each], traffic.before)
    gradients = of_all(tables, [load(layer.backward) for layer in tables.kinds])
    backward = priced(gradients.plus(again), rates)
    update = priced(load(tables.update.forward), rates)
    waits = activation_waits(tables, hosted, rates)
    forward, backward = _waiting(forward, waits[0]), _waiting(backward, waits[1])
    for other in exchanges:
        forward, backward = _exchanging(forward, backward, other, rates)
        if other.update is not None:
            update = Seconds(memory=other.update)
    exchanged = [
        max((getattr(other, phase) for other in exchanges), default=0.0)
        for phase in ("forward", "backward")
    ]
    # While the GPU updates the states that live on it, the link already brings the first others.
    early_s = update.step * traffic.resident
    whole, phases = _sum(forward, loss), [update]
    for first, times in ((True, 1), (False, passes - 1)):
        rising = traffic.rising_first if first else traffic.rising
        head_start = early_s if first else 0.0
        arrived = _arrived(rising, left, forward.step, loss.step, link, head_start)
        up = rising[..., -1] - head_start * link
        down = hosted.nbytes + (traffic.falls_first if first else 0)
        phases.append(_times(overlapped(whole, np.maximum(arrived, exchanged[0]), up, down), times))
    slowest = np.maximum(backward.step + traffic.backward.alone / link, exchanged[1])
    up = traffic.backward.up + hosted.nbytes
    phases.append(_times(overlapped(backward, slowest, up, traffic.backward.down), passes))
    step = _sum(*phases)
    return step._replace(link=step.link + passes * sum(other.link for other in exchanges))


def _exchanging(
    forward: Seconds, backward: Seconds, other: Exchanged, rates: Rates
) -> tuple[Seconds, Seconds]:
    """Returns both passes with what an exchange takes of them and keeps waiting."""
    moved_s = other.memory_bytes / rates.memory_bytes
    # Weights are gathered in forward and again in backward, where gradients of as many bytes are
    # reduced, too: a third of the bytes are forward's.
    forward = forward._replace(
        memory=forward.memory + moved_s / 3, attention=forward.attention + other.taken_forward
    )
    backward = backward._replace(
        memory=backward.memory + moved_s * 2 / 3,
        attention=backward.attention + other.taken_backward,
    )
    return _waiting(forward, other.alone_forward), _waiting(backward, other.alone_backward)


def of_all(tables: Tables, each: Sequence[Load]) -> Load:
    """Returns the sum over all layers, from the load of a layer of each kind."""
    counted = zip(each, tables.sizes.counts, strict=True)
    return reduce(Load.plus, (work.each(partial(mul, n)) for work, n in counted))


def left_at(tables: Tables, each_s: Sequence[float], before: Any) -> Any:  # (blocks,)
    """Returns the share of the layers' forward that remains when a block is used after `before`
    layers. `each_s` are the seconds of a layer of each kind."""
    kinds = np.eye(len(each_s))[[*tables.sizes.of_layer]]  # (layers, kinds)
    done_s = np.cumsum(np.vstack([0 * kinds[:1], kinds]), axis=0) @ each_s  # (layers + 1,)
    return 1 - done_s[np.minimum(before, len(kinds))] / (done_s[-1] or 1.0)


def _waiting(compute: Seconds, seconds: Numbers) -> Seconds:
    return compute._replace(waits=compute.waits + seconds)


def _sum(*parts: Seconds) -> Seconds:
    return Seconds(*map(sum, zip(*parts, strict=True)))


def _times(part: Seconds, n: int) -> Seconds:
    return Seconds(*(n * seconds for seconds in part))


def _arrived(
    rising: Any, left: Any, layers_s: Numbers, loss_s: Numbers, link: float, head_start: Numbers
) -> Numbers:
    """Returns how long forward lasts if no block is computed before its copies have arrived. The
    link begins `head_start` seconds before forward."""
    # Forward ends no earlier than the arrival of a block plus all computation from this block on:
    # with layers of 10 ms, a block for the last three that arrives after 50 ms means 80 ms. Blocks
    # that live on the GPU bring nothing and set no such limit.
    comes = np.diff(rising, prepend=0) > 0
    layers_s, head_start = np.asarray(layers_s), np.asarray(head_start)
    ends = rising / link - head_start[..., None] + left * layers_s[..., None] + loss_s
    return np.where(comes, ends, 0.0).max(axis=-1)


def activation_waits(tables: Tables, hosted: Hosted, rates: Rates) -> tuple[Numbers, Numbers]:
    """Returns the seconds of forward and of backward in which saved activations are copied and
    nothing is computed. In backward the first tile of x and o is copied up while the layer above
    finishes its later tiles (the gradients of q, k, v); a single tile overlaps with no
    computation."""
    tiles, link = tables.tiles, rates.link_bytes
    # The layer above may be of another kind than the one that waits: the sum changes little.
    ends_s = [priced(load(layer.finishing), rates).step for layer in tables.kinds]
    overlap_s = hosted.layers @ np.array(ends_s) * (tiles - 1)
    down = hosted.numbers @ _falling_waits(tables, hosted.falling, rates)
    return down, np.maximum(0, hosted.first / link - overlap_s) / tiles


def _falling_waits(tables: Tables, falling: Falling, rates: Rates) -> Any:  # (choices,)
    """Returns how long a layer's copies down outlast its forward: those of all bytes, of the bytes
    that are made after the part over the row, after the first tile, or with the last tile."""
    early, middle, late = (nbytes / rates.link_bytes for nbytes in falling[1:])
    of_kinds = [[priced(load(w), rates).step for w in (t.forward, t.tiled)] for t in tables.kinds]
    whole, tiled = np.array(of_kinds)[falling.kinds].T
    others = (tables.tiles - 1) / tables.tiles
    return np.maximum.reduce(
        [
            early + middle + late - whole,
            middle + late - tiled,
            late - others * tiled,
            late / tables.tiles,
        ]
    )
