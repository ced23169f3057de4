"""The host memory that this process may still take: the machine's, within its container's limits.

A container's limit is that of its cgroup, and the limits of all cgroups above it hold too. The page
cache counts as free, as in the kernel's MemAvailable, since it is given back when needed. cgroup v1
and v2: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil
from torch import Tensor

from longctx.constants import GIB
from longctx.cost.fitted import HOST_MOST_SPARED_GIB, HOST_SPARE

PROC = Path("/proc/self")


def available_host_bytes() -> int:
    """Returns the host bytes that can be taken without swapping and without being killed."""
    return max(0, min(psutil.virtual_memory().available, *_rooms(PROC)))


def host_share_bytes() -> int:
    """Returns the share of `available_host_bytes` that each of a run's processes on this machine
    may take."""
    return available_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def held_host_bytes() -> int:
    """Returns the host bytes that this run's processes hold: private and shared pages, each once,
    and memory that longctx or CUDA's driver has page-locked. The pages of mapped files do not
    count, since the kernel drops them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = psutil.Process(os.getppid() if ranks > 1 else os.getpid())  # the launcher of all ranks
    held = 0
    for process in [first, *first.children(recursive=True)]:
        kinds = dict(_sizes(Path(f"/proc/{process.pid}/smaps_rollup")))
        held += sum(kinds.get(name, 0) for name in ("Pss_Anon", "Pss_Shmem"))
    return held


def own_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of host memory that are free once these tensors are dropped. Those in
    mapped files, as safetensors reads weights, count as free already."""
    held = [x for x in tensors if x.device.type == "cpu"]
    files = [area for area in _areas() if area.inode]
    starts = [area.start for area in files]

    def is_mapped(x: Tensor) -> bool:
        at = bisect_right(starts, x.data_ptr()) - 1
        return at >= 0 and x.data_ptr() < files[at].end

    return sum(x.nbytes for x in held if not is_mapped(x))


class _Area(NamedTuple):
    """The addresses of one of this process's mappings, and the inode of its file; 0 without a
    file."""

    start: int
    end: int
    inode: int


def _areas() -> Iterator[_Area]:
    """Yields the process's mappings in the order of their addresses (proc(5))."""
    for line in _lines(PROC / "maps"):
        addresses, _, _, _, inode, *_ = line.split(None, 5)
        start, end = (int(text, 16) for text in addresses.split("-"))
        yield _Area(start, end, int(inode))


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yields names and bytes from a file whose lines are `Name:  number kB`."""
    for line in _lines(path):
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            yield words[0].rstrip(":"), int(words[1]) * 1024


def cgroup_limit_bytes() -> int | None:
    """Returns the limit of this process's own control group; None if it has none, as cgroup v1 says
    by a number that no machine has."""
    limits = [
        _number(folder / name)
        for folder, _ in _memory_cgroups(PROC)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    most = psutil.virtual_memory().total
    return min((limit for limit in limits if limit is not None and limit < most), default=None)


def host_budget(available: int, limit_gib: float | None) -> int:
    """Returns the bytes that a run may lock, from those that are free."""
    available -= int(min(HOST_SPARE * available, HOST_MOST_SPARED_GIB * GIB))
    return available if limit_gib is None else min(available, int(limit_gib * GIB))


def _rooms(proc: Path) -> Iterator[int]:
    """Yields the bytes that remain under each limit of this process."""
    yield psutil.virtual_memory().total
    for folder, mounted in _memory_cgroups(proc):
        for level in [folder, *folder.parents]:
            yield from _room(level)
            if level == mounted:
                break


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, Path]]:
    """Yields the process's cgroups that limit memory, each with the folder where its tree is
    mounted."""
    paths: dict[bool, str] = {}  # is it v2 -> path in its tree
    for line in _lines(proc / "cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" or "memory" in controllers.split(","):
            paths[hierarchy == "0"] = path
    for line in _lines(proc / "mountinfo"):
        where, _, what = line.partition(" - ")
        mount_root, mounted = where.split()[3:5]
        kind, _, options = what.split()
        is_v2 = kind == "cgroup2"
        if is_v2 in paths and (is_v2 or (kind == "cgroup" and "memory" in options.split(","))):
            # Inside a container the tree may be mounted from the container's own cgroup on.
            own = PurePosixPath(paths[is_v2])
            seen = own.is_relative_to(mount_root)
            inside = own.relative_to(mount_root) if seen else PurePosixPath()
            yield Path(mounted) / inside, Path(mounted)


def _room(cgroup: Path) -> Iterator[int]:
    """Yields a cgroup's limit less the memory that it uses and cannot give back, if it has a
    limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory.high", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit_bytes, used_bytes = _number(cgroup / limit), _number(cgroup / used)
        if limit_bytes is not None and used_bytes is not None:
            stat = dict(line.split() for line in _lines(cgroup / "memory.stat"))
            prefix = "total_" if "total_active_file" in stat else ""  # v1: with its children
            cached = sum(
                int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive")
            )
            yield limit_bytes - used_bytes + cached


def _number(path: Path) -> int | None:
    """Returns a file's number; None if the file is missing or says `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux, or not for us to read
        return []
