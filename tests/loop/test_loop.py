"""Exact AdamW in a loop of one's own."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from small_model import packed_batch, tiny_config
from torch import Tensor
from transformers import LlamaForCausalLM

import longctx
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")
STEPS = 4


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).to(dtype).train()


def trained(ours: Any, optimizer: Any, batches: int = 1) -> dict[str, Tensor]:
    for _ in range(STEPS):
        for _ in range(batches):
            (ours(**packed_batch()).loss / batches).backward()
        if hasattr(optimizer, "clip"):
            optimizer.clip(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.clone() for name, weight in ours.state_dict().items()}


@pytest.mark.parametrize("batches", [1, 2])
def test_a_loop_is_one_loop_wherever_states_live(batches) -> None:
    found = []
    for place in ("gpu", "host"):
        ours = longctx.patch(model(torch.bfloat16))
        optimizer = longctx.exact_adamw(ours, lr=1e-2, tokens=96, place=place, batches=batches)
        found.append(trained(ours, optimizer, batches))
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(tokens=-3), "tokens must be at least 1, got -3"),
        (dict(tokens=0.5), "tokens must be a whole number, got 0.5"),
        (dict(tokens=True), "tokens must be a whole number, got True"),
        (dict(place="gppu"), "place must be one of auto, gpu, host, got 'gppu'"),
        (dict(batches=0), "batches must be at least 1, got 0"),
        (dict(model=None), "model must be a torch module, got NoneType"),
        (dict(gpu_memory_gib=0), "gpu_memory_gib must be above 0, got 0"),
        (dict(image_tokens=-1), "image_tokens must be at least 0, got -1"),
        (dict(image_tokens=9), "image_tokens=9 of tokens=8 are too many"),
        (dict(image_tokens=4), "image_tokens are of a patched model that sees images"),
    ],
)
def test_a_wrong_argument_is_named(changed, message) -> None:
    with pytest.raises(UserError, match=re.escape(f"exact_adamw: {message}")):
        longctx.exact_adamw(**{"model": torch.nn.Linear(2, 2), "tokens": 8} | changed)


def test_as_torchs_adamw_in_fp32() -> None:
    vanilla = model(torch.float32)
    ours = longctx.patch(copy.deepcopy(vanilla))
    groups = [
        {"params": [p for p in vanilla.parameters() if p.dim() > 1]},
        {"params": [p for p in vanilla.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    truth = trained(vanilla, torch.optim.AdamW(groups, lr=1e-2))
    found = trained(ours, longctx.exact_adamw(ours, lr=1e-2, tokens=96))
    for name, weight in truth.items():
        assert (found[name] - weight).norm() <= 1e-4 * weight.norm(), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_loss_that_reads_lm_heads_weight(device) -> None:
    """Of a preference loss: another forward comes between forward and backward."""
    batch = {k: x.to(device) for k, x in packed_batch().items() if isinstance(x, Tensor)}
    labels = batch.pop("labels")
    found = []
    for place in ("gpu", "host"):
        ours = longctx.patch(model(torch.bfloat16).to(device))
        optimizer = longctx.exact_adamw(ours, lr=1e-2, tokens=96, place=place)
        for _ in range(STEPS):
            hidden = ours.model(**batch).last_hidden_state
            scores = longctx.linear_log_probs(hidden, ours.lm_head.weight, labels).log_probs
            with torch.no_grad():
                ours.model(**batch)
            scores.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: weight.cpu().clone() for name, weight in ours.state_dict().items()})
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
