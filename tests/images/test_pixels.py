"""Patches by a product, images in one launch: what Hugging Face's code gives, and nothing stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_vision import KINDS, image_batch, video_batch, vision_model
from test_images import QWENS, on_device
from torch import nn

import longctx
from exactness import DEVICE, assert_exact
from longctx.images import pixels
from longctx.images.pixels import by_image, embedded, fast_tower
from longctx.images.tower import tower_of

pytestmark = pytest.mark.usefixtures("reference_kernels")
BOUNDS = [0, 5, 6, 23, 40]


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_of_its_kernels_size_is_a_product(bias) -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=bias).double()
    given = torch.randn(5, 3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 8, 1, 1, 1, dtype=torch.float64)
    found = []
    for forward in (conv, lambda x: embedded(conv, x)):
        y = forward(given)
        inputs = [given, *conv.parameters()]
        found.append([y, *torch.autograd.grad(y, inputs, dy)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_larger_images_are_convolved() -> None:
    conv = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    given = torch.randn(1, 3, 4, 8, 8)
    assert torch.equal(embedded(conv, given), conv(given))


@pytest.mark.parametrize("kind", QWENS)
def test_what_runs_in_a_tower(kind, monkeypatch) -> None:
    """No convolution, and our attention in each layer; afterwards the tower is as it was."""
    model = longctx.patch(vision_model(kind).to(DEVICE), strict=True)
    tower, calls = tower_of(model), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["max_length_q"])
        return by_image(*args, **kwargs)

    monkeypatch.setitem(pixels.ALL_ATTENTION_FUNCTIONS, pixels.ATTENTION, counted)
    monkeypatch.setattr(nn.Conv3d, "forward", lambda *args: pytest.fail("it is convolved"))
    conv = next(m for m in tower.modules() if isinstance(m, nn.Conv3d))
    model(**on_device(video_batch(kind, 0))).loss.backward()
    assert len(calls) == tower.config.depth and min(calls) > 0
    assert "forward" not in vars(conv) and tower.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", KINDS)
def test_other_towers_and_what_a_user_asked_for_stay(kind) -> None:
    model = vision_model(kind)
    tower = tower_of(model)
    if kind in QWENS:
        tower.config._attn_implementation = "eager"
    usual = tower.config._attn_implementation
    with fast_tower(tower):
        assert tower.config._attn_implementation == usual
    ours = longctx.patch(copy.deepcopy(model).to(DEVICE))
    inputs = on_device(image_batch(kind, [[4, 20]]))
    theirs = model.to(DEVICE)(**inputs).loss
    torch.testing.assert_close(ours(**inputs).loss, theirs, rtol=1e-5, atol=1e-6)


def test_an_error_inside_leaves_nothing() -> None:
    tower = tower_of(vision_model("qwen3_vl"))
    with pytest.raises(RuntimeError, match="inside"), fast_tower(tower):
        assert tower.config._attn_implementation == pixels.ATTENTION
        raise RuntimeError("inside")
    assert tower.config._attn_implementation == "sdpa"


def attended(x: list[torch.Tensor], forward: Any) -> list[torch.Tensor]:
    q, k, v, do = (y.detach().clone().requires_grad_() for y in x)
    o = forward(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    number = torch.arange(len(BOUNDS) - 1, device=q.device)
    own = number.repeat_interleave(torch.tensor(BOUNDS, device=q.device).diff())
    mask = own[:, None] == own
    found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
    return found.transpose(1, 2)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each image in a call of its own, as Hugging Face's code has it."""
    parts = zip(*(x.split(torch.tensor(BOUNDS).diff().tolist(), 2) for x in (q, k, v)), strict=True)
    each = [nn.functional.scaled_dot_product_attention(*part, scale=0.2) for part in parts]
    return torch.cat(each, 2).transpose(1, 2)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=q.device)
    given: dict[str, Any] = dict(cu_seq_lens_q=bounds, max_length_q=17, cu_seq_lens_k=bounds)
    return by_image(nn.Module(), q, k, v, None, scaling=0.2, is_causal=False, **given)[0]


@pytest.mark.parametrize("head_dim", [72, 80, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_image_by_itself(dtype, head_dim) -> None:
    """Heads of 72 and 80 are those of Qwen's towers; flash takes none of 20 on a GPU."""
    torch.manual_seed(0)
    x = [torch.randn(1, 2, 40, head_dim, device=DEVICE).to(dtype) for _ in range(3)]
    x.append(torch.randn(1, 40, 2, head_dim, device=DEVICE).to(dtype))
    found, naive = attended(x, ours), attended(x, alone)
    truth = attended([y.double() for y in x], masked)
    for label, a, b, c in zip("o dq dk dv".split(), found, naive, truth, strict=True):
        assert_exact(label, a, b, c)
