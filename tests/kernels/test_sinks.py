"""Sinks added to o and lse, and their gradient, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.sinks import (
    add_sinks_,
    add_sinks_reference_,
    sinks_grad,
    sinks_grad_reference,
)

SHAPES = [
    (1, 1, 8),  # one token
    (65, 3, 24),  # one token past a program, heads that are no power of two
    (130, 2, 64),  # gpt-oss's heads
]


def draw(T: int, H: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """o and do as slices of wider tensors, lse, and sinks from far below to far above it."""
    torch.manual_seed(T)
    o, _, do = torch.randn(T, 3 * H, d, device=DEVICE).to(dtype).split(H, dim=1)
    lse = 3 * torch.randn(H, T, device=DEVICE)
    sinks = torch.linspace(-90, 90, H, device=DEVICE) if H > 1 else lse.mean(1)
    sinks[H // 2] = 0.3
    return o, do, lse, sinks.to(dtype)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_in_fp64(shape, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    o, do, lse, sinks = draw(*shape, dtype)
    true_o, true_lse = o.double(), lse.double()
    add_sinks_reference_(true_o, true_lse, sinks.double())
    naive_o, naive_lse = o.clone(), lse.clone()
    add_sinks_reference_(naive_o, naive_lse, sinks)
    add_sinks_(o, lse, sinks)
    assert_exact("lse", lse, naive_lse, true_lse)
    assert_exact("o", o, naive_o, true_o)
    truth = sinks_grad_reference(do.double(), o.double(), lse.double(), sinks.double())
    grad = sinks_grad(do, o, lse, sinks)
    assert grad.dtype == torch.float32
    assert_exact("grad", grad, sinks_grad_reference(do, o, lse, sinks), truth)
    assert torch.equal(grad, sinks_grad(do, o, lse, sinks))


def test_what_sees_nothing_and_what_outweighs_all() -> None:
    """A query without keys has lse -inf and o 0; a sink far above every score leaves 0 of o."""
    o = torch.tensor([[[0.0], [1.0], [1.0]]], device=DEVICE)
    lse = torch.tensor([[-torch.inf], [-90.0], [90.0]], device=DEVICE)
    sinks = torch.tensor([0.5, 90.0, -90.0], device=DEVICE)
    add_sinks_(o, lse, sinks)
    assert o.flatten().tolist() == [0, 0, 1] and lse.flatten().tolist() == [0.5, 90, 90]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": torch.zeros(2, 4)}, r"lse must have shape \(2, 3\)"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \(2,\)"),
        ({"lse": torch.zeros(2, 3).half()}, "lse must have dtype torch.float32"),
        ({"o": torch.zeros(3, 2, 8).int()}, "o must be bfloat16"),
        ({"o": torch.zeros(8, 2, 3).transpose(0, 2)}, "o must be contiguous"),
    ],
)
def test_wrong_arguments(change, message) -> None:
    given = {"o": torch.zeros(3, 2, 8), "lse": torch.zeros(2, 3), "sinks": torch.zeros(2)} | change
    given = {name: x.to(DEVICE) for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        add_sinks_(**given)
    with pytest.raises(ValueError, match=message):
        sinks_grad(torch.zeros(3, 2, 8, device=DEVICE), **given)
