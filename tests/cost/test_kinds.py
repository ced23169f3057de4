"""Models whose layers are of several kinds, among them parts that no family has: a mixer that is
the identity, and a second MLP-like part with a rate, a moment and kept tensors of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from cost_sizes import ATTENTION, LLAMA_LAYER, MLP, SETS, layer, of_layers

from longctx.constants import GIB
from longctx.cost import rates
from longctx.cost.dims import LayerKind
from longctx.cost.kept import Keep, describe
from longctx.cost.peak import phases
from longctx.cost.rates import AttentionRates, Rates
from longctx.cost.seconds import left_at
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, load
from longctx.layer.specs.part_spec import PartSpec
from longctx.memory.ladder import Budget, Chosen, Step, choose, predicted
from longctx.memory.levels import pending_levels
from longctx.memory.place import BlockSizes, Place, PlacedStates
from longctx.runtime.costs import StepTable

T = 131072
ROW = Batch(T, T)
RATES = Rates(6e14, 5e10, 3e12, AttentionRates(6e14, 6e14))


@dataclass(frozen=True, kw_only=True)
class IdentitySpec(PartSpec):
    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        x = Keepable(name="x", nbytes=s.unit(batch.tokens), word="x", always=True)
        return Table(keepables=(x,))


@dataclass(frozen=True, kw_only=True)
class FakeExpertsSpec(PartSpec):
    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        grouped = Work(name="experts", flops=1e14, rate="grouped")
        return Table(
            forward=(grouped,),
            backward=(replace(grouped, flops=2e14),),
            keepables=(
                Keepable(name="route", nbytes=4 * batch.tokens, always=True),
                Keepable(name="experts", nbytes=GIB, spares=(grouped,), of_tiles=True),
            ),
            buffers=(
                Buffer(name="sorted", nbytes=3 * GIB, during="experts forward"),
                Buffer(name="sorted", nbytes=9 * GIB, during="experts backward"),
                Buffer(name="their gradients", nbytes=GIB, during="experts backward", span="after"),
            ),
        )


MIXES = replace(LLAMA_LAYER, parts=(IdentitySpec(hidden=4096), MLP))
ROUTES = replace(LLAMA_LAYER, parts=(ATTENTION, MLP, FakeExpertsSpec(hidden=4096)))
LAYERS = of_layers(2 * [LLAMA_LAYER, MIXES, MIXES, ROUTES])


@pytest.fixture(autouse=True)
def grouped(monkeypatch) -> None:
    monkeypatch.setitem(rates.RATE_SHARES, "grouped", ("matmul", 0.5))


def chosen(gpu_gib: float, host_gib: float, **asked) -> tuple[Step, Chosen]:
    step = Step(count=StepTable.of, sizes=LAYERS, batch=ROW, rates=RATES, **asked)
    levels = [pending_levels(LAYERS.layers, 0, 0, accumulates=False)]
    return step, choose(step, levels, Budget(int(gpu_gib * GIB), int(host_gib * GIB)))


def test_a_kind_has_the_rows_of_its_own_parts() -> None:
    llama, mixes, routes = StepTable.of(LAYERS, ROW).kinds
    assert LAYERS.of_layer == 2 * (0, 1, 1, 2) and LAYERS.counts == (2, 4, 2)
    assert mixes.by_name.keys() == {"x", "gate up"} and load(mixes.forward).at("attention") == 0
    assert not mixes.during("attention backward") and mixes.finishing == ()
    assert routes.by_name.keys() - llama.by_name.keys() == {"route", "experts"}
    assert routes.always == {"x", "route"} and llama.always == {"x"}
    assert load(routes.backward).at("grouped") == 2e14


def test_what_outlives_its_part_stands_beside_whatever_computes_then() -> None:
    """Backward runs experts, MLP, attention, projections."""
    llama, _, routes = StepTable.of(LAYERS, ROW).kinds
    added = {"their gradients": GIB}
    for moment in ("mlp backward", "attention backward", "projections backward"):
        assert routes.during(moment) == llama.during(moment) | added
    sums = {name: n for name, n in llama.during("mlp backward").items() if name[:2] == "o'"}
    assert routes.during("experts backward") == sums | {"sorted": 9 * GIB, "do": 0, "dn1": 0} | {
        "a layer's dense weights": 0
    }


def test_the_peak_is_that_of_the_layer_with_most() -> None:
    tables = StepTable.of(LAYERS, ROW)
    ladder = tuple(Keep(layer.always) for layer in tables.layers)
    none = BlockSizes(weight=0, states=0, grad=0, movable=False)
    blocks = [none, *(replace(none, layer=i) for i in range(LAYERS.layers))]
    standing = PlacedStates(blocks, len(blocks) * [Place()], accumulates=False)
    found = {phase.name: phase.buffers for phase in phases(tables, ladder, standing)}
    assert found["forward"]["sorted"] == 3 * GIB and found["backward"]["sorted"] == 9 * GIB


def test_seconds_are_summed_over_kinds() -> None:
    """A layer of each kind alone, and what models without layers take, but for waiting, of which
    there is less where more is computed."""

    def step_s(sizes: Sizes) -> float:
        step = Step(count=StepTable.of, sizes=sizes, batch=ROW, rates=RATES, keep="x")
        levels = [pending_levels(sizes.layers, 0, 0, accumulates=False)]
        found = predicted(step, choose(step, levels, Budget(2**50, 2**50)))
        return float(found.step - found.waits)

    cut = dict(tile_tokens=8192, head_groups=8, logits_bytes=GIB)
    one, two = ([step_s(of_layers(n * [kind], **cut)) for kind in LAYERS.kinds] for n in (1, 2))
    ends = 2 * one[0] - two[0]
    layers = sum(n * (b - a) for n, a, b in zip(LAYERS.counts, one, two, strict=True))
    assert step_s(replace(LAYERS, **cut)) == pytest.approx(ends + layers)


def test_what_is_left_of_forward_is_a_share_of_its_seconds() -> None:
    """Layers of 5, 1, 1, 3 s, twice: 20 s, of which 5 and 10 are over."""
    found = left_at(StepTable.of(LAYERS, ROW), [5.0, 1.0, 3.0], np.array([0, 1, 4, 8]))
    assert found == pytest.approx([1, 0.75, 0.5, 0])


@pytest.mark.parametrize("keep", ["auto", "x", "o", "all"])
@pytest.mark.parametrize(("gpu_gib", "host_gib"), [(20, 60), (60, 10), (400, 0)])
def test_each_kind_keeps_what_it_has(keep, gpu_gib, host_gib) -> None:
    step, found = chosen(gpu_gib, host_gib, keep=keep)
    for table, kept in zip(StepTable.of(LAYERS, ROW).layers, found.ladder, strict=True):
        assert table.always <= kept.kept <= table.by_name.keys() and kept.hosted <= kept.kept
        if keep == "o":
            assert kept.kept == table.always | (table.by_name.keys() & {"o"})
    assert predicted(step, found).step == pytest.approx(found.seconds)


def test_what_is_worth_most_is_kept_first() -> None:
    """o of full rows spares 70 ms of attention, that of a window 2 ms."""
    sizes = of_layers(8 * [layer(window=1024), LLAMA_LAYER])
    step = Step(count=StepTable.of, sizes=sizes, batch=ROW, rates=RATES, offload="none")
    levels = [pending_levels(16, 0, 0, accumulates=False)]
    found = [choose(step, levels, Budget(gib * GIB, 0)).ladder for gib in range(24, 60, 4)]
    counts = [[sum("o" in keep.kept for keep in ladder[k::2]) for k in (0, 1)] for ladder in found]
    assert all(windowed <= full for windowed, full in counts)
    assert [0, 8] in counts and [8, 8] in counts


def test_a_ladder_of_alternating_kinds_in_words() -> None:
    x, o = Keep(SETS["x"], SETS["x"]), Keep(SETS["o"])
    assert describe((x, x, o, x, x, o, o)) == (
        "kept for backward: 4 of layers 0 to 4: x on the host; 3 of layers 2 to 6: x o on the GPU"
    )
    assert describe((Keep(frozenset()), o)).endswith("layer 0: nothing; layer 1: x o on the GPU")
