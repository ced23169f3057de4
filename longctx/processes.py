"""Child processes: they end with their parent, and what ended one is said in one line."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from longctx.errors import UserError

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_parent: int | None = None  # whose children are bound to it


def die_with_parent(parent: int) -> None:
    """Called in a child: when process `parent` ends, however it does, the kernel kills this one."""
    if hasattr(_LIBC, "prctl"):  # Linux
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


@contextmanager
def bound_children() -> Iterator[None]:
    """Processes forked within end with this one. A pool's workers would wait on their queue for
    ever after a SIGKILL of their parent."""
    global _parent
    before, _parent = _parent, os.getpid()
    try:
        yield
    finally:
        _parent = before


def _bind() -> None:
    global _parent
    parent, _parent = _parent, None
    if parent is not None:
        die_with_parent(parent)


os.register_at_fork(after_in_child=_bind)


@contextmanager
def explained_workers() -> Iterator[None]:
    """Makes one line of what torch and datasets say of their workers: a UserError with a traceback
    in front of it, a worker that was killed."""
    try:
        yield
    except UserError as error:
        lines = str(error).strip().splitlines()
        if len(lines) < 2 or not lines[0].startswith("Caught UserError in DataLoader worker"):
            raise
        raise UserError(lines[-1].partition("UserError: ")[2]) from None
    except RuntimeError as error:
        said = str(error)
        if re.match(r"DataLoader worker \(pid.* (exited unexpectedly|is killed by signal)", said):
            who, cure = "a data loader worker", "give fewer --dataloader_num_workers"
        elif said.startswith("One of the subprocesses has abruptly died during map operation"):
            who, cure = "a process that tokenises", "give fewer cores (`taskset -c 0`)"
        else:
            raise
        raise UserError(
            f"{who} was killed, most often because the memory was full: {cure} or more memory"
        ) from error
