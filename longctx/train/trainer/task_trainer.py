"""Trainer whose loss is that of a task (longctx/train/tasks), or the loss that the model has.

A step's loss is the sum over its items (pairs, answers) by their number in the whole step, over
all batches and processes: an item counts as much wherever it lies. TRL takes the mean of the
batches' means, which is the same where batches have as many items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longctx.attention.shards import Shards
from longctx.constants import IGNORE_INDEX
from longctx.train.tasks.protocol import Metric, Task
from longctx.train.trainer.exact import ExactTrainer, overrides
from longctx.train.trainer.towers import Towers

REWARDS = {"rewards/chosen", "rewards/rejected"}


class Tally:
    """Means of metrics between two logged lines, over all processes; nothing waits for the GPU
    before they are read."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
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
    shards: Shards | None = None
    """The processes that share each row; None if each has rows of its own."""

    def __init__(self, *, model: Any, task: Task, **kwargs: Any) -> None:
        self.task, self.head_movable = task, not task.scores
        self.counted_task = task.options.task
        self.tally, self.eval_tally = Tally(), Tally()
        self._evaluations: dict[int, dict[str, float]] = {}
        """The metrics of each evaluation, by the step before it."""
        task.attach(model)
        super().__init__(model=model, **kwargs)

    @overrides
    def _prepare_for_training(self, max_steps: int, dataloader: Any, resume: str | None) -> Any:
        """Adds the reference's log-probabilities here, where the engine has wrapped the model and
        nothing but `resume` has changed it."""
        with self.towers.wrapped():
            model, dataloader = super()._prepare_for_training(max_steps, dataloader, resume)
        if self.add_reference is not None:
            self.add_reference(model)
            dataloader = self.get_train_dataloader()
        return model, dataloader

    @overrides
    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Keeps all columns for a task, which reads columns that no model takes."""
        if self.task.scores:
            return dataset
        return super()._remove_unused_columns(dataset, description)

    @overrides
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Returns the items of a step's batches, over all processes."""
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
        """Returns the sum of the losses of the batch's first rows, and the number of their
        items."""
        values = self.task.values(model, inputs)
        self.eval_tally.add({name: m.first(rows) for name, m in values.metrics.items()})
        losses = values.losses[values.rows < rows].double()
        return torch.stack([losses.sum(), losses.new_tensor(len(losses))])

    @overrides
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as Trainer does, but with the mean over all tokens as loss, on any number of
        processes.

        Trainer takes the mean of the rows' means, which weights a token of a short row more, and
        differs with the number of processes.
        """
        self.evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, **kwargs)
        loss_sum, tokens = self.accelerator.reduce(self.evaluated, "sum").tolist()
        prefix = kwargs.get("metric_key_prefix", "eval")
        assert output.metrics is not None
        output.metrics[f"{prefix}_loss"] = loss_sum / max(tokens, 1)
        found = self.eval_tally.read(self.accelerator)
        output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        self._evaluations[self.state.global_step] = output.metrics
        return output

    def evaluate_final(self) -> dict[str, float]:
        """Returns the evaluation of the weights that the run ends with. It is made unless the run
        has evaluated after the step that made these weights."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        known = self._evaluations.get(self.state.global_step if best is None else best)
        return self.evaluate() if known is None else known

    @overrides
    @torch.no_grad()
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        rows = self._own_rows(len(inputs["input_ids"]))
        if self.task.scores:
            found = self.evaluated_values(model, inputs, rows)
            self.evaluated += found
            return found[0] / found[1].clamp(min=1), None, None
        labels = inputs["labels"]  # (B, S)
        if rows < len(labels):
            labels = inputs["labels"] = labels.clone()
            labels[rows:] = IGNORE_INDEX
        targets = labels[:, 1:]
        if self.shards:
            inputs["shift_labels"] = torch.nn.functional.pad(targets, (0, 1), value=IGNORE_INDEX)
            inputs = self.shards.cut(inputs)
            targets = inputs["shift_labels"]
        loss_sum = model(**inputs, num_items_in_batch=1).loss
        tokens = (targets != IGNORE_INDEX).sum()
        self.evaluated += torch.stack([loss_sum.double(), tokens.double()])
        return loss_sum / tokens.clamp(min=1), None, None

    def _own_rows(self, rows: int) -> int:
        """Returns how many of a batch's rows are there for the first time: at the end of the data
        accelerate repeats rows, so that each process has as many."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        ranks_a_row = self.shards.ranks if self.shards else 1
        first = self.args.process_index // ranks_a_row * rows
        return max(0, min(rows, state.remainder - first))
