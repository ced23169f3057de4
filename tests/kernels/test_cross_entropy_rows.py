"""Loss and gradient of logits that stay, against autograd in fp64 and in the dtype under test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, WIDTHS, assert_exact
from longctx.constants import IGNORE_INDEX
from longctx.kernels import cross_entropy_rows as module
from longctx.kernels.cross_entropy_rows import (
    Terms,
    cross_entropy_rows,
    cross_entropy_rows_gradient,
)

SHAPES = [(1, 64), (127, 50), (3, 4097), (2, 50257), (4, 128256)]
TERMS = [
    Terms(),
    Terms(label_smoothing=0.1),
    Terms(softcap=5.0),
    Terms(lse_square_scale=0.01),
    Terms(0.2, 3.0, 0.1),
]


def truth(x: Tensor, y: Tensor, scale: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The losses, and the gradient of sum(scale loss), through autograd in x's dtype."""
    x = x.detach().clone().requires_grad_()
    z = x if terms.softcap is None else terms.softcap * torch.tanh(x / terms.softcap)
    loss = torch.nn.functional.cross_entropy(
        z, y, reduction="none", label_smoothing=terms.label_smoothing
    )
    squares = torch.where(y != IGNORE_INDEX, z.logsumexp(dim=-1) ** 2, 0)
    loss = loss + terms.lse_square_scale * squares
    (loss * scale.to(loss.dtype)).sum().backward()
    return loss.detach(), x.grad


def inputs(T: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(T + V)
    x = (torch.randn(T, V, dtype=torch.float64) * 3).to(DEVICE, dtype)
    y = torch.randint(V, (T,), device=DEVICE)
    y[T // 2 + 1 :: 2] = IGNORE_INDEX
    return x, y, torch.rand(T, device=DEVICE) * 4 - 1


def ours(x: Tensor, y: Tensor, scale: Tensor, terms: Terms, into: Tensor) -> Tensor:
    """The losses; writes the gradient into a tensor, which may be x."""
    loss, lse = cross_entropy_rows(x, y, terms)
    cross_entropy_rows_gradient(x, y, lse, scale, into, terms)
    return loss


def assert_right(x: Tensor, y: Tensor, scale: Tensor, terms: Terms) -> None:
    true, naive = truth(x.double(), y, scale, terms), truth(x, y, scale, terms)
    grad = torch.full_like(x, torch.nan)
    loss = ours(x, y, scale, terms, grad)
    assert_exact("loss", loss, naive[0], true[0])
    assert_exact("gradient", grad, naive[1], true[1])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in WIDTHS), (SHAPES[1], torch.float16)],
    ids=str,
)
def test_loss_and_gradient(shape, dtype) -> None:
    assert_right(*inputs(*shape, dtype), Terms())


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_terms(terms, kernel, monkeypatch) -> None:
    if not kernel:
        monkeypatch.setattr(module, "runs_kernel", lambda *_: False)
    assert_right(*inputs(6, 1000, torch.float32), terms)


def test_in_place_at_any_stride_and_into_another_dtype() -> None:
    x, y, scale = inputs(7, 300, torch.float32)
    padded = torch.full((7, 320), torch.nan, device=DEVICE)
    padded[:, :300] = x
    into_bf16 = torch.empty(7, 300, dtype=torch.bfloat16, device=DEVICE)
    loss = ours(padded[:, :300], y, scale, Terms(), into_bf16)
    assert torch.equal(padded[:, :300], x)
    strided = torch.stack([scale, scale + 1], 1)[:, 0]
    assert torch.equal(ours(padded[:, :300], y, strided, Terms(), padded[:, :300]), loss)
    assert torch.equal(padded[:, :300].bfloat16(), into_bf16)
    assert padded[:, 300:].isnan().all()  # nothing is written past the vocabulary


def test_rows_that_are_ignored_and_labels_that_are_none() -> None:
    x, _, scale = inputs(4, 40, torch.float32)
    x[0] = torch.nan  # as padding's logits may be
    y = torch.tensor([IGNORE_INDEX, 40, -1, 3], device=DEVICE)
    grad = torch.empty_like(x)
    loss = ours(x, y, scale, Terms(), grad)
    assert loss[0] == 0 and loss[1:3].isnan().all() and loss[3].isfinite()
    assert not grad[0].any() and grad[1:].isfinite().all()
    broken = torch.full_like(x, torch.nan)
    assert cross_entropy_rows(broken, y)[0][3].isnan()


def test_extreme_logits() -> None:
    """Minus infinity in most of a row, and sums that overflow where no maximum is taken off."""
    x, y, scale = inputs(3, 700, torch.float32)
    x[0, 5:], y[0] = -torch.inf, 2
    x[1] *= 1e4
    x[2], y[1], y[2] = 0.0, 9, 9
    assert_right(x, y, scale, Terms())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(4)}, "shape"),
    ({"logits": torch.zeros(4, 5).int()}, "must be bfloat16"),
    ({"labels": torch.zeros(3).long()}, "labels must have shape"),
    ({"labels": torch.zeros(4)}, "int64"),
    ({"lse": torch.zeros(3)}, "lse must have shape"),
    ({"scale": torch.zeros(())}, "scale must have shape"),
    ({"d_logits": torch.zeros(4, 6)}, "d_logits must have shape"),
    ({"terms": Terms(softcap=0.0)}, "softcap must be positive"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments(change, message) -> None:
    zeros = torch.zeros(4, 5)
    given = {"logits": zeros, "labels": torch.zeros(4).long(), "lse": zeros[:, 0]}
    given |= {"scale": zeros[:, 0], "d_logits": zeros.clone(), "terms": Terms(), **change}
    with pytest.raises(ValueError, match=message):
        cross_entropy_rows_gradient(**given)
    if not change.keys() & {"lse", "scale", "d_logits"}:
        with pytest.raises(ValueError, match=message):
            cross_entropy_rows(given["logits"], given["labels"], given["terms"])


def test_no_rows() -> None:
    x, y = torch.zeros(0, 8, device=DEVICE), torch.zeros(0, device=DEVICE).long()
    loss, lse = cross_entropy_rows(x, y)
    cross_entropy_rows_gradient(x, y, lse, loss, x)
    assert loss.shape == lse.shape == (0,)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.randn(17_000, 128_256, dtype=torch.bfloat16, device="cuda")
    y = torch.randint(128_256, (17_000,), device="cuda")
    last, last_y, scale = x[-2:].clone(), y[-2:], torch.ones(17_000, device="cuda")
    loss = ours(x, y, scale, Terms(), x)
    expected = torch.empty_like(last)
    assert torch.equal(ours(last, last_y, scale[-2:], Terms(), expected), loss[-2:])
    assert torch.equal(x[-2:], expected)
