"""Around a training step: room for activations, the clock, metrics.jsonl, run.json, the console."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from longctx.any_model.runtime import any_runtime_of
from longctx.constants import GIB
from longctx.errors import on_terminal, print_rank0, say
from longctx.families.families import base_of
from longctx.families.strangers import why_not_scheduled
from longctx.loop.collectives import all_reduce_min
from longctx.loop.host_link import shared_link_bytes
from longctx.loop.metrics import Throughput
from longctx.train.output import METRICS
from longctx.train.output.record import Record, write_record
from longctx.train.output.save import disk_problem


class Reserve(TrainerCallback):
    """Makes room for the activations when everything else has its memory, before the first step:
    host memory that is short shows there. Processes of one host look at what it has free before any
    takes its share, and go by the least that one of them saw."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model, self.tokens = model, tokens  # patched

    def _covered(self) -> bool:
        base = base_of(self.model)
        return base is not None and why_not_scheduled(base) is None

    def on_train_begin(self, args: Any, *more: Any, **kwargs: Any) -> None:
        if self._covered():
            runtime = self.model.longctx
            if args.device.type == "cuda":
                runtime.surround(link_bytes=shared_link_bytes(args.device))
            host_bytes = all_reduce_min(runtime.store.host_bytes(), args.device)
            if runtime.reserve(self.model, self.tokens, host_bytes):
                line = runtime.describe(self.model.config.get_text_config().vocab_size)
                print_rank0(line + _locked(runtime.store.locked_bytes, host_bytes))


class ReserveInputs(TrainerCallback):
    """Makes room for the inputs of Hugging Face's layers before the first step, in a model patched
    with class_type any."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model, self.tokens = model, tokens

    def on_train_begin(self, args: Any, *more: Any, **kwargs: Any) -> None:
        runtime = any_runtime_of(self.model)
        if runtime is None or runtime.reserved_tokens >= self.tokens:
            return
        if args.device.type == "cuda":
            runtime.surround(link_bytes=shared_link_bytes(args.device))
        host_bytes = all_reduce_min(runtime.store.host_bytes(), args.device)
        runtime.reserve(self.model, self.tokens, host_bytes)
        print_rank0(runtime.describe() + _locked(runtime.store.locked_bytes, host_bytes))


def _locked(nbytes: int, limit: int) -> str:
    """Returns the locked memory in words. The plan says it beforehand, of a host that has other
    things in its memory now."""
    if not nbytes:
        return ""
    return f"; {nbytes / GIB:.1f} of {limit / GIB:.1f} GiB of host memory that a process may lock"


class Clock(TrainerCallback):
    """Times steps from the end of one to the end of the next, saves and evaluations left out, as
    the host sees them: what the GPU still does at the end of a step is of the next one. That is its
    update, and all of a step that is late (step_end.py). Counts the run's tokens in Trainer's
    state, which checkpoints hold."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.throughput.start_clock()

    on_save = on_evaluate = on_train_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tokens = self.throughput.step_done()
        if args.include_num_input_tokens_seen == "no":  # or Trainer counts, as it was asked to
            state.num_input_tokens_seen += tokens


class MetricsFile(TrainerCallback):
    """Appends every logged line to `metrics.jsonl`; a resumed run drops the lines it repeats."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / METRICS
        if not state.is_world_process_zero or not path.exists():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text[: text.rfind("\n") + 1].splitlines()  # a killed run may leave half a line
        kept = [line for line in lines if _step(line) <= state.global_step]
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            print_rank0(f"{path} keeps lines of steps that are repeated: {error.strerror}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
        except OSError as error:
            print_rank0(f"step {state.global_step} is missing in {path}: {error.strerror}")


def _step(line: str) -> float:
    """Returns the step of a line of metrics.jsonl; beyond all steps for one that is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return float("inf")


class RunFile(TrainerCallback):
    """Writes `run.json` after the first step: a start that fails before leaves the folder alone."""

    def __init__(self, record: Record, *, resumed: bool) -> None:
        self.record, self.resumed, self.written = record, resumed, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and not self.written:
            write_record(Path(args.output_dir), self.record, resumed=self.resumed)
        self.written = True


class Reporter:
    """A reporting integration of transformers (TensorBoard, ...) whose full disk ends no run."""

    def __init__(self, callback: TrainerCallback) -> None:
        self._callback = callback
        self._said = False

    def write_to(self, folder: Path) -> None:
        """Sets where TensorBoard's files go, if TENSORBOARD_LOGGING_DIR does not say it."""
        if getattr(self._callback, "logging_dir", folder) is None:
            vars(self._callback)["logging_dir"] = str(folder)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._callback, name)
        return self._guarded(method) if name.startswith("on_") else method

    def _guarded(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                if (reason := disk_problem(error)) is None:
                    raise
                if not self._said:
                    name = type(self._callback).__name__
                    print_rank0(f"{name} cannot write: {reason}; training goes on without it")
                self._said = True

        return call


def spare_reporters(handler: Any) -> None:
    """Wraps transformers' own reporting callbacks, of --report_to, in `Reporter`."""
    handler.callbacks = [
        Reporter(callback)
        if type(callback).__module__.startswith("transformers.integr")
        else callback
        for callback in handler.callbacks
    ]


def is_known(callback: Any) -> bool:
    """Whether a callback is transformers' or longctx's."""
    return type(callback).__module__.startswith(("transformers.", "longctx."))


def has_own(callback: Any, event: str) -> bool:
    """Whether a callback has a method of its own for an event."""
    method = getattr(callback, event, None)
    return getattr(method, "__func__", method) is not getattr(TrainerCallback, event)


def flush_before_others(handler: Any, flush: Callable[[], None]) -> None:
    """Ends outstanding updates before an event for which a callback that is neither transformers'
    nor longctx's has a method: it may read weights, unless it says `reads_weights = False`."""

    def may_read(callback: Any, event: str) -> bool:
        known = is_known(callback) or not getattr(callback, "reads_weights", True)
        return not known and has_own(callback, event)

    call = handler.call_event

    def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
        if any(may_read(callback, event) for callback in handler.callbacks):
            flush()
        return call(event, *args, **kwargs)

    handler.call_event = call_event


class Console(ProgressCallback):
    """The progress bar, with one readable line per logged step."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        if not logs or not {"loss", "eval_loss"} & logs.keys():
            return
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(format_line(state.global_step, state.max_steps, logs))


class Lines(TrainerCallback):
    """Prints a line with the time of day for each logged step, instead of the progress bar, whose
    redrawn line would fill a file."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        if logs and {"loss", "eval_loss"} & logs.keys() and state.is_world_process_zero:
            line = format_line(state.global_step, state.max_steps, logs)
            say(f"{datetime.now():%H:%M:%S}  {line}")


def console(args: Any) -> TrainerCallback:
    """Shows a run's steps: a bar on a terminal, lines in a file and with --disable_tqdm."""
    return Console() if on_terminal() and not args.disable_tqdm else Lines()


def format_line(step: int, steps: int, logs: dict[str, float]) -> str:
    """Returns one logged step for people: `step  3/40  loss 8.7102  lr 3.00e-04  grad  1.20 ...`.
    Each figure has the same width in every step, so that lines make columns."""
    formats = {
        "loss": "loss {:.4f}",
        "eval_loss": "eval loss {:.4f}",
        "rewards/margins": "margin {:.3g}",
        "rewards/accuracies": "accuracy {:.0%}",
        "eval_rewards/margins": "eval margin {:.3g}",
        "eval_rewards/accuracies": "eval accuracy {:.0%}",
        "margin": "margin {:.3g}",
        "accuracy": "accuracy {:.0%}",
        "eval_accuracy": "eval accuracy {:.0%}",
        "kl": "KL {:.3g}",
        "learning_rate": "lr {:.2e}",
        "grad_norm": "grad {:#5.3g}",
        "step_s": "{:5.2f} s/step",
        "tokens_per_s": "{:6,.0f} tok/s",
        "mfu": "MFU {:.1%}",
        "peak_gpu_gib": "GPU {:5.2f} GiB",
        "peak_host_gib": "host {:5.2f} GiB",
    }
    figures = [form.format(float(logs[key])) for key, form in formats.items() if key in logs]
    return "  ".join([f"step {step:{len(str(steps))}}/{steps}", *figures])
