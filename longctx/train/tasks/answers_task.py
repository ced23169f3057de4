"""The base class of tasks whose loss is made of log-probabilities of answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from longctx.train.tasks.collate import answers_collator
from longctx.train.tasks.protocol import Batch, Task
from longctx.train.tasks.scoring import attach_scoring


class AnswersTask(Task):
    """A task that scores answers inside the model's own forward."""

    lists_prompts = False
    """Whether batches also list the prompts' own tokens."""

    def collator(
        self, class_type: str, *, alone: bool = False
    ) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        return answers_collator(class_type, alone=alone, prompts=self.lists_prompts)

    def attach(self, model: Any) -> None:
        attach_scoring(model)
