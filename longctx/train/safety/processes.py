"""Child processes: they end with their parent, and what ended one is said in one line.

A stranger's program, pattern or pickle may loop for ever or fill the memory inside one call into C,
where Python handles no signal. `in_child` does such work in a process with limits.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD, fcntl
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from longctx.errors import UserError, one_line

PR_SET_PDEATHSIG = 1  # of linux/prctl.h, which Python does not name
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


@contextmanager
def same_environ() -> Iterator[None]:
    """Afterwards `os.environ` is the object that it was. datasets puts a copy in its place when it
    starts processes, and what holds the first one, as rich does, would see no later change."""
    environ = os.environ
    try:
        yield
    finally:
        os.environ = environ  # noqa: B003


def _bind() -> None:
    """Runs in every forked process, whose only thread has the number of the one that forked it."""
    global _binding
    binding, _binding = _binding, None
    if binding is not None and binding[1] == threading.get_ident():
        die_with_parent(binding[0])


os.register_at_fork(after_in_child=_bind)


class Unbounded(Exception):
    """Work took more time or memory than it may; the message is the end of a sentence."""


def in_child(work: Callable[[], Any], *, seconds: float, more_bytes: int) -> Any:
    """Returns what `work` returns (it must pickle), computed in a process of its own that may take
    `seconds`, and `more_bytes` of memory more than it is born with. What it prints is lost.

    Raises Unbounded, the UserError that `work` raises, and RuntimeError with the line that any
    other error says.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    if not (pid := fork()):
        _answer(work, theirs, parent, more_bytes)
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise Unbounded(f"does not end within {seconds:.0f} s")
        kind, answer = ours.recv()
    except EOFError as error:
        raise Unbounded("was killed, most often because the memory was full") from error
    finally:
        ours.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if kind == "memory":
        raise Unbounded(f"takes more than {more_bytes / 2**30:.1f} GiB of memory")
    if kind == "user":
        raise UserError(answer)
    if kind == "error":
        raise RuntimeError(answer)
    return answer


def _answer(
    work: Callable[[], Any], connection: Connection, parent: int, more_bytes: int
) -> NoReturn:
    """Does the work in the child, and sends its answer."""
    try:
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides
            signal.signal(number, signal.SIG_IGN)
        # A program that was started without outputs has its pipe in one of their places.
        connection = Connection(fcntl(connection.fileno(), F_DUPFD, 3), readable=False)
        silence = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(silence, output)
        limit_memory(more_bytes)
        try:
            said: tuple[str, Any] = ("made", work())
        except MemoryError:
            said = ("memory", None)
        except UserError as error:
            said = ("user", str(error))
        except BaseException as error:  # also Rust's panics, which are no Exception
            said = ("error", one_line(error))
        connection.send(said)
    finally:
        os._exit(0)


def fork() -> int:
    """Forks without the warning of tokenizers that their threads do not survive: the child has no
    use for them."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "true")
    try:
        return os.fork()
    finally:
        if before is None:
            del os.environ[name]


def limit_memory(more_bytes: int) -> None:
    """Limits the memory of this process to `more_bytes` more than it has."""
    with suppress(OSError, ValueError):  # no /proc, or a lower limit from outside
        with open("/proc/self/statm") as file:
            size_bytes = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + more_bytes, hard))


SPARE_FILES = 64
"""A run opens so many files at once: its data, a checkpoint, sockets between ranks."""
WORKER_FILES, BATCH_FILES = 4, 4
"""Files of a data loader's worker: its pipes. Each tensor of a batch is a file on its way."""


def make_room_for_workers(workers: int, batches_ahead: int | None) -> None:
    """Raises this process's limit of open files as far as the data loader's workers need. Raises
    UserError where the system allows no more: torch's workers would print tracebacks without end,
    and the run would wait for them for ever."""
    if not workers:
        return
    batches = workers * (batches_ahead or 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = SPARE_FILES + WORKER_FILES * workers + BATCH_FILES * batches
    with suppress(OSError):
        needed += len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"--dataloader_num_workers {workers}: they need {needed} open files, and {hard} are "
            "allowed: give fewer, or raise the limit with ulimit -Hn"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
