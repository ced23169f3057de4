"""Checkpoints that are whole or absent, and the checks that come before the first step.

A checkpoint is written into `<output_dir>/.incomplete-<name>` and renamed to its place when every
file is there. A rename is atomic, so a killed run leaves either the whole checkpoint or a folder
that nothing takes for one; `clear_output_dir` sweeps those up.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from longctx.config import TrainArguments, UserError, say
from longctx.metrics import GIB
from longctx.report import METRICS
from longctx.resume import damage

_STAGING = ".incomplete-"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
FINAL = "final"


def staging_path(path: Path) -> Path:
    """An empty path beside `path` to write into."""
    staging = path.with_name(_STAGING + path.name)
    shutil.rmtree(staging, ignore_errors=True)
    return staging


def publish(staging: Path, path: Path) -> None:
    """Moves a finished folder to its place; an older one there is replaced."""
    if path.exists():
        old = staging_path(path.with_name(path.name + "-replaced"))
        path.rename(old)
        staging.rename(path)
        shutil.rmtree(old)
    else:
        staging.rename(path)


def resolve_resume(args: TrainArguments) -> Path | None:
    """The checkpoint to resume from. `last` (or `true`) means the newest whole one in output_dir.

    Raises UserError for a folder that is not a whole checkpoint.
    """
    name = args.resume_from_checkpoint
    if name is None or name.lower() == "false":
        return None
    if name.lower() in ("last", "true"):
        return _last_whole(Path(str(args.output_dir)))
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"--resume_from_checkpoint: no such folder: {path}")
    if problem := damage(path):
        raise UserError(
            f"--resume_from_checkpoint: {path} is no whole checkpoint ({problem}); "
            "name a checkpoint-N folder, or `last`"
        )
    return path


def _last_whole(output_dir: Path) -> Path:
    found = [p for p in output_dir.glob("checkpoint-*") if _CHECKPOINT.fullmatch(p.name)]
    for path in sorted(found, key=lambda p: int(p.name.split("-")[1]), reverse=True):
        problem = damage(path)
        if problem is None:
            return path
        say(f"not resuming from {path}: {problem}")
    whole = "whole " if found else ""
    raise UserError(f"nothing to resume: {output_dir} holds no {whole}checkpoint-N folder")


def open_output_dir(args: TrainArguments) -> Path:
    """Makes the folder if need be. Raises UserError where that is impossible."""
    output_dir = Path(str(args.output_dir))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create --output_dir {output_dir}: {error.strerror}") from error
    return output_dir


def check_output_dir(output_dir: Path, args: TrainArguments, resume: Path | None) -> None:
    """Raises UserError if an earlier run is there that is neither resumed nor to be overwritten.

    Nothing in the folder is touched yet.
    """
    if resume is None and not args.overwrite_output_dir and _earlier_run(output_dir):
        raise UserError(
            f"{output_dir} holds an earlier run: continue it with --resume_from_checkpoint last, "
            "replace it with --overwrite_output_dir, or choose another --output_dir"
        )


def clear_output_dir(output_dir: Path, resume: Path | None) -> None:
    """Deletes what a killed run left half done and, unless resuming, the run to be overwritten.

    Called when everything else is known to work, by one process.
    """
    leftovers = list(output_dir.glob(_STAGING + "*"))
    for path in leftovers + ([] if resume else _earlier_run(output_dir)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _earlier_run(output_dir: Path) -> list[Path]:
    return [
        path
        for path in output_dir.iterdir()
        if _CHECKPOINT.fullmatch(path.name) or path.name in (FINAL, METRICS)
    ]


def check_disk_space(output_dir: Path, weights_bytes: int, args: TrainArguments) -> None:
    """Raises UserError if the disk cannot take one checkpoint and the final model.

    A checkpoint is the weights and, unless `save_only_model`, two Adam moments as large as them.
    Engines save all three in fp32, DeepSpeed the model's weights too.
    """
    fp32 = 2 if args.engine != "plain" and (args.bf16 or args.fp16) else 1
    whole = {"plain": 3, "fsdp": 3 * fp32, "deepspeed": 1 + 3 * fp32}[args.engine]
    checkpoint = 0 if args.save_strategy == "no" else 1 if args.save_only_model else whole
    copies = 1 + checkpoint
    needed_bytes, free_bytes = copies * weights_bytes, shutil.disk_usage(output_dir).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"no space for the checkpoint: {output_dir} has {free_bytes / GIB:.2f} GiB free and "
            f"{needed_bytes / GIB:.2f} GiB are needed; free some, choose another --output_dir, "
            "or use --save_strategy no --save_only_model"
        )
