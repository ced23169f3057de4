"""The rows that parts declare: worked examples of Llama-3.1-8B at 131072 tokens, where a (T, D)
tensor has 1 GiB."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from cost_sizes import LLAMA_8B

from longctx.constants import GIB
from longctx.cost import rates
from longctx.cost.kept import ORDER, SETS, Keep, asked, describe, uniform
from longctx.cost.rates import AttentionRates, Rates
from longctx.cost.seconds import priced
from longctx.cost.sizes import Batch, Cut, default_head_groups, default_tile_tokens
from longctx.cost.table import Keepable, Table, Work, load
from longctx.layer.parts.attention import SelfAttention, attention_flops
from longctx.layer.parts.mlp import MLP
from longctx.memory.candidates import candidates, sets
from longctx.memory.ladder import Budget, Step, choose
from longctx.memory.levels import pending_levels
from longctx.model.costs import StepTable

T = 131072
TABLE = StepTable.of(LLAMA_8B, Batch(T, T))


def test_what_a_layer_keeps() -> None:
    """32 heads' log-sum-exp in fp32 are 16 MiB."""
    for kept, units in zip(SETS.values(), [1, 2, 3, 4.5, 11.5], strict=True):
        lse = 2**24 if "o" in kept else 0
        assert 0 <= TABLE.layer.kept_bytes(kept) - units * GIB - lse <= 16 * 512


def test_what_a_byte_spares_above_o_is_the_same() -> None:
    """4096 FLOPs of matmuls, and of q, k and v the norm and the rotation besides."""
    sets = list(SETS.values())[1:]
    for low, high in pairwise(sets):
        again = [load(TABLE.layer.again(kept)).at("matmul") for kept in (low, high)]
        spared = again[0] - again[1]
        kept = TABLE.layer.kept_bytes(high) - TABLE.layer.kept_bytes(low)
        assert spared / kept == pytest.approx(4096, rel=1e-4)
    assert load(TABLE.layer.again(SETS["all"])) == load(())
    assert load(TABLE.layer.forward).at("matmul") == 2 * T * 218_103_808


def test_without_o_attention_runs_again_and_q_k_v_twice() -> None:
    again = load(TABLE.layer.again(SETS["x"]))
    assert again.at("attention") == attention_flops(LLAMA_8B, Batch(T, T)) == 2 * 4096 * T**2
    once = load(TABLE.layer.again(SETS["o"]))
    assert again.at("matmul") - once.at("matmul") == TABLE.layer.forward[0].flops
    assert TABLE.layer.again_bytes(SETS["x"]) == TABLE.layer.by_name["o"].aligned
    assert TABLE.layer.again_bytes(SETS["o"]) == 0


def test_what_a_layer_works_with() -> None:
    """Three quarters of a unit of weight gradients in fp32 and a tile; with one head group q, k, v,
    do and their gradients."""
    tile = 8192 * (3 * 14336 + 4 * 4096) * 2
    mlp = 14 * 14336 * 4096 + 4 * 4096**2 + tile
    assert sum(TABLE.layer.during("mlp backward").values()) == GIB + mlp
    one_group = StepTable.of(replace(LLAMA_8B, head_groups=1), Batch(T, T)).layer
    group = (1.5 + 1 + 1 + 0.5 + 2 * 1.5) * GIB
    rounded = 2 * (3 * 14336 + 4096) * 4096
    found = sum(one_group.during("attention backward").values())
    assert found == GIB + rounded + GIB // 2 + group
    kept = sum(one_group.during("attention backward", SETS["qkv"]).values())
    assert found - kept == 1.5 * GIB


def test_what_the_loss_works_with() -> None:
    """128256 x 4096 in fp32 are 1.957 GiB, and so much has the workspace of logits."""
    rows = {"rows of the loss": 7 / 64}

    def gib(table: StepTable) -> float:
        found = table.loss.during("loss")
        return sum(n for name, n in found.items() if name not in rows) / GIB

    assert gib(TABLE) == pytest.approx(3 + 1.957 + 1.957, abs=0.001)
    short = StepTable.of(replace(LLAMA_8B, vocab=32000), Batch(T, T))
    assert gib(short) == pytest.approx(3 + 0.488 + 1, abs=0.001)


def test_attention_in_windows_costs_less() -> None:
    """Behind a window of half the row a token sees what one in the middle of a row without does."""
    whole = attention_flops(LLAMA_8B, Batch(8192, 8192))
    half = replace(LLAMA_8B, windows=(4096,) * 32)
    assert attention_flops(half, Batch(8192, 8192)) == pytest.approx(0.75 * whole, rel=1e-3)
    mixed = replace(LLAMA_8B, windows=(1024, None) * 16)
    assert attention_flops(mixed, Batch(8192, 8192)) < 0.63 * whole
    assert attention_flops(LLAMA_8B, Batch(8192, 4096)) == whole / 2


def test_ranks_that_share_a_row_have_a_share_of_its_attention() -> None:
    shared = attention_flops(replace(LLAMA_8B, ranks=2), Batch(T // 2, T))
    assert 2 * shared == attention_flops(LLAMA_8B, Batch(T, T))


def test_tiles_read_and_write_the_sums_of_weight_gradients() -> None:
    def nbytes(tile: int, **changes) -> float:
        sizes = replace(LLAMA_8B, tile_tokens=tile, **changes)
        return load(StepTable.of(sizes, Batch(T, T)).layer.backward).nbytes

    weights = 218_103_808
    assert nbytes(T // 4) - nbytes(T) == weights * (8 * 4 + 2 - 2)
    frozen = dict(trains_weights=False)
    assert nbytes(T // 4, **frozen) == nbytes(T, **frozen)


def test_short_batches_run_whole_long_ones_in_parts() -> None:
    tiles = {1536: 65536, 8192: 16384, 14336: 8192, 28672: 4096}
    assert {F: default_tile_tokens(F) for F in tiles} == tiles
    assert [default_head_groups(tokens, 8) for tokens in (65535, 65536)] == [1, 8]


def test_every_cut_worth_a_look() -> None:
    cuts = [sizes.cut(T) for sizes in LLAMA_8B.cuts(T)]
    assert len({*cuts}) == len(cuts)
    assert {(c.tile_tokens, c.head_groups) for c in cuts} == {
        (8192, 8),
        *((8192 * 2**i, 1) for i in range(5)),
    }
    asked = replace(LLAMA_8B, tile_tokens=512, head_groups=2, logits_bytes=GIB)
    assert [sizes.cut(T) for sizes in asked.cuts(T)] == [(512, 2, GIB)]
    assert {c.head_groups for c in (s.cut(T) for s in replace(LLAMA_8B, ranks=2).cuts(T))} == {4}


def test_a_ladder_in_words() -> None:
    ladder = (*2 * (Keep.of("o", "o"),), Keep.of("all", "o"), Keep.of("qkv"))
    assert describe(ladder) == (
        "kept for backward: layers 0 to 1: x o on the host; "
        "layer 2: x o on the host, h q k v gate up on the GPU; "
        "layer 3: x o h q k v on the GPU"
    )
    assert describe(ladder[2:], on_gpu=False) == (
        "kept for backward: layer 0: x o h q k v gate up; layer 1: x o h q k v"
    )


def test_a_cut_in_words() -> None:
    cut = Cut(tile_tokens=8192, head_groups=8, logits_bytes=GIB)
    assert str(cut.of(T, 128256)) == "8 head groups, tiles of 8192 tokens, 1 GiB of logits"
    assert str(cut.of(512, 2**19)) == "8 head groups, tiles of 512 tokens, 1 GiB of logits"
    assert str(cut.of(64, 1000)) == "8 head groups, tiles of 64 tokens, 1 MiB of logits"


def test_the_order_of_names() -> None:
    assert {*ORDER} == SETS["all"] | {"down"}


@pytest.mark.parametrize(("offload", "hosts"), [("none", 0), ("auto", 0), ("all", 2)])
@pytest.mark.parametrize(("keep", "name"), [("auto", "o"), ("x", "x"), ("all", "all")])
def test_without_a_look_at_memory(offload, hosts, keep, name) -> None:
    expected = hosts * (Keep.of(name, name),) + (3 - hosts) * (Keep.of(name),)
    assert uniform(TABLE.layer, 3, keep, offload) == expected


RATES = Rates(1e14, 1e10, 1e12, AttentionRates(1e14, 1e14))
ROUTE = Keepable(name="route", nbytes=2 * T, always=True)
"""What a router chose, say: nothing can recompute it, and no word of --keep names it."""


@pytest.mark.parametrize("keep", ["auto", *SETS])
@pytest.mark.parametrize("offload", ["none", "auto", "all"])
def test_a_second_keepable_that_must_be_kept_is_in_every_set(keep, offload) -> None:
    layer = TABLE.layer + Table(keepables=(ROUTE,))
    wanted = {"x", "route"} | (SETS[keep] if keep != "auto" else set())
    assert asked(keep, layer) >= wanted
    chosen = None if keep == "auto" else asked(keep, layer)
    searched = candidates(4, sets(layer, RATES), offload, chosen).keeps
    for k in (*searched, *uniform(layer, 4, keep, offload)):
        assert k.kept >= wanted
        assert not k.hosted or {"x", "route"} <= k.hosted


def test_a_rate_that_is_a_share_of_a_measured_one_is_priced_everywhere(monkeypatch) -> None:
    """Experts, say, whose grouped matmuls reach 0.6 of a dense one's rate."""
    monkeypatch.setitem(rates.RATE_SHARES, "grouped", ("matmul", 0.6))
    grouped = Work(name="experts", flops=6e14, rate="grouped")
    kept = Keepable(name="z", nbytes=2**20, spares=(grouped,))
    found = priced(load((grouped, replace(grouped, rate="matmul"))), RATES)
    assert (found.products, found.attention) == (pytest.approx(6e14 / 0.6e14 + 6e14 / 1e14), 0.0)
    table = StepTable.of(LLAMA_8B, Batch(T, T))
    vars(table)["layer"] = table.layer + Table(forward=(grouped,), keepables=(kept,))
    assert {"x", "z"} == sets(table.layer, RATES)[1]  # 10 s for a MiB

    def seconds(tables: StepTable) -> float:
        step = Step(
            count=lambda *of: tables, sizes=LLAMA_8B, batch=Batch(T, T), rates=RATES, keep="x"
        )
        levels = [pending_levels(LLAMA_8B.layers, 0, 0, accumulates=False)]
        return choose(step, levels, Budget(2**50, 2**50)).seconds

    assert seconds(table) - seconds(TABLE) == pytest.approx(32 * 2 * 10, rel=1e-3)


def test_work_at_a_rate_that_nobody_knows_is_no_free_work() -> None:
    with pytest.raises(KeyError, match="grouped"):
        priced(load((Work(name="experts", flops=1e15, rate="grouped"),)), RATES)


def test_a_part_declares_what_it_makes_and_nothing_of_other_parts() -> None:
    """Also what it leaves behind while another part computes."""

    def rows(part: Any, **changes: Any) -> Table:
        return part.cost(replace(LLAMA_8B, tile_tokens=8192, **changes), Batch(T, T))

    assert rows(SelfAttention, intermediate=100) == rows(SelfAttention)
    assert rows(MLP, heads=64, kv_heads=64) == rows(MLP)


def test_a_word_names_what_a_layer_has() -> None:
    parallel = StepTable.of(replace(LLAMA_8B, parallel=True), Batch(T, T)).layer
    assert asked("h", parallel) == asked("o", parallel) == SETS["o"]
    normed = StepTable.of(replace(LLAMA_8B, post_norms=True), Batch(T, T)).layer
    assert asked("all", normed) == SETS["all"] | {"down"}
