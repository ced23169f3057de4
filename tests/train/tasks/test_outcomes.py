"""What a user finds after a run for a task: models that load, figures, and lines that say why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import run
from small_task import flags, pairs, rated, write_jsonl, written
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from longctx.errors import UserError
from longctx.train.lora.merge import merge
from longctx.train.options.config import parse_flags
from longctx.train.start.options import parse_args

pytestmark = pytest.mark.usefixtures("reference_kernels")
ONE = ("--max_steps", "1")
TEXT = "the quick brown fox"


def reward_of(model: Any, folder: Path) -> float:
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    with torch.no_grad():
        return float(model.eval()(**tokens).logits)


def test_a_model_of_rewards_is_a_classifier_of_one_number(tmp_path: Path) -> None:
    run(flags(tmp_path, written(), "--task", "reward", *ONE), tmp_path / "run")
    final = tmp_path / "run" / "final"
    model = AutoModelForSequenceClassification.from_pretrained(final)
    assert model.config.num_labels == 1
    rated_by = pipeline("text-classification", model=str(final))
    (found,) = rated_by(TEXT, function_to_apply="none")
    assert found["score"] == pytest.approx(reward_of(model, final), rel=1e-5)


@pytest.mark.parametrize("class_type", ["custom", "vanilla"])
def test_adapters_of_rewards_hold_their_head(tmp_path: Path, class_type: str, capsys) -> None:
    """PEFT trains and saves `score`, and merging keeps it. Training says that it starts random."""
    peft = pytest.importorskip("peft")
    more = ["--task", "reward", "--lora_r", "4", "--class_type", class_type, *ONE]
    run(flags(tmp_path, written(), *more), tmp_path / "run")
    final = tmp_path / "run" / "final"
    heads = [x for n, x in load_file(final / "adapter_model.safetensors").items() if "score" in n]
    assert [tuple(x.shape) for x in heads] == [(1, 64)]
    adapted = peft.AutoPeftModelForSequenceClassification.from_pretrained(final, num_labels=1)
    assert capsys.readouterr().out.count("its head of one number starts random") == 1
    merge(final, tmp_path / "merged")
    assert "random" not in "".join(capsys.readouterr())
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.score.weight, heads[0])
    expected = reward_of(merged, final)
    assert reward_of(adapted, final) == pytest.approx(expected, rel=1e-5)


def test_resumed_adapters_of_rewards(tmp_path: Path) -> None:
    more = ["--task", "reward", "--lora_r", "4", "--save_strategy", "steps", "--save_steps", "2"]
    words = flags(tmp_path, written(), *more)
    whole = run(words, tmp_path / "run")
    again = run(words, tmp_path / "run", "--resume_from_checkpoint", f"{tmp_path}/run/checkpoint-2")
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora_targets score", "--lora_targets score: the head of rewards is trained as a whole"),
        ("--lora_modules_to_save score", "--lora_modules_to_save score: it always is"),
        ("--lora_modules_to_save lm_head", "lm_head: the model has no such part"),
    ],
)
def test_what_adapters_of_rewards_refuse(tmp_path: Path, words: str, message: str) -> None:
    more = ["--task", "reward", "--lora_r", "4", *words.split()]
    with pytest.raises(UserError, match=message):
        run(flags(tmp_path, written(), *more), tmp_path / "run")


def test_ratings_log_margins(tmp_path: Path) -> None:
    """TRL's KTOTrainer logs them too: the difference of the means."""
    data = write_jsonl(tmp_path / "eval.jsonl", rated())
    more = ["--task", "kto", "--eval_file", str(data), *ONE]
    for line in run(flags(tmp_path, rated(), *more), tmp_path / "run"):
        margin = line["rewards/chosen"] - line["rewards/rejected"]
        assert line["rewards/margins"] == pytest.approx(margin)
    assert "eval_rewards/margins" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_what_a_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference is computed once; columns that no model takes stay."""
    data = write_jsonl(tmp_path / "eval.jsonl", pairs(2))
    more = ["--task", "dpo", "--eval_file", str(data), "--remove_unused_columns", "true", *ONE]
    words = flags(tmp_path, pairs(), *more)
    run(words, tmp_path / "run")
    said = capsys.readouterr().out
    first = "under the model before its first step are computed once, 1 row, and kept in "
    assert said.count(first) == 2
    assert re.search("evaluation accuracy *│ [0-9]+%", said)
    assert "longctx report" in said
    run(words, tmp_path / "again")
    said = capsys.readouterr().out
    assert said.count("log-probabilities under the model before its first step are in ") == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("dpo --label_smoothing 0.1", "--label_smoothing needs --loss_type exo_pair, robust"),
        ("dpo --loss_type robust --label_smoothing 0.1", None),
        ("cpo --label_smoothing 0.1", None),
        ("cpo --loss_type hinge --label_smoothing 0.1", "--label_smoothing needs"),
        ("dpo --discopop_tau 0.1", "--discopop_tau needs --loss_type discopop"),
        ("dpo --f_alpha_divergence_coef 1", "needs --f_divergence_type alpha_divergence"),
        ("kto", "--learning_rate 5e-05 is transformers' default; that of TRL's trainer for kto"),
        ("reward", None),
    ],
)
def test_options_that_no_loss_reads(
    words: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = [] if line and line.startswith("--learning_rate") else ["--learning_rate", "1e-6"]
    parse_args(["--use_cpu", "--task", *words.split(), *rate])
    said = capsys.readouterr().out
    assert line in said if line else "--" not in said


@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_every_number_of_a_list_is_checked(value: str) -> None:
    with pytest.raises(UserError, match="--loss_weights must be"):
        parse_args(["--use_cpu", "--task", "dpo", "--loss_weights", "1", value])
    assert parse_flags(["--loss_weights", "1", "2"]).loss_weights == [1.0, 2.0]
