"""The rows that parts declare: worked examples of Llama-3.1-8B at 131072 tokens, where a (T, D)
tensor has 1 GiB."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from cost_sizes import ATTENTION, LLAMA_8B, MATRICES, SETS, keep_of, llama_8b

from longctx.constants import GIB
from longctx.cost import rates
from longctx.cost.kept import ORDER, asked, describe, uniform
from longctx.cost.rates import AttentionRates, Rates
from longctx.cost.seconds import priced
from longctx.cost.sizes import Batch, Cut, default_head_groups, default_tile_tokens
from longctx.cost.table import Keepable, Table, Work, load
from longctx.layer.specs.attention_sizes import attention_flops
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.memory.candidates import candidates, sets
from longctx.memory.ladder import Budget, Step, choose
from longctx.memory.levels import pending_levels
from longctx.runtime.costs import StepTable

T = 131072
TABLE = StepTable.of(LLAMA_8B, Batch(T, T))


def test_what_a_layer_keeps() -> None:
    """32 heads' log-sum-exp in fp32 are 16 MiB."""
    for kept, units in zip(SETS.values(), [1, 2, 3, 4.5, 11.5], strict=True):
        lse = 2**24 if "o" in kept else 0
        assert 0 <= TABLE.kinds[0].kept_bytes(kept) - units * GIB - lse <= 16 * 512


def test_what_a_byte_spares_above_o_is_the_same() -> None:
    """4096 FLOPs of matmuls, and of q, k and v the norm and the rotation besides."""
    sets = list(SETS.values())[1:]
    for low, high in pairwise(sets):
        again = [load(TABLE.kinds[0].again(kept)).at("matmul") for kept in (low, high)]
        spared = again[0] - again[1]
        kept = TABLE.kinds[0].kept_bytes(high) - TABLE.kinds[0].kept_bytes(low)
        assert spared / kept == pytest.approx(4096, rel=1e-4)
    assert load(TABLE.kinds[0].again(SETS["all"])) == load(())
    assert load(TABLE.kinds[0].forward).at("matmul") == 2 * T * MATRICES


def test_without_o_attention_runs_again_and_q_k_v_twice() -> None:
    again = load(TABLE.kinds[0].again(SETS["x"]))
    assert again.at("attention") == 2 * 4096 * T**2
    assert again.at("attention") == attention_flops(LLAMA_8B, ATTENTION, Batch(T, T))
    once = load(TABLE.kinds[0].again(SETS["o"]))
    assert again.at("matmul") - once.at("matmul") == TABLE.kinds[0].forward[0].flops
    assert TABLE.kinds[0].again_bytes(SETS["x"]) == TABLE.kinds[0].by_name["o"].aligned
    assert TABLE.kinds[0].again_bytes(SETS["o"]) == 0


def test_what_a_layer_works_with() -> None:
    """Three quarters of a unit of weight gradients in fp32 and a tile; with one head group q, k, v,
    do and their gradients."""
    tile = 8192 * (3 * 14336 + 4 * 4096) * 2
    mlp = 14 * 14336 * 4096 + 4 * 4096**2 + tile
    assert sum(TABLE.kinds[0].during("mlp backward").values()) == GIB + mlp
    one_group = StepTable.of(llama_8b(head_groups=1), Batch(T, T)).kinds[0]
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
    short = StepTable.of(llama_8b(vocab=32000), Batch(T, T))
    assert gib(short) == pytest.approx(3 + 0.488 + 1, abs=0.001)


def test_attention_in_windows_costs_less() -> None:
    """Behind a window of half the row a token sees what one in the middle of a row without does."""
    row = Batch(8192, 8192)
    whole = attention_flops(LLAMA_8B, ATTENTION, row)
    half, short = (replace(ATTENTION, window=window) for window in (4096, 1024))
    assert attention_flops(LLAMA_8B, half, row) == pytest.approx(0.75 * whole, rel=1e-3)
    assert attention_flops(LLAMA_8B, short, row) < 0.26 * whole
    assert attention_flops(LLAMA_8B, ATTENTION, Batch(8192, 4096)) == whole / 2


def test_ranks_that_share_a_row_have_a_share_of_its_attention() -> None:
    shared = attention_flops(llama_8b(ranks=2), ATTENTION, Batch(T // 2, T))
    assert 2 * shared == attention_flops(LLAMA_8B, ATTENTION, Batch(T, T))


def test_tiles_read_and_write_the_sums_of_weight_gradients() -> None:
    def nbytes(tile: int, **changes) -> float:
        sizes = llama_8b(tile_tokens=tile, **changes)
        return load(StepTable.of(sizes, Batch(T, T)).kinds[0].backward).nbytes

    assert nbytes(T // 4) - nbytes(T) == MATRICES * (8 * 4 + 2 - 2)
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
    asked = llama_8b(tile_tokens=512, head_groups=2, logits_bytes=GIB)
    assert [sizes.cut(T) for sizes in asked.cuts(T)] == [(512, 2, GIB)]
    assert {c.head_groups for c in (s.cut(T) for s in llama_8b(ranks=2).cuts(T))} == {4}


def test_a_ladder_in_words() -> None:
    ladder = (*2 * (keep_of("o", "o"),), keep_of("all", "o"), keep_of("qkv"))
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
    assert {*ORDER} == SETS["all"] | {"down", "routing", "graph"}


@pytest.mark.parametrize(("offload", "hosts"), [("none", 0), ("auto", 0), ("all", 2)])
@pytest.mark.parametrize(("keep", "name"), [("auto", "o"), ("x", "x"), ("all", "all")])
def test_without_a_look_at_memory(offload, hosts, keep, name) -> None:
    expected = hosts * (keep_of(name, name),) + (3 - hosts) * (keep_of(name),)
    assert uniform(3 * TABLE.kinds, keep, offload) == expected


RATES = Rates(1e14, 1e10, 1e12, AttentionRates(1e14, 1e14))
ROUTE = Keepable(name="route", nbytes=2 * T, always=True)
"""What a router chose, say: nothing can recompute it, and no word of --keep names it."""


@pytest.mark.parametrize("keep", ["auto", *SETS])
@pytest.mark.parametrize("offload", ["none", "auto", "all"])
def test_a_second_keepable_that_must_be_kept_is_in_every_set(keep, offload) -> None:
    layer = TABLE.kinds[0] + Table(keepables=(ROUTE,))
    wanted = {"x", "route"} | (SETS[keep] if keep != "auto" else set())
    assert asked(keep, layer) >= wanted
    chosen = None if keep == "auto" else (asked(keep, layer),)
    searched = candidates(4 * (0,), sets([layer], RATES), offload, chosen).choices
    for k in (*(choice.keep for choice in searched), *uniform(4 * [layer], keep, offload)):
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
    vars(table)["kinds"] = (table.kinds[0] + Table(forward=(grouped,), keepables=(kept,)),)
    assert ({"x", "z"},) == sets(table.kinds, RATES)[1]  # 10 s for a MiB

    def seconds(tables: StepTable) -> float:
        step = Step(
            count=lambda *of: tables, sizes=LLAMA_8B, batch=Batch(T, T), rates=RATES, keep="x"
        )
        levels = [pending_levels(LLAMA_8B.layers, 0, 0, accumulates=False)]
        return choose(step, levels, Budget(2**50, 2**50)).seconds

    assert seconds(table) - seconds(TABLE) == pytest.approx(32 * 2 * 10, rel=1e-3)


def test_work_at_a_rate_that_nobody_knows_is_no_free_work() -> None:
    with pytest.raises(KeyError, match="scanned"):
        priced(load((Work(name="mixer", flops=1e15, rate="scanned"),)), RATES)


def test_a_part_declares_what_it_makes_and_nothing_of_other_parts() -> None:
    """Also what it leaves behind while another part computes."""

    def rows(spec: Any, **changes: Any) -> Table:
        sizes = llama_8b(tile_tokens=8192, **changes)
        kind = sizes.kinds[0]
        return kind.one(spec).cost(sizes, kind, Batch(T, T))

    assert rows(AttentionSpec, width=100) == rows(AttentionSpec)
    assert rows(MlpSpec, heads=64, kv_heads=64) == rows(MlpSpec)


def test_a_word_names_what_a_layer_has() -> None:
    parallel = StepTable.of(llama_8b(beside=True), Batch(T, T)).kinds[0]
    assert asked("h", parallel) == asked("o", parallel) == SETS["o"]
    normed = StepTable.of(llama_8b(post_norms=True), Batch(T, T)).kinds[0]
    assert asked("all", normed) == SETS["all"] | {"down"}
