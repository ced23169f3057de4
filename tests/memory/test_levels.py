"""Where model states live: levels, and the bytes of each against those of its places by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cost_sizes import keep_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from longctx.constants import GIB
from longctx.memory.levels import ORDERS, Activity, Levels, pending_levels
from longctx.memory.pending import Pending, pending_bytes
from longctx.memory.place import (
    BlockSizes,
    Place,
    PlacedStates,
    moved_ring_bytes,
    ring_bytes,
    window_bytes,
)
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

UNIT = 2**28
RING_BYTES = 3 * UNIT
"""Three pieces of 2^24 elements with 16 bytes each."""


def block(weight: int, movable: bool = True, fixed: bool = False, layer: int | None = None):
    """In bf16; `weight` in units."""
    size = weight * UNIT
    return BlockSizes(
        weight=size, states=5 * size, grad=size, movable=movable, fixed=fixed, layer=layer
    )


FIXED = block(7, movable=False, fixed=True)
LAYERS = [block(100, layer=i) for i in range(4)]
MODEL = [block(300), *LAYERS, block(300), FIXED]


def kept(places: list[Place], kind: str) -> list[bool]:
    return [getattr(place, kind) for place in places]


def idle(layers: int = 4, nbytes: int = 0) -> Activity:
    """No activations, or so many bytes of them at each moment."""
    each = np.full((1, layers), nbytes)
    return Activity(forward=each, loss=each[:, 0], backward=each, embedding=nbytes)


def placed(blocks, gpu: int, placement="auto", **options) -> list[Place]:
    levels = Levels(blocks, placement, accumulates=False, **options)
    level, _ = levels.lowest(idle(levels.layers), gpu)
    return levels.places(int(level[0]))


def buffer_bytes(places: list[Place]) -> int:
    """Of the buffers through which blocks move that are not all on the GPU."""
    streamed = [b for b, place in zip(MODEL, places, strict=True) if not place.weight]
    return moved_ring_bytes(places) + window_bytes(streamed)


def test_the_buffers_of_what_moves() -> None:
    """Three pieces of states or gradients, and the weights of three blocks."""
    assert ring_bytes() == RING_BYTES
    assert window_bytes(MODEL) == (100 + 100 + 300) * UNIT  # the embedding's, or lm_head's
    assert window_bytes(MODEL[:2]) == 400 * UNIT
    assert window_bytes([FIXED]) == window_bytes([]) == 0
    everything = [Place()] * 7
    assert buffer_bytes(everything) == 0
    states = [*everything[:3], Place(states=False), *everything[4:]]
    assert buffer_bytes(states) == RING_BYTES
    weights = [*everything[:3], Place(weight=False), Place(weight=False), *everything[5:]]
    assert buffer_bytes(weights) == 200 * UNIT
    away = Place(weight=False, states=False, grad=False)
    ends = [away, *everything[1:5], away, Place()]
    assert buffer_bytes(ends) == RING_BYTES + 600 * UNIT


def test_gpu_means_the_gpu_and_host_all_that_may_leave() -> None:
    assert placed(MODEL, 0, "gpu") == [Place()] * 7
    tied = [block(300, movable=False), *MODEL[1:]]
    places = placed(tied, 10**15, "host")
    assert kept(places, "weight") == [True, *5 * [False], True]
    assert kept(places, "grad") == kept(places, "states") == [*6 * [False], True]
    with_gradients = placed(MODEL, 10**15, "host", keeps_gradients=True)
    assert kept(with_gradients, "grad") == 7 * [True]
    assert kept(with_gradients, "states") == [*6 * [False], True]


def test_of_frozen_blocks_the_weights_leave_alone() -> None:
    """Nothing of them is updated, so that there is no ring; adapters are fixed."""
    blocks = [replace(b, states=0, grad=0) for b in MODEL[:-1]] + [FIXED]
    assert placed(blocks, 10**15, "host") == [*6 * [Place(weight=False)], Place()]
    assert placed(blocks, 10**15) == 7 * [Place()]


@pytest.mark.parametrize("order", ORDERS)
def test_what_leaves_first(order) -> None:
    """Kinds in their order, of each the last blocks first."""
    levels = Levels(MODEL, "auto", accumulates=False, order=order)
    assert len(levels) == 1 + 3 * 6 and levels.places(0) == [Place()] * 7
    one = levels.places(1)
    assert kept(one, "states") == [*5 * [True], False, True]
    assert kept(one, "weight") == kept(one, "grad") == 7 * [True]
    eight = levels.places(8)
    assert kept(eight, "states") == [*6 * [False], True]
    assert kept(eight, order[1]) == [*4 * [True], False, False, True]
    assert kept(eight, order[2]) == 7 * [True]


def test_the_embeddings_states_are_the_last_or_the_first_to_leave() -> None:
    def states(level: int, first: bool) -> list[bool]:
        levels = Levels(MODEL, "auto", accumulates=False, embedding_first=first)
        return kept(levels.places(level), "states")

    assert states(5, False) == [True, *5 * [False], True]
    assert states(1, True) == [False, *6 * [True]]


def test_several_processes_keep_weights_and_gradients() -> None:
    blocks = [block(100, movable=False, layer=i) for i in range(3)]
    places = placed(blocks, RING_BYTES + (600 + 501) * UNIT, keeps_gradients=True)
    assert kept(places, "weight") == kept(places, "grad") == 3 * [True]
    assert kept(places, "states") == [True, False, False]


def test_gradients_take_the_room_of_activations() -> None:
    """Where the loss has the peak, they come as what layers keep goes."""
    blocks = [replace(b, states=0) for b in MODEL]
    levels = Levels(blocks, "auto", accumulates=False, order=ORDERS[1])
    backward = np.array([[100, 200, 300, 400]]) * UNIT
    a = Activity(forward=backward, loss=np.array([1000 * UNIT]), backward=backward, embedding=UNIT)
    weights = sum(b.weight for b in blocks)
    level, missing = levels.lowest(a, weights + 1009 * UNIT)
    places = levels.places(int(level[0]))
    assert missing[0] == 0 and kept(places, "weight") == kept(places, "grad") == 7 * [True]
    accumulating = Levels(blocks, "auto", accumulates=True, order=ORDERS[1])
    level, _ = accumulating.lowest(a, weights + 1009 * UNIT)
    assert not all(kept(accumulating.places(int(level[0])), "weight"))


SIZE = st.integers(0, 30).map(lambda n: n * UNIT // 4)
BLOCK = st.builds(
    BlockSizes, weight=SIZE, states=SIZE, grad=SIZE, movable=st.booleans(), fixed=st.booleans()
).map(lambda b: replace(b, movable=b.movable and not b.fixed))


def exact_peak(levels: Levels, level: int, a: Activity) -> int:
    """By the places of a level, at each moment of a step."""
    standing = PlacedStates(levels.blocks, levels.places(level), accumulates=levels.accumulates)
    total = lambda buffers: sum(buffers.values())  # noqa: E731
    moments = [total(standing.loss()) + standing.loss_gradients() + int(a.loss[0])]
    for i in range(levels.layers):
        forward = total(standing.forward()) + standing.old_gradients(i)
        backward = total(standing.backward(i)) + standing.new_gradients(i)
        moments += [forward + int(a.forward[0, i]), backward + int(a.backward[0, i])]
    made = standing.embedding({"made": a.embedding})
    moments.append(total(standing.backward(-1)) + total(made))
    moments.append(total(standing.update()) + standing.all_gradients())
    return max(moments)


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.lists(BLOCK, min_size=3, max_size=8),
    layers=st.integers(1, 6),
    activity=st.lists(st.integers(0, 200), min_size=14, max_size=14),
    share=st.floats(0, 1.3),
    accumulates=st.booleans(),
    keeps_gradients=st.booleans(),
    embedding_first=st.booleans(),
    tied=st.booleans(),
    tower=st.booleans(),
    tower_first=st.booleans(),
    order=st.sampled_from(ORDERS),
)
def test_the_lowest_level_fits_and_more_memory_never_makes_it_higher(
    blocks,
    layers,
    activity,
    share,
    accumulates,
    keeps_gradients,
    embedding_first,
    tied,
    tower,
    tower_first,
    order,
) -> None:
    layers = min(layers, len(blocks) - 1)
    blocks = [replace(blocks[0], tied=tied)] + [
        replace(b, layer=i if i < layers else None) for i, b in enumerate(blocks[1:])
    ]
    if tower:  # a frozen tower beside the last of them
        blocks.insert(1, replace(blocks[-1], layer=None, states=0, grad=0, tower=True, first=True))
    levels = Levels(
        blocks,
        "auto",
        accumulates=accumulates,
        keeps_gradients=keeps_gradients,
        order=order,
        embedding_first=embedding_first,
        tower_first=tower_first,
    )
    found = np.array(activity) * UNIT // 4
    a = Activity(
        forward=found[None, :layers],
        backward=found[None, 6 : 6 + layers],
        loss=found[12:13],
        embedding=int(found[13]),
    )
    everything = exact_peak(levels, 0, a)
    budgets = [int(share * everything), int(share * everything) + UNIT, everything]
    lows = []
    for budget in budgets:
        level, missing = levels.lowest(a, budget)
        if not missing[0]:
            assert exact_peak(levels, int(level[0]), a) <= budget
        lows.append((missing[0] > 0, int(level[0])))
    assert lows[1] <= lows[0] and lows[2] == (False, 0)
    least = exact_peak(levels, len(levels) - 1, a)
    if budgets[0] >= least + 2 * UNIT:  # what leaves is counted where it may be gone already
        assert not lows[0][0]


@settings(max_examples=50, deadline=None)
@given(gradients=st.integers(0, 100), layers=st.integers(1, 5), room=st.integers(0, 300))
def test_what_an_engine_adds_never_leaves(gradients, layers, room) -> None:
    levels = pending_levels(layers, 7 * UNIT, gradients * UNIT, accumulates=False)
    assert len(levels) == 1
    a = idle(layers, nbytes=UNIT)
    _, missing = levels.lowest(a, room * UNIT)
    assert (missing[0] == 0) == (exact_peak(levels, 0, a) <= room * UNIT)


def test_only_trained_parameters_on_a_gpu_are_pending() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    trained, frozen = (
        torch.zeros(3, 5).as_subclass(OnGpu).requires_grad_(t) for t in (True, False)
    )
    pending = pending_bytes([trained, frozen, torch.zeros(7, requires_grad=True)])
    assert pending == Pending(states=2 * 15 * 4, gradients=15 * 4)


@pytest.mark.gpu
@pytest.mark.parametrize("free_gib", [7, 8, 40])
def test_auto_fills_a_gpu_and_does_not_overflow_it(free_gib: float) -> None:
    """Six layers of Llama-3.1-8B at 32768 tokens beside a block that leaves `free_gib`: 0.5 GiB a
    layer are kept, gradients and 5 units come on top. Nothing runs out, and all layers stay on the
    GPU where there is room."""
    device, tokens = torch.device("cuda"), 32768
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=tokens), vocab_size=1)
    config.num_hidden_layers, config.vocab_size = 6, 1024
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    patch_as(model, PatchOptions(offload_activations="auto"), device)
    model.longctx.surround(
        pending_bytes=lambda model: Pending(0, pending_bytes(model.parameters())[1])
    )
    ids = torch.randint(1024, (1, tokens), device=device)
    batch = dict(input_ids=ids, labels=ids, position_ids=torch.arange(tokens, device=device)[None])
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    block = torch.empty(free_bytes - int(free_gib * GIB), dtype=torch.uint8, device=device)
    try:
        for _ in range(2):
            model.zero_grad()
            model(**batch).loss.backward()
        ladder = model.longctx.store.ladder
    finally:
        del block
        torch.cuda.empty_cache()  # for tests in other processes
    assert (set(ladder) == {keep_of("all")}) == (free_gib == 40), ladder
