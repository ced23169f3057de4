"""The end of a step: the norm of its gradients, its update, its numbers and its line.

The norm and the losses of a step are there when its backward has ended. If the host waits for them
then, the GPU waits in turn: for the logged line, for the next batch, for its launches, which takes
some milliseconds of a short step. The update needs no host, since a guard on the GPU leaves it out
if a number is not finite. So the numbers are read where the next step's forward has been launched,
and the line is written there, with the figures of its own step's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longctx.cost.fitted import GRAPHED_TOKENS
from longctx.loop.metrics import Throughput, figures, memory_figures
from longctx.train.engines import Engine
from longctx.train.trainer.callbacks import has_own, is_known
from longctx.train.trainer.checkpoints import CheckpointTrainer
from longctx.train.trainer.exact import overrides
from longctx.train.trainer.nonfinite import NonFinite, Recorded
from longctx.train.trainer.under_way import UnderWay

_EVENTS = ("on_step_begin", "on_substep_end", "on_optimizer_step", "on_step_end", "on_log")
"""The methods of callbacks that Trainer calls between the end of a step's backward and the next
step's forward."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step."""

    norm: float
    losses: Sequence[float]
    """Those of its batches."""
    logged: float
    """The sum of the losses since the last line."""
    pending: float | None
    """The attended pairs since the last line, if the GPU has counted them (`Throughput`)."""


@dataclass
class LateStep:
    """A step whose update has begun, and whose numbers are under way."""

    step: int
    recorded: Recorded
    norm_and_losses: UnderWay
    totals: UnderWay
    line: Callable[[StepNumbers], None] | None = None
    """Writes the step's line; None if it has none, or none yet."""

    def read(self) -> StepNumbers:
        """Waits until the numbers are here."""
        found, totals = self.norm_and_losses.read(), self.totals.read()
        pending = totals.get("pending")
        return StepNumbers(
            norm=found["norm"][0],
            losses=found["losses"],
            logged=totals["logged"][0],
            pending=None if pending is None else pending[0],
        )


class StepEndTrainer(CheckpointTrainer):
    """Ends steps as the file says. What counts and watches them is made by LongTrainer."""

    engine: Engine
    runtime: Any
    """The runtime of a patched model; None for others."""
    throughput: Throughput
    nonfinite: NonFinite

    def __init__(self, **kwargs: Any) -> None:
        self._late: LateStep | None = None
        self._logged: Tensor | None = None
        """The sum of the losses since the last line, if the host has it already."""
        self._figures: dict[str, float] | None = None
        """The speed and memory of a line that is late."""
        self._skipped_steps = 0
        super().__init__(**kwargs)

    @overrides
    def _clip_grad_norm(self, model: Any) -> Any:
        norm = self._clip_by_engine(model, self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    @overrides
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        self._end_step()  # the GPU has this forward to compute
        return found

    @overrides
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called once a step, before the optimizer: the place to keep a broken step out of it."""
        if grad_norm is None:
            grad_norm = self._clip_by_engine(model, math.inf)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        norm = 0.0 if self.args.fp16 else grad_norm  # fp16: the scaler skips overflows by itself
        if self._may_begin_update(norm):
            self._late = self._begin_update(grad_norm)
            if self._may_be_late():
                return grad_norm
            found = self._end_step()
            assert found is not None
            self._logged = torch.tensor(found.logged, dtype=self._tr_loss.dtype)
            if found.pending is not None:
                self.throughput.settle(found.pending)
            return found.norm
        if self.exact:  # before the host waits for the norm
            self.exact.prepare()
        self._skip_broken(self.nonfinite.end_step(), norm, self.state.global_step + 1)
        return grad_norm

    def _skip_broken(
        self, recorded: Recorded, norm: Any, step: int, losses: Sequence[float] | None = None
    ) -> None:
        """Keeps a step whose numbers are not finite out of the weights, if it raises no UserError
        for it."""
        broken = self.exact.broken_gradient if self.exact else None
        if self.nonfinite.check(self.model_wrapped, recorded, norm, step, broken, losses):
            self.model_wrapped.zero_grad()
            if self.exact:
                self.exact.zero_grad()  # an optimizer without gradients changes nothing
            self._skipped_steps += 1

    def _may_begin_update(self, norm: Any) -> bool:
        """Whether nothing acts between a step's norm and its update, which may then be launched
        before the host has waited for the norm."""
        alone = self.exact is not None and self.args.world_size == 1 and self.exact.can_begin
        if not alone or not isinstance(norm, Tensor):
            return False
        if type(self)._get_grad_norm is not StepEndTrainer._get_grad_norm:
            return False
        callbacks = self.callback_handler.callbacks
        return not any(has_own(callback, "on_pre_optimizer_step") for callback in callbacks)

    def _begin_update(self, norm: Tensor) -> LateStep:
        """Has the GPU go on with the update, which it leaves out if a number of the step is not
        finite. Returns the step, whose numbers are on their way to the host."""
        assert self.exact is not None
        numbers = UnderWay({"norm": norm, "losses": torch.stack(self.nonfinite.losses)})
        totals = {"logged": self._tr_loss}
        if (pending := self.throughput.pending) is not None:
            totals["pending"] = pending
        line = UnderWay(totals)
        self.exact.begin(numbers.guard)
        recorded = self.nonfinite.end_step()
        return LateStep(self.state.global_step + 1, recorded, numbers, line)

    def _may_be_late(self) -> bool:
        """Whether the numbers of a step whose update has begun may be read in the next step: a step
        that is not finite ends the run, and nobody else looks at steps. If there is time to wait,
        in long rows, they are read at once."""
        assert self.exact is not None
        others = [other for other in self.callback_handler.callbacks if not is_known(other)]
        return (
            self.exact.has_begun
            and self.args.on_nonfinite == "stop"
            and self.row_tokens <= GRAPHED_TOKENS
            and not self.task.scores
            and self.state.global_step + 1 < self.state.max_steps
            and not any(has_own(other, event) for other in others for event in _EVENTS)
        )

    def _end_step(self) -> StepNumbers | None:
        """Reads the numbers of a step that is late, acts on them, and writes its line, if that is
        late, too. Returns them; None if no step is late."""
        late, self._late = self._late, None
        if late is None:
            return None
        found = late.read()
        self._skip_broken(late.recorded, found.norm, late.step, found.losses)
        if late.line is not None:
            late.line(found)
        return found

    @overrides
    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Logs with the sum of the losses that the host may have already, or leaves the line of a
        step that is late to `_end_step`."""
        control, late = self.control, self._late
        acts = control.should_evaluate or control.should_save
        acts |= control.should_training_stop or control.should_epoch_stop
        if late is not None and control.should_log and not acts and late.line is None:
            counted, memory = self.throughput.cut(), memory_figures(self.args.device, self.runtime)
            late.line = partial(self._log_late, counted, memory, args, kwargs)
            control.should_log = False
            tr_loss.zero_()
            return
        if (control.should_log or acts) and (found := self._end_step()) is not None:
            grad_norm = found.norm
        logged, self._logged = self._logged, None
        if logged is None or not control.should_log:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            return
        super()._maybe_log_save_evaluate(logged, grad_norm, *args, **kwargs)
        tr_loss.zero_()

    def _log_late(
        self,
        counted: Throughput,
        memory: dict[str, float],
        args: Any,
        kwargs: Any,
        found: StepNumbers,
    ) -> None:
        """Writes the line of a step that was late, with the figures of its end."""
        if found.pending is not None:
            counted.settle(found.pending)
        self._figures = counted.read() | memory
        self.control.should_log = True
        logged = torch.tensor(found.logged, dtype=self._tr_loss.dtype)
        super()._maybe_log_save_evaluate(logged, found.norm, *args, **kwargs)

    def _clip_by_engine(self, model: Any, max_norm: float) -> Tensor | None:
        if self.exact:
            return self.exact.clip(max_norm)
        return self.engine.clip_grad_norm(self.accelerator, model.parameters(), max_norm)

    @overrides
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.tally.read(self.accelerator)
            found, self._figures = self._figures, None
            logs |= found or figures(self.throughput, self.args.device, self.runtime)
            logs["tokens"] = self.state.num_input_tokens_seen
            self._log_skipped(logs)
        super().log(logs, start_time)

    def _log_skipped(self, logs: dict[str, float]) -> None:
        """Counts skipped steps in a logged line. A line of skipped steps alone has no loss (Trainer
        would say 0)."""
        if self._skipped_steps:
            logs["skipped_steps"] = self._skipped_steps
            if self._skipped_steps >= self.state.logging_steps:
                del logs["loss"], logs["grad_norm"]
        self._skipped_steps = 0
