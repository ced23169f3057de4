"""What trackers are told of a run, and that a resumed run is the same one to them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_run import prepare, run

from longctx.train.start.trackers import tracked_as, tracked_name
from longctx.train.trainer.callbacks import Reporter


@pytest.mark.usefixtures("reference_kernels")
def test_a_resumed_run_goes_on_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [*prepare(tmp_path), "--report_to", "tensorboard"]
    evaluated = ["--eval_file", str(tmp_path / "data" / "0.txt"), "--eval_strategy", "epoch"]
    run([*flags, *evaluated], tmp_path / "a b", "--max_steps", "2")
    resume = ("--resume_from_checkpoint", "last", "--max_steps", "4")
    run([*flags, *evaluated], tmp_path / "a b", *resume)
    (folder,) = (tmp_path / "a b" / "runs").iterdir()
    assert folder.name == json.loads((tmp_path / "a b" / "run.json").read_text())["tracked_as"]
    assert folder.name.startswith("a-b-20")
    shown = EventAccumulator(str(folder)).Reload()
    for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "tokens"):
        assert [x.step for x in shown.Scalars(f"train/{name}")] == [1, 2, 3, 4]
    assert {"train/peak_host_gib", "eval/loss"} <= {*shown.Tags()["scalars"]}
    assert [x.value for x in shown.Scalars("train/tokens")] == [64, 128, 192, 256]


def test_a_name_that_nobody_can_misread(tmp_path: Path) -> None:
    args = SimpleNamespace(output_dir=str(tmp_path / "é / b:c"), report_to=["wandb"], run_name=None)
    Path(args.output_dir).mkdir(parents=True)
    name = tracked_name(args, resumed=False)
    assert name.startswith("-b-c-20")
    for known, kept in ((name, True), ("../x", False), (3, False)):
        (Path(args.output_dir) / "run.json").write_text(json.dumps({"tracked_as": known}))
        assert (tracked_name(args, resumed=True) == known) == kept


def test_what_a_person_has_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = SimpleNamespace(logging_dir=None)
    handler = SimpleNamespace(callbacks=[Reporter(board)])  # type: ignore[arg-type]
    args = SimpleNamespace(output_dir=str(tmp_path), report_to=["wandb"], run_name="mine")
    trainer = SimpleNamespace(args=args, callback_handler=handler)
    with tracked_as("ours", trainer):
        assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("ours", "allow")
    assert args.run_name == "mine" and board.logging_dir == str(tmp_path / "runs" / "ours")
    assert "WANDB_RUN_ID" not in os.environ and "WANDB_RESUME" not in os.environ
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    board.logging_dir = "elsewhere"
    with tracked_as("ours", trainer):
        assert os.environ["WANDB_RUN_ID"] == "chosen" and "WANDB_RESUME" not in os.environ
    assert os.environ["WANDB_RUN_ID"] == "chosen" and board.logging_dir == "elsewhere"
    args.report_to, args.run_name = [], None
    with tracked_as("ours", trainer):
        assert args.run_name is None
