"""The output folder: made, locked, checked against an earlier run, and cleared when all is ready.

One run at a time has it. `fcntl.lockf` locks belong to a process and are dropped by the kernel
however it ends, SIGKILL included. (`flock` locks are shared with forked data loader workers, which
outlive a killed parent by seconds: the resumed run would be refused.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from longctx.constants import GIB
from longctx.errors import UserError, print_rank0, shortened
from longctx.train.options.config import TrainArguments
from longctx.train.output import FINAL, MANIFEST, METRICS, STAGING, STATE, checkpoints
from longctx.train.output.inputs import refuse_lost
from longctx.train.output.removal import discard, remove, require_removable
from longctx.train.output.resume import set_aside_later
from longctx.train.output.save import remove_staging

LOCK = ".lock"
_SAVED = {MANIFEST, STATE, "config.json", "adapter_config.json"}
"""One of these is in every folder that a run has saved."""


def open_output_dir(args: TrainArguments) -> Path:
    """Makes the folder if need be. Raises UserError where that is impossible."""
    output_dir = Path(str(args.output_dir))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create --output_dir {output_dir}: {error.strerror}") from error
    return output_dir


def check_output_dir(
    output_dir: Path, args: TrainArguments, resume: Path | None, inputs: Iterable[Path] = ()
) -> None:
    """Raises UserError if an earlier run is there that is neither resumed nor to be overwritten, or
    that may not be deleted: one of the `inputs` is in it, its files are protected, or no run has
    saved it.

    With `--resume_from_checkpoint auto` a run that has saved nothing is started again. Nothing in
    the folder is touched yet.
    """
    for name, is_right, kind in ((FINAL, Path.is_dir, "folder"), (METRICS, Path.is_file, "file")):
        path = output_dir / name
        if path.exists() and not is_right(path):
            raise UserError(f"{path} is no {kind}: a run writes there, move it away")
    if resume is not None:
        return
    earlier = _earlier_run(output_dir)
    started_only = {METRICS} if str(args.resume_from_checkpoint).lower() == "auto" else set()
    if not args.overwrite_output_dir and {path.name for path in earlier} - started_only:
        raise UserError(
            f"{output_dir} holds an earlier run: continue it with --resume_from_checkpoint last, "
            "replace it with --overwrite_output_dir, or choose another --output_dir"
        )
    refuse_lost(earlier, inputs)
    require_removable(earlier)
    if others := [path for path in earlier if not _is_a_runs(path)]:
        raise UserError(
            f"--overwrite_output_dir: {others[0]} holds nothing that a run has saved: move it, or "
            "choose another --output_dir"
        )


def keep_images(output_dir: Path, files: Iterable[Path]) -> None:
    """Raises UserError if one of `files`, which records name, lies in a checkpoint or in the final
    model of the folder: a run deletes them to make way, rotates them, or replaces them."""
    refuse_lost(_earlier_run(output_dir), files)


def clear_output_dir(output_dir: Path, resume: Path | None) -> None:
    """Makes way for the run: what a killed one left half done goes, and so does the run to be
    overwritten; when resuming, checkpoints of later steps are set aside.

    Called when everything else is known to work, by one process.
    """
    for path in output_dir.glob(STAGING + "*"):
        remove(path)  # what cannot be deleted stands in nobody's way
    if resume is not None:
        set_aside_later(output_dir, resume)
        return
    if earlier := _earlier_run(output_dir):
        names = ", ".join(path.name for path in earlier)
        print_rank0(f"deleting the earlier run in {output_dir}: {shortened(names, 300)}")
    for path in earlier:
        discard(path)


def _earlier_run(output_dir: Path) -> list[Path]:
    others = [path for path in (output_dir / FINAL, output_dir / METRICS) if os.path.lexists(path)]
    return checkpoints(output_dir) + others


def _is_a_runs(path: Path) -> bool:
    """Whether a run, ours or another trainer's, has written what has such a name. To delete a link
    or an empty folder loses nothing."""
    if path.is_symlink() or not path.is_dir():
        return True
    names = {entry.name for entry in path.iterdir()}
    return not names or not names.isdisjoint(_SAVED)


def check_disk_space(
    output_dir: Path, weights_bytes: int, copies: int, args: TrainArguments
) -> None:
    """Raises UserError if the disk cannot take one checkpoint and the final model.

    A checkpoint is `copies` times the weights (`Engine.checkpoint_copies`), or with
    `save_only_model` the weights alone.
    """
    checkpoint = 0 if args.save_strategy == "no" else 1 if args.save_only_model else copies
    needed_bytes, free_bytes = (1 + checkpoint) * weights_bytes, shutil.disk_usage(output_dir).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"no space for the checkpoint: {output_dir} has {free_bytes / GIB:.2f} GiB free and "
            f"{needed_bytes / GIB:.2f} GiB are needed; free some, choose another --output_dir, "
            "or use --save_strategy no --save_only_model"
        )


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """A place to write what is published as `path`, a new folder, which one process has at a time.
    What is left there when this ends is deleted, as is what a killed process left.

    Raises UserError where `path` exists, cannot be made, or is being made by another process.
    """
    if os.path.lexists(path):  # also `.` and `/`, which have no name
        raise UserError(f"{path} exists: give --output a new folder")
    staging = path.with_name(f"{STAGING}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if staging.is_symlink():
            staging.unlink()
        staging.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}") from error
    with lock_folder(staging, "--output"):
        try:
            if os.path.lexists(path):  # another process has just published it
                raise UserError(f"{path} exists: give --output a new folder")
            remove(staging / path.name)
            yield staging / path.name
        finally:
            remove_staging(staging)


def lock_folder(folder: Path, option: str = "--output_dir") -> IO[bytes]:
    """Locks `folder`, which an `option` names, until the returned file is closed or the process
    ends.

    Raises UserError if another process has it. Says so where the filesystem knows no locks.
    """
    try:
        opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        file = open(opened, "r+b", buffering=0)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                f"{folder / LOCK} is a link and would be overwritten: remove it"
            ) from error
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            file.close()
            raise UserError(
                f"{folder} is in use by {holder}: stop that run or choose another {option}"
            ) from error
        print_rank0(f"{folder} cannot be locked ({error.strerror}): start no second run in it")
        return file
    if not _is_here(file, folder / LOCK):
        file.close()
        raise UserError(f"{folder} was just deleted by another process: try again")
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError:
        pass  # a full disk: the lock is held all the same, only its holder has no name
    return file


def _is_here(file: IO[bytes], path: Path) -> bool:
    """Whether a file that was opened has not been deleted since: a lock of it would lock nobody
    out."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False
