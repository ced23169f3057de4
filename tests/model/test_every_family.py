"""Every family's layers against vanilla Hugging Face, by the rule of tests/exactness.py.

The same as tests/model/test_layer.py has for Llama, with what the family adds (windows, norms of q
and k, scalars, fused weights) at values that matter.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from small_families import FAMILIES, family_config
from test_layer import KEEPS, PACKED, assert_trains_exactly, batch, batches, cast, gradients
from transformers import AutoModelForCausalLM

from exactness import DEVICE
from longctx.config import ModelArguments
from longctx.model.patch import patch

pytestmark = pytest.mark.usefixtures("reference_kernels")
DEVICE = torch.device(DEVICE)


def trio(family: str, dtype: torch.dtype, settings=None, **changes):
    """(truth, naive, ours) with the same weights, rounded to `dtype`."""
    torch.manual_seed(0)
    naive = AutoModelForCausalLM.from_config(family_config(family, **changes)).train()
    with torch.no_grad():
        for parameter in naive.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    naive = cast(naive.to(DEVICE), dtype)
    truth = cast(copy.deepcopy(naive), torch.float64)
    ours = copy.deepcopy(naive)
    patch(ours, ModelArguments(**(settings or {})), DEVICE)
    return truth, naive, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_exactness_on_packed_rows(family, dtype, capsys) -> None:
    models = trio(family, dtype)
    assert_trains_exactly(models, *batches(PACKED))
    assert "Hugging Face's layers" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings", [dict(head_groups=2, tile_tokens=7, keep="x"), dict(keep="all")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_and_tiles(family, settings) -> None:
    assert_trains_exactly(trio(family, torch.bfloat16, settings), *batches(PACKED))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_and_batched_rows(family) -> None:
    for lengths in ([[144]], [[5, 43], [48], [16, 16, 16]]):
        assert_trains_exactly(trio(family, torch.float32), *batches(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "granite", "phi3", "mistral"])
def test_no_bit_depends_on_what_is_kept_and_where(family, dtype) -> None:
    settings = dict(offload_activations="all", keep="all", tile_tokens=31, head_groups=2)
    _, _, ours = trio(family, dtype, settings)
    inputs, draw = batch(PACKED), random.Random(0)
    ours(**inputs)  # sizes the slab
    found = []
    for ladder in [*((keep,) for keep in KEEPS), *(draw.choices(KEEPS, k=3) for _ in range(10))]:
        ours.longctx.store.ladder = tuple(ladder)
        loss, grads = gradients(ours, inputs)
        found.append((ladder, loss.detach(), {n: g.clone() for n, g in grads.items()}))
    _, first_loss, first = found[0]
    for ladder, loss, grads in found:
        assert torch.equal(loss, first_loss), ladder
        assert [n for n in first if not torch.equal(grads[n], first[n])] == [], ladder
