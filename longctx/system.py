"""Finds a user's folders, the processor and the installed packages on this machine."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

CACHE = "~/.cache/longctx"
"""The folder of files that can be made again: tokenised data, measured rates, compiled kernels."""


def expanded(path: str) -> Path:
    """Returns the path with the home folder instead of `~`; a `~user` who does not exist stays."""
    return Path(os.path.expanduser(path))


def installed(module: str) -> bool:
    """Whether `import module` would find it; at most its parent package is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


@cache  # a package's metadata is parsed as an e-mail: 3 ms
def version_of(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def cpu_line(*names: str) -> str:
    """Returns the first line of Linux's /proc/cpuinfo that begins with one of these names; else
    ""."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith(names)), "")
    return ""
