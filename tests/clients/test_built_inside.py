"""Trainers that build their model themselves, of a class that was patched before: the same losses
and weights as without, by the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import LAYERS, arguments, logged, make_model, sentences
from small_tokenizer import small_tokenizer
from test_hf_trainer import token_rows
from test_other_trainers import rows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import longctx

pytestmark = pytest.mark.usefixtures("reference_kernels")
LINE = f"longctx patched: {LAYERS} scheduled decoder layers"


@pytest.fixture
def folder(tmp_path) -> str:
    make_model().save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def hf(folder: str, out: Any, **settings: Any) -> Any:
    return Trainer(
        model_init=lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=TrainingArguments(**arguments(out, eval_strategy="steps", eval_steps=2, **settings)),
        train_dataset=token_rows(12),
        eval_dataset=token_rows(4),
        data_collator=DataCollatorForLanguageModeling(small_tokenizer(), mlm=False),
    )


def hf_autocast(folder: str, out: Any) -> Any:
    return hf(folder, out, bf16=True)


def sft(folder: str, out: Any, **more: Any) -> Any:
    trl = pytest.importorskip("trl")
    load = {"dtype": torch.float32}
    settings = arguments(out, gradient_checkpointing=True, model_init_kwargs=load)
    config = trl.SFTConfig(**settings, packing=True, max_length=48)
    return trl.SFTTrainer(folder, args=config, train_dataset=sentences(60), **more)


def sft_with_adapters(folder: str, out: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return sft(folder, out, peft_config=lora)


def dpo(folder: str, out: Any) -> Any:
    """Its reference is built inside, too."""
    trl = pytest.importorskip("trl")
    config = trl.DPOConfig(**arguments(out, model_init_kwargs={"dtype": torch.float32}))
    return trl.DPOTrainer(folder, args=config, train_dataset=rows(prompt=0, chosen=3, rejected=5))


def trained(build: Callable[..., Any], folder: str, out: Any) -> tuple[Any, dict[str, Tensor]]:
    trainer = build(folder, out)
    trainer.train()
    return logged(trainer), {n: p.detach() for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("build", "passes", "models", "bar"),
    [
        (hf, 5, 1, 1e-4),
        (hf_autocast, 5, 1, 5e-2),
        (sft, 3, 1, 1e-4),
        (sft_with_adapters, 3, 1, 1e-4),
        (dpo, 6, 2, 1e-4),
    ],
)
def test_same_run(build, passes, models, bar, folder, tmp_path, scheduled, capsys) -> None:
    start = {n: p.detach() for n, p in make_model().named_parameters()}
    truth, weights = trained(build, folder, tmp_path)
    assert scheduled == []
    capsys.readouterr()
    with longctx.patch_class("llama"):
        found, ours = trained(build, folder, tmp_path)
    said = capsys.readouterr().out
    assert said.count(LINE) == models and "Hugging Face's layers" not in said
    assert len(scheduled) == LAYERS * passes
    for name, values in truth.items():
        rel = 2e-5 if bar < 1e-2 else 1e-2
        assert found[name] == pytest.approx(values, rel=rel, abs=1e-2 if rel > 1e-3 else 1e-5), name
    for name, weight in weights.items():
        change, other = (w - start.get(name, 0.0) for w in (weight, ours[name]))
        assert (other - change).norm() <= bar * change.norm() + 1e-9, name
