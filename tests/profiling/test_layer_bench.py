"""The benchmark of decoder layers."""

from __future__ import annotations

import pytest

from profiling.bench import layer_bench


@pytest.mark.gpu
@pytest.mark.parametrize("class_type", ["custom", "vanilla"])
def test_layers_of_each_class_are_measured(class_type: str) -> None:
    case = layer_bench.DEFAULTS | dict(class_type=class_type, preset="tiny", tokens=512, layers=2)
    (row,) = layer_bench.run_case(case | dict(offload="none"), repeats=1, flags=[])
    assert row["status"] == "ok"
    assert row["layer_s"] == pytest.approx(row["fwd_s"] + row["bwd_s"], rel=0.01)
    assert ("ladder" in row) == (class_type == "custom")
