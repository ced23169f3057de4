"""Child processes: they end with their parent, and what ended one is said in one line."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from longctx.errors import UserError

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_binding: tuple[int, int] | None = None  # the process and the thread whose children are bound


def die_with_parent(parent: int) -> None:
    """Called in a child: when process `parent` ends, however it does, the kernel kills this one.

    To Linux the parent is the thread that forked: the child ends with that one already.
    """
    if hasattr(_LIBC, "prctl"):  # Linux
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


@contextmanager
def bound_children() -> Iterator[None]:
    """Processes that this thread forks within end with this process. A pool's workers would wait on
    their queue for ever after a SIGKILL of their parent."""
    global _binding
    before, _binding = _binding, (os.getpid(), threading.get_ident())
    try:
        yield
    finally:
        _binding = before


def _bind() -> None:
    """In every forked process. Its only thread has the number of the one that forked it."""
    global _binding
    binding, _binding = _binding, None
    if binding is not None and binding[1] == threading.get_ident():
        die_with_parent(binding[0])


os.register_at_fork(after_in_child=_bind)


@contextmanager
def explained_workers() -> Iterator[None]:
    """Makes one line of what torch and datasets say of their workers: a UserError with a traceback
    in front of it, a worker that was killed. A signal that ends the run stays what it was."""
    try:
        yield
    except UserError as error:
        said = str(error.args[0])  # whole: a UserError shows it in one line, shortened
        if not said.startswith("Caught UserError in DataLoader worker"):
            raise
        raise UserError(said.rpartition("UserError: ")[2].strip()) from None
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
    except Exception as error:
        # Interrupted, datasets.map asks its workers for results, and does not get them in time.
        if isinstance(error.__context__, (SystemExit, KeyboardInterrupt)):
            raise error.__context__ from None
        raise
