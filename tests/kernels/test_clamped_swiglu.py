"""gpt-oss's activation against fp64, and against transformers' in the dtype under test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.clamped_swiglu import (
    Clamped,
    clamped_swiglu_backward_,
    clamped_swiglu_forward,
    clamped_swiglu_reference,
)

CLAMPED = Clamped(alpha=1.702, limit=1.5)
SHAPES = [
    (1, 8),  # one row
    (5, 100),  # nothing is a power of two, and rows of a last program are missing
    (3, 513),  # one feature past a block
    (2, 3, 40),  # a batch
]


def theirs(made: Tensor) -> Tensor:
    module = SimpleNamespace(alpha=CLAMPED.alpha, limit=CLAMPED.limit)
    return GptOssExperts._apply_gate(module, made)


def run(made: Tensor, dy: Tensor, op=theirs) -> list[Tensor]:
    leaf = made.detach().clone().requires_grad_()
    y = op(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad]


def draw(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate and up on both sides of the limits, and exactly there."""
    torch.manual_seed(shape[-1])
    made = 2 * torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)
    made[..., :2], made[..., 2:4] = CLAMPED.limit, -CLAMPED.limit
    return made.to(DEVICE, dtype), torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    made, dy = draw(*shape, dtype=dtype)
    truth, naive = run(made.double(), dy.double()), run(made, dy)
    wide = torch.cat([made, made], dim=-1)  # rows at a stride; what lies beside them stays
    own = wide[..., : made.shape[-1]]
    y = clamped_swiglu_forward(own, CLAMPED)
    assert clamped_swiglu_backward_(dy, own, CLAMPED) is own
    assert torch.equal(wide[..., made.shape[-1] :], made)
    for name, ours, plainly, true in zip(("y", "grads"), (y, own), naive, truth, strict=True):
        assert_exact(name, ours, plainly, true)
    assert torch.equal(own == 0, truth[1].to(dtype) == 0)


def test_the_reference_is_differentiable() -> None:
    made, dy = draw(5, 40, dtype=torch.float64)
    for x, y in zip(
        run(made, dy), run(made, dy, lambda x: clamped_swiglu_reference(x, CLAMPED)), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_what_is_no_number_stays_none(plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    made = torch.tensor([[torch.nan, 0.0, 1.0, torch.nan]], device=DEVICE)
    assert clamped_swiglu_forward(made, CLAMPED).isnan().all()
    found = clamped_swiglu_backward_(torch.ones(1, 2, device=DEVICE), made, CLAMPED)
    assert found.isnan().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(
    ("made", "dy", "message"),
    [
        (torch.zeros(3, 7), torch.zeros(3, 3), r"gate and up for each feature, got \(3, 7\)"),
        (torch.zeros(3, 8), torch.zeros(3, 3), r"d_product must have shape \(3, 4\)"),
        (torch.zeros(3, 8), torch.zeros(3, 4).half(), "d_product must have dtype torch.float32"),
        (torch.zeros(3, 8).int(), torch.zeros(3, 4), "made must be bfloat16"),
        (torch.zeros(8, 3).t(), torch.zeros(3, 4), "made must be contiguous"),
    ],
)
def test_wrong_arguments(made, dy, message) -> None:
    with pytest.raises(ValueError, match=message):
        clamped_swiglu_backward_(dy.to(DEVICE), made.to(DEVICE), CLAMPED)
