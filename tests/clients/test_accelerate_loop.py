"""A loop of one's own with accelerate: prepare, accumulate, clip."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from both import LAYERS, assert_same_run, make_model, sentence
from small_tokenizer import small_tokenizer
from torch.utils.data import DataLoader

import longctx

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def collate(texts: list[str]) -> dict[str, torch.Tensor]:
    inputs = small_tokenizer()(texts, padding=True, return_tensors="pt")
    return {**inputs, "labels": inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)}


def train(model: Any, **settings: Any) -> dict[str, list[float]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    texts = [sentence(n) for n in range(24)]
    prepared, optimizer, rows = accelerator.prepare(
        model.train(),
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5),
        DataLoader(texts, batch_size=4, collate_fn=collate),  # type: ignore[arg-type]
    )
    numbers: dict[str, list[float]] = {"loss": [], "norm": []}
    for batch in rows:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                numbers["norm"].append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        numbers["loss"].append(loss.item())
    assert accelerator.unwrap_model(prepared) is model
    return numbers


def test_it_trains_as_vanilla(scheduled, capsys) -> None:
    assert_same_run(train, scheduled, capsys, passes=6, steps=6)


def test_autocast(scheduled, capsys) -> None:
    def test(model: Any) -> dict[str, list[float]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        return train(model, mixed_precision="bf16")

    assert_same_run(test, scheduled, capsys, passes=6, steps=6, rel=2e-2, bar=0.1)


@pytest.mark.parametrize("then", ["unwrapped", "copied", "unpatched"])
def test_autocast_around_a_patched_model(scheduled, then) -> None:
    """accelerate leaves a forward of its own around ours, that calls it as vanilla's."""
    model = longctx.patch(make_model())
    train(model, mixed_precision="bf16")
    scheduled.clear()
    batch = collate(["the fox sleeps"])
    if then == "unwrapped":
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
        model(**batch).loss.backward()
        assert len(scheduled) == LAYERS
    elif then == "copied":
        other = copy.deepcopy(model)
        other(**batch).loss.backward()
        assert other.lm_head.weight.grad.any() and model.lm_head.weight.grad is None
    else:
        truth = make_model()
        truth.load_state_dict(longctx.unpatch(model).state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(**batch).loss, truth(**batch).loss)
