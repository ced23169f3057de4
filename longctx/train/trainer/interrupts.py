"""SIGTERM, Ctrl-C, SIGHUP: the step that runs is finished, a checkpoint is saved, the run exits.

The exit status is 128 + the signal's number (143 for SIGTERM, 130 for Ctrl-C, 129 for a terminal
that is gone), as shells report it, so that a script or scheduler does not take an interrupted run
for a finished one. A signal that is ignored when training begins, as SIGHUP is under `nohup`, stays
ignored. A second signal ends the process at once. Only a whole step can be resumed exactly, so the
time until the checkpoint begins is up to one step (and an evaluation, if the signal comes during
one; none is begun any more). With several processes a signal to any of them stops all.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from longctx.errors import print_rank0
from longctx.loop.collectives import all_reduce_max

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupts(TrainerCallback):
    """Turns the first signal into a save and a stop, as a context around training."""

    def __init__(self) -> None:
        self.stopped_by = 0
        """The signal that ended training, the same in every process; 0 for none."""
        self._received = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self.stopped_by = self._received = 0
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            heard = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agree(args.device):
            control.should_training_stop = True
            control.should_evaluate = False
            control.should_save = args.save_strategy != "no"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped_by:  # Trainer still ends the epoch, and would evaluate or save once more
            control.should_evaluate = control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agree(args.device):
            control.should_training_stop = True

    def agree(self, device: Any) -> int:
        """Returns the signal that any process has received, or 0."""
        self.stopped_by = all_reduce_max(self._received, device)
        return self.stopped_by

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a data loader's worker: it ends when this process does
            return
        self._received = number
        for again in self._before:
            signal.signal(again, signal.SIG_DFL)
        print_rank0(
            f"{signal.Signals(number).name}: stopping after this step; once more to stop at once"
        )

    def exit_if_stopped(self, saved: bool) -> None:
        """Ends the process with the signal's status if a signal ended training."""
        if not self.stopped_by:
            return
        how = "continue with --resume_from_checkpoint last" if saved else "nothing was saved"
        print_rank0(f"stopped by {signal.Signals(self.stopped_by).name}: {how}")
        raise SystemExit(128 + self.stopped_by)
