"""Walks over the modules that a step leaves out, and when it does not."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from longctx.runtime.runtime import Runtime
from longctx.settings import PatchOptions
from longctx.train.trainer.callbacks import MetricsFile
from longctx.train.trainer.settled import Settled


class Counted(nn.Linear):
    walks = 0

    def train(self, mode: bool = True) -> Any:
        self.walks += 1
        return super().train(mode)


class Others(TrainerCallback):
    pass


@pytest.fixture
def model() -> Counted:
    return Counted(2, 2)


def handler(*callbacks: Any) -> Any:
    return SimpleNamespace(callbacks=[*callbacks])


def step(settled: Settled, model: Counted, runtime: Any = None) -> bool:
    seen = None
    with settled.step(model, runtime):
        model.train()
        seen = runtime and runtime.settled
        model(torch.ones(2)).sum().backward()
    return bool(seen)


def test_the_first_step_looks_and_others_do_not(model) -> None:
    settled, runtime = (
        Settled(handler(MetricsFile())),
        Runtime.make(PatchOptions(), None, torch.device("meta"), torch.float32),
    )
    assert [step(settled, model, runtime) for _ in range(3)] == [False, True, True]
    assert model.walks == 1 and not runtime.settled
    settled.unsettle()
    assert [step(settled, model, runtime) for _ in range(2)] == [False, True]
    assert model.walks == 2 and "train" not in vars(model)


class Marks(Others):
    reads_weights = False


@pytest.mark.parametrize(("others", "walks"), [(Others, 3), (Marks, 1)])
def test_a_callback_of_others_may_change_anything(model, others, walks) -> None:
    """Unless it says that it does not even read weights."""
    settled = Settled(handler(MetricsFile(), others()))
    for _ in range(3):
        step(settled, model)
    assert model.walks == walks


def test_a_step_that_fails_settles_nothing(model) -> None:
    settled = Settled(handler())
    with pytest.raises(ZeroDivisionError), settled.step(model, None):
        raise ZeroDivisionError
    step(settled, model)
    assert model.walks == 1


def test_all_gradients_are_dropped(model) -> None:
    settled = Settled(handler())
    with settled.training(model):
        for frozen in (False, True, True):
            step(settled, model)
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
            model.bias.requires_grad_(not frozen)
        step(settled, model)
        model.zero_grad(set_to_none=False)
        assert model.weight.grad is not None and not model.weight.grad.any()
    assert "zero_grad" not in vars(model)


def test_a_copy_and_a_file_of_the_model_drop_their_own_gradients(model) -> None:
    settled = Settled(handler())
    with settled.training(model):
        step(settled, model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.ones(2)).sum().backward()
            other.zero_grad()
            assert other.weight.grad is None and model.weight.grad is not None
