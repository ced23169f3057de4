"""How long a step takes, by part:

    products    FLOPs of the linear maps and lm_head, what backward computes again included
    attention   2 H d L^2 FLOPs forward and 5 H d L^2 backward for a document of L tokens in a layer
                without a window (fewer with one)
    memory      bytes that norms, rope, swiglu, the loss, sums of weight gradients and the update
                read and write
    waits       for the link and for other GPUs: for blocks that come later than the computation
                could use them, for gradients that hold back memory, for what takes longer than the
                computation beside (of engines: engines.py)

each over the machine's rate for it (machines.py). Kernel launches are not counted: below about 4096
tokens a step takes longer than this.

Bytes are counted by tensor for the schedule (model/layer.py); for `vanilla` and `liger` they are
a D + b F numbers a token, fitted to h200_layer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longctx.memory.gradients import IN_FLIGHT_BYTES
from longctx.memory.ladder import (
    Batch,
    Ladder,
    Rung,
    again_flops,
    cut_bytes,
    forward_flops,
    on_host,
    waited_for,
)
from longctx.memory.plan import (
    BlockSizes,
    Place,
    Sizes,
)
from longctx.memory.states import BlockSpec
from longctx.plan.decide import Decision
from longctx.plan.engines import Exchanged
from longctx.plan.machines import SMALL_HEADS, Machine


class Seconds(NamedTuple):
    """Of a step."""

    products: float
    attention: float
    memory: float
    waits: float
    link: float
    """How long the link is busy, most of it beside the computation: no part of the sum."""

    @property
    def step(self) -> float:
        return self.products + self.attention + self.memory + self.waits


class Load(NamedTuple):
    """The computation of a phase."""

    product_flops: float = 0.0
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0
    memory_bytes: float = 0.0


class Copies(NamedTuple):
    """Bytes over the link in a phase."""

    up: int = 0
    down: int = 0
    alone: int = 0
    """Of them what nothing is computed beside."""


class Adapted(NamedTuple):
    """What adapters of all layers read and write a token, and their parameters."""

    inputs: int = 0
    outputs: int = 0
    parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A batch's computation."""

    sizes: Sizes
    tokens: int
    document: int
    """Tokens of one."""
    class_type: str
    ladder: Ladder
    trained: int
    """Parameters that are updated."""
    exact: bool
    adapted: Adapted = Adapted()
    exchanges: Sequence[Exchanged] = ()
    """Of a batch, with other GPUs and of an engine."""


def seconds(task: Task, decision: Decision, machine: Machine, backend: str, passes: int) -> Seconds:
    """Of a step of so many batches, on the attention backend of that name."""
    rates, link = machine.attention_at(backend, task.document), machine.link_bytes
    moved = list(zip(decision.specs, decision.blocks, decision.places, strict=True))
    hosted = decision.kept.host_bytes
    away = on_host(task.sizes, task.tokens, task.ladder)
    waits = waited_for(task.sizes, task.tokens, away, machine.rates)

    def computed(load: Load) -> Seconds:
        attention = load.attention_flops / rates.forward
        attention += load.attention_backward_flops / rates.backward
        attention /= 1.0 if task.sizes.head_dim >= 128 else SMALL_HEADS
        memory = load.memory_bytes / machine.memory_bytes
        return Seconds(load.product_flops / machine.flops, attention, memory, 0.0, 0.0)

    def beside(compute: Seconds, slowest: float, *copies: int) -> Seconds:
        slowest = max(compute.step, slowest, *(nbytes / link for nbytes in copies))
        waits = compute.waits + slowest - compute.step
        return compute._replace(waits=waits, link=max(copies) / link)

    def waiting(compute: Seconds, seconds: float) -> Seconds:
        return compute._replace(waits=compute.waits + seconds)

    layers, loss, backward, update = map(computed, _loads(task))
    layers, backward = waiting(layers, waits[0]), waiting(backward, waits[1])
    for other in task.exchanges:
        moved_s = other.memory_bytes / machine.memory_bytes
        if other.update is not None:
            update = Seconds(0.0, 0.0, other.update, 0.0, 0.0)
        # Weights are gathered twice, gradients are summed beside the second time.
        layers = layers._replace(
            memory=layers.memory + moved_s / 3, attention=layers.attention + other.taken_forward
        )
        backward = backward._replace(
            memory=backward.memory + moved_s * 2 / 3,
            attention=backward.attention + other.taken_backward,
        )
    exchanges = [
        max((getattr(other, phase) for other in task.exchanges), default=0.0)
        for phase in ("forward", "backward")
    ]
    layers = waiting(layers, sum(other.alone_forward for other in task.exchanges))
    backward = waiting(backward, sum(other.alone_backward for other in task.exchanges))
    forward = _sum(layers, loss)
    # What is on the GPU is updated while the first of the rest comes.
    resident = sum(block.states for _, block, place in moved if place.states)
    early_s = update.step * resident / max(1, sum(block.states for _, block, _ in moved))
    phases = [update]
    for i in range(passes):
        first = i == 0
        rising = [(spec.layer, _rises(block, place, first=first)) for spec, block, place in moved]
        up = sum(nbytes for _, nbytes in rising)
        down = hosted + sum(_falls(block, place, first=first) for _, block, place in moved)
        arrived = _arrives(rising, layers.step, loss.step, link, early_s if first else 0.0)
        arrived = max(arrived, exchanges[0])
        phases.append(beside(forward, arrived, up - int(early_s * link) * first, down))
        back = _backward_copies(moved, hosted, passes > 1)
        slowest = max(backward.step + back.alone / link, exchanges[1])
        phases.append(beside(backward, slowest, back.up, back.down))
    step = _sum(*phases)
    return step._replace(link=step.link + passes * sum(other.link for other in task.exchanges))


def _sum(*parts: Seconds) -> Seconds:
    return Seconds(*map(sum, zip(*parts, strict=True)))


# --- computation -----------------------------------------------------------------------------


def _loads(task: Task) -> tuple[Load, Load, Load, Load]:
    """Forward of the layers, the loss, backward, update."""
    s, tokens = task.sizes, task.tokens
    batch = Batch(tokens, row=0)  # attention is counted apart
    products = s.layers * forward_flops(s, batch)
    attention = attention_flops(s, tokens * s.ranks, task.document) / s.ranks
    loss = (6 if s.trains_head else 4) * tokens * s.vocab * s.hidden
    dx_dw = 2 if s.trains_weights else 1
    if task.class_type == "custom":
        runs = [max(keep.rung, Rung.O) for keep in task.ladder]
        again = sum(again_flops(s, batch, rung) for rung in runs)
        share = sum(keep.rung == Rung.X for keep in task.ladder) / s.layers
        again += int(share * (again_flops(s, batch, Rung.X) - again_flops(s, batch, Rung.O)))
        forward_bytes, backward_bytes = scheduled_bytes(s, tokens, task.ladder)
        more = adapter_bytes(task.adapted, tokens * s.itemsize)
        forward_bytes, backward_bytes = forward_bytes + more[0], backward_bytes + more[1]
    else:
        again, share = products, 1.0
        forward_bytes, backward_bytes = other_bytes(s, tokens, task.class_type)
    # AdamW reads 14 and writes 12 bytes a parameter, the norm reads 2. torch's, whose states are
    # bf16: 8 and 6, and clipping reads and writes each gradient once more.
    update_bytes = (28 if task.exact else 20) * task.trained
    inner = 2 * tokens * task.adapted.parameters
    return (
        Load(products + inner, attention, 0.0, forward_bytes),
        Load(loss, memory_bytes=loss_bytes_moved(s, tokens)),
        Load(
            dx_dw * products + again + 3 * inner,
            share * attention,
            2.5 * attention,
            backward_bytes,
        ),
        Load(memory_bytes=update_bytes),
    )


def attention_flops(sizes: Sizes, tokens: int, document: int) -> float:
    """Forward, of all layers, where documents have so many tokens."""
    windows = sizes.windows or (None,) * sizes.layers
    squared = sum(squared_length(document, window) for window in windows)
    rest = sum(squared_length(tokens % document, window) for window in windows)
    return 2.0 * sizes.heads * sizes.head_dim * (tokens // document * squared + rest)


def squared_length(document: int, window: int | None) -> int:
    """Twice the pairs of tokens that attend to each other: the sum of metrics.squared_lengths."""
    if window is None or document <= window:
        return document**2
    return window**2 + (document - window) * (2 * window - 1)


def scheduled_bytes(sizes: Sizes, tokens: int, ladder: Ladder) -> tuple[float, float]:
    """What forward and backward of all layers read and write outside of products and attention, of
    the weight gradients' sums what each tile reads and writes again."""
    s, n = sizes, tokens * sizes.itemsize
    wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
    unit, q, kv, gate = tokens * s.hidden * s.stream_bytes, n * wide, n * narrow, n * s.intermediate
    norm, rope = 2 * unit, 2 * (q + kv)
    dense = int(DEQUANTISE * s.dense_bytes)
    forward = rope + norm + 3 * gate + 2 * unit + dense
    shared = norm + rope + norm + 6 * gate + 8 * unit + 4 * q + 6 * kv + dense
    again = sum(rope for keep in ladder if keep.rung < Rung.QKV)
    cut_forward, cut_backward = cut_bytes(s, tokens, ladder)
    return s.layers * forward + cut_forward, s.layers * shared + again + cut_backward


DEQUANTISE = 3.5
"""A byte that bitsandbytes makes dense takes as long as so many that are read or written: 0.096 ms
for 14336 x 4096 on an H200."""


def adapter_bytes(adapted: Adapted, token_bytes: int) -> tuple[int, int]:
    """What adapters read and write in forward and backward. x A' reads x, which q, k and v have in
    common, and gate and up; u B' is added to y; dy B reads dy, v A is added to dx, dA reads x, dB
    reads dy, and u is computed again."""
    inputs, outputs = adapted.inputs * token_bytes, adapted.outputs * token_bytes
    return inputs + 2 * outputs, 4 * inputs + 2 * outputs


_OTHERS = {"vanilla": (116, 5, 1.6), "liger": (36, 3, 0.4)}
"""Numbers of D and F a token in forward, and how often as much backward moves besides."""


def other_bytes(sizes: Sizes, tokens: int, class_type: str) -> tuple[float, float]:
    """The same of Hugging Face's layers, which backward runs forward once more."""
    hidden, intermediate, times = _OTHERS[class_type]
    numbers = hidden * sizes.hidden + intermediate * sizes.intermediate
    forward = sizes.layers * tokens * sizes.itemsize * numbers
    return forward, (1 + times) * forward


def loss_bytes_moved(sizes: Sizes, tokens: int) -> float:
    """Logits written and read twice in fp32, their gradient written and read twice in 16 bits; the
    fp32 sum of lm_head's gradient for each group of rows."""
    return 18.0 * tokens * sizes.vocab + sizes.loss_sums_bytes(tokens)


# --- the link --------------------------------------------------------------------------------

Moved = list[tuple[BlockSpec, BlockSizes, Place]]


def _rises(block: BlockSizes, place: Place, *, first: bool) -> int:
    """What comes up for a block's forward: its weights, and in a step's first batch its update."""
    weight = 0 if place.weight else block.weight
    if not first:
        return weight
    return weight + (0 if place.states else block.states) + (0 if place.grad else block.grad)


def _falls(block: BlockSizes, place: Place, *, first: bool) -> int:
    if not first:
        return 0
    weight = block.weight if block.states and not place.weight else 0  # frozen ones stay there
    return weight + (0 if place.states else block.states)


def _arrives(
    rising: Sequence[tuple[int | None, int]],
    layers_s: float,
    loss_s: float,
    link: float,
    early_s: float,
) -> float:
    """How long forward lasts if no block is computed before all that comes for it is there:
    computation from any block on begins when the link has brought it and those before. The link
    began `early_s` before."""
    layer_s = layers_s / max(1, sum(layer is not None for layer, _ in rising))
    left, slowest, come = layers_s + loss_s, 0.0, 0
    for layer, nbytes in rising:
        come += nbytes
        slowest = max(slowest, come / link - early_s + left) if nbytes else slowest
        left -= layer_s if layer is not None else 0.0
    return slowest


def _backward_copies(moved: Moved, hosted: int, accumulates: bool) -> Copies:
    """Layers' weights and activations come, gradients go; where several batches add up they come
    first. A layer's gradients may be on their way up to IN_FLIGHT_BYTES, the next layer waits for
    the rest; all that lm_head and the embedding have is waited for."""
    up, down, alone = hosted, 0, 0
    for spec, block, place in moved:
        is_layer = spec.layer is not None
        up += block.weight if is_layer and not place.weight else 0
        if not place.grad:
            down += block.grad
            up += block.grad if accumulates else 0
            alone += max(0, block.grad - IN_FLIGHT_BYTES) if is_layer else block.grad
    return Copies(up, down, alone)
