"""The benchmark of heads compares what computes the same."""

from __future__ import annotations

import json

import pytest
import torch
from counted import flops
from paths import ROOT

from profiling.bench.head_bench import (
    COUNTS,
    OBJECTIVES,
    implementations,
    inputs,
    measure,
    predicted_ms,
)

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_compute_the_same(objective) -> None:
    torch.manual_seed(0)
    given, found = inputs(objective, 50, 100, 16, "cpu", torch.float32), {}
    for impl, function in implementations(objective):
        if impl == "liger":
            continue  # needs a GPU
        given.hidden.grad = given.weight.grad = None
        value = function(given)
        value.backward()
        found[impl] = [value, given.hidden.grad, given.weight.grad]
    assert {"longctx", "eager"} <= found.keys()
    for values in found.values():
        assert (values[2] is None) == (objective == "log_probs_frozen")
        for ours, truth in zip(values, found["eager"], strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_flops_are_those_that_are_counted(objective) -> None:
    given = inputs(objective, 50, 100, 16, "cpu", torch.float32)
    _, function = next(implementations(objective))
    counted = flops(lambda: function(given).backward())[1]
    assert counted == COUNTS[objective].flops * 2 * 50 * 100 * 16


def test_the_prediction_is_within_5_percent_of_what_was_measured() -> None:
    """Of the loss, on the machine whose rates it is given."""
    recorded = json.loads((ROOT / "profiling/results/h200_kernels.json").read_text())
    rates = [recorded["ceilings"][name] for name in ("matmul_tflop_per_s", "copy_tb_per_s")]
    rows = [row for row in recorded["rows"] if row["op"] == "linear_cross_entropy"]
    rows = [row for row in rows if row["impl"] == "longctx" and row["tokens"] >= 8192]
    assert rows
    for row in rows:
        predicted = predicted_ms("loss", row["tokens"], 128_256, row["hidden"], *rates)
        assert predicted == pytest.approx(row["fwd_bwd_ms"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_implementation_is_measured(objective) -> None:
    given = inputs(objective, 512, 1000, 256, "cuda", torch.bfloat16)
    for _, function in implementations(objective):
        row = measure(function, given, 0.01)
        assert row["fwd_bwd_ms"] > 0 and row["peak_gib"] > 0
