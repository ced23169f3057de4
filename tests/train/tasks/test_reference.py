"""The reference's log-probabilities: those of a second model, computed once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small_run import run
from small_task import flags, pairs, save_model, write_jsonl
from transformers import AutoModelForCausalLM

from longctx.train.tasks import reference

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each part that is computed."""
    found: list[int] = []
    score = reference.ReferencePass._scored

    def counted(self, rows, chosen):
        found.append(len(chosen))
        return score(self, rows, chosen)

    monkeypatch.setattr(reference.ReferencePass, "_scored", counted)
    return found


@pytest.mark.parametrize(
    "more",
    [[], ["--bf16", "true"], ["--dtype", "bfloat16"], ["--lora_r", "4"], ["--place", "host"]],
    ids=lambda more: " ".join(more) or "fp32",
)
def test_the_start_is_its_own_reference(tmp_path: Path, more: list[str]) -> None:
    """By the same forward, so that no reward differs from 0 before the first update."""
    lines = run(flags(tmp_path, pairs(), "--task", "dpo", *more), tmp_path / "run")
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert lines[0]["rewards/chosen"] == lines[0]["rewards/margins"] == 0
    assert lines[1]["rewards/margins"] != 0


def test_another_model_is_the_reference_it_would_be_beside(tmp_path: Path) -> None:
    words = flags(tmp_path, pairs(), "--task", "dpo")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_model(tmp_path / "other", other)
    ours = run([*words, "--reference", str(tmp_path / "other")], tmp_path / "run")
    itself = run([*words, "--reference", str(tmp_path / "model")], tmp_path / "itself")
    assert abs(ours[0]["rewards/margins"]) > 1e-3
    assert itself[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    # log pi - log pi_ref is that of both models, each as the other's reference, with another sign
    turned = [
        str(tmp_path / "other") if word == str(tmp_path / "model") else word for word in words
    ]
    back = run([*turned, "--reference", str(tmp_path / "model")], tmp_path / "back")
    for name in ("rewards/chosen", "rewards/rejected"):
        assert ours[0][name] == pytest.approx(-back[0][name], rel=1e-4)


def test_it_is_computed_once_in_parts(tmp_path: Path, passes: list[int], monkeypatch) -> None:
    monkeypatch.setattr(reference, "PART_ROWS", 2)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", pairs(2))
    words = flags(tmp_path, pairs(), "--task", "dpo", "--seq_len", "300")
    words += ["--eval_file", str(held_out), "--eval_strategy", "steps", "--eval_steps", "3"]
    first = run(words, tmp_path / "first")
    assert len(passes) >= 3 and max(passes) == 2
    computed = len(passes)
    again = run([*words, "--beta", "0.1"], tmp_path / "again")
    assert len(passes) == computed and [x["loss"] for x in first] == [x["loss"] for x in again]
    run([*words, "--ld_alpha", "0.5"], tmp_path / "weighted")  # other sums are others
    assert len(passes) == 2 * computed
    names = [path.name for path in (tmp_path / "cache").glob("reference-*.arrow")]
    assert len(names) == 4  # two of each run, for training and evaluation: no part is left
