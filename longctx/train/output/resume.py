"""Which checkpoint a run continues from, and reading it: damage is one clear error, and nothing in
it is run. Files are mapped, not copied.

`last` is the newest one that agrees with its manifest. Later ones are set aside, so that a run has
one timeline: what `last` finds afterwards was trained on from here.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import serialization
from torch.distributed.checkpoint import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.serialization import config as torch_files
from transformers import TrainerState

from longctx.errors import UserError, one_line, print_rank0, shortened
from longctx.system import expanded
from longctx.train.options.config import TrainArguments
from longctx.train.output import ABANDONED, STATE, checkpoint_step, checkpoints
from longctx.train.output.manifest import Damaged, check_files, unlisted
from longctx.train.safety.strange_files import read_json, tensor_problem

# --- choosing --------------------------------------------------------------------------------


def resolve_resume(args: TrainArguments) -> Path | None:
    """Returns the checkpoint to resume from. `last` (or `true`) means the newest whole one in
    output_dir; so does `auto`, which starts a new run where there is none yet (a job that is
    requeued).

    The first process reads checkpoints and compares their checksums; the others hear the outcome.
    Raises UserError for a folder that is not a whole checkpoint.
    """
    outcome: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            outcome[0] = _resolve(args)
        except UserError as error:
            outcome[1] = str(error)
    if args.world_size > 1:
        outcome = broadcast_object_list(outcome)
    checkpoint, problem = outcome
    if problem is not None:
        raise UserError(problem)
    return checkpoint


def _resolve(args: TrainArguments) -> Path | None:
    name = args.resume_from_checkpoint
    if name is None or name.lower() == "false":
        return None
    output_dir = Path(str(args.output_dir))
    if name.lower() == "auto" and not checkpoints(output_dir):
        return None
    if name.lower() in ("last", "true", "auto"):
        return _last_whole(output_dir)
    path = expanded(name)
    if not os.path.isdir(path):  # also for a name that is too long
        raise UserError(f"--resume_from_checkpoint: no such folder: {path}")
    if problem := integrity_problem(path):
        raise UserError(
            f"--resume_from_checkpoint: {path} is no whole checkpoint ({problem}); "
            "name a checkpoint-N folder, `last` or `auto`"
        )
    return path


def _last_whole(output_dir: Path) -> Path:
    found = checkpoints(output_dir)
    for path in reversed(found):
        problem = integrity_problem(path)
        if problem is None:
            return path
        print_rank0(f"not resuming from {path}: {problem}")
    whole = "whole " if found else ""
    raise UserError(f"nothing to resume: {output_dir} holds no {whole}checkpoint-N folder")


def integrity_problem(checkpoint: Path) -> str | None:
    """Returns as a short reason what is missing or damaged in a checkpoint; None for a whole
    one."""
    try:
        global_step(checkpoint)
        check_files(checkpoint)
        if others := unlisted(checkpoint):
            names = shortened(", ".join(others), 300)
            print_rank0(f"{checkpoint} holds files that were not saved with it: {names}")
        return tensor_problem(checkpoint)
    except Damaged as problem:
        return str(problem)


def global_step(checkpoint: Path) -> int:
    """Returns the steps it was trained for. Raises Damaged."""
    return read_state(checkpoint).global_step


def resuming(checkpoint: Path) -> str:
    """Returns the line that says from where a run goes on. Raises Damaged."""
    state = read_state(checkpoint)
    tokens = state.num_input_tokens_seen
    counted = f" and {tokens:,} tokens" if tokens else ""
    return f"resuming from {checkpoint}, after step {state.global_step}{counted}"


_NUMBERS = ("epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step")
_WORDS = ("best_model_checkpoint", "trial_name")


def read_state(checkpoint: Path) -> TrainerState:
    """Reads what transformers wrote of a run's progress, with its types. Raises Damaged."""
    try:
        content = read_json(checkpoint / STATE)
        state, step = TrainerState(**content), content["global_step"]
        if not _is_state(state) or not 0 < step == (checkpoint_step(checkpoint) or step):
            raise ValueError(step)
        return state
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Damaged(f"{STATE} is unreadable") from error


def _is_state(state: TrainerState) -> bool:
    lines: Any = state.log_history
    return (
        type(state.global_step) is int
        and all(_is_number(getattr(state, name)) for name in ("global_step", *_NUMBERS))
        and all(isinstance(getattr(state, name), (str, type(None))) for name in _WORDS)
        and isinstance(lines, list)
        and all(isinstance(line, dict) for line in lines)
        and all(_is_number(value) for line in lines for value in line.values())
    )


def _is_number(value: Any) -> bool:
    """Whether a value of a state is a number that fits in 64 bits, or None."""
    return value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)


def best_checkpoint(resume: Path, output_dir: Path) -> Path | None:
    """Returns the checkpoint that the state of `resume` names as its best, by the last part of its
    name, in the run's folder or next to `resume`: folders are moved, and a state may name any
    folder. None where it names none, or one that is not there, which is said. Raises Damaged."""
    named = read_state(resume).best_model_checkpoint
    if named is None:
        return None
    for folder in (output_dir, resume.parent):
        for path in checkpoints(folder):
            if path.name == Path(named).name and path.is_dir():
                return path
    print_rank0(
        f"{resume} names {shortened(named, 200)} as its best checkpoint, which is not in "
        f"{output_dir}: the best begins again"
    )
    return None


def set_aside_later(output_dir: Path, resume: Path) -> None:
    """Renames the checkpoints of later steps than `resume`, so that nothing continues from them.

    Raises UserError where that is not allowed.
    """
    step = global_step(resume)
    later = [path for path in checkpoints(output_dir) if int(path.name.split("-")[1]) > step]
    for path in later:
        if os.path.realpath(path) == os.path.realpath(resume):
            continue
        aside = _free_name(path.with_name(ABANDONED + path.name))
        try:
            path.rename(aside)
        except OSError as error:
            raise UserError(
                f"{path} lies after step {step} and cannot be set aside ({error.strerror}): move "
                "it, or choose another --output_dir"
            ) from error
        print_rank0(f"{path} lies after step {step}: set aside as {aside.name}")


def _free_name(path: Path) -> Path:
    names = (path if n == 1 else path.with_name(f"{path.name}.{n}") for n in range(1, 10**6))
    return next(name for name in names if not name.is_symlink() and not name.exists())


def require_whole_best(best: Path) -> None:
    """Raises UserError for one that cannot become final/."""
    if problem := integrity_problem(best):
        raise UserError(
            f"{best} was the best checkpoint and is not whole any more ({problem}): resume without "
            "--load_best_model_at_end to write final/"
        )


# --- reading ---------------------------------------------------------------------------------

_CPU_BY_NUMBER = 15
if _CPU_BY_NUMBER not in {priority for priority, *_ in serialization._package_registry}:
    # Several processes on CPUs have the device `cpu:0`, which torch 2.11 cannot read files to.
    serialization.register_package(
        _CPU_BY_NUMBER, lambda tensor: None, lambda to, place: to if place[:4] == "cpu:" else None
    )


@contextmanager
def mapped_files() -> Iterator[None]:
    """Has `torch.load` map files, within, instead of reading them into memory.

    Pages are read as they are copied to the GPU, so host memory never holds all of an optimizer's
    states; on the CPU the mapped pages (private, copy on write) are themselves the states.
    """
    with torch_files.patch("load.mmap", True):  # type: ignore[attr-defined]
        yield


@contextmanager
def explained_damage(checkpoint: str | Path | None) -> Iterator[None]:
    """Turns what a damaged or malicious checkpoint raises into a UserError. transformers reads
    every .pt file with `weights_only=True`, which refuses all but tensors and plain values."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{checkpoint} holds a file that is damaged or would run code when read; nothing of it "
            "was run: resume from another checkpoint"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # a file's values raise whatever they like
        raise UserError(
            f"cannot resume from {checkpoint} ({type(error).__name__}: {one_line(error, 200)}): "
            "resume from another checkpoint"
        ) from error


Options = Sequence[Mapping[str, Any]]
"""A group of parameters each: lr, betas, weight_decay, ..."""


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """Returns what the options of this run ask of each group of parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def check_states(optimizer: Any, scheduler: Any) -> None:
    """Called after a checkpoint's states were read. Raises ValueError for numbers of steps that are
    none, and for moments that are no tensors, which would end the run in its first step or
    later."""
    exact = getattr(optimizer, "steps", None)  # whose moments were checked as they were read
    counts = [getattr(scheduler, "last_epoch", 0), *(exact or {}).values()]
    for states in optimizer.state.values() if exact is None else ():
        counts += [states["step"]] if "step" in states else []
        for name in _MOMENTS:
            if not isinstance(states.get(name), (torch.Tensor, type(None))):
                raise ValueError(f"{name} is {type(states[name]).__name__}, no tensor")
    for count in counts:
        if not 0 <= float(count) < 2**53:
            raise ValueError(f"{count} is no number of steps")


def apply_options(optimizer: Any, asked: Options, checkpoint: Path) -> None:
    """Called after a checkpoint's states were read: options come from this run, states from the
    checkpoint (torch takes both from there).

    Raises UserError where the checkpoint's optimizer is of another kind, or has no states.
    """
    groups = optimizer.param_groups
    missing = {key for group, new in zip(groups, asked, strict=True) for key in new.keys() - group}
    adaptive = any("betas" in group for group in groups)
    if missing or (adaptive and not any(map(len, optimizer.state.values()))):
        what = f"has no {', '.join(sorted(missing))}" if missing else "has no states"
        raise UserError(
            f"the optimizer in {checkpoint} is not of this run's kind ({what}): give the --optim "
            "it was trained with, or start from its weights with --model_name_or_path"
        )
    weights = [weight for group in groups for weight in group["params"]]
    for weight in weights:
        states = optimizer.state.get(weight, {})
        for moment in (states[name] for name in _MOMENTS if states.get(name) is not None):
            if moment.numel() not in (0, weight.numel()):
                raise UserError(
                    f"the optimizer in {checkpoint} is of another model: a moment has "
                    f"{tuple(moment.shape)}, its weight {tuple(weight.shape)}"
                )
    without = sum(not optimizer.state.get(weight) for weight in weights)
    if adaptive and without:
        print_rank0(
            f"the optimizer in {checkpoint} has no moments for {without} of {len(weights)} "
            "weights: they start from zero"
        )
    for group, new in zip(groups, asked, strict=True):
        group.update({key: value for key, value in new.items() if key != "lr"})


def apply_learning_rate(scheduler: Any, base_lrs: Sequence[float]) -> None:
    """Sets the rate of this run's schedule after the checkpoint's steps; the same bits if nothing
    has changed. A schedule that is no function of the step (on a plateau of the loss) stays where
    it was."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(scheduler, LambdaLR):
        return
    scheduler.base_lrs[:] = base_lrs
    factors = [function(scheduler.last_epoch) for function in scheduler.lr_lambdas]
    rates: list[Any] = [base * factor for base, factor in zip(base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
