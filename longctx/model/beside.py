"""The frozen models that a trainer runs beside the one it trains: TRL's reference or teacher.

DPOTrainer and others load them by themselves, so nobody patches them. They are found from the first
call of training: the trainer that makes it stands on the call stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import PreTrainedModel

from longctx.model.runtime import patched_part

NAMES = ("ref_model", "teacher_model")
"""The attributes in which trainers of TRL keep them."""


def models_beside() -> Iterator[tuple[str, PreTrainedModel]]:
    """Returns the models without a patch of the trainer that makes the call under way, each with
    words for it. What engines have wrapped is left out."""
    trainer = _calling_trainer()
    for name in NAMES:
        model = getattr(trainer, name, None)
        if isinstance(model, PreTrainedModel) and patched_part(model) is None:
            yield f"{name} of {type(trainer).__name__}", model


def _calling_trainer() -> Any | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(f"{c.__module__}.{c.__name__}" == _TRAINER for c in type(owner).__mro__):
            return owner
        frame = frame.f_back
    return None


_TRAINER = "transformers.trainer.Trainer"
