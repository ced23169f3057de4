"""Our convolution and gated norm in the place of a module's, while a mixer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from longctx.kernels import launch
from longctx.model.mixer_kernels import OurConvolution, our_gated_norm

pytestmark = pytest.mark.usefixtures("reference_kernels")
CHANNELS, TAPS = 6, 4


def convolved(x: Tensor, weight: Tensor, tokens: int, **how: Any) -> Tensor:
    """Calls torch's convolution as transformers' mixers do, and cuts its result as they do."""
    how = dict(padding=TAPS - 1, groups=CHANNELS) | how
    y = torch.nn.functional.conv1d(x, weight, **how)[:, :, : x.shape[-1]]
    return torch.nn.functional.silu(y)[:, :, -tokens:]


@pytest.mark.parametrize("begins", [False, True])
def test_a_causal_convolution_is_ours_and_its_gradient_has_tokens_as_rows(
    begins, monkeypatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    torch.manual_seed(0)
    tokens = 9 + begins * (TAPS - 1)
    rows = torch.randn(2, tokens, CHANNELS, requires_grad=True)
    weight = torch.randn(CHANNELS, 1, TAPS, requires_grad=True)
    truth = convolved(rows.mT, weight, 9)
    dy = torch.randn(2, 9, CHANNELS)
    wanted = torch.autograd.grad(truth, (rows, weight), dy.mT)
    with OurConvolution(begins=begins):
        ours = convolved(rows.mT, weight, 9)
    assert ours.mT.is_contiguous() and ours.shape == truth.shape
    torch.testing.assert_close(ours, truth)
    found = torch.autograd.grad(ours, (rows, weight), dy.mT)
    assert found[0].is_contiguous()
    for own, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, true)


def test_other_convolutions_stay_torchs() -> None:
    x, weight = torch.randn(1, CHANNELS, 9), torch.randn(CHANNELS, 1, TAPS)
    others: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (x, weight, dict(padding=0, groups=CHANNELS)),
        (x, weight, dict(padding=TAPS - 1, groups=CHANNELS, stride=2)),
        (x, torch.randn(CHANNELS, CHANNELS, TAPS), dict(padding=TAPS - 1)),
        (x, torch.randn(CHANNELS, 1, 9), dict(padding=8, groups=CHANNELS)),
    ]
    for given, filters, how in others:
        with OurConvolution(begins=True):
            found = torch.conv1d(given, filters, **how)
        assert torch.equal(found, torch.conv1d(given, filters, **how)), how


def test_cuts_that_take_less_stay_cuts() -> None:
    x = torch.randn(3, 4)
    with OurConvolution(begins=False):
        assert x[:, -4:] is x
        assert x[:, -3:].shape == (3, 3) and x[1:, :].shape == (2, 4) and x[:, ::2].shape == (3, 2)
        assert x[0].shape == (4,) and x[:, None].shape == (3, 1, 4)


def test_a_gated_norm_is_ours_while_the_mixer_runs() -> None:
    norm = Qwen3_5RMSNormGated(8, eps=1e-6)
    x, gate = torch.randn(2, 5, 8)
    wanted = norm(x, gate)
    with our_gated_norm(norm):
        assert "forward" in vars(norm)
        torch.testing.assert_close(norm(x, gate), wanted)
    assert "forward" not in vars(norm)
    norm.forward = lambda x, gate: x  # somebody else's
    with our_gated_norm(norm), our_gated_norm(None):
        assert torch.equal(norm(x, gate), x)
    assert isinstance(norm, nn.Module) and "forward" in vars(norm)
