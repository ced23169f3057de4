"""One run at a time in an output folder.

`fcntl.lockf` locks belong to a process and are dropped by the kernel however it ends, SIGKILL
included. (`flock` locks are shared with forked data loader workers, which outlive a killed parent
by seconds: the resumed run would be refused.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from longctx.config import UserError, say

LOCK = ".lock"


def lock_folder(folder: Path) -> IO[bytes]:
    """Locks `folder` until the returned file is closed or the process ends.

    Raises UserError if another process has it. Says so where the filesystem knows no locks.
    """
    try:
        file = open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            file.close()
            raise UserError(
                f"{folder} is in use by {holder}: stop that run or choose another --output_dir"
            ) from error
        say(f"{folder} cannot be locked ({error.strerror}): start no second run in it")
        return file
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError:
        pass  # a full disk: the lock is held all the same, only its holder has no name
    return file
