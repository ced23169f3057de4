"""The ladder: what of a layer's activations forward keeps for backward, and where it waits.

    rung   keeps, besides what is below it         a token of Llama-3.1-8B   backward is spared
    x      the layer's input                       1 unit (2 D bytes)
    o      attention's output, its log-sum-exp     1                         attention; q, k, v once
    h      the residual stream after attention     1                         o Wo'
    qkv    q, k, v, rotated (*)                    1.5                       n1 [Wq; Wk; Wv]'
    all    gate and up                             7                         n2 Wg', n2 Wu'

(*) where q and k have norms, as they were projected: the norms' gradients need them so.

Above o a byte spares the same on every rung, about D products (6.5 ms a GiB on an H200). No number
depends on the rung: what is computed again comes from the same kernels and the same tiles.

A ladder has a `Keep` for each layer. `choose` times all that fit, by count: products by FLOPs and
copies by bytes, at the machine's own rates (rates.py), beside the model states that share
GPU, host and link with them (plan.py). The first layers wait on the host: backward needs
them last. `choose_beside` weighs larger pieces of work (`Cut`) against them: what memory is left
when everything is kept buys one head group and one tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from longctx.memory.plan import Offload, Placement, Sizes

Keeping = Literal["auto", "x", "o", "h", "qkv", "all"]
HOST_PRICE = 0.02
"""Share of a step that is worth all of the host's memory: little is not locked for nothing."""


class Rung(IntEnum):
    X, O, H, QKV, ALL = range(5)  # noqa: E741


class Keep(NamedTuple):
    """What a layer keeps, and up to which rung it waits on the host (None: all on the GPU)."""

    rung: Rung = Rung.O
    host: Rung | None = None


Ladder = tuple[Keep, ...]
"""The layers' in their order; where it is shorter than the model, the first is that of all layers
below."""


class Rates(NamedTuple):
    """What a machine does in a second."""

    flops: float
    link_bytes: float
    """Copied to the host, or from it."""
    memory_bytes: float
    """Read and written on the GPU."""


class Batch(NamedTuple):
    """A step: `passes` batches of `tokens` tokens in rows of `row`."""

    tokens: int
    row: int
    passes: int = 1


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of model states, which may have to make room. Default: there are none."""

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    """With the remainders of the masters."""
    placement: Placement = "gpu"
    weights_move: bool = False
    gradients_move: bool = False
    ring: int = 0
    """GPU buffers of what moves, and"""
    window: int = 0
    """of weights that do."""


class Room(NamedTuple):
    """Bytes for states and activations, besides what a layer's backward works with."""

    gpu: int
    host: int
    early: int = 0
    """What is needed besides, before there are layers' gradients."""


# --- bytes and FLOPs -------------------------------------------------------------------------


def rung_bytes(sizes: Sizes, tokens: int, rung: Rung) -> int:
    """What a layer keeps up to this rung. Every tensor starts at a multiple of 512 bytes."""
    wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    stream = sizes.hidden * sizes.stream_bytes
    values = [wide, wide + 2 * narrow, 2 * sizes.intermediate]
    o, qkv, gate_up = (n * sizes.itemsize for n in values)
    kept = [stream, o + 4 * sizes.heads, stream, qkv, gate_up]
    tensors = [1, 2, 1, sizes.kv_heads, 2]
    return tokens * sum(kept[: rung + 1]) + 512 * sum(tensors[: rung + 1])


def forward_flops(sizes: Sizes, batch: Batch) -> int:
    """Of a layer's products; attention's depend on the documents."""
    down = 2 * batch.tokens * sizes.hidden * sizes.intermediate
    return again_flops(sizes, batch, Rung.O) + down


def again_flops(sizes: Sizes, batch: Batch, rung: Rung) -> int:
    """What a layer's backward computes again where this rung is kept."""
    wide = sizes.heads * sizes.head_dim
    spared = [
        _qkv_flops(sizes, batch) + 2 * batch.tokens * batch.row * wide,  # causal: half of the row
        2 * batch.tokens * wide * sizes.hidden,
        _qkv_flops(sizes, batch),
        4 * batch.tokens * sizes.hidden * sizes.intermediate,
    ]
    return sum(spared[rung:])


def _attended(sizes: Sizes, row: int) -> int:
    """The length of rows without windows whose attention costs as much, over all layers: a token
    of a row sees half of it, on average."""
    if not sizes.windows:
        return row
    lengths = [row if window is None else min(row, 2 * window) for window in sizes.windows]
    return sum(lengths) // len(lengths)


def _qkv_flops(sizes: Sizes, batch: Batch) -> int:
    columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    return 2 * batch.tokens * sizes.hidden * columns


def gpu_bytes(sizes: Sizes, tokens: int, ladder: Ladder) -> int:
    """What kept activations take on the GPU at most: when forward ends, or when those of the first
    layers come back from the host, one layer's at a time."""
    return _gpu_bytes(_table(sizes, tokens), _runs(ladder))


def lasting_bytes(sizes: Sizes, tokens: int, ladder: Ladder) -> int:
    """Of them what is there until backward ends, when nearly all gradients are: the first layer's,
    wherever it waited."""
    return _lasting_bytes(_table(sizes, tokens), ladder[0])


def on_gpu(sizes: Sizes, tokens: int, keep: Keep) -> int:
    """What a layer keeps there when its forward is over."""
    return _on_gpu(_table(sizes, tokens), keep)


def host_bytes(sizes: Sizes, tokens: int, ladder: Ladder) -> int:
    return _host_bytes(_table(sizes, tokens), _runs(ladder))


Numbers = np.ndarray[Any, Any]
"""One of each ladder."""
Table = Sequence[int]
"""`rung_bytes` by rung; the last, of no rung at all, is 0."""
Runs = list[tuple[Keep, int]]
"""Layers that keep the same, and how many follow each other."""
NONE = len(Rung)


def _table(sizes: Sizes, tokens: int) -> Table:
    return [*(rung_bytes(sizes, tokens, rung) for rung in Rung), 0]


def _gpu_bytes(table: Table, runs: Runs) -> int:
    kept = hosted = back = again = 0
    for keep, n in runs:
        nbytes = n * _on_gpu(table, keep)
        kept += nbytes
        again = max(again, _again_bytes(table, keep))
        if keep.host is not None:
            hosted += nbytes
            back = max(back, table[keep.host])
    return max(kept, hosted + back) + again


def _lasting_bytes(table: Table, first: Keep) -> int:
    return table[first.rung] + _again_bytes(table, first)


def _again_bytes(table: Table, keep: Keep) -> int:
    """Attention's output, of one layer, where it is not kept."""
    return table[Rung.O] - table[Rung.X] if keep.rung == Rung.X else 0


def _on_gpu(table: Table, keep: Keep) -> int:
    return table[keep.rung] - table[NONE if keep.host is None else keep.host]


def _host_bytes(table: Table, runs: Runs) -> int:
    return sum(n * table[keep.host] for keep, n in runs if keep.host is not None)


def describe(ladder: Ladder) -> str:
    """In one line: what is kept, where, and of which layers."""
    parts, first = [], 0
    for keep, n in _runs(ladder):
        hosted = 0 if keep.host is None else keep.host + 1
        places = {"on the host": _NAMES[:hosted], "on the GPU": _NAMES[hosted : keep.rung + 1]}
        what = ", ".join(f"{' '.join(names)} {place}" for place, names in places.items() if names)
        parts.append(f"layers {first} to {first + n - 1}: {what}")
        first += n
    return "kept for backward: " + "; ".join(parts)


_NAMES = ("x", "o", "h", "q k v", "gate up")


def _runs(ladder: Ladder) -> Runs:
    return [(keep, len(list(layers))) for keep, layers in groupby(ladder)]


# --- the choice ------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of a ladder; the least is the best."""

    missing_bytes: int
    """Of the GPU and the host."""
    seconds: float


class Chosen(NamedTuple):
    """What of a batch is kept, and how the work on it is cut."""

    ladder: Ladder
    sizes: Sizes
    """With the cut."""


def choose(
    sizes: Sizes,
    batch: Batch,
    room: Room,
    rates: Rates,
    *,
    keep: Keeping = "auto",
    offload: Offload = "auto",
    states: States | None = None,
) -> Ladder:
    """The fastest ladder that fits; where none does, the one that lacks least."""
    return _choose(sizes, batch, room, rates, keep, offload, states or States())[0]


def _choose(
    sizes: Sizes,
    batch: Batch,
    room: Room,
    rates: Rates,
    keep: Keeping,
    offload: Offload,
    states: States,
) -> tuple[Ladder, Cost]:
    row = _attended(sizes, batch.row)
    sums = _sums(_shape(sizes), batch._replace(row=row), keep, offload)
    forward_s = sizes.layers * forward_flops(sizes, batch) / rates.flops
    waits = waited_for(sizes, batch.tokens, sums.hosted, rates)
    missing, seconds = _costs(sums, sizes, forward_s, waits, batch.passes, room, rates, states)
    best = np.lexsort((seconds, missing))[0]
    return sums.ladders[best], Cost(int(missing[best]), float(seconds[best]))


def choose_beside(
    sizes: Sizes,
    batch: Batch,
    gpu: int,
    host: int,
    rates: Rates | None,
    *,
    keep: Keeping = "auto",
    offload: Offload = "auto",
    states: States | None = None,
) -> Chosen:
    """The same where `gpu` bytes are for what a step works with, too, and with the fastest cut.
    Without `rates` there is nothing to weigh: it is all one memory."""
    cuts = list(sizes.cuts(batch.tokens))
    if rates is None:
        return Chosen(uniform(sizes.layers, keep, offload), cuts[0])
    states = states or States()

    def weighed(cut: Sizes) -> tuple[Cost, Chosen]:
        early_bytes = cut.early_bytes(batch.tokens, batch.passes > 1)
        work = cut.layer_bytes(batch.tokens)
        room = Room(gpu - work, host, early_bytes)
        there = replace(states, gradients=states.gradients - _not_yet(cut, batch, states, work))
        ladder, cost = _choose(cut, batch, room, rates, keep, offload, there)
        moved = sum(cut_bytes(cut, batch.tokens, ladder)) + cut.loss_sums_bytes(batch.tokens)
        moved *= batch.passes
        return cost._replace(seconds=cost.seconds + moved / rates.memory_bytes), Chosen(ladder, cut)

    best = weighed(cuts[0])
    for cut in cuts[1:] if offload != "all" else []:
        larger = weighed(cut)
        if larger[0] >= best[0]:
            break
        best = larger
    for cut in best[1].sizes.fewer_logits(batch.tokens):
        best = min(best, weighed(cut), key=lambda found: found[0])
    return best[1]


def _not_yet(sizes: Sizes, batch: Batch, states: States, work: int) -> int:
    """Bytes of gradients that come after the work of the first layer's backward has gone, as far as
    that is more than what comes with them. Where gradients may leave the GPU, placing counts all
    (plan.place_blocks)."""
    if batch.passes > 1 or states.gradients_move:
        return 0
    room = max(0, work - sum(sizes.embedding_parts(batch.tokens).values()))
    return min(states.gradients, sizes.last_gradients(), room)


def cut_bytes(sizes: Sizes, tokens: int, ladder: Ladder) -> tuple[int, int]:
    """What forward and backward of all layers read and write for their work to be in pieces: n1 for
    each head group, the sums of weight gradients for each tile (model/layer.py)."""
    tile_tokens, groups, _ = sizes.cut(tokens)
    n1 = 2 * tokens * sizes.hidden * sizes.stream_bytes
    tiles = -(-tokens // tile_tokens)
    wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    weights = sizes.hidden * (2 * wide + 2 * narrow + 3 * sizes.intermediate)
    sums = weights * sizes.trains_weights * (8 * tiles + 2 if tiles > 1 else 2)
    again = sum(keep.rung < Rung.QKV for keep in ladder)
    return sizes.layers * groups * n1, again * groups * n1 + sizes.layers * sums


class Hosted(NamedTuple):
    """What waits on the host: a number, or one of each ladder."""

    nbytes: Any
    layers: Any
    first: Any
    """Bytes of x and o, which backward reads first and gives back last."""
    late: Any
    """Bytes of what the MLP leaves, tile by tile: it has the rest of them to go down beside."""


def on_host(sizes: Sizes, tokens: int, ladder: Ladder) -> Hosted:
    return _hosted(_table(sizes, tokens), _runs(ladder))


def _hosted(table: Table, runs: Runs) -> Hosted:
    mlp = [table[Rung.H] - table[Rung.O], table[Rung.ALL] - table[Rung.QKV]]
    hosted = [(keep.host, n) for keep, n in runs if keep.host is not None]
    late = sum(n * (mlp[0] * (h >= Rung.H) + mlp[1] * (h >= Rung.ALL)) for h, n in hosted)
    first = sum(n * table[np.minimum(h, Rung.O)] for h, n in hosted)
    return Hosted(_host_bytes(table, runs), sum(n for _, n in hosted), first, late)


def waited_for(sizes: Sizes, tokens: int, hosted: Hosted, rates: Rates) -> tuple[Any, Any]:
    """Seconds of forward and of backward in which nothing is computed while kept activations move.
    The last tile of what the MLP leaves goes down alone. Up comes the first tile of x and o while
    the layer above finishes its own later ones (layer.input_backward_): a single comes alone."""
    tiles, link = -(-tokens // sizes.cut(tokens).tile_tokens), rates.link_bytes
    finished = (1 + sizes.trains_weights) * _qkv_flops(sizes, Batch(tokens, 0)) / rates.flops
    beside = hosted.layers * finished * (tiles - 1)
    return hosted.late / link / tiles, np.maximum(0, hosted.first / link - beside) / tiles


def ladders(layers: int, keep: Keeping, offload: Offload) -> Iterator[Ladder]:
    """All that are looked at: the first layers wait on the host, the last keep all. Of four layers
    the best of them takes at most 5% longer than the best of any (tests/memory/test_ladder.py),
    which is a part of one layer's work."""
    counts = {"none": [0], "all": [layers - 1], "auto": [*range(layers)]}[offload]
    counts = counts[:: -(-len(counts) // 32)]
    if keep != "auto":
        rung = Rung[keep.upper()]
        for n in counts:
            yield n * (Keep(rung, rung),) + (layers - n) * (Keep(rung),)
        return
    for n in counts:
        if n == 0:
            hosts: tuple[Rung | None, ...] = (None,)
        else:
            hosts = (Rung.X, Rung.O) if offload == "all" else tuple(Rung)
        tops = [0] if offload == "all" else range(0, layers + 1, -(-layers // 32))
        for host in hosts:
            for top in tops:
                for base in (Rung.O,) if n else (Rung.O, Rung.X):
                    yield _ladder(layers, n, host, top, base)
            yield from _between(layers, n, host)


def _between(layers: int, hosted: int, host: Rung | None) -> Iterator[Ladder]:
    """Where GPU or host is full between two rungs: the first of the hosted layers keep a rung less,
    or the first of the others x alone."""
    if host is not None and host > Rung.X:
        fewer = Keep(Rung(host - 1), Rung(host - 1))
        for first in range(1, hosted):
            rest = _ladder(layers - first, hosted - first, host, 0, Rung.O)
            yield first * (fewer,) + rest
        return
    for first in range(1, layers - hosted + 1):
        above = first * (Keep(Rung.X),) + (layers - hosted - first) * (Keep(Rung.O),)
        yield hosted * (Keep(Rung.X, host),) + above


def uniform(layers: int, keep: Keeping, offload: Offload) -> Ladder:
    """Without a look at memory: x and o, or what was asked for."""
    rung = Rung.O if keep == "auto" else Rung[keep.upper()]
    return tuple(ladders(layers, _KEEPING[rung], "all" if offload == "all" else "none"))[0]


_KEEPING: tuple[Keeping, ...] = ("x", "o", "h", "qkv", "all")


def _ladder(layers: int, hosted: int, host: Rung | None, top: int, base: Rung) -> Ladder:
    below, above = sorted((hosted, layers - top))
    first = Keep(base if host is None else host, host)
    between = Keep(Rung.ALL, host) if hosted > layers - top else Keep(base)
    return below * (first,) + (above - below) * (between,) + (layers - above) * (Keep(Rung.ALL),)


class _Sums(NamedTuple):
    """What of each ladder its cost depends on: bytes of all layers, FLOPs of backward."""

    ladders: list[Ladder]
    kept: Numbers
    lasting: Numbers
    hosted: Hosted
    again_flops: Numbers


@lru_cache(maxsize=8)  # other cuts, budgets and places ask for the same ones
def _sums(sizes: Sizes, batch: Batch, keep: Keeping, offload: Offload) -> _Sums:
    """Of all ladders that are looked at."""
    table = _table(sizes, batch.tokens)
    again = [again_flops(sizes, batch, rung) for rung in Rung]
    found = list(ladders(sizes.layers, keep, offload))
    runs = [_runs(ladder) for ladder in found]
    return _Sums(
        found,
        np.array([_gpu_bytes(table, r) for r in runs]),
        np.array([_lasting_bytes(table, ladder[0]) for ladder in found]),
        Hosted(*np.array([_hosted(table, r) for r in runs]).T),
        np.array([float(sum(n * again[keep.rung] for keep, n in r)) for r in runs]),
    )


def _shape(sizes: Sizes) -> Sizes:
    """Without the cut, of which nothing is counted here."""
    return replace(sizes, tile_tokens=None, head_groups=None, logits_bytes=None)


def _costs(
    sums: _Sums,
    sizes: Sizes,
    forward: Any,
    waits: tuple[Numbers, Numbers],
    passes: int,
    room: Room,
    rates: Rates,
    states: States,
) -> tuple[Numbers, Numbers]:
    """Bytes that are missing, and seconds; `forward` is how long all layers' products take, `waits`
    how long they and backward compute nothing. Of weights that are not trained there are no
    gradients, and they never go down."""
    trained, whole = sizes.trains_weights, sizes.layers
    _, kept, lasting, (hosted, layers, *_), again = sums
    computed, forward = forward, forward + waits[0]
    at_once = passes == 1  # gradients come as activations go, but the first layer's
    away, missing = _make_room(states, room.gpu - lasting, kept - lasting + room.early, at_once)
    # A gradient takes the place of its own layer's activations, the last layers' come first.
    above = np.minimum(away.gradients, states.gradients * (1 - layers / whole))
    together = np.maximum(hosted + above, away.gradients) if at_once else hosted + away.gradients
    on_host = away.weights + away.moments + together
    missing = missing + np.maximum(0, on_host - room.host)
    backward = (1 + trained) * computed + again / rates.flops + waits[1]

    def phase(compute: Any, *copies: Numbers) -> Numbers:
        return np.maximum(compute, np.maximum.reduce(copies) / rates.link_bytes)

    up, down = away.weights, hosted  # in each forward
    falling = away.weights * trained + away.moments
    first = phase(forward, up + away.moments + away.gradients, down + falling)
    added_up = 0 if at_once else away.gradients
    last = phase(backward, hosted + away.weights + added_up, away.gradients)
    seconds = first + (passes - 1) * phase(forward, up, down) + passes * last
    return missing, seconds * (1 + HOST_PRICE * on_host / max(1, room.host))


class _Away(NamedTuple):
    """Bytes of states on the host."""

    weights: Numbers
    gradients: Numbers
    moments: Numbers


def _make_room(s: States, gpu: Numbers, head: Numbers, at_once: bool) -> tuple[_Away, Numbers]:
    """What of the states leaves the GPU, beside `head` bytes that are needed until there are
    gradients, in the order of plan.place_blocks; and what is missing all the same."""
    shared = head if at_once else np.zeros_like(head)  # with gradients
    everything = s.weights + s.moments + np.maximum(s.gradients, shared) + head - shared
    fits = (everything <= gpu) | (s.placement == "gpu")
    stays = s.placement == "auto"
    left = gpu - s.ring - head
    weights = np.full_like(left, s.weights)
    if s.weights_move:
        moves = (weights > left) | (not stays)
        left = left - s.window * moves
        weights = np.where(moves, np.clip(left, 0, s.weights) * stays, weights)
    left = left - weights
    gradients = np.full_like(left, s.gradients)
    if s.gradients_move:
        gradients = np.minimum(gradients, np.maximum(0, left) + shared) * stays
    left = left - np.maximum(0, gradients - shared)
    moments = np.clip(left, 0, s.moments) * stays
    left = np.where(fits, gpu - everything, left - moments)
    away = ((s.weights, weights), (s.gradients, gradients), (s.moments, moments))
    return _Away(*(np.where(fits, 0, all_ - here) for all_, here in away)), np.maximum(0, -left)
