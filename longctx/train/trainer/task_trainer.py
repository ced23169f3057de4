"""Trainer whose loss is that of a task (longctx/train/tasks), beside the losses that models have.

A step's loss is the sum over its items (pairs, answers) by their number in the whole step, over
all batches and processes: an item counts as much wherever it lies. TRL takes the mean of the
batches' means, which is the same where batches have as many items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longctx.train.tasks.protocol import Measured, Task
from longctx.train.trainer.exact import ExactTrainer, overrides
from longctx.train.trainer.towers import Towers

REWARDS = {"rewards/chosen", "rewards/rejected"}


class Tally:
    """Means of metrics between two logged lines, over all processes; nothing waits for the GPU
    before they are read."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Measured]) -> None:
        for name, measured in metrics.items():
            values = measured.values.detach().double()
            both = torch.stack([values.sum(), values.new_tensor(len(values))])
            self._found[name] = self._found.get(name, 0) + both

    def read(self, accelerator: Any) -> dict[str, float]:
        """Returns the means by name, and starts anew. Every process must call it."""
        found, self._found = self._found, {}
        if not found:
            return {}
        sums = accelerator.reduce(torch.stack([*found.values()]), "sum").tolist()
        means = {name: x / n for name, (x, n) in zip(found, sums, strict=True) if n}
        if REWARDS <= means.keys():  # of pairs that is the mean of their margins
            margin = means["rewards/chosen"] - means["rewards/rejected"]
            means.setdefault("rewards/margins", margin)
        return means


class TaskTrainer(ExactTrainer):
    """Trains for a task."""

    add_reference: Callable[[Any], None] | None = None
    """Gives the rows of this trainer a reference's log-probabilities, from the model that it is
    called with. Set where an engine shards the weights, which are whole in no process before it has
    wrapped the model."""

    towers: Towers
    """The frozen vision towers, which no engine and no DDP wraps with the model."""

    def __init__(self, *, model: Any, task: Task, **kwargs: Any) -> None:
        self.task, self.head_movable = task, not task.scores
        self.counted_task = task.options.task
        self.tally, self.eval_tally = Tally(), Tally()
        task.attach(model)
        super().__init__(model=model, **kwargs)

    @overrides
    def _prepare_for_training(self, max_steps: int, dataloader: Any, resume: str | None) -> Any:
        """The engine has wrapped the model here, and nothing but `resume` has changed it."""
        with self.towers.wrapped():
            model, dataloader = super()._prepare_for_training(max_steps, dataloader, resume)
        if self.add_reference is not None:
            self.add_reference(model)
            dataloader = self.get_train_dataloader()
        return model, dataloader

    @overrides
    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A task reads columns that no model takes."""
        if self.task.scores:
            return dataset
        return super()._remove_unused_columns(dataset, description)

    @overrides
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The items of a step's batches, over all processes."""
        if not self.task.scores:
            return super()._get_num_items_in_batch(batch_samples, device)
        counted = [self.task.items(batch) for batch in batch_samples]
        count = torch.stack(counted).sum().to(device) if counted else torch.zeros((), device=device)
        return self.accelerator.reduce(count, "sum")

    @overrides
    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if not self.task.scores:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        values = self.task.values(model, inputs)
        self.tally.add(values.metrics)
        items = len(values.losses) if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, so that their sum is the step's.
        ranks = 1 if num_items_in_batch is None else self.accelerator.num_processes
        return (values.losses.sum() * ranks / items).float()

    def evaluated_values(self, model: Any, inputs: dict[str, Any], rows: int) -> Tensor:  # (2,)
        """The sum of the losses of the batch's first rows, and the number of their items."""
        values = self.task.values(model, inputs)
        self.eval_tally.add({name: m.first(rows) for name, m in values.metrics.items()})
        losses = values.losses[values.rows < rows].double()
        return torch.stack([losses.sum(), losses.new_tensor(len(losses))])
