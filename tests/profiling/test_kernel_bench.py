"""The benchmark of kernels compares what computes the same, in sizes that a CPU runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from profiling.bench import kernel_bench

pytestmark = pytest.mark.usefixtures("reference_kernels")
SIZES = dict(HIDDEN=32, INTERMEDIATE=48, HEADS=4, KV_HEADS=2, HEAD_DIM=8, VOCAB=96)


def run(op: str, function: Any, arguments: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, as `measure` makes them."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments if x.requires_grad]
    outs = function(*(x * 1 for x in leaves), *arguments[len(leaves) :])
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    if grads:
        outs = [
            o.movedim(1, 2).view_as(g) if o.dim() == 4 else o
            for o, g in zip(outs, grads, strict=True)
        ]
    torch.autograd.backward(outs, grads or None)
    return [x.detach() for x in outs] + [x.grad for x in leaves]


@pytest.mark.parametrize("op", kernel_bench.OPS)
def test_all_compute_the_same(op, monkeypatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(kernel_bench, name, size)
    monkeypatch.setattr(kernel_bench, "_tables", {})
    monkeypatch.setattr(kernel_bench, "_compiled", lambda function: function)  # takes half a minute
    torch.manual_seed(0)
    arguments, grads = kernel_bench.inputs(op, 17, "cpu")
    found = {
        impl: run(op, function, arguments, grads)
        for impl, function in kernel_bench.peers(op)
        if impl != "liger"  # whose kernels need a GPU
    }
    assert {"longctx", "eager", "compile"} <= found.keys() and found.keys() <= set(
        kernel_bench.IMPLS
    )
    for values in found.values():
        for ours, truth in zip(values, found["eager"], strict=True):
            error = (ours.float() - truth.float()).norm() / truth.float().norm()
            assert error < 2e-2  # of bf16


@pytest.mark.gpu
@pytest.mark.parametrize("op", kernel_bench.OPS)
def test_every_implementation_is_measured(op) -> None:
    for _, function in kernel_bench.peers(op):
        row = kernel_bench.measure(op, function, 64, rep_ms=5, seconds=0.01)
        assert row["fwd_bwd_ms"] > 0 and row["peak_gib"] >= 0


@pytest.mark.gpu
def test_our_gradient_takes_the_memory_of_logits() -> None:
    _, function = next(kernel_bench.peers("cross_entropy"))
    row = kernel_bench.measure("cross_entropy", function, 1024, rep_ms=5, seconds=0.01)
    assert row["peak_gib"] * 2**30 < 1024 * kernel_bench.VOCAB * 2 / 10
