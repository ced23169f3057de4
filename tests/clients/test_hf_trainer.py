"""transformers' Trainer on a patched model."""

from __future__ import annotations

import functools
from typing import Any

import datasets
import pytest
import torch
from both import (
    LAYERS,
    arguments,
    assert_same_run,
    logged,
    make_model,
    sentence,
    sentences,
    trained,
)
from small_tokenizer import small_tokenizer
from transformers import DataCollatorForLanguageModeling, EvalPrediction, Trainer, TrainingArguments

import longctx
from longctx.calls import shared_prefixes
from longctx.head import logits

pytestmark = pytest.mark.usefixtures("reference_kernels")


def accuracy(found: EvalPrediction) -> dict[str, float]:
    guesses, labels = found.predictions, found.label_ids
    if guesses.ndim == 3:
        guesses = guesses.argmax(-1)
    guesses, labels = guesses[:, :-1], labels[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


def token_rows(rows: int) -> Any:
    tokenizer = small_tokenizer()
    data = sentences(rows)
    return data.map(lambda row: dict(tokenizer(row["text"])), remove_columns="text")


def make_trainer(model: Any, folder: Any, rows: int = 12, more: Any = None, **settings: Any) -> Any:
    return Trainer(
        model,
        args=TrainingArguments(**arguments(folder, **settings)),
        train_dataset=token_rows(rows),
        eval_dataset=token_rows(7),
        data_collator=DataCollatorForLanguageModeling(small_tokenizer(), mlm=False),
        **more or {},
    )


@pytest.fixture
def run(tmp_path, scheduled, capsys):
    """Trains both models with a Trainer of these settings."""

    def run(passes: int = 3, test: Any = None, bars: Any = None, **settings: Any) -> Any:
        train = trained(lambda model: make_trainer(model, tmp_path, **settings))
        return assert_same_run(test or train, scheduled, capsys, passes=passes, **bars or {})

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},  # Trainer computes the loss, of the logits
        {"average_tokens_across_devices": False},
        {"torch_empty_cache_steps": 1, "max_grad_norm": 0.1},
        {"train_sampling_strategy": "group_by_length"},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_training(run, settings) -> None:
    run(passes=3 * settings.get("gradient_accumulation_steps", 1), rows=24, **settings)


def prompts(rows: int) -> datasets.Dataset:
    """Two rows of three begin with the same words."""
    texts = [sentence(3) * (n % 3 > 0) + sentence(n) for n in range(rows)]
    rows_of = small_tokenizer()(texts)
    return datasets.Dataset.from_dict({"input_ids": rows_of["input_ids"]})


def test_prompts_in_accumulated_steps(scheduled, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 8)

    def make(model: Any) -> Any:
        trainer = make_trainer(model, tmp_path, gradient_accumulation_steps=2)
        trainer.train_dataset = prompts(24)
        return trainer

    patch = functools.partial(longctx.patch, share_prefixes=True)
    assert_same_run(trained(make), scheduled, capsys, passes=6, patch=patch)
    real = sum(len(row["input_ids"]) for row in prompts(24))
    assert 0 < sum(scheduled) < 0.9 * LAYERS * real


@pytest.mark.parametrize("reduced", [False, True])
def test_metrics(run, reduced) -> None:
    """Of all logits, and of what is left of them."""
    more: dict[str, Any] = {"compute_metrics": accuracy}
    if reduced:
        more["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    numbers = run(passes=3 + 3 * 2, eval_strategy="steps", eval_steps=1, more=more)
    assert len(numbers["eval_loss"]) == len(numbers["eval_accuracy"]) == 3


@pytest.mark.parametrize("loss_only", [False, True])
def test_evaluation_alone(run, monkeypatch, loss_only) -> None:
    """Logits are computed if they are asked for."""
    computed: list[int] = []
    read = logits.LazyLogits.read
    monkeypatch.setattr(logits.LazyLogits, "read", lambda self: computed.append(1) or read(self))
    run(
        passes=3 + 2,
        eval_strategy="epoch",
        prediction_loss_only=loss_only,
        more=None if loss_only else {"compute_metrics": accuracy},
    )
    assert bool(computed) == (not loss_only)


def test_predict(run, tmp_path) -> None:
    def test(model: Any) -> Any:
        trainer = make_trainer(model, tmp_path, more={"compute_metrics": accuracy})
        trainer.train()
        found = trainer.predict(token_rows(7))
        real = found.predictions[found.label_ids != -100]
        metrics = {name: found.metrics[f"test_{name}"] for name in ("loss", "accuracy")}
        evaluated = trainer.evaluate()["eval_loss"]
        return logged(trainer) | {
            "predictions": real[:, ::40].flatten().tolist(),
            "metrics": list(metrics.values()),
            "evaluated": [evaluated],
        }

    run(passes=3 + 2 + 2, test=test)


def test_autocast(run) -> None:
    """bf16=True, in the precision of bf16."""
    settings = dict(more={"compute_metrics": accuracy}, eval_strategy="epoch")
    run(passes=3 + 2, bf16=True, bars=dict(rel=2e-2, bar=0.1), **settings)


def test_bfloat16_weights(scheduled, capsys, tmp_path) -> None:
    train = trained(lambda model: make_trainer(model, tmp_path, learning_rate=0.02))
    model = make_model().to(torch.bfloat16)
    assert_same_run(train, scheduled, capsys, passes=3, model=model, rel=2e-2, bar=0.2)
