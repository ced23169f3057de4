"""What is predicted for the steps and layers that were measured (profiling/plan_cells.py)."""

from __future__ import annotations

import statistics

import pytest

from profiling.plan_cells import Cell, layer_cells, step_cells


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return [*step_cells(), *layer_cells()]


@pytest.mark.parametrize(
    ("key", "count", "mean", "worst"),
    [("gpu_gib", 28, 0.006, 0.015), ("host_gib", 8, 0.025, 0.06), ("step_s", 42, 0.02, 0.055)],
)
def test_errors(cells, key, count, mean, worst) -> None:
    """Rates were taken from these rows; bytes were counted."""
    errors = [abs(errors[key]) for cell in cells if key in (errors := cell.errors())]
    assert len(errors) == count
    assert statistics.mean(errors) <= mean
    assert max(errors) <= worst


def test_what_ran_was_not_refused(cells) -> None:
    assert all(cell.plan.fits for cell in cells), [c.plan.problem for c in cells]
