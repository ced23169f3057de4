"""--task distill: the divergence of all logits, and a student that becomes its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from both import make_model, sentence
from small_run import run
from small_task import flags, save_model
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM

from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")


def texts() -> list[dict[str, Any]]:
    return [{"prompt": sentence(n), "completion": " " + sentence(n + 3)} for n in range(6)]


def teacher(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(7)
    model = make_model(max_position_embeddings=4096, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return save_model(folder, model)


def divergence(student: Any, teacher: Any, beta: float, temperature: float) -> float:
    """GKD's divergence on the completions' tokens, from all logits."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    tokenizer, total, count = small_tokenizer(), 0.0, 0
    for record in texts():
        before = tokenizer(record["prompt"])["input_ids"]
        after = tokenizer(record["completion"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*before, *after, tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(before)] = -100
        with torch.no_grad():
            logits = [m(ids, use_cache=False).logits[:, :-1] for m in (student, teacher)]
        found = gkd.GKDTrainer.generalized_jsd_loss(
            *logits, labels[:, 1:], beta=beta, temperature=temperature, reduction="sum"
        )
        total += float(found)
        count += int((labels[:, 1:] != -100).sum())
    return total / count


@pytest.mark.parametrize(
    ("class_type", "beta"), [("custom", 0.0), ("custom", 0.5), ("custom", 1.0), ("vanilla", 0.5)]
)
def test_the_first_loss_is_that_of_all_logits(tmp_path: Path, beta: float, class_type: str) -> None:
    path = teacher(tmp_path / "teacher", hidden_size=48, num_hidden_layers=3)
    more = ["--task", "distill", "--teacher", str(path), "--class_type", class_type]
    more += ["--distill_beta", str(beta), "--temperature", "1.5"]
    words = flags(tmp_path, texts(), *more)
    lines = run(words, tmp_path / "run")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = divergence(student, AutoModelForCausalLM.from_pretrained(path), beta, 1.5)
    assert lines[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_adapters_on_rows_and_batches(tmp_path: Path) -> None:
    """The same steps, cut into rows of another length."""
    path = teacher(tmp_path / "teacher")
    words = flags(tmp_path, texts(), "--task", "distill", "--teacher", str(path), "--lora_r", "4")
    whole = run(words, tmp_path / "whole")
    cut = ["--seq_len", "256", "--gradient_accumulation_steps", "8"]
    rows = run([*words, *cut], tmp_path / "rows")
    assert [x["loss"] for x in rows] == pytest.approx([x["loss"] for x in whole], rel=1e-4)


def test_a_teacher_of_another_vocabulary_is_one_line(tmp_path: Path) -> None:
    path = teacher(tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(400)
    save_model(path, model)
    words = flags(tmp_path, texts(), "--task", "distill", "--teacher", str(path))
    with pytest.raises(UserError, match="its vocabulary has 400 entries, the student's"):
        run(words, tmp_path / "run")
    with pytest.raises(UserError, match="needs --teacher"):
        run(words[:-2], tmp_path / "run")
