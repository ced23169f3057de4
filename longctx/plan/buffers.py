"""The large buffers of a step on the GPU, by name, in each of its phases.

    forward      weights, states, activations kept so far, one layer's work, gradients that wait for
                 their block's update
    loss         all kept activations, the logits' workspace, lm_head's gradient in fp32
    backward     what lower layers kept, gradients of the layers above, one layer's work
    embedding    all gradients, and the sums of the embedding's
    update       weights, states, gradients

A phase stands for the moment of it at which most is allocated; the peak is that of the largest.
What a layer and the loss work with are counted by memory/plan.py, what is kept by
memory/ladder.py; where states live was decided (decide.py).

Of Hugging Face's layers (`vanilla`, `liger`) with checkpointing by layer: T D of every layer are
kept, and one works with a D + b F numbers a token (`OTHERS`, h200_layer.json: 31.5 and 21.5 units
of Llama-3.1-8B, at 32768 and at 131072 tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from longctx.memory.gradients import IN_FLIGHT_BYTES
from longctx.memory.ladder import Keep, Rung, lasting_bytes, on_gpu, rung_bytes
from longctx.memory.plan import (
    Sizes,
    moved_ring_bytes,
    window_bytes,
)
from longctx.plan.decide import Decision

Buffers = dict[str, int]
"""Name -> bytes."""
LIBRARY_BYTES = 2**26
"""cuBLAS's workspaces, of 32 MiB for each thread that multiplies: forward's and backward's."""


class Phase(NamedTuple):
    name: str
    buffers: Buffers

    @property
    def nbytes(self) -> int:
        return sum(self.buffers.values())


class Work(NamedTuple):
    """What Hugging Face's layer has at a time in backward, in numbers a token: D and F so often."""

    hidden: float
    intermediate: float


OTHERS = {"vanilla": Work(7, 7), "liger": Work(4, 5)}


def peak(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.nbytes)


# --- what all phases share -------------------------------------------------------------------


class States:
    """Weights, states and gradients on the GPU as a step goes on."""

    def __init__(self, decision: Decision, accumulates: bool) -> None:
        self.accumulates = accumulates
        placed = [*zip(decision.specs, decision.blocks, decision.places, strict=True)]
        streamed = [(spec, block) for spec, block, place in placed if not place.weight]
        self._window = window_bytes([block for _, block in streamed])
        self._layers_window = window_bytes([b for spec, b in streamed if spec.layer is not None])
        self._always = {
            "weights": sum(block.weight for _, block, place in placed if place.weight),
            "AdamW's states": sum(block.states for _, block, place in placed if place.states),
            "buffers of the update": moved_ring_bytes(decision.places),
            "libraries": LIBRARY_BYTES,
        }
        layers = len([spec for spec in decision.specs if spec.layer is not None])
        self._stay: dict[int, int] = defaultdict(int)
        """Bytes of gradients by the layer that they are of; -1: the embedding's."""
        self._wait: dict[int, int] = defaultdict(int)
        """Of them, what the next forward's update reads."""
        self._leave: dict[int, int] = defaultdict(int)
        for spec, block, place in placed:
            at = spec.layer if spec.layer is not None else layers
            at = -1 if spec is decision.specs[0] else at
            (self._stay if place.grad else self._leave)[at] += block.grad
            self._wait[at] += block.grad if place.grad and not place.all_on_gpu else 0
        self.embedding = decision.blocks[0].grad
        self.tied = len(decision.specs[0].modules) > 1

    def forward(self) -> Buffers:
        """Weights and states while a layer's forward runs,"""
        return {**self._always, "weights on their way": self._window}

    def loss(self) -> Buffers:
        return self.forward()

    def backward(self, layer: int) -> Buffers:
        """while this layer's backward does; -1: the embedding's,"""
        return {**self._always, "weights on their way": self._layers_window}

    def update(self) -> Buffers:
        """and while they are updated."""
        return self.forward()

    def others(self, kept: int, unit: int) -> list[Phase]:
        """Moments that only an engine has; `kept` activations, a unit of T D numbers, in bytes."""
        return []

    def all_gradients(self) -> int:
        return sum(self._stay.values())

    def old_gradients(self, layer: int) -> int:
        """Of the step before, or of its batches, when forward is at this layer."""
        if self.accumulates:
            return self.all_gradients()
        return sum(nbytes for at, nbytes in self._wait.items() if at >= layer)

    def loss_gradients(self) -> int:
        """Before backward."""
        return self.all_gradients() if self.accumulates else 0

    def of_embedding(self, sizes: Sizes, tokens: int) -> Buffers:
        """All gradients, while the embedding's is made; a frozen one has none."""
        if not self.embedding:
            return {"gradients": self.all_gradients()}
        return {
            "gradients": max(0, self.all_gradients() - self.embedding),
            "the embedding's gradient": (1 + self.tied) * self.embedding,
            **sizes.embedding_parts(tokens),
        }

    def new_gradients(self, layer: int) -> int:
        """When backward is at this layer: those that stay, and one that leaves."""
        if self.accumulates:
            return self.all_gradients()
        leaving = min(IN_FLIGHT_BYTES, self._leave[layer + 1])
        done = sum(nbytes for at, nbytes in self._stay.items() if at > layer)
        return leaving + done + (self._stay[-1] if self.tied else 0)


# --- custom ----------------------------------------------------------------------------------


def scheduled_phases(
    decision: Decision,
    sizes: Sizes,
    tokens: int,
    accumulates: bool,
    states: States | None = None,
) -> list[Phase]:
    """Of a patched model. `states`: an engine's."""
    states = states or States(decision, accumulates)
    ladder = decision.kept.ladder
    last = len(ladder) - 1
    kept_below = [0, *accumulate(on_gpu(sizes, tokens, keep) for keep in ladder)]

    def forward(i: int) -> Phase:
        buffers = {
            **states.forward(),
            "gradients": states.old_gradients(i),
            "kept activations": kept_below[i],
            **_forward_work(sizes, tokens, ladder[i]),
        }
        return Phase("forward", buffers)

    def backward(i: int) -> Phase:
        rung = ladder[i].rung
        buffers = {
            **states.backward(i),
            "gradients": states.new_gradients(i),
            "kept activations": kept_below[i] + lasting_bytes(sizes, tokens, ladder[i:]),
            **sizes.layer_parts(tokens, qkv=rung >= Rung.QKV, mlp=rung == Rung.ALL),
        }
        return Phase("backward", buffers)

    loss = {
        **states.loss(),
        "gradients": states.loss_gradients(),
        "kept activations": kept_below[-1],
        **sizes.loss_parts(tokens),
        "rows of the loss": sizes.loss_rows_bytes(tokens),
    }
    embedding = {**states.backward(-1), **states.of_embedding(sizes, tokens)}
    return [
        peak(forward(i) for i in range(last + 1)),
        Phase("loss", loss),
        *states.others(kept_below[-1], tokens * sizes.hidden * sizes.stream_bytes),
        peak(backward(i) for i in range(last, -1, -1)),
        Phase("embedding", embedding),
        Phase("update", {**states.update(), "gradients": states.all_gradients()}),
    ]


def _forward_work(sizes: Sizes, tokens: int, keep: Keep) -> Buffers:
    """x and o of this layer, and what it will keep; y; a group's q, k, v or a tile of the MLP."""
    unit = tokens * sizes.hidden * sizes.stream_bytes
    cut = sizes.cut(tokens)
    heads = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    group = tokens * (heads // cut.head_groups) * sizes.itemsize
    rows = min(tokens, cut.tile_tokens)
    wide = 1 if keep.rung == Rung.ALL else 2  # gate and up, or their product beside them
    tile = rows * (wide * sizes.intermediate + 2 * sizes.hidden) * sizes.itemsize
    return {
        "this layer's": rung_bytes(sizes, tokens, max(keep.rung, Rung.O)),
        "its output": unit,
        "a head group or a tile": max(group - unit, tile),
    }


# --- vanilla and liger -----------------------------------------------------------------------


def other_phases(
    decision: Decision,
    sizes: Sizes,
    tokens: int,
    accumulates: bool,
    class_type: str,
    states: States | None = None,
) -> list[Phase]:
    """Of Hugging Face's layers with checkpointing by layer."""
    states = states or States(decision, accumulates)
    unit = tokens * sizes.hidden * sizes.itemsize
    work = OTHERS[class_type]
    numbers = work.hidden * sizes.hidden + work.intermediate * sizes.intermediate
    layer = int(tokens * numbers) * sizes.itemsize
    head = sizes.hidden * sizes.vocab * sizes.itemsize
    logits = {"logits": 12 * tokens * sizes.vocab + unit}  # and gradients, in bf16 and fp32
    if class_type == "liger":  # its fused loss: h200_kernels.json
        logits = {"lm_head's gradient": head, "logits": 2 * unit}
    kept = {"kept activations": sizes.layers * unit}
    old = {"gradients": states.old_gradients(0)}
    before = {"gradients": states.loss_gradients()}

    def backward(i: int) -> Phase:
        grads = {"gradients": states.new_gradients(i)}
        below = {"kept activations": i * unit}
        return Phase("backward", {**states.backward(i), **grads, **below, "a layer": layer})

    return [
        Phase("forward", {**states.forward(), **old, **kept, "a layer": layer // 2}),
        Phase("loss", {**states.loss(), **before, **kept, **logits}),
        *states.others(sizes.layers * unit, unit),
        peak(backward(i) for i in range(sizes.layers)),
        Phase("embedding", {**states.backward(-1), **states.of_embedding(sizes, tokens)}),
        Phase("update", {**states.update(), "gradients": states.all_gradients()}),
    ]
