"""Every kind of layer under autocast, as Trainer's `bf16=True`: 16-bit products over fp32 weights.
Vanilla in the same autocast is what no gradient may be farther from the truth than.

Where q and k have norms, Hugging Face's return fp32 there (an fp32 weight times a 16-bit x), and
attention rounds q and k after they are rotated: once since the norm, as ours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_layer import (
    PACKED,
    SHORT,
    Autocast,
    assert_settings_train_exactly_in_autocast,
    assert_trains_exactly,
    batch,
    batches,
    gradients,
    in_turn,
)
from test_every_family import trio

from longctx.kernels.norm import norm_backward, norm_forward
from longctx.layer import norm_spec

pytestmark = pytest.mark.usefixtures("reference_kernels")


def wrapped(family: str, settings: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    """The truth is the naive model itself, without autocast."""
    _, naive, ours = trio(family, torch.float32, settings)
    return Autocast(naive, enabled=False), Autocast(naive), Autocast(ours)


@pytest.mark.ci
@pytest.mark.parametrize(
    "family",
    ["qwen3", "granite", "olmo3", "gemma2", "starcoder2", "cohere", "qwen3_5_text-attention"],
)
def test_exactness_on_packed_rows(family, scheduled, capsys) -> None:
    """Kinds of layers of which tests/layer/test_schedule.py and tests/families/test_adapters.py
    have no autocast. Over 16 batches: over four, errors in 16 bits differ between CPUs with and
    without AMX by up to a tenth."""
    models = wrapped(family)
    assert_trains_exactly(models, *batches(PACKED, 16))
    assert len(scheduled) == 16 * 3 and "custom: " not in capsys.readouterr().out
    assert all(p.grad.dtype == torch.float32 for p in models[2].parameters())


@pytest.mark.parametrize(("family", "keep"), [("qwen3", "x"), ("olmo3", "all")])
def test_groups_and_tiles(family, keep) -> None:
    settings = dict(head_groups=2, tile_tokens=7, keep=keep, offload_activations="all")
    lengths, model = [[5, 43], [48]], (trio, family, torch.float32)
    assert_settings_train_exactly_in_autocast(*model, lengths=lengths, settings=settings)


def test_no_bit_depends_on_what_is_kept() -> None:
    """tests/layer/test_schedule.py has the other two turns."""
    _, _, model = wrapped("qwen3", dict(offload_activations="all", keep="all", tile_tokens=31))
    inputs, found = batch(SHORT), []
    gradients(model, inputs)
    for ladder in in_turn(0):
        model.model.longctx.store.ladder = ladder
        found.append({n: g.clone() for n, g in gradients(model, inputs)[1].items()})
    for grads in found:
        assert [n for n in grads if not torch.equal(grads[n], found[0][n])] == []


def test_norms_of_q_and_k_are_fp32_for_a_tile_only(monkeypatch) -> None:
    rows: list[int] = []

    def watched(norm: Any) -> Any:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = norm(x, *args, **kwargs)
            wide = out if norm is norm_forward else x  # dy
            if x.dim() == 3:
                assert wide.dtype == torch.float32
                rows.append(len(x))
            return out

        return run

    for name, norm in (
        ("norm_forward", norm_forward),
        ("norm_backward", norm_backward),
    ):
        monkeypatch.setattr(norm_spec, name, watched(norm))
    _, _, model = wrapped("qwen3", dict(tile_tokens=50))
    gradients(model, batch(PACKED))
    assert sorted(set(rows)) == [44, 50]


def test_frozen_norms_get_no_gradient() -> None:
    models = wrapped("qwen3")
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_norm" not in name)
    assert_trains_exactly(models, *batches(PACKED))
    assert all(p.grad is None for n, p in models[2].named_parameters() if "q_norm" in n)
