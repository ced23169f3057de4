"""Tasks on a GPU in bfloat16: losses of Hugging Face's model, and of a teacher that is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from both import make_model
from small_run import run
from small_task import flags, pairs, save_model, written

pytestmark = pytest.mark.gpu


def words(folder: Path, records: list, *more: str) -> list[str]:
    found = [word for word in flags(folder, records, *more) if word != "--use_cpu"]
    return [*found, "--attn_backend", "math"]


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "reward"])
@pytest.mark.parametrize("more", [[], ["--place", "host"], ["--lora_r", "4"]], ids=" ".join)
def test_losses_are_those_of_vanilla(tmp_path: Path, task: str, more: list[str]) -> None:
    given = words(tmp_path, pairs(), "--task", task, "--learning_rate", "1e-4")
    alone = [*given, "--class_type", "vanilla", "--attn_backend", "auto"]
    lora = more if "--lora_r" in more else []
    theirs = run([*alone, *lora], tmp_path / "vanilla")
    ours = run([*given, *more], tmp_path / "custom")
    found = [[line["loss"] for line in lines] for lines in (ours, theirs)]
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def test_a_teacher_waits_on_the_host(tmp_path: Path) -> None:
    """Its layers come to the GPU as they are needed: the divergences are those of one that stays
    on a CPU."""
    teacher = save_model(tmp_path / "teacher", make_model(num_hidden_layers=6))
    texts = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in written()]
    more = ["--task", "distill", "--teacher", str(teacher), "--dtype", "float32"]
    given = words(tmp_path, texts, *more)
    ours = run(given, tmp_path / "gpu")
    theirs = run([*given, "--use_cpu"], tmp_path / "cpu")
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
