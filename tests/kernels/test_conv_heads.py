"""A Gated DeltaNet's convolution with SiLU and norms of heads, against its equations in fp64. Naive
is what it replaces, one operation after the other as transformers and flash-linear-attention have
them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact, with_gradients
from longctx.kernels.causal_conv import causal_conv_reference
from longctx.kernels.conv_heads import EPS, Part, conv_heads

Parts = tuple[Part, ...]
SIZES: dict[str, tuple[int, int, Parts, int]] = {
    "a token": (1, 1, (Part(1, 8, True), Part(1, 8, True), Part(1, 8, False)), 4),
    "many": (2, 70, (Part(2, 24, True), Part(2, 24, True), Part(4, 40, False)), 4),
    "other taps": (1, 40, (Part(3, 16, True), Part(2, 32, False)), 3),
}
NAMES = "out", "dx", "dw", "d_begin"


def in_turn(x: Tensor, weight: Tensor, begin: Tensor, parts: Parts) -> Tensor:
    """Returns all parts side by side."""
    c = causal_conv_reference(torch.cat([begin, x], dim=1), weight)[:, begin.shape[1] :]
    y, found = torch.nn.functional.silu(c), []
    for part, own in zip(parts, y.split([p.heads * p.width for p in parts], -1), strict=True):
        heads = own.unflatten(-1, (part.heads, part.width))
        if part.normed:
            wide = heads if heads.dtype == torch.float64 else heads.float()
            heads = (wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)
        found.append(heads.flatten(-2))
    return torch.cat(found, dim=-1)


def side_by_side(parts: Parts, **how: Tensor) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, begin: Tensor | None = None) -> Tensor:
        given = how if begin is None else {"begin": begin, **how}
        return torch.cat([out.flatten(-2) for out in conv_heads(x, weight, parts, **given)], -1)

    return run


def rows(B: int, T: int, parts: Parts, taps: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns x, whose tokens lie at a stride, filters, what stands before x, and a gradient."""
    C = sum(part.heads * part.width for part in parts)
    torch.manual_seed(T)
    shapes = (B, T, C + 8), (C, taps), (B, taps - 1, C), (B, T, C)
    x, *others = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    return [x[..., :C], *others]


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_as_in_fp64(name, begins, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    B, T, parts, taps = SIZES[name]
    x, weight, begin, dy = rows(B, T, parts, taps, dtype)
    given = [x, weight, begin if begins else torch.zeros_like(begin)]

    def apart(x: Tensor, weight: Tensor, begin: Tensor) -> Tensor:
        return in_turn(x, weight, begin, parts)

    truth = with_gradients(apart, [tensor.double() for tensor in given], dy)
    naive = with_gradients(apart, given, dy)
    ours = with_gradients(side_by_side(parts), given[: 2 + begins], dy)
    for each, own, near, true in zip(NAMES, ours, naive, truth, strict=False):
        assert_exact(each, own, near, true)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_document_begins_with_zeros(dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    parts = (Part(1, 16, True), Part(1, 8, False))
    bounds = [0, 3, 4, 5, 41, 70]  # two of a single token within the reach of one filter
    x, weight, begin, dy = rows(1, bounds[-1], parts, 4, dtype)
    positions = torch.cat([torch.arange(b - a, dtype=torch.int32) for a, b in pairwise(bounds)])
    nothing = torch.zeros_like(begin)

    def apart(x: Tensor, weight: Tensor) -> Tensor:
        cut = [x[:, a:b] for a, b in pairwise(bounds)]
        return torch.cat([in_turn(own, weight, nothing.to(x.dtype), parts) for own in cut], dim=1)

    truth = with_gradients(apart, [x.double(), weight.double()], dy)
    naive = with_gradients(apart, [x, weight], dy)
    ours = with_gradients(side_by_side(parts, positions=positions.to(DEVICE)), [x, weight], dy)
    for each, own, near, true in zip(NAMES, ours, naive, truth, strict=False):
        assert_exact(each, own, near, true)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("cut", [1, 2, 6])
def test_a_row_in_two_calls(cut, plain, request) -> None:
    """The second begins with the end of the first, which may be shorter than what a filter
    reaches."""
    if plain:
        request.getfixturevalue("reference_kernels")
    parts = (Part(1, 8, True), Part(2, 4, False))
    x, weight, begin, dy = rows(2, 9, parts, 4, torch.float32)

    def in_two(x: Tensor, weight: Tensor, begin: Tensor) -> Tensor:
        *first, end = conv_heads(x[:, :cut], weight, parts, begin=begin, ends=True)
        *second, last = conv_heads(x[:, cut:], weight, parts, begin=end, ends=True)
        heads = (torch.cat(each, 1).flatten(-2) for each in zip(first, second, strict=True))
        return torch.cat([torch.cat([*heads], dim=-1), last], dim=1)

    def whole(x: Tensor, weight: Tensor, begin: Tensor) -> Tensor:
        return torch.cat([in_turn(x, weight, begin, parts), x[:, -3:]], dim=1)

    dy = torch.cat([dy, torch.randn_like(begin)], dim=1)
    truth = with_gradients(whole, [x.double(), weight.double(), begin.double()], dy)
    for own, true in zip(with_gradients(in_two, [x, weight, begin], dy), truth, strict=True):
        torch.testing.assert_close(own.double(), true, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias(dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    parts = (Part(1, 40, False),)
    x, weight, _, dy = rows(2, 50, parts, 4, dtype)
    given = [x, weight, torch.randn(40, device=DEVICE).to(dtype)]

    def apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.silu(causal_conv_reference(x, weight, bias))

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (out,) = conv_heads(x, weight, parts, bias=bias)
        return out.flatten(-2)

    truth = with_gradients(apart, [tensor.double() for tensor in given], dy)
    found = zip(with_gradients(ours, given, dy), with_gradients(apart, given, dy), strict=True)
    for name, (own, near), true in zip(("out", "dx", "dw", "db"), found, truth, strict=True):
        assert_exact(name, own, near, true)


def test_frozen_filters_have_no_gradient() -> None:
    parts = (Part(1, 8, True),)
    x, weight, _, dy = rows(1, 9, parts, 4, torch.float32)
    x = x.detach().requires_grad_()
    (out,) = conv_heads(x, weight, parts)
    assert out.shape == (1, 9, 1, 8) and not weight.requires_grad
    (dx,) = torch.autograd.grad(out, x, dy.view_as(out))
    assert dx.shape == x.shape


def test_what_is_refused() -> None:
    x, weight = torch.randn(1, 4, 8, device=DEVICE), torch.randn(8, 4, device=DEVICE)
    whole = (Part(1, 8, True),)
    with pytest.raises(ValueError, match="weight must have shape"):
        conv_heads(x, torch.randn(9, 4, device=DEVICE), whole)
    with pytest.raises(ValueError, match="the parts have 6 columns, and x 8"):
        conv_heads(x, weight, (Part(3, 2, False),))
    with pytest.raises(ValueError, match="begin must have shape"):
        conv_heads(x, weight, whole, begin=torch.randn(1, 4, 8, device=DEVICE))
    with pytest.raises(ValueError, match="1 to 8 taps"):
        conv_heads(x, torch.randn(8, 9, device=DEVICE), whole)
    wide = torch.randn(1, 4, 513, device=DEVICE)
    with pytest.raises(ValueError, match="at most 512 columns, got 513"):
        conv_heads(wide, torch.randn(513, 4, device=DEVICE), (Part(1, 513, True),))
