"""The frozen models that a trainer runs beside the one it trains: TRL's reference or teacher.

DPOTrainer and others load them by themselves, so they are not patched. They are found when the
trained model is called, since the trainer is on the call stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longctx.runtime.runtime import patched_part

NAMES = ("ref_model", "teacher_model")
"""The attributes of TRL's trainers that hold these models."""


def models_beside(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields the trainer's models that are not patched, each with words for it."""
    for name in NAMES:
        model = getattr(trainer, name, None)
        known = isinstance(model, PreTrainedModel) and patched_part(model) is not None
        if isinstance(model, nn.Module) and not known:
            yield f"{name} of {type(trainer).__name__}", model


def calling_trainer() -> Any | None:
    """Returns transformers' Trainer that makes the current call, if one does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_HOMES):
            owner = _self_of(frame)
            if any(f"{c.__module__}.{c.__name__}" == _TRAINER for c in type(owner).__mro__):
                return owner
        frame = frame.f_back
    return None


_HOMES = ("transformers.trainer", "trl.")
"""The modules whose methods call models."""
_TRAINER = "transformers.trainer.Trainer"


def _self_of(frame: FrameType) -> Any:
    """Returns the object whose method runs in a frame.

    Before Python 3.13 reading `f_locals` leaves a copy of the variables in the frame. It would hold
    the models, and their memory, that the method deletes later, so it is emptied.
    """
    variables = frame.f_locals
    owner = variables.get("self")
    if isinstance(variables, dict) and variables is not frame.f_globals:
        variables.clear()
    return owner
