"""A signal ends a run after the step with a checkpoint, and resuming loses nothing."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from small_run import SendAt, add_callback, fork_ranks, logged, prepare, run

from longctx.train.trainer import checkpoints
from longctx.train.trainer.interrupts import Interrupts

pytestmark = pytest.mark.usefixtures("reference_kernels", "heard_signals")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "6"]


@pytest.fixture(scope="module")
def whole(flags, plain_kernels, tmp_path_factory) -> list[dict[str, float]]:
    """What a run logs that nobody stops."""
    return run(flags, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_stops_and_resumes_exactly(
    flags, whole, monkeypatch, tmp_path, number, capsys
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    add_callback(SendAt(number, 3), monkeypatch)
    with pytest.raises(SystemExit) as stop:
        run(flags, tmp_path / "run")
    assert stop.value.code == 128 + number
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    assert [line["step"] for line in logged(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").exists()
    assert not (tmp_path / "run" / "final").exists()
    out = capsys.readouterr().out
    assert f"stopped by {number.name}: continue with --resume_from_checkpoint last" in out
    monkeypatch.undo()
    resumed = run(flags, tmp_path / "run", "--resume_from_checkpoint", "last")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


def test_save_strategy_no_saves_nothing(flags, monkeypatch, tmp_path, capsys) -> None:
    add_callback(SendAt(signal.SIGTERM, 3), monkeypatch)
    with pytest.raises(SystemExit):
        run(flags, tmp_path / "run", "--save_strategy", "no")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert "stopped by SIGTERM: nothing was saved" in capsys.readouterr().out


def test_a_stopping_run_begins_no_evaluation(flags, monkeypatch, tmp_path) -> None:
    """Neither for its own sake nor to find out whether `best` is worth a checkpoint."""
    add_callback(SendAt(signal.SIGTERM, 3), monkeypatch)
    text = flags[flags.index("--train_file") + 1]
    evaluate = f"--eval_file {text} --eval_strategy steps --eval_steps 1 --save_strategy best"
    with pytest.raises(SystemExit):
        run(flags, tmp_path / "run", *evaluate.split(), "--metric_for_best_model", "eval_loss")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("eval_loss" in line for line in lines) == 2
    assert (tmp_path / "run" / "checkpoint-3").exists()


def test_a_stopping_run_does_not_end_its_epoch(flags, monkeypatch, tmp_path) -> None:
    """Trainer would evaluate and save once more, by the strategy `epoch`."""
    placed = []
    place = checkpoints.publish

    def place_and_note(staged: Path, path: Path, run: Any) -> int:
        placed.append(path.name)
        return place(staged, path, run)

    monkeypatch.setattr(checkpoints, "publish", place_and_note)
    add_callback(SendAt(signal.SIGTERM, 3), monkeypatch)
    text = flags[flags.index("--train_file") + 1]
    words = f"--eval_file {text} --eval_strategy epoch --save_strategy epoch"
    with pytest.raises(SystemExit):
        run(flags, tmp_path / "run", *words.split())
    assert "eval_loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert placed == ["checkpoint-3"]


@pytest.mark.parametrize("step", [6])
def test_a_signal_during_a_save_is_not_forgotten(flags, monkeypatch, tmp_path, step) -> None:
    """Not in the last one either, and no second checkpoint is made."""
    place = checkpoints.publish

    def place_late(staged: Path, checkpoint: Path, run: Any) -> int:
        if checkpoint.name == f"checkpoint-{step}":
            os.kill(os.getpid(), signal.SIGTERM)
        return place(staged, checkpoint, run)

    monkeypatch.setattr(checkpoints, "publish", place_late)
    with pytest.raises(SystemExit) as stop:
        run(flags, tmp_path / "run", "--save_steps", "2")
    assert stop.value.code == 143
    assert [line["step"] for line in logged(tmp_path / "run")][-1] == step
    assert (tmp_path / "run" / f"checkpoint-{step}").exists()
    resumed = run(flags, tmp_path / "run", "--resume_from_checkpoint", "last")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "final").exists()


def test_a_second_signal_ends_the_process_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM


def test_a_signal_to_one_process_stops_all_at_the_same_step(flags, tmp_path) -> None:
    """Rank 1 gets one in step 2."""
    log = tmp_path / "log"

    def train_and_exit(rank: int) -> NoReturn:
        status = 1
        try:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            torch.set_num_threads(1)
            if rank == 1:
                add_callback(SendAt(signal.SIGTERM, 2))
            run(flags, tmp_path / "run")
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        finally:
            os._exit(status)

    statuses = [os.waitpid(child, 0)[1] for child in fork_ranks(2, train_and_exit)]
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [143, 143]
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert log.read_text().count("stopped by SIGTERM: continue with") == 1
