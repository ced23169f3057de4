"""TRL's trainers on a patched mixture of experts. By default they ask its base model for the logits
of routers, and add the auxiliary loss themselves."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import pytest
import torch
from both import LAYERS, arguments, assert_same_run, sentence, sentences, trained
from small_families import family_config
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture
def mixtral() -> Any:
    tokenizer = small_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    sizes = dict(vocab_size=len(tokenizer), num_hidden_layers=LAYERS, router_aux_loss_coef=0.3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config("mixtral", **sizes, **special))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_sft(tmp_path, scheduled, capsys, mixtral, packing) -> None:
    def make(model: Any) -> Any:
        settings = arguments(tmp_path, packing=packing, max_length=40)
        return trl.SFTTrainer(
            model,
            args=trl.SFTConfig(**settings),
            train_dataset=sentences(60),
            processing_class=small_tokenizer(),
        )

    numbers = assert_same_run(trained(make), scheduled, capsys, passes=3, model=mixtral)
    assert min(numbers["aux_loss"]) > 1


def test_dpo(tmp_path, scheduled, capsys, mixtral) -> None:
    rows = [
        {"prompt": sentence(n), "chosen": " " + sentence(n + 5), "rejected": " " + sentence(n + 3)}
        for n in range(12)
    ]

    def make(model: Any) -> Any:
        reference = copy.deepcopy(model)
        with (
            torch.no_grad()
        ):  # rewards that are not 0 at first, whose sign would be one of rounding
            reference.lm_head.weight.mul_(0.5)
        return trl.DPOTrainer(
            model,
            ref_model=reference,
            args=trl.DPOConfig(**arguments(tmp_path)),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=small_tokenizer(),
        )

    numbers = assert_same_run(trained(make), scheduled, capsys, passes=6, model=mixtral)
    assert min(numbers["aux_loss"]) > 1
