"""Finds what the operating system has refused in an error, however a library words it.

    OSError                                                        its number
    MemoryError                                                    ENOMEM
    RuntimeError("unable to open shared memory object </torch_1>   the system's own words
      in read-write mode: Too many open files (24)")
    RuntimeError("can't start new thread")                         words of Python and torch

Rust, C++ and Python's own threads raise no OSError. Imports nothing heavy: a command is guarded
before it imports torch.
"""

from __future__ import annotations

import errno
import os

from longctx.errors import one_line

CURES = {
    errno.ENOSPC: "free some, also in /dev/shm, where processes share data",
    errno.EDQUOT: "free some, or write to another file system",
    errno.EROFS: "write to another file system",
    errno.EFBIG: "raise the limit of file sizes with ulimit -f, or write to another file system",
    errno.EMFILE: "raise the limit of open files with ulimit -n, or give fewer "
    "--dataloader_num_workers",
    errno.ENFILE: "other programs hold all files that the system can open",
    errno.ENOMEM: "other programs hold the memory, or a limit is too low",
    errno.EAGAIN: "raise the limit of processes and threads with ulimit -u",
    errno.EIO: "the disk or the network behind it fails",
    errno.ESTALE: "the disk behind the network has lost it: mount it again",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "links lead to one another: name the file that is meant",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
}
"""Error of the operating system -> what to do. Where we know more, it is caught and said there."""

_NO_PROC = "longctx asks the kernel there what the machine has: mount /proc"
_WORDS = {
    "can't start new thread": errno.EAGAIN,
    "can't allocate memory": errno.ENOMEM,
    "0 items of ancdata": errno.EMFILE,  # a file that another process sent had no place here
    **{os.strerror(number): number for number in CURES if number != errno.EAGAIN},
    "Resource temporarily unavailable (os error": errno.EAGAIN,
    'WouldBlock, message: "Resource temporarily unavailable"': errno.EAGAIN,
}
"""Words of libraries for such an error, where they do not print the system's own."""


def refusal(error: BaseException | None) -> str | None:
    """Returns the line for an error that is the system's, or was made of one: where, what and what
    to do. Returns None for any other."""
    if error is None:
        return None
    number = _number(error)
    name = getattr(error, "filename", None)
    if isinstance(name, str) and name.startswith("/proc/"):
        return f"{name}: {os.strerror(number)}: {_NO_PROC}"
    if number not in CURES:
        return refusal(error.__cause__)
    said = os.strerror(number)
    if isinstance(error, OSError):
        return f"{name}: " * bool(name) + f"{said}: {CURES[number]}"
    return f"{said} ({one_line(error, 200)}): {CURES[number]}"


def _number(error: BaseException) -> int:
    """Returns its errno; 0 for an error that has none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    text = str(error)[:4000]
    return next((number for words, number in _WORDS.items() if words in text), 0)
