"""A checkpoint's whole life: written aside, published, rotated; found damaged or whole, and read.

    space     the last checkpoint's size must be free before the next one is begun
    write     into <output_dir>/.incomplete-checkpoint-N/checkpoint-N
    publish   flush to disk, manifest.json (every file's size), rename; then delete the oldest
    choose    `last` is the newest whole one: its state can be read, every file has its size
    read      mapped, without running code from it; damage is one clear error

A rename is atomic, so a run killed at any moment leaves the whole checkpoint or a folder that
nothing takes for one (`output_dir.py` sweeps those up). Old checkpoints are deleted last, and
renamed first, so that no half of one looks whole. Every process tries each step and all agree on
its outcome before the next, so that none waits for one whose disk was full (but DeepSpeed, in whose
own files a failure of a single process leaves the others waiting for it).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from torch.utils.serialization import config as torch_files
from transformers import TrainerState

from longctx.config import TrainArguments
from longctx.errors import UserError, print_rank0
from longctx.memory.plan import GIB

STAGING = ".incomplete-"
STATE = "trainer_state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_READ_ERRORS = (SafetensorError, OSError, EOFError, RuntimeError, ValueError, LookupError)


def checkpoint_step(path: Path) -> int | None:
    """N of a folder called checkpoint-N; None for any other name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


# --- writing ---------------------------------------------------------------------------------


def staging_path(path: Path) -> Path:
    """An empty path beside `path` to write into."""
    staging = path.with_name(STAGING + path.name)
    shutil.rmtree(staging, ignore_errors=True)
    return staging


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises OSError if fewer bytes are free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            f"{free_bytes / GIB:.2f} GiB free, {needed_bytes / GIB:.2f} GiB needed in {folder}"
        )


def try_on_all_ranks(work: Callable[[], None]) -> str | None:
    """Runs `work` in every process; None, or what a disk did to one of them, in all of them."""
    reason = None
    try:
        work()
    except (Exception, CheckpointException) as error:  # FSDP2's is no Exception
        reason = disk_problem(error)
        if reason is None:
            raise
    return next((found for found in gather_object([reason]) if found), None)


def disk_problem(error: BaseException) -> str | None:
    """What went wrong, if it is a failure to write files, in one line; None for anything else."""
    if isinstance(error, CheckpointException):
        found = (disk_problem(failure) for failure, _ in error.failures.values())
        return next((reason for reason in found if reason), None)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, SafetensorError) and "I/O error" in str(error):
        return str(error).split("I/O error:")[-1].strip()
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
        return "a file could not be written whole"  # all that torch.save says of a full disk
    return None


def publish(staging: Path, path: Path) -> None:
    """Renames a finished folder into its place; an older one there is replaced."""
    if path.exists():
        old = staging_path(path.with_name(path.name + "-replaced"))
        path.rename(old)
        staging.rename(path)
        shutil.rmtree(old)
    else:
        staging.rename(path)


def publish_checkpoint(staged: Path, checkpoint: Path) -> int:
    """Publishes a written checkpoint with its manifest; returns its size in bytes."""
    sizes_bytes = {}
    for path in sorted(p for p in staged.rglob("*") if p.is_file()):
        sizes_bytes[str(path.relative_to(staged))] = path.stat().st_size
    (staged / MANIFEST).write_text(json.dumps(sizes_bytes, indent=1), encoding="utf-8")
    # A rename may reach the disk before the data it publishes: after a power cut the newest
    # checkpoint would be empty, and the one before it deleted.
    for path in [*staged.rglob("*"), staged]:
        _flush(path)
    publish(staged, checkpoint)
    staged.parent.rmdir()
    _flush(checkpoint.parent)
    return sum(sizes_bytes.values())


def rotate(run_dir: Path, limit: int | None, keep: set[Path]) -> None:
    """Deletes the checkpoints saved first until `limit` are left, but never those of `keep`."""
    if not limit:
        return
    found = [p for p in run_dir.iterdir() if checkpoint_step(p) is not None]
    found.sort(key=lambda p: (p.stat().st_mtime_ns, checkpoint_step(p)))
    kept = {path.resolve() for path in keep}
    surplus = len(found) - max(limit, len(kept))
    for path in [p for p in found if p.resolve() not in kept][: max(0, surplus)]:
        doomed = staging_path(path)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def report_unsaved(reason: str, what: Path, *, stop: bool) -> None:
    """Says that `what` was not saved. Raises UserError if the run is to stop."""
    line = f"{what.name} was not saved in {what.parent}: {reason}"
    if not stop:
        print_rank0(f"{line}; training goes on, earlier checkpoints are whole")
        return
    raise UserError(
        f"{line}; earlier checkpoints are whole: free some space, then continue with "
        "--resume_from_checkpoint last"
    )


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- choosing --------------------------------------------------------------------------------


def resolve_resume(args: TrainArguments) -> Path | None:
    """The checkpoint to resume from. `last` (or `true`) means the newest whole one in output_dir;
    so does `auto`, which starts a new run where there is none yet (a job that is requeued).

    Raises UserError for a folder that is not a whole checkpoint.
    """
    name = args.resume_from_checkpoint
    if name is None or name.lower() == "false":
        return None
    output_dir = Path(str(args.output_dir))
    if name.lower() == "auto" and not _checkpoints(output_dir):
        return None
    if name.lower() in ("last", "true", "auto"):
        return _last_whole(output_dir)
    path = Path(name)
    if not os.path.isdir(path):
        raise UserError(f"--resume_from_checkpoint: no such folder: {path}")
    if problem := integrity_problem(path):
        raise UserError(
            f"--resume_from_checkpoint: {path} is no whole checkpoint ({problem}); "
            "name a checkpoint-N folder, `last` or `auto`"
        )
    return path


def _last_whole(output_dir: Path) -> Path:
    found = _checkpoints(output_dir)
    for _, path in sorted(found, reverse=True):
        problem = integrity_problem(path)
        if problem is None:
            return path
        print_rank0(f"not resuming from {path}: {problem}")
    whole = "whole " if found else ""
    raise UserError(f"nothing to resume: {output_dir} holds no {whole}checkpoint-N folder")


def _checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    return [(step, p) for p in output_dir.glob("*") if (step := checkpoint_step(p)) is not None]


def integrity_problem(checkpoint: Path) -> str | None:
    """What is missing or cut off in a checkpoint, in a few words; None for a whole one."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        TrainerState(**state)
        range(state["global_step"])
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (OSError, ValueError, LookupError, TypeError):
        return f"{STATE} is unreadable"
    try:
        sizes_bytes = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).items()
    except FileNotFoundError:
        return None  # written by another program
    except (OSError, ValueError, AttributeError):
        return f"{MANIFEST} is unreadable"
    for name, size_bytes in sizes_bytes:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size_bytes:
            return f"{name} has {path.stat().st_size} of {size_bytes} bytes"
    return None


# --- reading ---------------------------------------------------------------------------------


@contextmanager
def mapped_files() -> Iterator[None]:
    """`torch.load` maps files instead of reading them into memory.

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
    except (*_READ_ERRORS, CheckpointException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot resume from {checkpoint} ({type(error).__name__}: {reason}): resume from "
            "another checkpoint"
        ) from error
