"""What a run asks of its task. The class here is the answer of `sft`: text, and the loss of the
model itself.

    rows, mismatched   before data is read     which records, and what a packed row holds of them
    with_images                                whether they may have images
    has_reference      before training         whether a reference model's log-probabilities count
    collate            a batch                 rows -> tensors
    attach             once the model is there
    log_probs          a batch                 what the reference is asked
    items, values      a batch                 how many count, and what each of them loses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from longctx.attention.shards import Shards
from longctx.errors import UserError
from longctx.train.data.rows import collate
from longctx.train.options.task import TaskOptions

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Values:
    """Losses of a batch's items (pairs, answers, tokens), and what is logged of them."""

    losses: Tensor  # (items,) fp32 or fp64, differentiable
    rows: Tensor  # (items,) int64: the row of the batch in which each is
    metrics: dict[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A metric of some of a batch's items; its mean is logged."""

    values: Tensor  # (n,)
    rows: Tensor  # (n,) int64

    def first(self, rows: int) -> Measured:
        """Returns the values of a batch's first rows."""
        kept = self.rows < rows
        return Measured(self.values[kept], self.rows[kept])


class Task:
    """Supervised fine-tuning: the model's own loss of labels."""

    rows: ClassVar[Literal["text", "pairs", "rated"]] = "text"
    mismatched: ClassVar[bool] = False
    """Whether each prompt also gets an answer to another prompt, of which a KL is estimated."""
    with_images: ClassVar[bool] = True
    """Whether records may have images, with a model that sees them."""
    has_reference: ClassVar[bool] = False
    loss_types: ClassVar[Sequence[str]] = ()
    """Values that --loss_type may have; the first is the default."""

    shards: Shards | None = None
    """The ranks that share rows with this one, if there are any."""
    teacher: Any = None
    """The model that is followed, if the task has one."""

    def __init__(self, options: TaskOptions) -> None:
        """Raises UserError for options that the task cannot have."""
        self.options = options
        for name in options.loss_type or ():
            if name not in self.loss_types:
                known = ", ".join(self.loss_types)
                have = f"one of {known}" if known else "left out: it has one loss"
                raise UserError(f"--loss_type {name}: --task {options.task} needs {have}")

    @property
    def scores(self) -> bool:
        """Whether the task computes its loss from what the model scores (`values`); else the model
        computes it from labels."""
        return type(self) is not Task

    def collator(
        self, class_type: str, *, alone: bool = False
    ) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        """Makes a batch of packed rows. `custom` computes a prompt once for all of its answers, the
        other class types once for each, with `alone` in a row of its own."""
        return collate

    def attach(self, model: Any) -> None:
        """Prepares a model for `values`. Raises UserError for one that cannot be scored."""

    def log_probs(self, model: Any, batch: Batch) -> Tensor:  # (A,)
        """Returns the log-probability of each answer, which is compared with the reference's."""
        raise NotImplementedError

    def items(self, batch: Batch) -> Tensor:  # ()
        """Returns how many items of a batch count."""
        raise NotImplementedError

    def values(self, model: Any, batch: Batch) -> Values:
        """Runs the model on a batch."""
        raise NotImplementedError
