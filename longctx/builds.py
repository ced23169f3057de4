"""Locks of C++ extensions: a build that was killed must not stop every later run.

DeepSpeed compiles what it needs (CPU Adam, asynchronous I/O) on first use, through torch: one
process builds, the others wait until its lock file is gone. A build that is killed leaves the file,
and every later run would wait for it, silently and for ever.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from longctx.errors import UserError

QUIET_S = 120  # a build of another machine, in a shared home, writes something more often than this


def wait_for_builds() -> None:
    """Returns when no lock is left but those of builds that run on this machine.

    A lock that no process here holds is removed when its folder has not changed for `QUIET_S`
    seconds. Every process must come here before its first build, or it may wait in torch for a lock
    whose removal it takes for the end of the build. Raises UserError where it may not remove one.
    """
    # Not at the top: it is slow to import, and only runs with DeepSpeed need it.
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        _wait_for(lock, first=os.environ.get("LOCAL_RANK", "0") == "0")


def _wait_for(lock: Path, first: bool) -> None:
    told = False
    while lock.exists() and not _is_held(lock):
        left_s = _changed(lock.parent) + QUIET_S - time.time()
        if first and left_s <= 0:
            _remove(lock)
            return
        if first and not told:
            print(
                f"waiting up to {left_s:.0f} s: {lock} belongs to a build on another machine, or "
                "to one that was killed (then it can be deleted)"
            )
            told = True
        time.sleep(0.5)


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the file open, as torch does while it builds."""
    path = str(lock.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == path for file in process.open_files()):
                return True
        except (psutil.Error, OSError):  # it has ended, or is another user's
            continue
    return False


def _changed(folder: Path) -> float:
    """When something in the folder was last written, in seconds since the epoch."""
    times = []
    for path in [folder, *folder.glob("*")]:
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # compilers' temporary files come and go
            continue
    return max(times, default=0.0)


def _remove(lock: Path) -> None:
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{lock} was left by a build that was killed and no run can go on while it is there: "
            f"delete it ({error.strerror})"
        ) from error
    print(f"removed {lock}, which a build that was killed had left")
