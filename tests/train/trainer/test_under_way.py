"""Updates that begin before the host knows a step's numbers: the run is the same, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import logged, prepare, run
from torch import Tensor
from transformers import TrainerCallback

from exactness import DEVICE
from longctx.memory.optimizer import ExactAdamW
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
