"""TRL's RewardTrainer and GRPOTrainer on a patched model, and PEFT's prompts and prefixes."""

from __future__ import annotations

import functools
from typing import Any

import datasets
import pytest
import torch
from both import arguments, assert_same_run, make_model, sentence, trained
from small_tokenizer import small_tokenizer
from test_hf_trainer import make_trainer
from transformers import AutoModelForSequenceClassification

import longctx
from longctx.calls import shared_prefixes

pytestmark = pytest.mark.usefixtures("reference_kernels")


def rows(**columns: int) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{name: " " + sentence(n + k) for name, k in columns.items()} for n in range(12)]
    )


def test_reward(scheduled, capsys, tmp_path) -> None:
    """Of a classifier around the base model."""
    trl = pytest.importorskip("trl")
    config = make_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config)

    def make(model: Any) -> Any:
        return trl.RewardTrainer(
            model,
            args=trl.RewardConfig(**arguments(tmp_path)),
            train_dataset=rows(prompt=0, chosen=3, rejected=5),
            processing_class=small_tokenizer(),
        )

    assert_same_run(trained(make), scheduled, capsys, passes=3, model=classifier)


@pytest.mark.parametrize("share_prefixes", [False, True], ids=["rows", "prompts once"])
def test_grpo(scheduled, capsys, tmp_path, share_prefixes, monkeypatch) -> None:
    """It generates between steps, from logits of the last tokens. All answers to a prompt begin
    with it."""
    trl = pytest.importorskip("trl")
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 2)

    def make(model: Any) -> Any:
        settings = dict(num_generations=2, max_completion_length=6, max_steps=2)
        return trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
            args=trl.GRPOConfig(**arguments(tmp_path, **settings)),
            train_dataset=rows(prompt=0),
            processing_class=small_tokenizer(),
        )

    def train(model: Any) -> Any:
        numbers = trained(make)(model)
        del numbers["step_time"]
        return numbers

    patch = functools.partial(longctx.patch, share_prefixes=share_prefixes)
    assert_same_run(train, scheduled, capsys, passes=2, steps=2, patch=patch)


@pytest.mark.parametrize(
    ("method", "says"), [("PromptTuningConfig", None), ("PrefixTuningConfig", "a key/value cache")]
)
def test_prompts(scheduled, capsys, tmp_path, method, says) -> None:
    """A prompt is more embeddings; a prefix lies in the cache."""
    peft = pytest.importorskip("peft")

    def make(model: Any) -> Any:
        torch.manual_seed(3)
        adapters = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return make_trainer(peft.get_peft_model(model, adapters), tmp_path)

    assert_same_run(trained(make), scheduled, capsys, passes=3, says=says)
