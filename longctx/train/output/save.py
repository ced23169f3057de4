"""Saving a folder so that it is whole or absent, whatever happens meanwhile.

    space     the last checkpoint's size must be free before the next one is begun
    write     into <output_dir>/.incomplete-checkpoint-N/checkpoint-N
    publish   manifest.json, flush to disk, rename; then delete the oldest

A rename is atomic, so a run killed at any moment leaves the whole checkpoint or a folder that
nothing takes for one (folder.py sweeps those up). Old checkpoints are deleted last, and renamed
first, so that no half of one looks whole. Every process tries each step and all agree on its
outcome before the next, so that none waits for one whose disk was full (but DeepSpeed, in whose own
files a failure of a single process leaves the others waiting for it).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from longctx.constants import GIB
from longctx.errors import UserError, print_rank0
from longctx.train.output import checkpoints
from longctx.train.output.manifest import write_manifest
from longctx.train.output.removal import discard, discard_renamed, link_target, remove, staging_path

_OS_ERROR = re.compile(r"([^:]+) \(os error \d+\)")
"""Matches what Rust (safetensors, tokenizers) says of a failed system call."""
_CPP_STREAMS = ("inline_container", "PytorchStreamWriter", "basic_ios::clear", "iostream error")
"""Words by which to tell what torch's C++ says of a failed write."""


def common_staging(path: Path) -> Path:
    """Returns `staging_path`, the same in every process."""
    found: list[Any] = [None]
    if int(os.environ.get("RANK", "0")) == 0:
        found = [staging_path(path)]
    return broadcast_object_list(found)[0]


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


def disk_problem(error: BaseException | None) -> str | None:
    """Returns what went wrong in one line if it is a failure to write files; None for anything
    else."""
    if error is None:
        return None
    if isinstance(error, CheckpointException):
        found = (disk_problem(failure) for failure, _ in error.failures.values())
        return next((reason for reason in found if reason), None)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if rust := _OS_ERROR.search(text):
        return rust[1].strip()
    if isinstance(error, SafetensorError) and "I/O error" in text:
        return text.split("I/O error:")[-1].strip()
    if any(word in text for word in _CPP_STREAMS):
        return "a file could not be written whole"
    return disk_problem(error.__cause__)


def publish(
    staged: Path, path: Path, run: Mapping[str, Any] | None = None, *, replace: bool = True
) -> int:
    """Gives a written folder its manifest and its name; an older one there is replaced, or with
    `replace` false stays and is an OSError. Returns its size in bytes; `run` is what definition.py
    says. Raises OSError."""
    size_bytes = write_manifest(staged, run)
    # A rename may reach the disk before the data it publishes: after a power cut the newest
    # checkpoint would be empty, and the one before it deleted.
    for written in [*staged.rglob("*"), staged]:
        _flush(written)
    older = staging_path(path.with_name(path.name + "-replaced"))
    replaces, target = replace and os.path.lexists(path), link_target(path)
    if replaces:
        path.rename(older)
    try:
        staged.rename(path)
    except OSError:
        if replaces:
            older.rename(path)
        raise
    _flush(path.parent)
    if target is not None:
        print_rank0(f"{path} was a link to {target}: it is a folder now, {target} stays as it was")
    if replaces:
        discard_renamed(older, path)
    return size_bytes


def rotate(run_dir: Path, limit: int | None, keep: set[Path]) -> None:
    """Deletes the oldest checkpoints until `limit` are left, but never those of `keep`."""
    if not limit:
        return
    found = checkpoints(run_dir)
    kept = set(map(os.path.realpath, keep))
    surplus = len(found) - max(limit, len(kept))
    for path in [p for p in found if os.path.realpath(p) not in kept][: max(0, surplus)]:
        discard(path)


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


def remove_staging(staging: Path) -> None:
    """Removes what a failed save leaves half done."""
    if reason := remove(staging):
        print_rank0(f"{staging} could not be deleted: {reason}")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some filesystems flush no folders
            raise
    finally:
        os.close(handle)
