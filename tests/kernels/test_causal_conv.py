"""The short convolution of mixers, against its equation in fp64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact, with_gradients
from longctx.kernels.causal_conv import causal_conv, causal_conv_reference

SHAPES = [
    (1, 1, 1, 4),  # a token before which there is nothing
    (2, 35, 130, 4),  # more tokens and channels than a program has
    (1, 40, 24, 2),
]


def summed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The equation as it stands."""
    taps, tokens = weight.shape[1], x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    y = torch.stack([padded[:, j : j + tokens] * weight[:, j] for j in range(taps)]).sum(0)
    return y if bias is None else y + bias


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_in_fp64(shape, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    B, T, C, taps = shape
    torch.manual_seed(T)
    wide = torch.randn(B, T, 2 * C, device=DEVICE).to(dtype)
    x, dy = wide.split(C, dim=-1)  # tokens at a stride
    weight, bias = torch.randn(C, taps, device=DEVICE), torch.randn(C, device=DEVICE)
    given = [x, weight.to(dtype), bias.to(dtype)]
    truth = with_gradients(summed, [tensor.double() for tensor in given], dy)
    naive = with_gradients(causal_conv_reference, given, dy)
    ours = with_gradients(causal_conv, given, dy)
    for name, own, near, true in zip(("y", "dx", "dw", "db"), ours, naive, truth, strict=True):
        assert_exact(name, own, near, true)


POSITIONS = [*range(3), 0, 0, *range(36), *range(30), *range(7)]
"""Those of six documents. Two of a single token end within the reach of one filter."""


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [3, 4])
def test_each_document_begins_with_zeros(taps, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(taps)
    T, C = len(POSITIONS), 24
    positions = torch.tensor(POSITIONS, dtype=torch.int32, device=DEVICE)
    starts = [t for t, position in enumerate(POSITIONS) if not position]
    documents = [slice(a, b) for a, b in pairwise([*starts, T])]

    def apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([summed(x[:, tokens], weight, bias) for tokens in documents], dim=1)

    x, dy = torch.randn(2, 1, T, C, device=DEVICE).to(dtype)
    weight, bias = torch.randn(C, taps, device=DEVICE), torch.randn(C, device=DEVICE)
    given = [x, weight.to(dtype), bias.to(dtype)]
    truth = with_gradients(apart, [tensor.double() for tensor in given], dy)
    by_positions = partial(causal_conv_reference, positions=positions)
    naive = with_gradients(by_positions, given, dy)
    ours = with_gradients(partial(causal_conv, positions=positions), given, dy)
    for name, own, near, true in zip(("y", "dx", "dw", "db"), ours, naive, truth, strict=True):
        assert_exact(name, own, near, true)
    wide = with_gradients(by_positions, [tensor.double() for tensor in given], dy)
    for near, true in zip(wide, truth, strict=True):
        torch.testing.assert_close(near, true)


def test_frozen_filters_have_no_gradient() -> None:
    x = torch.randn(1, 40, 24, device=DEVICE, requires_grad=True)
    weight = torch.randn(24, 4, device=DEVICE)
    (dx,) = torch.autograd.grad(causal_conv(x, weight).sum(), x)
    (true,) = torch.autograd.grad(summed(x.double(), weight.double(), None).sum(), x)
    torch.testing.assert_close(dx, true, check_dtype=False)


def test_what_is_refused() -> None:
    x = torch.randn(1, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="weight must have shape"):
        causal_conv(x, torch.randn(9, 4, device=DEVICE))
    with pytest.raises(ValueError, match="1 to 8 taps"):
        causal_conv(x, torch.randn(8, 9, device=DEVICE))
    with pytest.raises(ValueError, match="bias must have shape"):
        causal_conv(x, torch.randn(8, 4, device=DEVICE), torch.randn(4, device=DEVICE))
    with pytest.raises(ValueError, match="positions must have shape"):
        causal_conv(x, torch.randn(8, 4, device=DEVICE), positions=torch.arange(5, device=DEVICE))
