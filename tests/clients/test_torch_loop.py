"""A loop of one's own with torch's AdamW, and generation after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from both import assert_same_run, sentence
from small_tokenizer import small_tokenizer

pytestmark = pytest.mark.usefixtures("reference_kernels")


def batch(number: int, side: str = "right") -> dict[str, torch.Tensor]:
    tokenizer = small_tokenizer()
    texts = [sentence(4 * number + n) for n in range(4)]
    return dict(tokenizer(texts, padding=True, padding_side=side, return_tensors="pt"))


def train(model: Any) -> dict[str, list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    numbers: dict[str, list[float]] = {"loss": [], "norm": [], "held out": [], "logits": []}
    for step in range(3):
        model.train()
        inputs = batch(step)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        numbers["norm"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        numbers["loss"].append(loss.item())
        model.eval()
        with torch.inference_mode():
            inputs = {"input_ids": torch.arange(3, 40)[None]}
            output = model(**inputs, labels=inputs["input_ids"])
        numbers["held out"].append(output.loss.item())
        numbers["logits"] += output.logits[0, -1, ::40].tolist()
    return numbers


def test_it_trains_as_vanilla(scheduled, capsys) -> None:
    assert_same_run(train, scheduled, capsys, passes=3 + 3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_loss_of_its_own_over_padding_too(scheduled, capsys, side) -> None:
    """The commonest loop: cross-entropy over all logits of a padded batch, nothing masked."""

    def train(model: Any) -> dict[str, list[float]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        losses = []
        for step in range(3):
            inputs = batch(step, side)
            logits, targets = model(**inputs).logits[:, :-1], inputs["input_ids"][:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"loss": losses}

    assert_same_run(train, scheduled, capsys, passes=3)


GENERATION = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sample": {"do_sample": True, "top_k": 20},
    "without a cache": {"use_cache": False},
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_it_generates_as_vanilla_after_training(scheduled, capsys, training) -> None:
    """From prompts that are padded on their left. Also by who forgets eval()."""

    def generate(model: Any) -> dict[str, list[float]]:
        numbers = train(model)
        model.train(training)
        prompts = batch(5, side="left")
        for name, settings in GENERATION.items():
            torch.manual_seed(7)
            texts = model.generate(**prompts, max_new_tokens=6, min_new_tokens=6, **settings)
            numbers[name] = texts.flatten().tolist()
        return numbers

    assert_same_run(generate, scheduled, capsys, passes=3 + 3 + 6)
