"""Updates that begin before the host knows a step's numbers: the run is the same, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import add_callback, logged, prepare, run
from torch import Tensor
from transformers import TrainerCallback

from exactness import DEVICE
from longctx.errors import UserError
from longctx.memory.optimizer import ExactAdamW
from longctx.train.trainer.task_trainer import TaskTrainer
from longctx.train.trainer.trainer import LongTrainer
from longctx.train.trainer.under_way import UnderWay

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    exact = ["--dtype", "bfloat16", "--optimizer_states", "fp32", "--max_steps", "5"]
    return [*prepare(tmp_path_factory.mktemp("model")), *exact]


@pytest.fixture
def begun(monkeypatch) -> list[float]:
    """The guard of each update that began before its step."""
    guards: list[float] = []
    begin = ExactAdamW.begin

    def counted(self: ExactAdamW, guard: Tensor) -> None:
        guards.append(float(guard))
        begin(self, guard)

    monkeypatch.setattr(ExactAdamW, "begin", counted)
    return guards


def test_numbers_are_those_of_their_mark() -> None:
    norm, losses = torch.tensor(3.0, device=DEVICE), torch.tensor([1.0, 2.0], device=DEVICE)
    numbers = UnderWay({"norm": norm, "losses": losses})
    norm.zero_()
    losses.fill_(torch.nan)
    assert numbers.read() == {"norm": [3.0], "losses": [1.0, 2.0]} and numbers.guard == 0.0
    for broken in (torch.nan, torch.inf, -torch.inf):
        numbers = UnderWay({"norm": torch.tensor(1.0), "losses": torch.tensor([broken, 1.0])})
        assert numbers.guard.isnan() and numbers.guard.shape == ()
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert UnderWay({"losses": largest}).guard == 0.0


MORE = [
    "--logging_steps 2 --gradient_accumulation_steps 2".split(),
    "--max_grad_norm 0 --save_strategy no".split(),
    "--logging_steps 10 --eval_strategy steps --eval_steps 2 --eval_share .2".split(),
]


@pytest.mark.parametrize("more", MORE, ids=["accumulates", "no clipping", "evaluates"])
def test_a_run_is_what_it_was(flags, more, begun, monkeypatch, tmp_path: Path) -> None:
    known = ("loss", "grad_norm", "learning_rate", "tokens", "eval_loss")
    lines = [{k: line.get(k) for k in known} for line in run([*flags, *more], tmp_path / "begun")]
    assert begun == [0.0] * 5
    monkeypatch.setattr(LongTrainer, "_may_begin_update", lambda *_: False)
    run([*flags, *more], tmp_path / "after")
    assert len(begun) == 5
    assert lines == [{k: line.get(k) for k in known} for line in logged(tmp_path / "after")]
    begun_file, after_file = (tmp_path / n / "final/model.safetensors" for n in ("begun", "after"))
    assert begun_file.read_bytes() == after_file.read_bytes()


def doubled(trainer: LongTrainer) -> None:
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 2


class Doubles(TrainerCallback):
    """Acts between a step's gradients and its update."""

    reads_weights = False
    trainer: Any = None

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        doubled(self.trainer)


class Quiet(TrainerCallback):
    """Acts at other times."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize(("callback", "steps"), [(Doubles, 0), (Quiet, 5)])
def test_nobody_is_overtaken(flags, callback, steps, begun, monkeypatch, tmp_path) -> None:
    train = LongTrainer.train

    def with_callback(self: LongTrainer, *args: Any, **how: Any) -> Any:
        added = callback()
        added.trainer = self
        self.add_callback(added)
        return train(self, *args, **how)

    monkeypatch.setattr(LongTrainer, "train", with_callback)
    run([*flags, "--max_grad_norm", "0"], tmp_path / "run")
    assert len(begun) == steps


def test_a_trainer_with_a_norm_of_its_own(flags, begun, monkeypatch, tmp_path) -> None:
    class Own(LongTrainer):
        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            found = super()._get_grad_norm(model, grad_norm)
            doubled(self)
            return found

    monkeypatch.setattr("longctx.train.commands.train.LongTrainer", Own)
    run([*flags, "--max_grad_norm", "0"], tmp_path / "run")
    assert not begun


KNOWN = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss")


@pytest.fixture
def late(monkeypatch) -> list[int]:
    """The steps whose lines were written in the next step's forward."""
    steps: list[int] = []
    write = LongTrainer._log_late

    def noted(self: LongTrainer, *given: Any) -> None:
        steps.append(self.state.global_step)
        write(self, *given)

    monkeypatch.setattr(LongTrainer, "_log_late", noted)
    return steps


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("--save_strategy no", [1, 2, 3, 4]),
        ("--save_strategy no --gradient_accumulation_steps 2", [1, 2, 3, 4]),
        ("--save_strategy no --logging_steps 2", [2, 4]),
        ("--save_steps 2", [1, 3]),
        ("--save_strategy no --eval_strategy steps --eval_steps 3 --eval_share .2", [1, 2, 4]),
        ("--save_strategy no --lora_r 2", [1, 2, 3, 4]),
    ],
)
def test_a_late_line_is_what_it_was(flags, more, steps, late, monkeypatch, tmp_path: Path) -> None:
    """A step that saves or evaluates, and the last one, is read at its end."""
    flags = [*flags, *more.split()]
    lines = [{k: line.get(k) for k in KNOWN} for line in run(flags, tmp_path / "late")]
    assert late == steps
    monkeypatch.setattr(LongTrainer, "_may_be_late", lambda self: False)
    at_once = [{k: line.get(k) for k in KNOWN} for line in run(flags, tmp_path / "at once")]
    assert lines == at_once and late == steps
    found = [*(tmp_path / "late" / "final").glob("*.safetensors")]
    assert found
    for file in found:
        other = tmp_path / "at once" / "final" / file.name
        assert file.read_bytes() == other.read_bytes()


def test_a_late_line_is_written_once_the_next_forward_is_launched(
    flags, monkeypatch, tmp_path
) -> None:
    events: list[str] = []
    loss, log = TaskTrainer.compute_loss, LongTrainer.log

    def computed(self: Any, *args: Any, **how: Any) -> Any:
        found = loss(self, *args, **how)
        events.append(f"forward {self.state.global_step + 1}")
        return found

    def logged(self: Any, logs: dict[str, float], *more: Any) -> None:
        events.append(f"line {self.state.global_step}")
        assert logs.get("step_s", 1) > 0
        log(self, logs, *more)

    monkeypatch.setattr(TaskTrainer, "compute_loss", computed)
    monkeypatch.setattr(LongTrainer, "log", logged)
    run([*flags, "--max_steps", "3", "--save_strategy", "no"], tmp_path / "run")
    steps = ["forward 1", "forward 2", "line 1", "forward 3", "line 2", "line 3"]
    assert events[: len(steps)] == steps


def test_a_failing_step_leaves_the_line_before_it(flags, late, monkeypatch, tmp_path) -> None:
    loss = TaskTrainer.compute_loss

    def fails(self: Any, *args: Any, **how: Any) -> Any:
        if self.state.global_step == 2:
            raise ZeroDivisionError
        return loss(self, *args, **how)

    monkeypatch.setattr(TaskTrainer, "compute_loss", fails)
    with pytest.raises(ZeroDivisionError):
        run([*flags, "--save_strategy", "no"], tmp_path / "run")
    assert [line["step"] for line in logged(tmp_path / "run")] == late == [1, 2]


@pytest.mark.parametrize("lateness", [True, False])
def test_a_late_step_that_is_not_finite(flags, lateness, monkeypatch, tmp_path) -> None:
    """It is named as it would be at once, and nothing of it is written."""
    loss = TaskTrainer.compute_loss

    def breaks(self: Any, *args: Any, **how: Any) -> Any:
        found = loss(self, *args, **how)
        return found * torch.nan if self.state.global_step == 2 else found

    if not lateness:
        monkeypatch.setattr(LongTrainer, "_may_be_late", lambda self: False)
    monkeypatch.setattr(TaskTrainer, "compute_loss", breaks)
    with pytest.raises(
        UserError, match="step 3 is not finite: first in the gradient of model.norm.weight"
    ):
        run([*flags, "--save_strategy", "no"], tmp_path / "run")
    assert [line["step"] for line in logged(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run" / "final").exists()


def test_a_callback_that_looks_at_steps_sees_each_at_its_end(flags, late, monkeypatch, tmp_path):
    add_callback(Quiet(), monkeypatch)
    run([*flags, "--save_strategy", "no"], tmp_path / "run")
    assert late == []
