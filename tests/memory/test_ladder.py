"""The search: what is chosen on machines like those people have; more memory never hurts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product

import numpy as np
import pytest
from cost_sizes import LLAMA_8B, LLAMA_LAYER, SETS, keep_of, layer, llama_8b, of_layers
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.constants import GIB
from longctx.cost.kept import ORDER, Keep, Ladder
from longctx.cost.machines import MACHINES
from longctx.cost.peak import peak, phases
from longctx.cost.rates import AttentionRates, Rates
from longctx.cost.seconds import Falling, activation_waits, nothing_hosted, priced
from longctx.cost.sizes import Batch, Cut, default_logits_bytes
from longctx.cost.table import Keepable, Table, load
from longctx.memory import ladder as search
from longctx.memory.candidates import Candidates, Stretch, candidates, sets
from longctx.memory.ladder import (
    Budget,
    Chosen,
    Step,
    choose,
    displayed,
    gaps,
    predicted,
)
from longctx.memory.levels import ORDERS, Levels, pending_levels
from longctx.memory.place import BlockSizes, PlacedStates
from longctx.runtime.costs import StepTable
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config

T = 131072
ATTENTION = AttentionRates(665e12, 610e12)
H100 = Rates(flops=680e12, link_bytes=47e9, memory_bytes=3e12, attention=ATTENTION)
LOST = H100._replace(link_bytes=1e6)
"""A link that is too slow for anything."""
(LAYER,) = StepTable.of(LLAMA_8B, Batch(T, T)).kinds
O_BYTES, ALL_BYTES = (LAYER.kept_bytes(SETS[name]) for name in ("o", "all"))
LOGITS = default_logits_bytes(128256, 4096)
LITTLE = Cut(8192, 8, LOGITS)


def step_of(tokens: int = T, rates: Rates = H100, passes: int = 1, sizes=LLAMA_8B, **asked) -> Step:
    batch = Batch(tokens, tokens, passes)
    return Step(count=StepTable.of, sizes=sizes, batch=batch, rates=rates, **asked)


def chosen(gpu_gib: float, host_gib: float, levels=None, **options) -> Chosen:
    """Of Llama-3.1-8B without states: forward and backward alone."""
    step = step_of(**options)
    levels = levels or [pending_levels(step.sizes.layers, 0, 0, accumulates=False)]
    return choose(step, levels, Budget(int(gpu_gib * GIB), int(host_gib * GIB)))


def bytes_of(found: Chosen, tokens: int = T) -> tuple[int, int]:
    """Kept on the GPU, and on the host."""
    layer = StepTable.of(found.sizes, Batch(tokens, tokens)).kinds[0]
    kept = [(layer.kept_bytes(k.on_gpu), layer.kept_bytes(k.hosted)) for k in found.ladder]
    return sum(gpu for gpu, _ in kept), sum(host for _, host in kept)


def states(weight=15, layers=32, placement="auto", **options) -> list[Levels]:
    """Of a model with so many GiB of weights, as many of gradients and five times that of states,
    in its layers."""
    size = weight * GIB // layers
    blocks = [
        BlockSizes(weight=size, states=5 * size, grad=size, movable=True, layer=i)
        for i in range(layers)
    ]
    none = BlockSizes(weight=0, states=0, grad=0, movable=False)
    return [Levels([none, *blocks], placement, accumulates=False, **options)]


# --- what is kept ------------------------------------------------------------------------------


def test_free_memory_is_spent_on_time() -> None:
    assert chosen(32 * ALL_BYTES / GIB + 20, 0).ladder == 32 * (keep_of("all"),)


def test_without_a_host_the_last_layers_keep_all() -> None:
    found = chosen(110, 0)
    assert not any(keep.hosted for keep in found.ladder)
    assert {keep.kept for keep in found.ladder} == {SETS["o"], SETS["all"]}
    assert [*found.ladder] == sorted(found.ladder, key=lambda keep: len(keep.kept))


def test_x_and_o_make_room_on_the_gpu_where_the_link_has_time() -> None:
    with_link, without = chosen(110, 200), chosen(110, 200, rates=LOST)
    assert bytes_of(with_link)[1] > 50 * GIB and bytes_of(without)[1] == 0
    many, few = (sum(k.kept == SETS["all"] for k in c.ladder) for c in (with_link, without))
    assert many > few


def test_what_is_not_faster_to_three_digits_takes_no_host() -> None:
    assert bytes_of(chosen(26, 500, tokens=8192), 8192)[1] == 0


def test_what_does_not_fit_is_computed_again() -> None:
    """20 GiB of GPU and 40 of host cannot hold 64 GiB of x and o."""
    found = chosen(24, 40)
    assert found.ladder[0] == keep_of("x", "x")
    assert found.needed.gpu <= 24 * GIB and found.needed.host <= 40 * GIB


def test_a_host_that_is_full_in_between_holds_more_of_the_later_layers() -> None:
    found = chosen(16, 40)
    assert {keep_of("x", "x"), keep_of("o", "o")} <= {*found.ladder}
    assert 38.9 * GIB < found.needed.host <= 40 * GIB


def test_one_long_batch_moves_its_states_and_keeps_them_for_a_short_one() -> None:
    """What 16 batches of a step spare is worth more than states on the GPU, of one batch not."""
    many = chosen(75, 150, states(), tokens=8192, passes=16)
    assert many.ladder == 32 * (keep_of("all"),)
    assert chosen(45, 150, states(), tokens=8192).ladder != many.ladder


@pytest.mark.parametrize("keep", ["x", "o", "h", "qkv", "all"])
@pytest.mark.parametrize("offload", ["none", "all", "auto"])
def test_what_was_asked_for_is_done(keep, offload) -> None:
    for gpu_gib in (0, 60, 1000):
        ladder = chosen(gpu_gib, 500, keep=keep, offload=offload).ladder
        assert {k.kept for k in ladder} == {SETS[keep]}
        hosts = sum(bool(k.hosted) for k in ladder)
        assert hosts == {"none": 0, "all": 31}.get(offload, hosts)
        if offload == "auto":
            assert hosts < 32 and (gpu_gib < 1000 or hosts == 0)


NARROW = layer(width=4096, heads=16, kv_heads=4)
WINDOWED = layer(window=1024)
FOUR_LAYERS = {
    "one kind": (4 * [LLAMA_LAYER], 2),
    "dimensions": (2 * [NARROW, LLAMA_LAYER], 6),
    "windows": (2 * [LLAMA_LAYER, WINDOWED], 6),
}
"""Layers, and the steps in which budgets grow."""


def every_ladder(of_layer: tuple[int, ...]) -> Candidates:
    """Returns all ladders in which no layer has more on the host than one below it of its kind."""
    names = [frozenset(ORDER[: i + 1]) for i in range(5)]
    keeps = [Keep(kept, host) for kept in names for host in (frozenset(), *names) if host <= kept]
    keeps.sort(key=lambda keep: len(keep.hosted), reverse=True)
    kinds = range(1 + max(of_layer))
    of_kinds = [[*combinations_with_replacement(keeps, of_layer.count(kind))] for kind in kinds]

    def ladders() -> Iterator[list[Stretch]]:
        for chosen in product(*of_kinds):
            rest = [*map(iter, chosen)]
            yield [(len(kinds) * (next(rest[kind]),), 1) for kind in of_layer]

    return Candidates.of(ladders(), of_layer)


@pytest.mark.parametrize("name", FOUR_LAYERS)
def test_no_ladder_of_four_layers_is_much_faster(monkeypatch, name) -> None:
    """What is lost is a part of a layer's work. And where any ladder fits, one fits."""
    layers, step = FOUR_LAYERS[name]
    sizes = of_layers(layers, tile_tokens=8192, head_groups=4, logits_bytes=GIB)
    tables = StepTable.of(sizes, Batch(T, T))
    whole = sum(layer.kept_bytes(SETS["all"]) for layer in tables.layers)
    levels = [pending_levels(4, 0, 0, accumulates=False)]
    shares = product(range(5, 30, step), range(0, 22, step + 1))
    budgets = [Budget(whole * g // 20, whole * h // 20) for g, h in shares]
    ours = [choose(step_of(sizes=sizes), levels, budget) for budget in budgets]
    every = every_ladder(sizes.of_layer)
    monkeypatch.setattr(search, "candidates", lambda *_: every)
    best = [choose(step_of(sizes=sizes), levels, budget) for budget in budgets]

    def fits(found: Chosen, budget: Budget) -> bool:
        return found.needed.gpu <= budget.gpu and found.needed.host <= budget.host

    assert [*map(fits, ours, budgets)] == [*map(fits, best, budgets)]
    pairs = [(a, b) for a, b, c in zip(ours, best, budgets, strict=True) if fits(a, c)]
    lost = [a.seconds / b.seconds - 1 for a, b in pairs]
    assert len(lost) > 15 and max(lost) < 0.05 and statistics.mean(lost) < 0.012


# --- how the work is cut -----------------------------------------------------------------------


def cut(gpu_gib: float, tokens: int = T, **asked) -> Cut:
    names = {"tile": "tile_tokens", "groups": "head_groups"}
    sizes = llama_8b(**{names[k]: asked.pop(k) for k in names if k in asked})
    return chosen(gpu_gib, 500, tokens=tokens, sizes=sizes, **asked).sizes.cut(tokens)


def test_little_memory_is_cut_small() -> None:
    assert cut(20, offload="all") == cut(2000, offload="all") == Cut(8192, 8, LOGITS)
    assert min(cut(gib, offload="all").logits_bytes for gib in (7, 8, 9)) < LOGITS


def test_free_memory_makes_one_group_and_one_tile() -> None:
    everything = 32 * ALL_BYTES / GIB
    assert cut(everything + 40, offload="none") == Cut(T, 1, LOGITS)
    assert cut(200, tokens=8192) == Cut(8192, 1, LOGITS)  # a short batch is one tile anyway


def test_what_was_asked_for_stays() -> None:
    assert cut(2000, groups=4).head_groups == 4
    assert cut(2000, tile=512)[:2] == (512, 1)
    assert cut(2000, tile=512, groups=2)[:2] == (512, 2)


def test_what_waits_on_the_host_comes_up_beside_several_tiles() -> None:
    none = nothing_hosted(StepTable.of(LLAMA_8B, Batch(T, T)))
    hosted = none._replace(nbytes=60 * GIB, layers=np.array([31]), first=60 * GIB)
    one = StepTable.of(llama_8b(tile_tokens=T), Batch(T, T))
    alone = hosted.first / H100.link_bytes
    assert activation_waits(one, hosted, H100) == pytest.approx((0, alone))
    many = StepTable.of(llama_8b(tile_tokens=T // 16), Batch(T, T))
    assert activation_waits(many, hosted, H100) == (0, 0)


@given(st.tuples(*3 * [st.integers(0, 8 * GIB)]), st.sampled_from([1, 2, 16]))
def test_a_layer_ends_when_its_copies_are_down(nbytes, tiles) -> None:
    """As in a queue: x at the layer's begin, what attention makes at its end, then each tile."""
    tables = StepTable.of(llama_8b(tile_tokens=T // tiles), Batch(T, T))
    (layer,) = tables.kinds
    whole, tiled = (priced(load(works), H100).step for works in (layer.forward, layer.tiled))
    assert 0 < tiled < whole
    early, middle, late = (n / H100.link_bytes for n in nbytes)
    sent = [(0.0, early), (whole - tiled, middle)]
    sent += [(whole - tiled + tiled * (i + 1) / tiles, late / tiles) for i in range(tiles)]
    free = 0.0
    for begin, seconds in sent:
        free = max(free, begin) + seconds
    falling = Falling(np.array([0]), *(np.array([n]) for n in nbytes))
    hosted = nothing_hosted(tables)._replace(falling=falling, numbers=np.array([32]))
    waits, _ = activation_waits(tables, hosted, H100)
    assert waits == pytest.approx(32 * (free - whole), abs=1e-9)


def test_what_is_slower_to_copy_than_to_compute_again_is_not_copied() -> None:
    """A layer with a mixer computes for 55 ms at 65536 tokens. Its gate and up take 60 ms on the
    link, and 18 to compute again."""
    args = ModelArguments(class_type="custom", preset="qwen3.5-9b", seq_len=65536, lora_r=16)
    subject = Subject(load_config(args, vocab_size=1), args)
    found = plan(subject, PlannedRun(model=args, gpu_memory_gib=24), MACHINES["h100"], 112 * GIB)
    assert found.fits and found.seconds.waits < 0.01 * found.step_s
    ladder = found.decision.chosen.ladder
    assert any(keep.hosted for keep in ladder)
    assert not any("gate up" in keep.hosted for keep in ladder)


# --- layers that keep no input -----------------------------------------------------------------


@pytest.mark.parametrize(("gpu_gib", "host_gib"), [(16, 8), (16, 20), (24, 0), (40, 10)])
def test_where_not_each_input_has_room_every_kth_is_kept(gpu_gib, host_gib) -> None:
    """32 GiB of x, and more of o, have no room."""
    budget = Budget(gpu_gib * GIB, host_gib * GIB)
    without, found = (chosen(gpu_gib, host_gib, again=again) for again in (False, True))
    assert found.needed.gpu <= budget.gpu and found.needed.host <= budget.host
    assert without.needed.gpu > budget.gpu or without.seconds > found.seconds
    bare = [not keep.kept for keep in found.ladder]
    assert any(bare) and not bare[0]
    assert found.seconds < 1.5 * chosen(500, 500).seconds


def test_where_there_is_room_every_input_is_kept() -> None:
    """Where each layer's input has room, the choice is the same whether layers can run forward
    again or not."""
    for gpu_gib, host_gib in ((16, 80), (24, 64), (75, 60), (500, 0)):
        found = [chosen(gpu_gib, host_gib, again=again) for again in (False, True)]
        assert found[0].ladder == found[1].ladder and found[0].sizes == found[1].sizes


def test_no_ladder_of_few_inputs_is_much_faster(monkeypatch) -> None:
    """Of eight layers: than the best of all in which any layers but the first keep x, x and o, or
    nothing, on the host or not."""
    sizes = llama_8b(layers=8, tile_tokens=8192, head_groups=8, logits_bytes=GIB)
    step = step_of(sizes=sizes, again=True)
    levels = [pending_levels(8, 0, 0, accumulates=False)]
    keeps = [keep_of("x", "x"), keep_of("o", "o"), keep_of("o"), Keep(frozenset())]
    ladders = product(keeps[:2], *7 * [keeps])
    every = Candidates.of(([((keep,), 1) for keep in ladder] for ladder in ladders), 8 * (0,))
    budgets = [Budget(gpu * GIB, host * GIB) for gpu in (10, 13, 16) for host in (2, 4, 6, 9)]
    ours = [choose(step, levels, budget) for budget in budgets]
    monkeypatch.setattr(search, "sparse", lambda *_: every)
    best = [choose(step, levels, budget) for budget in budgets]
    lost = []
    for a, b, budget in zip(ours, best, budgets, strict=True):
        fits = [c.needed.gpu <= budget.gpu and c.needed.host <= budget.host for c in (a, b)]
        assert fits[0] == fits[1]
        lost += [a.seconds / b.seconds - 1] * fits[0]
    assert len(lost) > 8 and max(lost) < 0.06 and statistics.mean(lost) < 0.02, lost


# --- keepables ---------------------------------------------------------------------------------


def test_sets_grow_by_what_spares_most_a_byte() -> None:
    found = [kept for (kept,) in sets([LAYER], H100)]
    assert found[0] == SETS["x"] and found[1] == SETS["o"] and found[-1] == SETS["all"]
    assert all(a < b and len(b) == len(a) + 1 for a, b in zip(found, found[1:], strict=False))


def test_a_keepable_is_one_declaration() -> None:
    """What goes into the down matmul has half the bytes of gate and up, and is a by-product of
    silu's backward: it spares nothing, and is never kept. If it spared the gate's and up's matmuls
    it would be kept before them."""

    def having(flops: float) -> Table:
        spared = (replace(LAYER.forward[0], name="product", flops=flops, nbytes=0),)
        nbytes = LAYER.by_name["gate up"].nbytes // 2
        needs = frozenset({"o"})
        return LAYER + Table(
            keepables=(Keepable(name="product", nbytes=nbytes, spares=spared, needs=needs),)
        )

    assert not any("product" in kept for (kept,) in sets([having(0.0)], H100))
    worthy = sets([having(load(LAYER.by_name["gate up"].spares).at("matmul"))], H100)
    first = [next(iter(b - a)) for (a,), (b,) in pairwise(worthy)]
    assert first.index("product") < first.index("gate up")
    ladders = candidates(8 * (0,), worthy, "auto")
    assert any("product" in choice.keep.hosted for choice in ladders.choices)


# --- never worse with more memory --------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 24),
    tokens=st.sampled_from([1, 1000, 8192, T]),
    gpu_gib=st.floats(1, 150),
    host_gib=st.floats(0, 300),
    offload=st.sampled_from(["none", "all", "auto"]),
    passes=st.sampled_from([1, 16]),
    link=st.sampled_from([5e9, 47e9]),
    more=st.sampled_from([(1, 0), (0, 1), (7, 30)]),
    again=st.booleans(),
)
def test_a_choice_fits_by_name_and_is_never_worse_with_more_memory(
    layers, tokens, gpu_gib, host_gib, offload, passes, link, more, again
) -> None:
    sizes = llama_8b(layers=layers)
    rates = Rates(1e14, link, 1e12, AttentionRates(8e13, 7e13))
    step = step_of(tokens, rates, passes, sizes, offload=offload, again=again)
    levels = [*states(layers / 2, layers), *states(layers / 2, layers, order=ORDERS[1])]
    less = Budget(int(gpu_gib * GIB), int(host_gib * GIB))
    budgets = [less, Budget(less.gpu + more[0] * GIB, less.host + more[1] * GIB)]
    found = [choose(step, levels, budget) for budget in budgets]
    fits = [
        c.needed.gpu <= budget.gpu and c.needed.host <= budget.host
        for c, budget in zip(found, budgets, strict=True)
    ]
    assert fits[1] or not fits[0]
    if fits[0]:
        assert displayed(found[1].seconds) <= displayed(found[0].seconds)
        for c, budget in zip(found, budgets, strict=True):
            standing = PlacedStates(levels[0].blocks, c.places, accumulates=False)
            most = peak(phases(StepTable.of(c.sizes, step.batch), c.ladder, standing))
            assert most.nbytes <= budget.gpu - gaps(step)
            assert predicted(step, c).step == pytest.approx(c.seconds)


def test_seconds_are_told_to_three_digits() -> None:
    assert displayed(np.array([35.678, 0.012345, 1234.0])) == pytest.approx([35.7, 0.0123, 1230])


def test_ladders_of_deep_models_stay_few() -> None:
    found = candidates(300 * (0,), sets([LAYER], H100), "auto")
    assert len(found.layers) < 20_000
    ladder: Ladder = found.ladder(len(found.layers) - 1)
    assert len(ladder) == 300
