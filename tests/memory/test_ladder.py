"""The ladder's arithmetic, and what is chosen on machines like those people have."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import LLAMA_8B

from longctx.memory.ladder import (
    Batch,
    Cost,
    Keep,
    Ladder,
    Rates,
    Room,
    Rung,
    States,
    _attended,
    _choose,
    _sums,
    again_flops,
    choose,
    choose_beside,
    describe,
    forward_flops,
    gpu_bytes,
    host_bytes,
    ladders,
    on_host,
    rung_bytes,
    uniform,
    waited_for,
)
from longctx.memory.plan import GIB, Cut, default_logits_bytes

T = 131072
H100 = Rates(flops=680e12, link_bytes=47e9, memory_bytes=3e12)
LOST = Rates(flops=680e12, link_bytes=1e6, memory_bytes=3e12)
"""A link that is too slow for anything."""
O_BYTES = rung_bytes(LLAMA_8B, T, Rung.O)
ALL_BYTES = rung_bytes(LLAMA_8B, T, Rung.ALL)


def test_a_layer_of_llama_8b_at_131072_tokens_by_rung() -> None:
    """A unit is 1 GiB there, and 32 heads' log-sum-exp in fp32 are 16 MiB."""
    units = [1, 2, 3, 4.5, 11.5]
    for rung, expected in zip(Rung, units, strict=True):
        lse = 2**24 if rung >= Rung.O else 0
        assert 0 <= rung_bytes(LLAMA_8B, T, rung) - expected * GIB - lse <= 16 * 512


def test_what_a_byte_spares_above_o_is_the_same() -> None:
    """4096 products, for every rung."""
    batch = Batch(T, row=T)
    for low, high in pairwise(list(Rung)[1:]):
        spared = again_flops(LLAMA_8B, batch, low) - again_flops(LLAMA_8B, batch, high)
        kept = rung_bytes(LLAMA_8B, T, high) - rung_bytes(LLAMA_8B, T, low)
        assert spared / kept == pytest.approx(4096, rel=1e-4)
    assert again_flops(LLAMA_8B, batch, Rung.ALL) == 0
    assert forward_flops(LLAMA_8B, batch) == 2 * T * (218_103_808)


def test_what_is_on_the_gpu_and_on_the_host() -> None:
    on_gpu: Ladder = 32 * (Keep(),)
    assert gpu_bytes(LLAMA_8B, T, on_gpu) == 32 * O_BYTES and host_bytes(LLAMA_8B, T, on_gpu) == 0
    away = 31 * (Keep(Rung.O, Rung.O),) + (Keep(),)
    assert gpu_bytes(LLAMA_8B, T, away) == O_BYTES  # the last one's, or what comes back
    assert host_bytes(LLAMA_8B, T, away) == 31 * O_BYTES
    partly = 2 * (Keep(Rung.ALL, Rung.O),)
    assert gpu_bytes(LLAMA_8B, T, partly) == 2 * (ALL_BYTES - O_BYTES) + O_BYTES
    recomputed = 31 * (Keep(Rung.X, Rung.X),) + (Keep(Rung.X),)
    assert gpu_bytes(LLAMA_8B, T, recomputed) == O_BYTES  # x, and o while its backward runs


def test_a_ladder_in_words() -> None:
    ladder = 2 * (Keep(Rung.O, Rung.O),) + (Keep(Rung.ALL, Rung.O),) + (Keep(Rung.QKV),)
    assert describe(ladder) == (
        "kept for backward: layers 0 to 1: x o on the host; "
        "layers 2 to 2: x o on the host, h q k v gate up on the GPU; "
        "layers 3 to 3: x o h q k v on the GPU"
    )


@pytest.mark.parametrize(("offload", "hosts"), [("none", 0), ("auto", 0), ("all", 2)])
@pytest.mark.parametrize(("keep", "rung"), [("auto", Rung.O), ("x", Rung.X), ("all", Rung.ALL)])
def test_without_a_look_at_memory(offload, hosts, keep, rung) -> None:
    expected = hosts * (Keep(rung, rung),) + (3 - hosts) * (Keep(rung),)
    assert uniform(3, keep, offload) == expected


# --- how the work is cut ---------------------------------------------------------------------


def cut(gpu_gib: float, tokens: int = T, rates: Rates | None = H100, **asked) -> Cut:
    names = {"tile": "tile_tokens", "groups": "head_groups"}
    sizes = replace(LLAMA_8B, **{names[k]: asked.pop(k) for k in names if k in asked})
    budgets = int(gpu_gib * GIB), 500 * GIB
    return choose_beside(sizes, Batch(tokens, tokens), *budgets, rates, **asked).sizes.cut(tokens)


LOGITS = default_logits_bytes(128256, 4096)
LITTLE = Cut(8192, 8, LOGITS)


@pytest.mark.parametrize("asked", [{"offload": "all"}, {"rates": None}, {"offload": "none"}])
def test_little_memory_is_cut_small(asked) -> None:
    assert cut(20, **asked)[:2] == LITTLE[:2]
    assert cut(2000, **asked) == (Cut(T, 1, LOGITS) if asked == {"offload": "none"} else LITTLE)


def test_free_memory_makes_one_group_and_one_tile() -> None:
    everything = 32 * ALL_BYTES / GIB
    assert cut(everything + 20, offload="none") == Cut(T, 1, LOGITS)
    assert cut(200, tokens=8192) == Cut(8192, 1, LOGITS)  # a short batch is one tile anyway


def test_what_waits_on_the_host_comes_up_beside_several_tiles() -> None:
    tiles = T // cut(32 * ALL_BYTES / GIB).tile_tokens
    assert tiles > 1
    sizes = replace(LLAMA_8B, tile_tokens=T)
    ladder = 31 * (Keep(Rung.H, Rung.H),) + (Keep(),)
    hosted = on_host(sizes, T, ladder)
    x, o, h = (host_bytes(sizes, T, 31 * (Keep(r, r),)) for r in (Rung.X, Rung.O, Rung.H))
    assert hosted == (h, 31, o, h - o) and o > 2 * x
    alone = [nbytes / H100.link_bytes for nbytes in (hosted.late, hosted.first)]
    assert waited_for(sizes, T, hosted, H100) == pytest.approx(alone)
    down, up = waited_for(replace(sizes, tile_tokens=T // 16), T, hosted, H100)
    assert (down, up) == (pytest.approx(alone[0] / 16), 0)


def test_pieces_are_worth_less_than_attention() -> None:
    """What larger ones need is not taken from x and o."""
    assert cut(32 * O_BYTES / GIB + 8, offload="none") == LITTLE


def test_what_was_asked_for_stays() -> None:
    assert cut(2000, groups=4) == Cut(T, 4, LOGITS)
    assert cut(2000, tile=512) == Cut(512, 1, LOGITS)
    assert cut(2000, tile=512, groups=2) == Cut(512, 2, LOGITS)


def test_frozen_weights_have_no_sums_that_tiles_would_spare() -> None:
    sizes = replace(LLAMA_8B, trains_weights=False)
    found = choose_beside(sizes, Batch(T, T), 2000 * GIB, 0, H100)
    assert found.sizes.cut(T) == Cut(8192, 1, LOGITS)


def test_logits_are_fewer_where_activations_are_worth_more() -> None:
    """Four layers in 8 GiB, 3.6 of them weights, as many gradients; what is kept beside fewer
    logits saves more than lm_head's gradient costs that adds up more often."""
    four, tokens = replace(LLAMA_8B, layers=4), 8192
    states = States(gradients=int(3.58 * GIB))

    def found(gib: float) -> Cut:
        free, batch = int((gib - 3.58) * GIB), Batch(tokens, tokens)
        chosen = choose_beside(four, batch, free, 500 * GIB, H100, offload="none", states=states)
        return chosen.sizes.cut(tokens)

    assert found(12).logits_bytes == LOGITS
    assert 2**28 <= found(7.75).logits_bytes < LOGITS
    assert found(4).logits_bytes >= 2**28


# --- choices ---------------------------------------------------------------------------------


def chosen(gpu_gib: float, host_gib: float, tokens: int = T, rates: Rates = H100, **kw) -> Ladder:
    """Of Llama-3.1-8B, in what is left beside what a layer's backward works with."""
    batch = Batch(tokens, row=tokens, passes=kw.pop("passes", 1))
    room = Room(int(gpu_gib * GIB), int(host_gib * GIB))
    return choose(LLAMA_8B, batch, room, rates, **kw)


STATES = States(
    weights=15 * GIB,
    gradients=15 * GIB,
    moments=75 * GIB,
    placement="auto",
    weights_move=True,
    gradients_move=True,
    ring=3 * GIB // 4,
    window=2 * GIB,
)


def test_free_memory_is_spent_on_time() -> None:
    assert chosen(32 * ALL_BYTES / GIB, 0) == 32 * (Keep(Rung.ALL),)


def test_without_a_host_the_last_layers_keep_all() -> None:
    ladder = chosen(100, 0)
    rungs = [keep.rung for keep in ladder]
    assert {keep.host for keep in ladder} == {None}
    assert set(rungs) == {Rung.O, Rung.ALL} and rungs == sorted(rungs)
    assert gpu_bytes(LLAMA_8B, T, ladder) <= 100 * GIB


def test_x_and_o_make_room_on_the_gpu_where_the_link_has_time() -> None:
    with_link, without = chosen(100, 200), chosen(100, 200, rates=LOST)
    assert host_bytes(LLAMA_8B, T, with_link) > 50 * GIB
    assert host_bytes(LLAMA_8B, T, without) == 0
    assert sum(k.rung == Rung.ALL for k in with_link) > sum(k.rung == Rung.ALL for k in without)


def test_a_little_time_is_not_bought_with_all_of_the_host() -> None:
    assert host_bytes(LLAMA_8B, 8192, chosen(12, 200, 8192)) < 10 * GIB


def test_what_does_not_fit_is_computed_again() -> None:
    """20 GiB of GPU and 40 of host cannot hold 64 GiB of x and o."""
    ladder = chosen(20, 40)
    assert ladder[0] == Keep(Rung.X, Rung.X)
    assert gpu_bytes(LLAMA_8B, T, ladder) <= 20 * GIB
    assert host_bytes(LLAMA_8B, T, ladder) <= 40 * GIB


def test_a_host_that_is_full_in_between_holds_more_of_the_later_layers() -> None:
    """Of x and o, 2 GiB a layer, 10 GiB of GPU and 40 of host hold 50 of 64."""
    ladder = chosen(10, 40)
    assert {Keep(Rung.X, Rung.X), Keep(Rung.O, Rung.O)} <= {*ladder}
    assert [*ladder] == sorted(ladder, key=lambda keep: keep.rung)
    assert gpu_bytes(LLAMA_8B, T, ladder) <= 10 * GIB
    assert 38.9 * GIB < host_bytes(LLAMA_8B, T, ladder) <= 40 * GIB


def test_no_ladder_of_four_layers_is_much_faster(monkeypatch) -> None:
    """Of all in which no layer has more on the host than one below it: what is lost is a part of a
    layer's work. And where any fits, one fits."""
    keeps = [Keep(rung, host) for rung in Rung for host in (None, *[*Rung][: rung + 1])]
    keeps.sort(key=lambda keep: -1 if keep.host is None else keep.host, reverse=True)
    every = [*combinations_with_replacement(keeps, 4)]
    sizes, whole = replace(LLAMA_8B, layers=4), 4 * ALL_BYTES
    shares = product(range(1, 22), range(0, 22, 3))
    rooms = [Room(whole * gpu // 20, whole * host // 20) for gpu, host in shares]

    def costs() -> list[Cost]:
        _sums.cache_clear()
        batch, states = Batch(T, T), States()
        return [_choose(sizes, batch, r, H100, "auto", "auto", states)[1] for r in rooms]

    ours = costs()
    monkeypatch.setattr("longctx.memory.ladder.ladders", lambda *_: every)
    best = costs()
    _sums.cache_clear()
    assert [c.missing_bytes for c in ours] == [c.missing_bytes for c in best]
    lost = [a.seconds / b.seconds - 1 for a, b in zip(ours, best, strict=True)]
    assert max(lost) < 0.05 and statistics.mean(lost) < 0.012


def test_one_long_batch_moves_its_states_and_keeps_them_for_a_short_one() -> None:
    """23 GiB hold all of 8192 tokens' activations: for 16 batches a step worth more than states on
    the GPU, for one not."""
    accumulated = replace(STATES, gradients=30 * GIB)
    many = chosen(70, 120, 8192, states=accumulated, passes=16)
    assert many == 32 * (Keep(Rung.ALL),)
    one = chosen(40, 120, 8192, states=STATES)
    assert sum(keep.rung == Rung.ALL for keep in one) < 32


@pytest.mark.parametrize("keep", ["x", "o", "h", "qkv", "all"])
@pytest.mark.parametrize("offload", ["none", "all", "auto"])
def test_what_was_asked_for_is_done(keep, offload) -> None:
    for gpu_gib in (0, 60, 1000):
        ladder = chosen(gpu_gib, 500, keep=keep, offload=offload)
        assert {k.rung for k in ladder} == {Rung[keep.upper()]}
        hosts = sum(k.host is not None for k in ladder)
        assert hosts == {"none": 0, "all": 31}.get(offload, hosts)
        if offload == "auto":
            assert hosts < 32 and (gpu_gib < 1000 or hosts == 0)


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 40),
    tokens=st.sampled_from([1, 1000, 8192, 131072]),
    gpu_gib=st.floats(0, 200),
    host_gib=st.floats(0, 500),
    offload=st.sampled_from(["none", "all", "auto"]),
    passes=st.sampled_from([1, 16]),
    link=st.sampled_from([5e9, 47e9]),
)
def test_a_choice_fits_if_any_ladder_does(
    layers, tokens, gpu_gib, host_gib, offload, passes, link
) -> None:
    sizes = replace(LLAMA_8B, layers=layers)
    room = Room(int(gpu_gib * GIB), int(host_gib * GIB))

    def fits(ladder: Ladder) -> bool:
        on_gpu, on_host = (count(sizes, tokens, ladder) for count in (gpu_bytes, host_bytes))
        return on_gpu <= room.gpu and on_host <= room.host

    ladder = choose(
        sizes, Batch(tokens, tokens, passes), room, Rates(1e14, link, 1e12), offload=offload
    )
    assert len(ladder) == layers
    assert fits(ladder) or not any(fits(other) for other in ladders(layers, "auto", offload))


def test_attention_in_windows_is_cheap_to_repeat() -> None:
    """Behind a window of half the row a token sees what one in the middle of a row without does."""
    sizes = replace(LLAMA_8B, windows=(None,) * LLAMA_8B.layers)
    assert _attended(sizes, 8192) == _attended(LLAMA_8B, 8192) == 8192
    assert _attended(replace(LLAMA_8B, windows=(4096,) * LLAMA_8B.layers), 8192) == 8192
    assert _attended(replace(LLAMA_8B, windows=(1024, None) * (LLAMA_8B.layers // 2)), 8192) == 5120
