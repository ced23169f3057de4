"""A signal ends a run after the step with a checkpoint, and resuming loses nothing."""

from __future__ import annotations

import os
import signal

import pytest
from small_run import add_callback, logged, prepare, run
from transformers import TrainerCallback

from longctx.interrupts import Interrupts

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "6"]


class SendAt(TrainerCallback):
    """Sends this process a signal while step `step` runs."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self.number, self.step = number, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_stops_and_resumes_exactly(
    flags, monkeypatch, tmp_path, number, capsys
) -> None:
    whole = run(flags, tmp_path / "whole")
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    add_callback(monkeypatch, SendAt(number, 3))
    with pytest.raises(SystemExit) as stop:
        run(flags, tmp_path / "run")
    assert stop.value.code == 128 + number
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    assert [line["step"] for line in logged(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").exists()
    assert not (tmp_path / "run" / "final").exists()
    out = capsys.readouterr().out
    assert f"stopped by {number.name}: continue with --resume_from_checkpoint last" in out
    resumed = run(flags, tmp_path / "run", "--resume_from_checkpoint", "last")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


def test_save_strategy_no_saves_nothing(flags, monkeypatch, tmp_path, capsys) -> None:
    add_callback(monkeypatch, SendAt(signal.SIGTERM, 3))
    with pytest.raises(SystemExit):
        run(flags, tmp_path / "run", "--save_strategy", "no")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert "stopped by SIGTERM: nothing was saved" in capsys.readouterr().out


def test_a_second_signal_ends_the_process_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
