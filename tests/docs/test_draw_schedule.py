"""The picture of the schedule counts what the tables of parts count."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from cost_sizes import LLAMA_8B, SETS
from paths import ROOT

from longctx.cost.sizes import Batch
from longctx.runtime.costs import StepTable


@pytest.fixture(scope="module")
def drawn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawn", ROOT / "docs/draw_schedule.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_kept_and_computed_is_the_counts(drawn) -> None:
    table = StepTable.of(LLAMA_8B, Batch(drawn.T, drawn.T)).kinds[0]
    assert drawn.x + drawn.o + drawn.lse == pytest.approx(
        table.kept_bytes(SETS["o"]) / table.by_name["x"].nbytes, abs=1e-5
    )
    works = {work.name: work.flops for work in table.forward}
    linear = drawn.LINEAR
    assert works["attention"] == drawn.ATTENTION
    assert works["q k v"] + works["o"] == linear["qkv"] + linear["o"]
    assert works["gate up"] + works["down"] == 3 * linear["mlp"]


@pytest.mark.parametrize(("phase", "moment"), [("1", "mlp backward"), ("2", "attention backward")])
def test_the_peaks_are_within_a_twentieth_of_the_counts(drawn, phase, moment) -> None:
    """The count leaves room for what the picture shows to be gone: a tile's h and n2 beside their
    gradients, and weight gradients, of which the picture has none that are finished."""
    table = StepTable.of(LLAMA_8B, Batch(drawn.T, drawn.T)).kinds[0]
    unit = table.by_name["x"].nbytes
    buffers = dict(table.during(moment, SETS["o"]))
    for finished in ("the MLP's gradients", "o's gradient"):
        buffers.pop(finished, None)
    counted = (sum(buffers.values()) + table.kept_bytes(SETS["o"])) / unit
    assert drawn.total(phase)[0] == pytest.approx(counted, rel=0.05)


def test_the_page_says_what_the_picture_says(drawn) -> None:
    page = (ROOT / "docs/schedule.md").read_text()
    for phase in ("1", "2", "mlp"):
        assert f"{drawn.total(phase)[0]:.2f}" in page, phase
