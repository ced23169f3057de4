"""Files that a stranger or an earlier run left: opened so that none hangs or fills the memory.

odd_entry        a pipe, a device or a socket: opening one may wait, reading one may never end
open_regular     a file, and no larger than its disk
read_small       the bytes of one that ought to be small
read_json        a small description: bounded in bytes and in values, each key once
refuse_run       a folder of a run, which holds a model and is none
tensor_problem   a file of tensors that would take far more memory than it has bytes

Nothing here trusts a name, a size or a header that a file states about itself.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from longctx.errors import UserError
from longctx.train.safety.processes import Unbounded, in_child

MOST_BYTES = 2**46
"""More than any file has; the kernel's own files in /proc say 2^47."""
MOST_JSON_BYTES = 256 << 20
MOST_JSON_VALUES = 8_000_000
"""Half a million logged steps. The worst of them take 0.8 GiB of memory."""
MOST_HEADER_BYTES = 16 << 20
"""Largest header of a safetensors file: 100,000 tensors. Parsed, it takes 15 times the memory."""
MOST_LEVELS = 100
TORCH_FILES = ("*.pt", "*.pth", "*.bin")
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")
VET_S, VET_BYTES = 120.0, 512 << 20


def odd_entry(folder: Path) -> str | None:
    """Returns the first thing in the folder, at any depth, that is neither file nor folder, nor a
    link to one; a link to nothing is not odd, and hidden folders are not looked into. None where
    there is none."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted([*folders, *names]):
            path = os.path.join(root, name)
            try:
                mode = os.stat(path).st_mode
            except OSError:
                continue  # a link to nothing or to itself, which cannot be opened
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return os.path.relpath(path, folder)
    return None


def refuse_run(name: str, folder: Path) -> None:
    """Raises UserError for a run's folder that is given instead of the model that it holds."""
    if os.path.isfile(folder / "final" / "config.json") and not (folder / "config.json").exists():
        raise UserError(f"{name} is the folder of a run: its model is in {Path(name, 'final')}")


def refuse_odd(folder: Path) -> None:
    """Raises UserError for a folder of a model or an adapter with something in it that is no file,
    or with a description of hundreds of megabytes, which libraries would read whole."""
    if found := odd_entry(folder):
        raise UserError(f"{folder}: {found} is not a regular file: remove it, or get it again")
    for path in sorted(p for ending in DESCRIPTIONS for p in folder.glob(ending)):
        if path.is_file() and (size := path.stat().st_size) > MOST_JSON_BYTES:
            raise UserError(f"{folder}: {path.name} has {size >> 20} MiB: get it again")


def open_regular(path: Path) -> IO[bytes]:
    """Raises OSError, also for what is no regular file and for a size that its disk cannot hold."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info, disk = os.fstat(handle), os.fstatvfs(handle)
        disk_bytes = disk.f_blocks * disk.f_frsize or MOST_BYTES  # some tell no size
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if info.st_size > min(disk_bytes, MOST_BYTES):
            raise OSError(errno.EFBIG, "larger than its disk", str(path))
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb", buffering=0)


def read_small(path: Path, most_bytes: int) -> bytes:
    """Returns a file's bytes. Raises OSError, and ValueError for a file that is too large."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > most_bytes:
            raise ValueError(f"it has {size_bytes >> 20} MiB")
        data = b""
        while len(data) < size_bytes and (block := file.read(size_bytes - len(data))):
            data += block
    return data


def read_json(path: Path) -> Any:
    """Raises OSError, and ValueError for what is no JSON, is too large, or has a key twice."""
    data = read_small(path, MOST_JSON_BYTES)
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MOST_JSON_VALUES:
        raise ValueError("it has too many values")
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_each_key_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for part in parts for x in part if isinstance(x, (dict, list))]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


def tensor_problem(folder: Path, torch_files: Sequence[str] = TORCH_FILES) -> str | None:
    """Returns as a short reason what is wrong with a file of tensors in the folder itself, if
    reading it would take memory without bound; None for all others, damaged ones among them.
    Torch's files (patterns of names) are read in a child with limits."""
    for path in sorted(folder.glob("*.safetensors")):
        if MOST_HEADER_BYTES < (size := _header_bytes(path)) < path.stat().st_size:
            return f"{path.name} says that its header has {size} bytes"
    found = {path for pattern in torch_files for path in folder.glob(pattern) if path.is_file()}
    saved = sorted(path for path in found if path.name != "training_args.bin")
    if not saved:
        return None
    more_bytes = VET_BYTES + 2 * max(path.stat().st_size for path in saved)
    try:
        return in_child(lambda: _vet(saved), seconds=VET_S, more_bytes=more_bytes)
    except Unbounded as error:
        names = ", ".join(path.name for path in saved)
        return f"reading {names} {error}"


def _header_bytes(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0  # reading it will say why


def _vet(paths: Sequence[Path]) -> str | None:
    """Runs in the child. What is damaged or would run code is for the reader to say."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    for path in paths:
        try:
            with safe_globals():
                loaded = torch.load(
                    path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
                )
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and "alloc" in str(error):
                raise MemoryError from error
            continue
        if _expanded(loaded, torch.Tensor):
            return f"{path.name} holds a tensor that is larger than its bytes"
    return None


def _expanded(value: Any, tensor: Any) -> bool:
    """Whether one tensor has more numbers than are stored: a copy of it would fill the memory."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, tensor):
            if str(value.layout) != "torch.strided":
                return True
            if value.nbytes > value.untyped_storage().nbytes():
                return True
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return False
