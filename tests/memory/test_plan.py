"""The arithmetic of a step's memory: worked examples, and against a GPU's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from longctx.config import ModelArguments
from longctx.memory.ladder import Keep, Rung
from longctx.memory.plan import (
    GIB,
    BlockSizes,
    Pending,
    Place,
    Sizes,
    buffer_bytes,
    default_head_groups,
    default_tile_tokens,
    pending_bytes,
    place_blocks,
    ring_bytes,
    window_bytes,
)
from longctx.model.patch import patch_as
from longctx.run.loading import load_config

LLAMA_8B = Sizes(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    itemsize=2,
)


def test_what_a_step_works_with() -> None:
    """Of Llama-3.1-8B at 131072 tokens, where a unit is 1 GiB: 128256 x 4096 in fp32 are 1.957."""
    assert LLAMA_8B.loss_bytes(131072) / GIB == pytest.approx(3 + 1.957 + 1.957, abs=0.001)
    assert LLAMA_8B.working_bytes(131072) == LLAMA_8B.loss_bytes(131072)
    short = replace(LLAMA_8B, vocab=32000)
    assert short.loss_bytes(131072) / GIB == pytest.approx(3 + 0.488 + 1, abs=0.001)
    tile = 8192 * (3 * 14336 + 4 * 4096) * 2
    mlp = 14 * 14336 * 4096 + 4 * 4096**2 + tile
    assert LLAMA_8B.layer_bytes(131072) == GIB + mlp
    one_group = replace(LLAMA_8B, head_groups=1)
    group = (1.5 + 1 + 1 + 0.5 + 2 * 1.5) * GIB
    rounded = 2 * (3 * 14336 + 4096) * 4096
    assert one_group.layer_bytes(131072) == GIB + rounded + GIB // 2 + group


def test_short_batches_run_whole_long_ones_in_parts() -> None:
    tiles = {1536: 65536, 8192: 16384, 14336: 8192, 28672: 4096}
    assert {F: default_tile_tokens(F) for F in tiles} == tiles
    assert [default_head_groups(tokens, 8) for tokens in (65535, 65536)] == [1, 8]


def test_only_trained_parameters_on_a_gpu_are_pending() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    trained, frozen = (
        torch.zeros(3, 5).as_subclass(OnGpu).requires_grad_(t) for t in (True, False)
    )
    pending = pending_bytes([trained, frozen, torch.zeros(7, requires_grad=True)])
    assert pending == Pending(states=2 * 15 * 4, gradients=15 * 4)


# --- model states ----------------------------------------------------------------------------

UNIT = 2**28
RING_BYTES = 3 * UNIT
"""Three pieces of 2^24 elements with 16 bytes each."""


def block(weight: int, movable: bool = True, fixed: bool = False) -> BlockSizes:
    """In bf16; `weight` in units."""
    size = weight * UNIT
    return BlockSizes(weight=size, states=5 * size, grad=size, movable=movable, fixed=fixed)


FIXED = block(7, movable=False, fixed=True)


LAYERS = [block(100) for _ in range(4)]
MODEL = [block(300), *LAYERS, block(300), FIXED]
WINDOW = (100 + 100 + 300) * UNIT  # the embedding's, or lm_head's
WEIGHTS = (2 * 300 + 4 * 100) * UNIT
FORCED = RING_BYTES + 49 * UNIT


def kept(places: list[Place], kind: str) -> list[bool]:
    return [getattr(place, kind) for place in places]


def on_gpu_bytes(blocks: list[BlockSizes], places: list[Place]) -> int:
    return sum(b.on_gpu(place) for b, place in zip(blocks, places, strict=True))


def test_the_buffers_of_what_moves() -> None:
    """Three pieces of states or gradients, and the weights of three blocks."""
    assert ring_bytes() == RING_BYTES
    assert window_bytes(MODEL) == WINDOW
    assert window_bytes(MODEL[:2]) == 400 * UNIT
    assert window_bytes([FIXED]) == window_bytes([]) == 0
    everything = [Place()] * 7
    assert buffer_bytes(MODEL, everything) == 0
    states = [*everything[:3], Place(states=False), *everything[4:]]
    assert buffer_bytes(MODEL, states) == RING_BYTES
    weights = [*everything[:3], Place(weight=False), Place(weight=False), *everything[5:]]
    assert buffer_bytes(MODEL, weights) == 200 * UNIT
    away = Place(weight=False, states=False, grad=False)
    ends = [away, *everything[1:5], away, Place()]
    assert buffer_bytes(MODEL, ends) == RING_BYTES + 600 * UNIT


@pytest.mark.parametrize("placement", ["auto", "gpu"])
def test_what_fits_needs_no_buffers(placement) -> None:
    total = sum(b.weight + b.states + b.grad for b in MODEL)
    assert place_blocks(MODEL, total, placement) == [Place()] * 7
    assert not all(place.all_on_gpu for place in place_blocks(MODEL, total - 1, "auto"))


def test_gpu_means_the_gpu() -> None:
    assert place_blocks(MODEL, 0, "gpu") == [Place()] * 7


def test_host_means_all_that_may_leave() -> None:
    places = place_blocks([block(300, movable=False), *MODEL[1:]], 10**15, "host")
    assert kept(places, "weight") == [True, *5 * [False], True]
    assert kept(places, "grad") == kept(places, "states") == [*6 * [False], True]
    with_gradients = place_blocks(MODEL, 10**15, "host", keeps_gradients=True)
    assert kept(with_gradients, "grad") == 7 * [True]
    assert kept(with_gradients, "states") == [*6 * [False], True]


def test_of_frozen_blocks_the_weights_leave_alone() -> None:
    """Nothing of them is updated, so that there is no ring; adapters are fixed."""
    blocks = [replace(b, states=0, grad=0) for b in MODEL[:-1]] + [FIXED]
    places = place_blocks(blocks, 10**15, "host")
    assert places == [*6 * [Place(weight=False)], Place()]
    assert buffer_bytes(blocks, places) == WINDOW
    room = on_gpu_bytes([FIXED], [Place()]) + WINDOW
    assert place_blocks(blocks, room, "auto") == places
    places = place_blocks(blocks, room + 499 * UNIT, "auto")
    assert kept(places, "weight") == [True, True, *4 * [False], True]


def test_gradients_may_have_what_is_needed_before_they_are_there() -> None:
    """The first ones that fit, where nothing else is left; --place host sends them all away."""
    options = dict(before_gradients=450 * UNIT)
    places = place_blocks(MODEL, FORCED + WEIGHTS, "auto", **options)
    assert kept(places, "weight") == 7 * [True]
    assert kept(places, "grad") == [True, True, *4 * [False], True]
    places = place_blocks(MODEL, 0, "host", **options)
    assert kept(places, "grad") == [*6 * [False], True]


def test_weights_come_first_then_gradients_then_states() -> None:
    """Of each kind the first blocks first."""
    places = place_blocks(MODEL, FORCED + WEIGHTS + 500 * UNIT, "auto")
    assert kept(places, "weight") == 7 * [True]
    assert kept(places, "grad") == [True, True, True, False, False, False, True]
    assert kept(places, "states") == [*6 * [False], True]
    places = place_blocks(MODEL, FORCED + 2 * WEIGHTS + 1999 * UNIT, "auto")
    assert kept(places, "grad") == 7 * [True]
    assert kept(places, "states") == [True, *5 * [False], True]


def test_weights_that_stream_have_a_window() -> None:
    places = place_blocks(MODEL, FORCED + WEIGHTS - 1, "auto")
    assert kept(places, "weight") == [True, True, *4 * [False], True]  # 300 + 100 of 499
    assert kept(places, "grad") == [*6 * [False], True]
    places = place_blocks(MODEL, FORCED + WINDOW + 299 * UNIT, "auto")
    assert kept(places, "weight") == [*6 * [False], True]  # no layer stays before the embedding


def test_several_processes_keep_weights_and_gradients() -> None:
    blocks = [block(100, movable=False) for _ in range(3)]
    places = place_blocks(blocks, RING_BYTES + (600 + 500) * UNIT, "auto", keeps_gradients=True)
    assert kept(places, "weight") == kept(places, "grad") == 3 * [True]
    assert kept(places, "states") == [True, False, False]


SIZE = st.integers(0, 30).map(lambda n: n * UNIT // 4)
BLOCK = st.builds(
    BlockSizes, weight=SIZE, states=SIZE, grad=SIZE, movable=st.booleans(), fixed=st.booleans()
).map(lambda b: replace(b, movable=b.movable and not b.fixed))


@example(  # small blocks between large ones
    blocks=[
        BlockSizes(weight=size * UNIT, states=0, grad=0, movable=True)
        for size in (10, 1, 1, 10, 1, 1, 10)
    ],
    share=0.57,
    keeps_gradients=False,
    before=0,
)
@settings(max_examples=300)
@given(
    blocks=st.lists(BLOCK, min_size=1, max_size=12),
    share=st.floats(0, 1.2),
    keeps_gradients=st.booleans(),
    before=SIZE,
)
def test_auto_never_takes_more_than_is_free(blocks, share, keeps_gradients, before) -> None:
    """Buffers included, if what must stay fits; and it takes nothing away that must stay. Gradients
    may have what is needed before they are there."""
    free = int(share * on_gpu_bytes(blocks, [Place()] * len(blocks)))
    options = dict(keeps_gradients=keeps_gradients, before_gradients=before)
    places = place_blocks(blocks, free, "auto", **options)
    for b, place in zip(blocks, places, strict=True):
        assert place.all_on_gpu or not b.fixed
        assert place.weight or b.movable
        assert place.grad or not keeps_gradients
    host = place_blocks(blocks, free, "host", **options)
    if on_gpu_bytes(blocks, host) + ring_bytes() + window_bytes(blocks) <= free:
        gradients = sum(b.grad for b, place in zip(blocks, places, strict=True) if place.grad)
        taken = on_gpu_bytes(blocks, places) - min(gradients, before)
        assert taken + buffer_bytes(blocks, places) <= free
    if on_gpu_bytes(blocks, [Place()] * len(blocks)) <= free:
        assert all(place.all_on_gpu for place in places)


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
    patch_as(model, ModelArguments(offload_activations="auto"), device)
    model.longctx.pending_bytes = lambda model: Pending(0, pending_bytes(model.parameters())[1])
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
    assert (set(ladder) == {Keep(Rung.ALL)}) == (free_gib == 40), ladder
