"""Optimizer and learning rates on trial, before heavy work: what Trainer would refuse to make, or
would make so that nothing is learned, ends the run here in one line.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import Trainer

from longctx.errors import UserError, many
from longctx.train.options.config import TrainArguments, explained_options


class _Trial(Trainer):
    """Is as much of Trainer as makes an optimizer and a schedule, for a model of two numbers."""

    def __init__(self, args: TrainArguments) -> None:
        self.args = copy.copy(args)
        if args.optim_target_modules:  # names of the real model
            self.args.optim_target_modules = "all-linear"
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = self.lr_scheduler = self.optimizer_cls_and_kwargs = None


def try_optimization(args: TrainArguments, steps: int) -> None:
    """Makes optimizer and schedule as Trainer will, and asks for the learning rates of `steps`
    steps (below 1: not known yet). Raises UserError for what would end the run then."""
    steps = steps if steps > 0 else 1000
    _check_optim_args(args)
    trial = _Trial(args)
    with explained_options(f"--optim {_word(args.optim)}"):
        trial.create_optimizer()
    with explained_options(f"--lr_scheduler_type {_word(args.lr_scheduler_type)}"):
        schedule: Any = trial.create_scheduler(steps)
        factors = [
            factor(step)
            for factor in getattr(schedule, "lr_lambdas", [])
            for step in [*range(0, steps, max(1, steps // 1000)), steps - 1, steps]
        ]
    if any(isinstance(f, complex) or not 0 <= f < math.inf for f in factors):
        raise UserError("--lr_scheduler_kwargs makes learning rates that are no positive numbers")
    if factors and not any(factors[:-1]):  # the last is of the step after them all
        raise UserError(
            f"the learning rate stays 0 for {many(steps, 'step')}: lower --warmup_steps or mend "
            "--lr_scheduler_kwargs"
        )


def _check_optim_args(args: TrainArguments) -> None:
    """Raises UserError for one that changes nothing: most optimizers read none."""
    pairs = (args.optim_args or "").replace(" ", "").split(",")
    if args.optim_args and not all(pair.count("=") == 1 for pair in pairs):
        raise UserError(f"--optim_args {args.optim_args}: key=value,key=value is expected")
    without = copy.copy(args)
    for pair in pairs if args.optim_args else ():
        without.optim_args = ",".join(other for other in pairs if other != pair)
        with explained_options(f"--optim {_word(args.optim)}"):
            changes = _optimizer_settings(without) != _optimizer_settings(args)
        if not changes:
            raise UserError(f"--optim_args {pair} changes nothing of --optim {_word(args.optim)}")


def _optimizer_settings(args: TrainArguments) -> Any:
    model: Any = torch.nn.Linear(1, 1)
    return Trainer.get_optimizer_cls_and_kwargs(args, model)[1]


def _word(choice: Any) -> str:
    """Returns a choice as it stands on the command line."""
    return str(getattr(choice, "value", choice))
