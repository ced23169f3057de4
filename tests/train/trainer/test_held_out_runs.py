"""Runs that hold out a share of their data: evaluated on it, never trained on it, also resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_run import logged, prepare, run
from small_task import flags as task_flags
from small_task import pairs, rated

from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("plain_kernels")
SHARE = ["--eval_share", "0.25", "--max_samples", "8", "--max_steps", "4"]


def evaluated(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def test_evaluated_resumed_and_refused_with_another_share(tmp_path: Path, capsys) -> None:
    words = [*prepare(tmp_path), *SHARE, "--eval_strategy", "steps", "--eval_steps", "2"]
    run(words, tmp_path / "run")
    said = capsys.readouterr().out
    assert "6 documents" in said and "held out of" in said and "2 documents" in said
    losses = [line["loss"] for line in logged(tmp_path / "run")], evaluated(tmp_path / "run")
    assert len(losses[1]) == 2
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "25% held out" in card

    again = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    resume = ["--resume_from_checkpoint", str(again / "checkpoint-2")]
    run(words, again, *resume)
    assert ([line["loss"] for line in logged(again)], evaluated(again)) == losses
    for changed in (["--eval_share", "0.5"], ["--max_samples", "9"]):
        with pytest.raises(UserError, match=f"is of another run: {changed[0][2:]} .* -> "):
            run(words, again, *resume, *changed)


@pytest.mark.parametrize(("task", "records"), [("dpo", pairs(8)), ("kto", rated(8))])
def test_tasks_hold_out_records(tmp_path: Path, task: str, records: list) -> None:
    more = ["--task", task, "--eval_share", "0.25", "--max_steps", "1"]
    run(task_flags(tmp_path, records, *more), tmp_path / "run")
    assert len(evaluated(tmp_path / "run")) == 1
    held = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["eval"]
    assert held["held_out"] == 0.25
