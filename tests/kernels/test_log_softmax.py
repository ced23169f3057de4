"""The log-probability kernels against autograd: in fp64, and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, WIDTHS, assert_exact
from longctx.kernels.log_softmax import log_softmax, log_softmax_gradient, log_softmax_reference

SHAPES = [
    (1, 64),  # one row, narrower than a block
    (9, 50),  # vocabulary below the smallest block
    (3, 4097),  # one element past a block
    (2, 50257),  # odd vocabulary: rows are not 16-byte aligned
    (2, 151936),  # Qwen 3
]
OPTIONS = [{}, {"temperature": 0.7}, {"softcap": 5.0}, {"temperature": 2.0, "softcap": 3.0}]
WEIGHTS = ["log_probs", "entropy", "both"]


def _inputs(T: int, V: int, dtype: torch.dtype, scale: float = 3.0):
    torch.manual_seed(T + V)
    x = (torch.randn(T, V, dtype=torch.float64) * scale).to(DEVICE, dtype)
    weights = [torch.randn(T, device=DEVICE) for _ in range(2)]
    return x, torch.randint(V, (T,), device=DEVICE), weights


def _truth(x: Tensor, y: Tensor, weights, temperature=1.0, **options):
    """(values, temperature * gradient of the weighted sum) by autograd, in x's dtype."""
    x = x.detach().clone().requires_grad_()
    found = log_softmax_reference(x, y, temperature=temperature, **options)
    d_log_probs, d_entropy = weights
    total = x.new_zeros(())
    if d_log_probs is not None:
        total = total + (found.log_probs * d_log_probs).sum()
    if d_entropy is not None:
        total = total + (found.entropy * d_entropy).sum()
    total.backward()
    return found, x.grad * temperature


def _check(x, y, weights, **options) -> None:
    truth, grad = _truth(x.double(), y, weights, **options)
    naive, naive_grad = _truth(x, y, weights, **options)
    ours = log_softmax(x, y, **options)
    for name in ("log_probs", "entropy", "mean_logits", "lse"):
        assert_exact(name, *(getattr(values, name) for values in (ours, naive, truth)))
    assert torch.equal(ours.is_top1, truth.is_top1)
    found = torch.full_like(x, float("nan"))
    log_softmax_gradient(x, y, ours, found, *weights, **options)
    assert_exact("d_logits", found, naive_grad, grad)
    log_softmax_gradient(x, y, ours, x, *weights, **options)  # in place
    assert torch.equal(x, found)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in WIDTHS), (SHAPES[1], torch.float16)],
    ids=str,
)
def test_values_and_gradient(shape, dtype):
    _check(*_inputs(*shape, dtype))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("which", WEIGHTS)
def test_options(which, options):
    x, y, (d_log_probs, d_entropy) = _inputs(5, 1000, torch.float32)
    weights = [
        None if which == "entropy" else d_log_probs,
        None if which == "log_probs" else d_entropy,
    ]
    _check(x, y, weights, **options)


def test_the_reference_runs_in_fp64():
    x, y, weights = _inputs(4, 300, torch.float64)
    for options in OPTIONS:
        truth, grad = _truth(x, y, weights, **options)
        found = torch.empty_like(x)
        values = log_softmax(x, y, **options)
        weights = [w.double() for w in weights]
        log_softmax_gradient(x, y, values, found, *weights, **options)
        torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-14)
        assert values.entropy.dtype == torch.float64
        torch.testing.assert_close(values.entropy, truth.entropy, rtol=1e-12, atol=0)


def test_into_another_dtype_and_a_wider_row():
    x, y, weights = _inputs(7, 300, torch.float32)
    padded = torch.full((7, 320), float("nan"), device=DEVICE)
    padded[:, :300] = x
    values = log_softmax(padded[:, :300], y)
    narrow = torch.empty(7, 300, dtype=torch.bfloat16, device=DEVICE)
    log_softmax_gradient(padded[:, :300], y, values, narrow, *weights)
    log_softmax_gradient(padded[:, :300], y, values, padded[:, :300], *weights)
    assert torch.equal(padded[:, :300].bfloat16(), narrow)
    assert padded[:, 300:].isnan().all()  # nothing is written past the vocabulary


def test_rows_that_are_nearly_certain():
    """Probabilities of 1 - 1e-6 at logits of a thousand: an entropy that is a difference of numbers
    of a thousand would be noise, or below zero."""
    x = torch.zeros(3, 5000, device=DEVICE)
    x[:, 17] = torch.tensor([25.0, 1025.0, 1e4])
    x[1] += 1000
    x[1, 17] = 1025.0
    y = torch.tensor([17, 17, 17], device=DEVICE)
    truth, naive, ours = log_softmax(x.double(), y), log_softmax_reference(x, y), log_softmax(x, y)
    for name in ("log_probs", "entropy"):
        assert_exact(name, *(getattr(values, name) for values in (ours, naive, truth)))
    assert (ours.entropy >= 0).all()


def test_words_that_are_masked_out():
    """Logits of -inf have no probability, no part in the entropy, and no gradient."""
    x, y, weights = _inputs(3, 5000, torch.float32)
    x[:, 2000:] = float("-inf")
    y %= 2000
    weights = [w.double() for w in weights]
    few = log_softmax(x[:, :2000].double(), y)
    grad = torch.empty(3, 2000, dtype=torch.float64, device=DEVICE)
    log_softmax_gradient(x[:, :2000].double(), y, few, grad, *weights)
    for ours in (log_softmax(x, y), log_softmax_reference(x, y)):
        assert_exact("log_probs", ours.log_probs, ours.log_probs, few.log_probs)
        torch.testing.assert_close(ours.entropy.double(), few.entropy, rtol=1e-5, atol=1e-6)
        assert (ours.mean_logits == float("-inf")).all()
    found = torch.empty_like(x)
    log_softmax_gradient(x, y, log_softmax(x, y), found, *(w.float() for w in weights))
    torch.testing.assert_close(found[:, :2000].double(), grad, rtol=1e-4, atol=1e-6)
    assert (found[:, 2000:] == 0).all()


def test_the_first_of_equal_logits_is_top():
    x = torch.zeros(4, 300, device=DEVICE)
    x[:, [5, 290]] = 1.0
    y = torch.tensor([5, 290, 0, 299], device=DEVICE)
    assert log_softmax(x, y).is_top1.tolist() == [True, False, False, False]
    assert log_softmax_reference(x, y).is_top1.tolist() == [True, False, False, False]


def test_a_row_without_a_weight_has_no_gradient():
    """Even if it is NaN, as hidden states of padding may be; and a label outside is never top."""
    x, y, (weights, _) = _inputs(3, 200, torch.float32)
    x[1], y[1], weights[1] = float("nan"), -100, 0.0
    ours = log_softmax(x, y)
    assert ours.log_probs.isnan().tolist() == [False, True, False] and not ours.is_top1[1]
    for d_log_probs, d_entropy in ((weights, None), (None, weights), (weights, weights)):
        found = torch.empty_like(x)
        log_softmax_gradient(x, y, ours, found, d_log_probs, d_entropy)
        assert (found[1] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 5, 6)}, r"logits must have shape \(T, V\), got \(4, 5, 6\)"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int32)}, "logits must be bfloat16.*int32"),
        ({"logits": torch.zeros(5, 4).t()}, r"logits must be contiguous.*\(1, 4\)"),
        ({"labels": torch.zeros(3).long()}, r"labels must have shape \(4,\), got \(3,\)"),
        ({"labels": torch.zeros(4).int()}, "labels must be int64.*int32"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"logits": torch.zeros(4, 5), "labels": torch.zeros(4).long()} | change
    with pytest.raises(ValueError, match=message):
        log_softmax(**arguments)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """17,000 x 151,936 = 2.58e9 logits: offsets past int32 in the last rows."""
    T, V = 17_000, 151_936
    x = torch.randn(T, V, dtype=torch.bfloat16, device="cuda")
    y = torch.randint(V, (T,), device="cuda")
    weights = [torch.randn(T, device="cuda") for _ in range(2)]
    rows = torch.tensor([0, 1, T - 2, T - 1], device="cuda")
    few, few_weights = x[rows].clone(), [w[rows] for w in weights]
    truth, grad = _truth(few.double(), y[rows], few_weights)
    naive, naive_grad = _truth(few, y[rows], few_weights)
    ours = log_softmax(x, y)
    for name in ("log_probs", "entropy", "mean_logits"):
        assert_exact(name, getattr(ours, name)[rows], getattr(naive, name), getattr(truth, name))
    log_softmax_gradient(x, y, ours, x, *weights)
    assert_exact("d_logits", x[rows], naive_grad, grad)
