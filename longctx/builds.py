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
from torch.utils.cpp_extension import get_default_build_root

from longctx.errors import UserError

QUIET_S = 180  # a build of another machine, in a shared home, writes something more often than this
GRACE_S = 10  # of the other processes, in which the first one removes a lock


def wait_for_builds() -> None:
    """Returns when no extension is being built.

    A lock that no process of this machine holds is removed when its folder has not changed for
    `QUIET_S` seconds. To be called before a run's own first build: who already waits in torch takes
    the removal for the end of the build. Raises UserError where a lock may not be removed.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    locks = (
        Path(folder).glob("*/lock") if folder else Path(get_default_build_root()).glob("*/*/lock")
    )
    for lock in locks:
        others = set(lock.parent.glob("*")) - {lock}
        if not others or lock.with_name("build.ninja") in others:  # or it is none of torch's
            _wait_for(lock, first=os.environ.get("LOCAL_RANK", "0") == "0")


def _wait_for(lock: Path, first: bool) -> None:
    told = False
    while lock.exists():
        held = _is_held(lock)
        left_s = _changed(lock.parent) + QUIET_S - time.time()
        if not held and left_s <= (0 if first else -GRACE_S):
            _remove(lock)
            return
        if first and not told:
            if held:
                print(f"waiting for another run's build in {lock.parent}", flush=True)
            else:
                print(
                    f"waiting up to {left_s:.0f} s: {lock} belongs to a build on another machine, "
                    "or to one that was killed (then it can be deleted)",
                    flush=True,
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
    print(f"removed {lock}, which a build that was killed had left", flush=True)
