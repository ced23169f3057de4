"""LongTrainer by hand, with transformers' own arguments and collator, beside its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from both import LAYERS, arguments, logged, make_model
from small_tokenizer import small_tokenizer
from test_hf_trainer import token_rows
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import longctx
from longctx.errors import UserError
from longctx.train.output.verify import verify

pytestmark = pytest.mark.usefixtures("reference_kernels")


def make(kind: Any, model: Any, folder: Path, more: Any = None, **settings: Any) -> Any:
    return kind(
        model,
        TrainingArguments(**arguments(folder, **settings)),
        train_dataset=token_rows(12),
        eval_dataset=token_rows(7),
        data_collator=DataCollatorForLanguageModeling(small_tokenizer(), mlm=False),
        **more or {},
    )


@pytest.mark.parametrize("patched", [False, True], ids=["vanilla", "patched"])
def test_it_trains_as_trainer(scheduled, tmp_path, patched) -> None:
    truth, ours = make_model(), make_model()
    if patched:
        longctx.patch(ours)
    trainer = make(Trainer, truth, tmp_path / "truth")
    trainer.train()
    found = make(longctx.LongTrainer, ours, tmp_path / "ours", {"seq_len": 16})
    found.train()
    losses, expected = logged(found), logged(trainer)
    assert losses["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    assert losses["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
    assert min(losses["tokens_per_s"]) > 0
    assert len(scheduled) == 3 * LAYERS * patched
    for (name, p), q in zip(ours.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5, msg=name)


def test_exact_states_and_whole_checkpoints(scheduled, tmp_path) -> None:
    """Of bf16 weights, as train.py's, with an evaluation by tokens; and going on from one."""
    settings = dict(save_strategy="steps", save_steps=2, eval_strategy="epoch")
    losses = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = longctx.patch(make_model().to(torch.bfloat16))
        trainer = make(longctx.LongTrainer, model, tmp_path, {"seq_len": 16}, **settings)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.exact is not None
        losses.append(logged(trainer)["loss"])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert logged(trainer)["eval_loss"][0] > 0
    assert verify(tmp_path / "checkpoint-2")
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")


def test_metrics_are_refused(tmp_path) -> None:
    """They would never be computed."""
    with pytest.raises(UserError, match="compute_metrics would never be called"):
        more = {"seq_len": 16, "compute_metrics": lambda found: {}}
        make(longctx.LongTrainer, make_model(), tmp_path, more)
