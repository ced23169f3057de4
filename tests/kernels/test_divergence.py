"""The divergence kernels against autograd: in fp64, and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.divergence import (
    How,
    divergence,
    divergence_gradient,
    divergence_reference,
)

SHAPES = [
    (1, 64),  # one row, narrower than a block
    (9, 50),  # vocabulary below the smallest block
    (3, 4097),  # one element past a block
    (2, 50257),  # odd vocabulary: rows are not 16-byte aligned
    (2, 151936),  # Qwen 3
]
BETAS = [0.0, 0.1, 0.5, 1.0]
OPTIONS = [
    {"temperature": 0.7},
    {"softcap": 5.0},
    {"teacher_softcap": 4.0, "temperature": 2.0},
    {"softcap": 3.0, "teacher_softcap": 6.0},
]


def _inputs(T: int, V: int, dtype: torch.dtype, apart: float = 1.0):
    """(student's logits, teacher's, weights): teacher's are `apart` from the student's."""
    torch.manual_seed(T + V)
    x = torch.randn(T, V, dtype=torch.float64) * 3
    teacher = x + torch.randn(T, V, dtype=torch.float64) * apart
    return x.to(DEVICE, dtype), teacher.to(DEVICE, dtype), torch.randn(T, device=DEVICE)


def _truth(x: Tensor, teacher: Tensor, weights: Tensor, how: How):
    """(values, temperature * gradient of the weighted sum) by autograd, in x's dtype."""
    x = x.detach().clone().requires_grad_()
    values = divergence_reference(x, teacher, how).value
    (values * weights).sum().backward()
    return values.detach(), x.grad * how.temperature


def _check(x, teacher, weights, how: How) -> None:
    truth, grad = _truth(x.double(), teacher.double(), weights, how)
    naive, naive_grad = _truth(x, teacher, weights, how)
    ours = divergence(x, teacher, how)
    assert_exact("value", ours.value, naive, truth)
    found = torch.full_like(x, float("nan"))
    divergence_gradient(x, teacher, ours, found, weights, how)
    assert_exact("d_logits", found, naive_grad, grad)
    divergence_gradient(x, teacher, ours, x, weights, how)  # in place
    assert torch.equal(x, found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_value_and_gradient(beta, dtype):
    _check(*_inputs(9, 50, dtype), How(beta))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    _check(*_inputs(*shape, torch.float32), How(0.5))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_options(beta, options):
    """The teacher is far enough that p - q does not cancel: a capped logit is less exact than
    torch's tanh in fp32, by 2e-7 of the cap."""
    _check(*_inputs(5, 1000, torch.float32, apart=4.0), How(beta, **options))


@pytest.mark.parametrize("beta", BETAS)
def test_the_reference_runs_in_fp64(beta):
    for options in OPTIONS:
        x, teacher, weights = _inputs(4, 300, torch.float64)
        how = How(beta, **options)
        _, grad = _truth(x, teacher, weights, how)
        values = divergence(x, teacher, how)
        found = torch.empty_like(x)
        divergence_gradient(x, teacher, values, found, weights.double(), how)
        torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("beta", BETAS)
def test_distributions_that_are_nearly_equal(beta):
    """A divergence of 1e-7 is the difference of numbers near ten; and of equal ones it is 0."""
    x, teacher, weights = _inputs(4, 3000, torch.float32, apart=1e-3)
    _check(x, teacher, weights, How(beta))
    equal = divergence(teacher, teacher, How(beta)).value
    assert (equal.abs() < 1e-6).all()


@pytest.mark.parametrize("beta", BETAS)
def test_distributions_that_share_nothing(beta):
    """Ratios of e^200: exponentials of them would overflow."""
    x = torch.full((2, 500), -200.0, device=DEVICE)
    teacher = x.clone()
    x[:, 7], teacher[:, 450] = 20.0, 20.0
    _check(x, teacher, torch.ones(2, device=DEVICE), How(beta))


@pytest.mark.parametrize("beta", BETAS)
def test_words_that_are_masked_out_of_both(beta):
    """Logits of -inf have no part in the divergence, and no gradient."""
    x, teacher, weights = _inputs(3, 4000, torch.float32)
    how, few = How(beta), (x[:, :1500].clone(), teacher[:, :1500].clone())
    expected = divergence(*few, how)
    grad = torch.empty_like(few[0])
    divergence_gradient(*few, expected, grad, weights, how)
    x[:, 1500:] = teacher[:, 1500:] = float("-inf")
    for function in (divergence, divergence_reference):
        torch.testing.assert_close(function(x, teacher, how).value, expected.value)
    found = torch.empty_like(x)
    divergence_gradient(x, teacher, divergence(x, teacher, how), found, weights, how)
    torch.testing.assert_close(found[:, :1500], grad, rtol=1e-4, atol=1e-6)
    assert (found[:, 1500:] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_row_without_a_weight_has_no_gradient(beta):
    x, teacher, weights = _inputs(3, 200, torch.float32)
    x[1], weights[1] = float("nan"), 0.0
    found = torch.empty_like(x)
    divergence_gradient(x, teacher, divergence(x, teacher, How(beta)), found, weights, How(beta))
    assert (found[1] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 5, 6)}, r"logits must have shape \(T, V\), got \(4, 5, 6\)"),
        ({"teacher": torch.zeros(4, 6)}, r"teacher must have shape \(4, 5\), got \(4, 6\)"),
        ({"teacher": torch.zeros(5, 4).t()}, r"teacher must be contiguous.*\(1, 4\)"),
        ({"teacher": torch.zeros(4, 5).double()}, "teacher must not be torch.float64 beside"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int32)}, "logits must be bfloat16.*int32"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"logits": torch.zeros(4, 5), "teacher": torch.zeros(4, 5)} | change
    with pytest.raises(ValueError, match=message):
        divergence(**arguments, how=How(0.5))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """17,000 x 151,936 = 2.58e9 logits: offsets past int32 in the last rows."""
    T, V = 17_000, 151_936
    x, teacher = (torch.randn(T, V, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weights, how = torch.randn(T, device="cuda"), How(0.3)
    rows = torch.tensor([0, 1, T - 2, T - 1], device="cuda")
    few = x[rows].clone(), teacher[rows].clone(), weights[rows]
    truth, grad = _truth(few[0].double(), few[1].double(), few[2], how)
    naive, naive_grad = _truth(*few, how)
    ours = divergence(x, teacher, how)
    assert_exact("value", ours.value[rows], naive, truth)
    divergence_gradient(x, teacher, ours, x, weights, how)
    assert_exact("d_logits", x[rows], naive_grad, grad)
