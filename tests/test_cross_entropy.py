"""The cross-entropy kernel against autograd in fp64 and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.cross_entropy import IGNORE_INDEX, cross_entropy, cross_entropy_reference

SHAPES = [
    (1, 64),  # one row, narrower than a block
    (127, 50),  # ragged rows, vocabulary below the smallest block
    (3, 4097),  # one element past a block
    (2, 50257),  # odd vocabulary: rows are not 16-byte aligned
    (4, 128256),  # Llama 3
]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0},
]


def _truth(x: Tensor, y: Tensor, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """(losses, gradient of their sum) through autograd, in x's dtype."""
    x = x.detach().clone().requires_grad_()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    loss = torch.nn.functional.cross_entropy(
        z, y, reduction="none", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
    )
    loss = loss + z_loss * z.logsumexp(1) ** 2 * (y != IGNORE_INDEX)
    loss.sum().backward()
    return loss.detach(), x.grad


def _inputs(N: int, V: int, dtype: torch.dtype, scale: float = 3.0):
    torch.manual_seed(N + V)
    x = (torch.randn(N, V, dtype=torch.float64) * scale).to(DEVICE, dtype)
    y = torch.randint(V, (N,), device=DEVICE)
    y[N // 2 + 1 :: 2] = IGNORE_INDEX
    return x, y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient(shape, dtype):
    x, y = _inputs(*shape, dtype)
    loss, grad = _truth(x.double(), y)
    naive_loss, naive_grad = _truth(x, y)
    ours_grad = torch.full_like(x, float("nan"))
    assert_exact("loss", cross_entropy(x, y, d_logits=ours_grad), naive_loss, loss)
    assert_exact("d_logits", ours_grad, naive_grad, grad)
    assert torch.equal(cross_entropy(x, y), cross_entropy(x, y, d_logits=ours_grad))
    assert (ours_grad[y == IGNORE_INDEX] == 0).all()


@pytest.mark.parametrize("op", [cross_entropy, cross_entropy_reference])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, op):
    x, y = _inputs(5, 1000, torch.float32)
    loss, grad = _truth(x.double(), y, **options)
    naive_loss, naive_grad = _truth(x, y, **options)
    ours_grad = torch.empty_like(x)
    ours = op(x, y, d_logits=ours_grad, scale=torch.tensor(0.25, device=DEVICE), **options)
    assert_exact("loss", ours, naive_loss, loss)
    assert_exact("d_logits", ours_grad, naive_grad * 0.25, grad * 0.25)


def test_in_place_and_into_another_dtype():
    x, y = _inputs(7, 300, torch.float32)
    padded = torch.full((7, 320), float("nan"), device=DEVICE)
    padded[:, :300] = x
    into_bf16 = torch.empty(7, 300, dtype=torch.bfloat16, device=DEVICE)
    loss = cross_entropy(padded[:, :300], y, d_logits=into_bf16)
    assert torch.equal(padded[:, :300], x)
    assert torch.equal(cross_entropy(padded[:, :300], y, d_logits=padded[:, :300]), loss)
    assert torch.equal(padded[:, :300].bfloat16(), into_bf16)
    assert padded[:, 300:].isnan().all()  # nothing is written past the vocabulary


def test_extreme_logits():
    """Masked-out words (-inf), large logits, and a row that is certain of its label."""
    x = torch.tensor(
        [[1e4, -1e4, 0.0], [float("-inf"), 2.0, 1.0], [88.0, 0.0, -88.0]], device=DEVICE
    )
    y = torch.tensor([0, 1, 0], device=DEVICE)
    grad = torch.empty_like(x)
    loss = cross_entropy(x, y, d_logits=grad)
    truth = _truth(x.double(), y)
    assert_exact("loss", loss, truth[0].float(), truth[0])
    assert_exact("d_logits", grad, truth[1].float(), truth[1])


def test_label_outside_the_vocabulary_gives_nan():
    x = torch.randn(2, 100, device=DEVICE)
    loss = cross_entropy(x, torch.tensor([100, 5], device=DEVICE))
    assert loss[0].isnan() and loss[1].isfinite()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 5, 6)}, r"logits must have shape \(N, V\), got \(4, 5, 6\)"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int32)}, "logits must be bfloat16.*int32"),
        ({"logits": torch.zeros(5, 4).t()}, r"logits must be contiguous.*\(1, 4\)"),
        (
            {"labels": torch.zeros(3, dtype=torch.int64)},
            r"labels must have shape \(4,\), got \(3,\)",
        ),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "labels must be int64.*int32"),
        ({"d_logits": torch.zeros(4, 6)}, r"d_logits must have shape \(4, 5\), got \(4, 6\)"),
        ({"softcap": -1.0}, "softcap must be positive, got -1.0"),
        ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, "one device.*meta"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"logits": torch.zeros(4, 5), "labels": torch.zeros(4, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        cross_entropy(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """17,000 x 128,256 = 2.18e9 logits: offsets past int32 in the last rows."""
    N, V = 17_000, 128_256
    x = torch.randn(N, V, dtype=torch.bfloat16, device="cuda")
    y = torch.randint(V, (N,), device="cuda")
    rows = torch.tensor([0, 1, N - 2, N - 1], device="cuda")
    few = x[rows].clone()
    loss, grad = _truth(few.double(), y[rows])
    naive_loss, naive_grad = _truth(few, y[rows])
    ours = cross_entropy(x, y, d_logits=x)
    assert_exact("loss", ours[rows], naive_loss, loss)
    assert_exact("d_logits", x[rows], naive_grad, grad)
