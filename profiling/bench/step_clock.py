"""Times steps on the GPU's own clock, without a synchronisation inside any of them.

`Clock.mark` records an event of CUDA where a phase begins; the seconds between events are read when
all steps are over. A step lasts from its begin to the begin of the next, so that everything a
trainer does between two steps counts. Without a GPU the marks are the host's seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from longctx.constants import GIB

IDLE_STEPS = 2
"""Steps after the timed ones, in which torch's profiler sees how long the GPU is busy."""
PHASES = {"forward": "fwd_s", "backward": "bwd_s", "optimizer": "opt_s", "rest": "rest_s"}


class Clock:
    """Seconds and peaks of `timed` steps that come after `warm_up` others."""

    def __init__(self, warm_up: int, timed: int, idle_steps: int | None = None) -> None:
        self.warm_up, self.timed = warm_up, timed
        self.idle_steps = IDLE_STEPS if idle_steps is None else idle_steps
        self.on_gpu = torch.cuda.is_available()
        self.steps: list[dict[str, Any]] = []
        """When each phase of each step began."""
        self.found: dict[str, float] = {}
        watches = self.on_gpu and self.idle_steps > 0
        self.profiler = profile(activities=[ProfilerActivity.CUDA]) if watches else None

    @property
    def total(self) -> int:
        """The steps to run."""
        return self.warm_up + self.timed + self.idle_steps

    def mark(self, phase: str) -> None:
        """Says that a phase begins; `forward` begins a step."""
        if phase == "forward":
            self.steps.append({})
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.steps[-1][phase] = now
        if phase == "forward" and self.on_gpu:
            self._watch_memory(len(self.steps) - 1)

    def _watch_memory(self, begun: int) -> None:
        if begun == self.warm_up:
            torch.cuda.reset_peak_memory_stats()
        elif begun == self.warm_up + self.timed:
            self.found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            self.found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            if self.profiler is not None:
                torch.cuda.synchronize()
                self.profiler.start()

    @property
    def timed_steps(self) -> range:
        """The numbers of the timed steps."""
        return range(self.warm_up, self.warm_up + self.timed)

    @property
    def timed_s(self) -> float:
        """The seconds of all timed steps, once they are over (`columns`)."""
        first, end = self.timed_steps.start, self.timed_steps.stop
        return self._seconds(self.steps[first]["forward"], self.steps[end]["forward"])

    def columns(self) -> dict[str, float]:
        """The medians of the timed steps, once `total` steps are over. A phase that was not marked
        in each of them has no column."""
        if self.on_gpu:
            torch.cuda.synchronize()
        if self.profiler is not None:
            self.profiler.stop()
        pairs = [(self.steps[i], self.steps[i + 1]) for i in self.timed_steps]
        whole = [self._seconds(one["forward"], after["forward"]) for one, after in pairs]
        seconds = {"step_s": statistics.median(whole), "slowest_s": max(whole)}
        if self.profiler is not None:
            self.found |= idle_column(self.profiler, self.idle_steps, seconds["step_s"])
        names = list(PHASES)
        for phase, end in zip(names, [*names[1:], None], strict=True):
            if all({phase, end or phase} <= one.keys() for one, _ in pairs):
                seconds[PHASES[phase]] = statistics.median(
                    self._seconds(one[phase], one[end] if end else after["forward"])
                    for one, after in pairs
                )
        return {**seconds, **self.found, "steps": self.timed}

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin


class TrainerMarks(TrainerCallback):
    """Gives a clock the steps of a trainer. Only accelerate's backward is wrapped: hooks on the
    model might change what runs."""

    reads_weights = False

    def __init__(self, trainer: Any, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        accelerator = self.trainer.accelerator
        accelerator_backward = accelerator.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self.clock.mark("backward")
            accelerator_backward(*args, **kwargs)
            self.clock.mark("optimizer")

        accelerator.backward = backward

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.mark("forward")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.mark("rest")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.mark("forward")  # where the last step ends


def time_trainer(trainer: Any, clock: Clock) -> None:
    """Runs a trainer of `clock.total` steps."""
    trainer.add_callback(TrainerMarks(trainer, clock))
    trainer.train()


def time_loop(
    model: Any,
    batches: Sequence[dict[str, Any]],
    clock: Clock,
    autocast: bool,
    optimizer: Any = None,
) -> None:
    """Steps of a loop that does nothing but train: it clips no gradients and logs nothing, and its
    batches wait on the device. AdamW is torch's fused one unless another is given. Says on stderr
    when a step begins."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-5, fused=True)
    device = trained[0].device.type
    for step in range(clock.total):
        print(f"    {time.strftime('%X')} step {step + 1} of {clock.total}", file=sys.stderr)
        clock.mark("forward")
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(**batches[step % len(batches)]).loss
        clock.mark("backward")
        loss.backward()
        clock.mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        clock.mark("rest")
    clock.mark("forward")  # where the last step ends


def idle_column(profiler: Any, steps: int, step_s: float) -> dict[str, float]:
    """`idle`, the share of a step of `step_s` seconds in which the GPU neither computes nor copies;
    nothing where torch's profiler saw no kernel. How long the GPU is busy is what it saw of `steps`
    other steps: under the profiler a step takes longer, its kernels do not."""
    busy = covered_ns(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    )
    return {"idle": max(0.0, 1 - busy / 1e9 / (steps * step_s))} if busy else {}


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """The nanoseconds that one of these intervals or more covers."""
    covered = end = 0
    for start, stop in sorted(intervals):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered
