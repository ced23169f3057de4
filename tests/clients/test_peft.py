"""LoRA by PEFT around a patched model: the schedule runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from both import arguments, assert_same_run, sentences, trained
from small_tokenizer import small_tokenizer
from test_hf_trainer import make_trainer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("reference_kernels")


def adapters() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def test_trainer(scheduled, capsys, tmp_path) -> None:
    def make(model: Any) -> Any:
        torch.manual_seed(3)
        return make_trainer(peft.get_peft_model(model, adapters()), tmp_path)

    assert_same_run(trained(make), scheduled, capsys, passes=3)


def test_sft(scheduled, capsys, tmp_path) -> None:
    trl = pytest.importorskip("trl")

    def make(model: Any) -> Any:
        torch.manual_seed(3)
        return trl.SFTTrainer(
            model,
            args=trl.SFTConfig(**arguments(tmp_path)),
            train_dataset=sentences(12),
            processing_class=small_tokenizer(),
            peft_config=adapters(),
        )

    assert_same_run(trained(make), scheduled, capsys, passes=3)


def test_merged_adapters_train_with_the_schedule(scheduled, capsys, tmp_path) -> None:
    def make(model: Any) -> Any:
        torch.manual_seed(3)
        merged = peft.get_peft_model(model, adapters()).merge_and_unload()
        return make_trainer(merged.requires_grad_(True), tmp_path)

    assert_same_run(trained(make), scheduled, capsys, passes=3)
