"""The benchmark of many tensors has the tensors that it says, and optimizers that take them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from exactness import DEVICE
from profiling.bench.optimizer_bench import make, shapes_of


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [("adapters", 448, 41_943_040), ("llama_1b", 146, 1_235_814_400)],
)
def test_tensors_are_those_of_the_models(model, tensors, parameters) -> None:
    shapes = shapes_of(model)
    assert len(shapes) == tensors and sum(map(math.prod, shapes)) == parameters


@pytest.mark.parametrize("impl", ["longctx", "torch_fused"])
def test_every_implementation_clips_and_steps(impl, reference_kernels) -> None:
    weights = [nn.Parameter(torch.ones(3, 5, device=DEVICE)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 10.0)
    norm, _ = make(impl, weights)()
    assert norm.item() == pytest.approx(10 * 30**0.5)
    assert all((weight < 1).all() for weight in weights)
