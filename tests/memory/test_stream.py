"""What the stream moves, and how much of the GPU it takes. That it changes no bit is tested in
test_exact_states.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import peft
import pytest
import torch
from small_states import Placed, batch, everything_on_gpu, llama, nothing_on_gpu, place

from exactness import DEVICE
from longctx.memory import stream as streaming
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import AHEAD, RING, Place
from longctx.memory.states import Block
from longctx.memory.stream import StateStream, _copy
from longctx.train.lora.quantise import quantise_

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture
def arrivals(monkeypatch) -> Counter:
    """How often the weights of each block came to the GPU."""
    found: Counter = Counter()
    arrive = Block.arrive

    def counted(block: Block, weight: torch.Tensor) -> None:
        assert block.is_away
        found[block.spec.name] += 1
        arrive(block, weight)

    monkeypatch.setattr(Block, "arrive", counted)
    return found


def train(placed: Placed, steps: int, *, flushes: bool = True) -> ExactAdamW:
    """The optimizer, which makes outstanding updates when it goes."""
    optimizer = placed.optimizer()
    for step in range(steps):
        placed.module(**batch(step, DEVICE)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if flushes:
        optimizer.flush()
    return optimizer


def deep_llama(**changes):
    """With layers enough that some are on neither end's way."""
    return llama(device=DEVICE, layers=8, **changes)


def test_layers_come_twice_a_step_and_the_ends_once(arrivals) -> None:
    """But for the last two, which backward begins with. After backward all weights are home, where
    their gradients are."""
    left = train(place(deep_llama(), nothing_on_gpu), 3, flushes=False)
    started = Counter(["embedding", "layer 0", "layer 1"])  # for the next step
    twice = {f"layer {i}": 6 for i in range(6)}
    once = {name: 3 for name in ("embedding", "layer 6", "layer 7", "lm_head")}
    assert arrivals == Counter(twice | once) + started
    del left


@pytest.mark.parametrize("nf4", [False, True])
def test_frozen_weights_come_and_nothing_goes(arrivals, monkeypatch, nf4) -> None:
    """As often as trained ones. No update needs buffers, and nothing is written on the host."""
    model = deep_llama()
    if nf4:
        pytest.importorskip("bitsandbytes")
        quantise_(model, torch.device(DEVICE))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    placed = place(model, nothing_on_gpu)
    before = [b.host_weight.clone() for b in placed.stream.blocks if b.streams]
    copied = []
    monkeypatch.setattr(streaming, "_copy", lambda pairs: (copied.extend(pairs), _copy(pairs)))
    train(placed, 3)
    twice = {f"layer {i}": 6 for i in range(6)}
    once = {name: 3 for name in ("embedding", "layer 6", "layer 7", "lm_head")}
    assert arrivals == Counter(twice | once)  # a step does not begin the next one's way
    streamed = [block for block in placed.stream.blocks if block.streams]
    assert [block.place.all_on_gpu for block in placed.stream.blocks] == [*10 * [False], True]
    assert placed.stream._ring == [] and all(block.written is None for block in streamed)
    assert all(torch.equal(x, b.host_weight) for x, b in zip(before, streamed, strict=True))
    nbytes = sum(arrivals[block.spec.name] * block.nbytes for block in streamed)
    assert sum(x.nbytes for x, _ in copied) == nbytes


def test_a_tied_head_sends_for_no_layer_in_vain(arrivals) -> None:
    """It is the embedding's block, but no layer follows."""
    left = train(place(deep_llama(tied=True), nothing_on_gpu), 3, flushes=False)
    twice = {f"layer {i}": 6 for i in range(6)}
    once = {"layer 6": 3, "layer 7": 3}
    assert arrivals == Counter(twice | once) + Counter(["layer 0", "layer 1"])
    del left


def test_what_is_on_the_gpu_does_not_come(arrivals) -> None:
    train(place(llama(device=DEVICE), everything_on_gpu), 2)
    train(place(llama(device=DEVICE), lambda spec: Place(states=not spec.modules)), 2)
    assert not arrivals


def test_a_head_that_alone_streams_leaves_before_the_layers_backward() -> None:
    """Though no layer's weights come, whose way would drop it."""
    placed = place(llama(device=DEVICE), lambda spec: Place(weight=spec.name != "lm_head"))
    (head,) = (block for block in placed.stream.blocks if block.streams)
    layers, seen = placed.module.model.layers, []

    def watch(layer: Any) -> None:
        layer.register_full_backward_hook(lambda *_: seen.append(head.is_away))

    for layer in layers:
        watch(layer)
    train(placed, 2)
    assert seen == 2 * len(layers) * [True]


@pytest.mark.parametrize("tied", [False, True])
def test_three_blocks_are_on_the_gpu_at_a_time(tied, monkeypatch) -> None:
    """Of the weights that live on the host; in evaluations and dropped forwards too."""
    placed = place(deep_llama(tied=tied), nothing_on_gpu)
    need, most = StateStream._need, []

    def watched(stream: StateStream, block: Block, order: list[Block]) -> None:
        need(stream, block, order)
        assert not block.is_away
        most.append(sum(b.streams and not b.is_away for b in stream.blocks))

    monkeypatch.setattr(StateStream, "_need", watched)
    train(placed, 2)
    with torch.no_grad():
        placed.module(**batch(0, DEVICE))
    dropped = placed.module(**batch(1, DEVICE)).loss
    train(placed, 1)
    del dropped
    assert max(most) == AHEAD + 1
    assert all(block.is_away == block.streams for block in placed.stream.blocks)
    assert len(placed.stream._ring) == RING


def test_updates_start_a_few_blocks_at_a_time() -> None:
    """More would bring later blocks' gradients and states up before earlier blocks are used."""
    placed = place(deep_llama(), lambda spec: Place(states=not spec.modules))
    optimizer = placed.optimizer()
    placed.module(**batch(0, DEVICE)).loss.backward()
    optimizer.step()

    def waiting() -> list[str]:
        return [name for name, block in placed.blocks.items() if block.update is not None]

    assert waiting() == [*(f"layer {i}" for i in range(2, 8)), "lm_head"]
    placed.stream.need(placed.blocks["layer 4"])
    assert waiting() == ["layer 2", "layer 3"]
    optimizer.flush()
    assert waiting() == []


def test_an_evaluation_ends_updates_too() -> None:
    placed, others = (place(llama(device=DEVICE), nothing_on_gpu) for _ in range(2))
    for each in (placed, others):
        optimizer = each.optimizer()
        each.module(**batch(0, DEVICE)).loss.backward()
        optimizer.step()
    others.stream.flush()
    with torch.no_grad():
        losses = [each.module(**batch(1, DEVICE)).loss for each in (placed, others)]
    assert torch.equal(*losses)
