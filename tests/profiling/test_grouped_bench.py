"""The benchmark of experts' matmuls compares what computes the same."""

from __future__ import annotations

import pytest
import torch
from counted import flops as counted_flops

from exactness import relative_error
from profiling.bench import grouped_bench, kernel_bench, runner
from profiling.bench.grouped_bench import (
    MODELS,
    MOVES,
    OPS,
    OUTER,
    PRODUCTS,
    ROUTINGS,
    SWEEP,
    Shape,
    blocks_text,
    choices,
    distinct,
    error,
    flops,
    moves,
    operands,
    ours,
    parse_blocks,
    peers,
)

pytestmark = pytest.mark.usefixtures("reference_kernels")
SMALL = Shape(hidden=32, inner=48, experts=6, chosen=2)


@pytest.mark.parametrize("op", [*PRODUCTS, *OUTER])
def test_all_compute_the_same(op) -> None:
    torch.manual_seed(0)
    x = operands(SMALL, 40, "skewed", "cpu", torch.bfloat16)
    sums, peers_sums = (torch.zeros_like(x.gate_up if "gate" in op else x.down) for _ in range(2))
    sums, peers_sums = (s.float() if op in OUTER else None for s in (sums, peers_sums))
    found, names = ours(op, x, sums, None), []
    for impl, function in peers(op, x, peers_sums):
        names.append(impl)
        if impl != "dense":
            assert relative_error(function(), found) < 1e-2
    assert {"torch_bare", "dense"} <= {*names}
    assert error(op, x, sums, None) < grouped_bench.LARGEST_ERROR


@pytest.mark.parametrize("op", [*PRODUCTS, *OUTER])
def test_flops_are_those_that_are_counted(op) -> None:
    """Of the one matmul that longctx is compared with, and of longctx."""
    x = operands(SMALL, 40, "balanced", "cpu", torch.float32)
    assert counted_flops(dict(peers(op, x, None))["dense"])[1] == flops(op, SMALL, 40)
    sums = torch.zeros_like(x.gate_up if "gate" in op else x.down)
    assert counted_flops(lambda: ours(op, x, sums, None))[1] == flops(op, SMALL, 40)


@pytest.mark.parametrize("op", MOVES)
def test_moves_run(op) -> None:
    run, nbytes = moves(op, operands(SMALL, 40, "random", "cpu", torch.bfloat16), SMALL)
    run()
    assert nbytes > 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing) -> None:
    torch.manual_seed(0)
    shape = MODELS["qwen3-30b-a3b"]
    ids = choices(routing, 2048, shape, "cpu")
    assert all(len({*row}) == shape.chosen for row in ids.tolist())  # k different experts
    loads = torch.bincount(ids.flatten(), minlength=shape.experts).float()
    most = (loads.max() / loads.mean()).item()
    low, high = {"balanced": (1, 1), "random": (1.1, 1.6), "skewed": (2.5, 17)}[routing]
    assert low <= most <= high


def test_blocks_survive_their_text() -> None:
    configs = parse_blocks("sweep")
    assert "+".join(map(blocks_text, configs)) == SWEEP and len(configs) > 10
    assert parse_blocks("default") == [None]
    texts = [blocks_text(config) for config in distinct("dw_down", configs)]
    assert len(texts) == len({*texts}) < len(configs) and not any("h" in text for text in texts)
    with pytest.raises(SystemExit, match="blocks are like 128x256x64w8s3g8, got 'x'"):
        parse_blocks("x")


def test_the_command_lists_its_cases(capsys) -> None:
    """tests/test_entry_points.py starts it in a process of its own."""
    runner.main(grouped_bench.BENCH, ["--dry_run", "--cases", "qwen3"])
    assert "[6/6] tokens=32768,routing=skewed" in capsys.readouterr().out


@pytest.fixture
def small(monkeypatch) -> dict[str, object]:
    """A case that is measured in a moment, on the CPU without the clocks of a GPU."""
    shape = Shape(hidden=128, inner=256, experts=6, chosen=2)
    monkeypatch.setitem(grouped_bench.MODELS, "small", shape)
    return grouped_bench.DEFAULTS | dict(model="small", tokens=64, seconds=0.01)


def check_measured(case) -> None:
    rows = grouped_bench.measure(case, 1, [])
    assert {row["op"] for row in rows} == {*OPS}
    assert all(row["ms"] > 0 and row["status"] == "ok" for row in rows)
    blocks = "64x128x64w4s3g4+64x64x64w4s3g1"
    rows = grouped_bench.measure(case | dict(blocks=blocks, ops="down+dw_down"), 1, [])
    found = [(row["op"], row["blocks"]) for row in rows if row.get("checked")]
    assert found == [(op, word) for op in ("down", "dw_down") for word in blocks.split("+")]


def test_a_case_without_a_gpu(small, monkeypatch) -> None:
    def once(function, seconds: float) -> float:
        function()
        return seconds

    monkeypatch.setattr(grouped_bench, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_bench, "sustained_ms", once)
    check_measured(small)
    with pytest.raises(SystemExit, match="unknown ops up; known: gate_up"):
        grouped_bench.measure(small | dict(ops="up"), 1, [])
    monkeypatch.setattr(grouped_bench, "LARGEST_ERROR", 1e-5)
    with pytest.raises(RuntimeError, match="gate_up with default is wrong: relative error"):
        grouped_bench.measure(small, 1, [])


@pytest.mark.gpu
def test_every_implementation_is_measured(small) -> None:
    check_measured(small)
