"""Products into an fp32 sum: on a GPU the matrix unit adds, on a CPU operands are converted."""

from __future__ import annotations

import pytest
import torch

from exactness import DEVICE, DTYPES, assert_exact, relative_error
from longctx.layer.linear import WeightGradient, addmm_, linear, linear_add, mm, scaled_mm, stacked

SHAPES = [
    pytest.param((96, 40, 72), id="ragged"),
    pytest.param((1, 8, 16), id="one-token"),
    pytest.param((4096, 1024, 512), id="large", marks=pytest.mark.gpu),
]


def operands(shape: tuple[int, int, int], dtype: torch.dtype):
    """dy (T, rows), x (T, columns) in `dtype`, and both in fp64."""
    torch.manual_seed(0)
    T, rows, columns = shape
    dy, x = (torch.randn(T, n, dtype=torch.float64, device=DEVICE) for n in (rows, columns))
    return dy.to(dtype), x.to(dtype), dy.to(dtype).double(), x.to(dtype).double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_stays_in_fp32(shape, dtype: torch.dtype) -> None:
    """Eight tiles added up: as exact as one fp32 product, where bf16 sums would lose bits."""
    dy, x, dy_true, x_true = operands(shape, dtype)
    total = torch.empty(shape[1], shape[2], dtype=torch.float32, device=DEVICE)
    mm(dy.t(), x, out=total)
    for _ in range(7):
        addmm_(total, dy.t(), x)
    truth = 8 * (dy_true.t() @ x_true)
    assert relative_error(total, truth) < 1e-5  # bf16 sums: 4e-3; the tensor cores' own: 5e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_gradient_is_rounded_once(shape, dtype: torch.dtype) -> None:
    dy, x, dy_true, x_true = operands(shape, dtype)
    gradient = WeightGradient(weight=True, bias=True)
    for tile in torch.arange(len(dy)).split(max(1, len(dy) // 5)):
        part = slice(int(tile[0]), int(tile[-1]) + 1)
        gradient.add(dy[part], x[part])
    weight, bias = gradient.round(dtype)
    truth, bias_truth = dy_true.t() @ x_true, dy_true.sum(0)
    assert weight.dtype == bias.dtype == dtype
    # The rounding of the exact result is all the error that is left (fp32: that of the sums).
    assert_exact("weight", weight, truth.to(dtype), truth)
    assert_exact("bias", bias, bias_truth.to(dtype), bias_truth)
    assert gradient.round(dtype) == (None, None)  # the sums are freed


def test_nothing_is_computed_for_frozen_weights() -> None:
    dy, x, *_ = operands((6, 4, 3), torch.float32)
    gradient = WeightGradient(weight=False)
    gradient.add(dy, x)
    assert gradient.round(torch.float32) == (None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_and_linear_add(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    base, x, w = (
        torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((9, 5), (9, 7), (5, 7))
    )
    bias = torch.randn(5, device=DEVICE).to(dtype) if biased else None
    wide = [None if t is None else t.double() for t in (base, x, w, bias)]
    truth = torch.nn.functional.linear(*wide[1:])
    naive = torch.nn.functional.linear(x, w, bias)
    assert_exact("linear", linear(x, w, bias), naive, truth)
    into = torch.empty_like(base)
    ours = linear_add(base, x, w, bias, out=into)
    assert ours.data_ptr() == into.data_ptr()
    assert_exact("linear_add", ours, base + naive, wide[0] + truth)
    for scale in (0.22, 1.7):  # torch.add would round them to bf16
        ours = linear_add(base, x, w, bias, scale=scale)
        assert_exact("linear_add", ours, base + naive * scale, wide[0] + scale * truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.22, 1.7])
def test_scaled_mm_and_a_scaled_gradient(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((9, 7), (7, 5)))
    truth = scale * (a.double() @ b.double())
    assert_exact("scaled_mm", scaled_mm(a, b, scale), (a @ b) * scale, truth)
    both = torch.full((18, 5), torch.nan, device=DEVICE)  # the gradient fills its half
    gradient = WeightGradient(weight=True, bias=True, into=both[9:])
    gradient.add(a.t(), b)
    weight, bias = gradient.round(dtype, scale)
    assert_exact("weight", weight, (a @ b) * scale, truth)
    assert_exact("bias", bias, a.sum(1) * scale, scale * a.double().sum(1))
    assert both[:9].isnan().all() and torch.equal(both[9:].to(dtype), weight)


def test_weights_one_under_the_other_are_copied_only_where_they_lie_apart() -> None:
    whole = torch.randn(9, 4, device=DEVICE)
    q, k, v = whole.split([5, 2, 2])
    together = stacked([q, k, v])
    assert together.data_ptr() == whole.data_ptr() and torch.equal(together, whole)
    inner = stacked([k, v])
    assert inner.data_ptr() == k.data_ptr() and torch.equal(inner, whole[5:])
    apart = ([q, v], [k, q], [q, k.clone()], [q.t().contiguous().t(), k])
    for weights in apart:
        made = stacked(weights)
        assert torch.equal(made, torch.cat(weights)) and made.data_ptr() != whole.data_ptr()
