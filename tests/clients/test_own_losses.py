"""Losses of one's own over a patched model: the last hidden state into a fused loss, as in Liger's
notebooks, and a Trainer with a collator and a loss of its own, as in ms-swift's scripts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from both import LAYERS, arguments, assert_same_run, sentence, sentences, trained
from small_tokenizer import small_tokenizer
from test_torch_loop import batch
from transformers import Trainer, TrainingArguments

import longctx
from longctx.runtime.runtime import runtime_of

pytestmark = pytest.mark.usefixtures("reference_kernels")


def fused(hidden: Any, weight: Any, labels: Any) -> Any:
    return longctx.linear_cross_entropy(hidden, weight, labels)


def plain(hidden: Any, weight: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


@pytest.mark.parametrize("strict", [False, True])
def test_the_last_hidden_state_into_the_fused_loss(scheduled, capsys, strict) -> None:
    """A notebook's loop: no labels, `hidden_states[-1]`, shifted by hand. Vanilla has logits."""

    def train(model: Any) -> dict[str, list[float]]:
        loss_of = plain if runtime_of(model) is None else fused
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        model.train()
        losses = []
        for step in range(3):
            inputs = batch(step)
            labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
            width = hidden.shape[-1]
            shifted = hidden[:, :-1].reshape(-1, width)
            loss = loss_of(shifted, model.lm_head.weight, labels[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"loss": losses}

    def patch(model: Any) -> Any:
        return longctx.patch(model, strict=strict)

    assert_same_run(train, scheduled, capsys, passes=3, patch=patch)


class Packed:
    """A collator of input_ids, labels and position_ids: all rows of a batch are one row, and no
    label crosses from one to the next (ms-swift's `padding_free`)."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        found: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for row in rows:
            ids = row["input_ids"]
            found["input_ids"] += ids
            found["labels"] += [-100, *ids[1:]]
            found["position_ids"] += range(len(ids))
        return {name: torch.tensor([values]) for name, values in found.items()}


class OwnLoss(Trainer):
    """Takes the labels away from the model, weights each token, and logs an accuracy of its own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        logits, targets = outputs.logits[:, :-1], labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        weights = torch.where(targets % 3 == 0, 2.0, 1.0) * (targets != -100)
        right = (logits.argmax(-1) == targets)[targets != -100].float().mean()
        self.accuracies = [*getattr(self, "accuracies", []), right.item()]
        loss = (losses * weights).sum() / (num_items_in_batch or (targets != -100).sum())
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [Trainer, OwnLoss], ids=["the model's loss", "its own loss"])
def test_a_trainer_with_a_collator_of_its_own(scheduled, capsys, tmp_path, kind) -> None:
    def make(model: Any) -> Any:
        tokenizer = small_tokenizer()
        data = sentences(24).map(lambda row: dict(tokenizer(row["text"])), remove_columns="text")
        settings = arguments(
            tmp_path, gradient_accumulation_steps=2, remove_unused_columns=False, eval_steps=3
        )
        return kind(
            model,
            args=TrainingArguments(**settings, eval_strategy="steps"),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            data_collator=Packed(),
        )

    def train(model: Any) -> Any:
        made: list[Any] = []
        numbers = trained(lambda model: made.append(make(model)) or made[0])(model)
        if kind is OwnLoss:
            numbers["accuracy"] = made[0].accuracies
        return numbers

    assert_same_run(train, scheduled, capsys, passes=6 + 1)
    rows = [len(small_tokenizer()(sentence(n))["input_ids"]) for n in range(24)]
    assert sum(scheduled) == LAYERS * (sum(rows) + sum(rows[:4]))
