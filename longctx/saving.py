"""Puts a written checkpoint in its place, and says what is wrong when the disk does not take it.

    space   the last checkpoint's size must be free before the next one is begun
    write   into the staging folder of longctx/checkpoint.py
    place   flush to disk, manifest.json (every file's size), rename, then delete the oldest

Every process attempts each of the three and all agree on the outcome before the next, so that none
waits for one whose disk was full (but DeepSpeed, in whose own files a failure of a single process
leaves the others waiting for it). Old checkpoints are deleted last, and renamed first, so a kill
at any moment leaves the newest one whole and no half of an old one that looks whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from longctx.agreement import gather
from longctx.checkpoint import publish, staging_path
from longctx.config import UserError, say
from longctx.metrics import GIB
from longctx.resume import MANIFEST


def attempt(work: Callable[[], None]) -> str | None:
    """Runs `work` in every process; None, or what a disk did to one of them, in all of them."""
    reason = None
    try:
        work()
    except (Exception, CheckpointException) as error:  # FSDP2's is no Exception
        reason = disk_problem(error)
        if reason is None:
            raise
    return next((found for found in gather(reason) if found), None)


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


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises OSError if fewer bytes are free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            f"{free_bytes / GIB:.2f} GiB free, {needed_bytes / GIB:.2f} GiB needed in {folder}"
        )


def place(staged: Path, checkpoint: Path) -> int:
    """Moves a written checkpoint to its place; returns its size in bytes."""
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
    found = [p for p in run_dir.iterdir() if re.fullmatch(r"checkpoint-\d+", p.name)]
    found.sort(key=lambda p: (p.stat().st_mtime_ns, int(p.name.split("-")[1])))
    kept = {path.resolve() for path in keep}
    surplus = len(found) - max(limit, len(kept))
    for path in [p for p in found if p.resolve() not in kept][: max(0, surplus)]:
        doomed = staging_path(path)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def report(reason: str, what: Path, *, stop: bool) -> None:
    """Says that `what` was not saved. Raises UserError if the run is to stop."""
    line = f"{what.name} was not saved in {what.parent}: {reason}"
    if not stop:
        say(f"{line}; training goes on, earlier checkpoints are whole")
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
