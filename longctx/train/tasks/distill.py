"""Distillation: the student's next-token distributions follow a teacher's, on tokens that are
trained (GKD's divergence on given text; Agarwal et al. 2024, arXiv 2306.13649)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longctx.constants import IGNORE_INDEX
from longctx.errors import UserError
from longctx.families.families import head_of, logits_cap, logits_scaling
from longctx.head.distillation import linear_jsd
from longctx.train.tasks.answers import scored
from longctx.train.tasks.protocol import Batch, Measured, Task, Values
from longctx.train.tasks.scoring import Scoring, attach_scoring, logits_bytes


class Teacher:
    """A frozen model that is run without gradients."""

    def __init__(self, model: Any, flush: Callable[[], None], stream: Any = None) -> None:
        """`flush` frees what a pass has brought to the GPU; `stream` is kept alive."""
        attach_scoring(model)
        self.model, self._flush, self._stream = model, flush, stream

    @torch.no_grad()
    def hidden(self, batch: Batch, predictors: Tensor) -> Tensor:  # (N,) -> (N, E)
        """Returns the hidden states from which its lm_head makes logits, divided by the model's own
        divisor of logits."""
        found = scored(self.model, batch, _Hidden(predictors))["hidden"]
        self._flush()
        return found / logits_scaling(self.model)


class Divergence(Scoring):
    """The divergence of each chosen token's distribution from the teacher's."""

    def __init__(
        self,
        predictors: Tensor,  # (N,)
        teacher_hidden: Tensor,  # (N, E)
        teacher: Any,
        options: Any,
    ) -> None:
        super().__init__(predictors)
        self.teacher_hidden, self.teacher, self.options = teacher_hidden, teacher, options

    def values(self, hidden: Tensor, head: Any, model: Any) -> dict[str, Tensor]:
        theirs = head_of(self.teacher)
        found = linear_jsd(
            hidden / logits_scaling(model),
            head.weight,
            self.teacher_hidden,
            theirs.weight,
            beta=self.options.distill_beta,
            bias=head.bias,
            teacher_bias=theirs.bias,
            temperature=self.options.temperature,
            softcap=logits_cap(model),
            teacher_softcap=logits_cap(self.teacher),
            reduction="none",
            logits_bytes=logits_bytes(model),
        )
        return {"divergence": found}


class _Hidden(Scoring):
    """The hidden states themselves."""

    def values(self, hidden: Tensor, head: nn.Module, model: Any) -> dict[str, Tensor]:
        return {"hidden": hidden}


class Distill(Task):
    """The rows are those of `sft`; `teacher` is set before training
    (longctx/train/start/teacher.py)."""

    with_images = False

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if options.teacher is None:
            raise UserError(
                "--task distill needs --teacher: a folder or hub id of the model to follow"
            )

    def attach(self, model: Any) -> None:
        attach_scoring(model)

    def items(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] != IGNORE_INDEX).sum()

    def values(self, model: Any, batch: Batch) -> Values:
        S = batch["labels"].shape[1]
        counts = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        predictors = (counts.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        theirs = self.teacher.hidden(batch, predictors)
        scoring = Divergence(predictors, theirs, self.teacher.model, self.options)
        losses = scored(model, batch, scoring)["divergence"]
        rows = predictors // S
        metrics = {"divergence": Measured(losses.detach(), rows)}
        return Values(losses=losses, rows=rows, metrics=metrics)
