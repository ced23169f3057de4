"""What is predicted for the steps and layers that were measured (profiling/plan_cells.py)."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from longctx.memory.ladder import Keep, Rung
from longctx.memory.plan import GIB
from longctx.plan.machines import MACHINES
from longctx.plan.predict import plan
from profiling.plan_cells import (
    Cell,
    adapter_cells,
    engine_cells,
    front_cells,
    layer_cells,
    read_ladder,
    rows_of,
    run_of,
    step_cells,
    subject,
)


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return [*step_cells(), *layer_cells()]


@pytest.mark.parametrize(
    ("key", "mean", "worst"),
    [("gpu_gib", 0.006, 0.02), ("host_gib", 0.035, 0.08), ("step_s", 0.021, 0.055)],
)
def test_errors(cells, key, mean, worst) -> None:
    """Rates were taken from these rows; bytes were counted."""
    errors = [abs(errors[key]) for cell in cells if key in (errors := cell.errors())]
    assert errors
    assert statistics.mean(errors) <= mean
    assert max(errors) <= worst


def test_what_ran_was_not_refused(cells) -> None:
    assert all(cell.plan.fits for cell in cells), [c.plan.problem for c in cells]


# --- engines -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines() -> list[Cell]:
    return [*engine_cells()]


@pytest.mark.parametrize(
    ("key", "mean", "worst"),
    [("gpu_gib", 0.01, 0.025), ("host_gib", 0.05, 0.12), ("step_s", 0.025, 0.075)],
)
def test_errors_of_engines(engines, key, mean, worst) -> None:
    """Bytes were counted. The same step of ZeRO-3 with CPU offload was 12% apart in two runs."""
    found = [abs(errors[key]) for cell in engines if key in (errors := cell.errors())]
    assert found
    assert statistics.mean(found) <= mean
    assert max(found) <= worst


def test_engines_that_ran_were_not_refused(engines) -> None:
    assert all(cell.plan.fits for cell in engines), [c.plan.problem for c in engines]


def test_the_ladder_of_a_shared_row_is_the_one_that_ran() -> None:
    """With 188 GiB of the host free, which nobody wrote down."""
    row = next(row for row in rows_of("h200_shared_step") if row["gpu_gib"] == 78)
    held = replace(MACHINES["h200"], gpu_gib=row["gpu_gib"])
    planned = plan(subject(), run_of(row, exact=True), held, 188 * GIB)
    ladder, cut = read_ladder(row["ladder"])
    found = planned.sizes.cut(planned.run.tokens)
    assert planned.decision.kept.ladder == ladder
    assert (found.head_groups, found.tile_tokens) == (cut["head_groups"], cut["tile_tokens"])


# --- adapters: no rate was taken from them -----------------------------------------------------


@pytest.mark.parametrize(
    ("key", "mean", "worst"), [("gpu_gib", 0.006, 0.01), ("step_s", 0.03, 0.065)]
)
def test_errors_of_adapters(key, mean, worst) -> None:
    pytest.importorskip("peft")
    cells = [*adapter_cells()]
    errors = [abs(cell.errors()[key]) for cell in cells]
    assert errors and all(cell.plan.fits for cell in cells)
    assert statistics.mean(errors) <= mean
    assert max(errors) <= worst


# --- the front: no rate was taken from it ------------------------------------------------------


@pytest.fixture(scope="module")
def front() -> list[Cell]:
    return [*front_cells()]


@pytest.mark.parametrize(
    ("key", "mean", "worst"), [("gpu_gib", 0.006, 0.02), ("step_s", 0.021, 0.05)]
)
def test_errors_of_the_front(front, key, mean, worst) -> None:
    errors = [abs(cell.errors()[key]) for cell in front if cell.measured]
    assert errors
    assert statistics.mean(errors) <= mean
    assert max(errors) <= worst


def test_what_ran_out_of_memory_is_refused(front) -> None:
    gone = [cell for cell in front if not cell.measured]
    assert gone and all(c.plan.gpu_bytes > c.plan.gpu_limit for c in gone)
    ran = [cell for cell in front if cell.measured]
    assert all(c.plan.gpu_bytes <= c.plan.gpu_limit for c in ran)


def test_what_a_run_says_is_read() -> None:
    text = (
        "kept for backward: layers 0 to 1: x o h on the host; layers 2 to 2: x o h q k v on the "
        "host, gate up on the GPU; layers 3 to 3: x o on the GPU; 1 head group, tiles of 16 tokens"
    )
    two = 2 * (Keep(Rung.H, Rung.H),)
    ladder = (*two, Keep(Rung.ALL, Rung.QKV), Keep(Rung.O))
    cut = dict(head_groups=1, tile_tokens=16)
    assert read_ladder(text) == (ladder, cut)
    assert read_ladder(f"{text}, 0.5 GiB of logits") == (ladder, cut | dict(logits_bytes=2**29))
