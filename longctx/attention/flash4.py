"""flash-attn-4, made ready to train: which GPUs it has kernels for, its compiled kernels kept on
disk, its compiler quiet.

Compute capabilities with a kernel for documents and grouped heads, by the assertions in
flash_attn/cute/interface.py of 4.0.0b36 (measured here: 9.0 only):

    forward    8.x  9.x  10.x  11.x  12.x
    backward        9.x  10.x  11.x  12.x (not deterministic)

flash-attn-4 can keep what it compiled, but does not unless asked, and then in /tmp. Its files are
native code, named by a hash of its own sources, the versions of Python, CUTLASS and TVM FFI, and
the kernel's parameters. Here they lie in a folder that only this user may write, named by what else
decides them (`_identity`). A folder that cannot be had costs compiling in every run, never a run.
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED and _CACHE_DIR, where set, are obeyed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import platform
import warnings
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from longctx.errors import one_line, print_rank0
from longctx.kernels.compiling import NOTICE
from longctx.system import CACHE, expanded

TRAINABLE = (9, 10, 11, 12)
"""Major compute capabilities with forward and backward."""
CHOSEN = (9, 10)
"""Those for which it was written, Hopper and data-centre Blackwell: `auto` takes it there. On 12.x
it runs Ampere's instructions, which torch's own kernels use as well."""

SMALLEST_HEAD = 24
"""Gradients of heads of 8 and 16 are wrong by as much as they are large (4.0.0b36 on an H200); 24,
32, 192 and 256 are right."""

ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def present() -> bool:
    """Whether the package is installed; nothing is imported. flash-attn 2 has the same name."""
    spec = util.find_spec("flash_attn")
    places = (spec and spec.submodule_search_locations) or ()
    return any(Path(place, "cute", "interface.py").is_file() for place in places)


def why_not(device: torch.device, head_dim: int = 128) -> str | None:
    """Why flash-attn-4 cannot train heads of this size on this GPU, in a few words; None if it
    can."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in TRAINABLE:
        return f"has no backward kernel for this GPU (sm_{major}{minor})"
    if head_dim < SMALLEST_HEAD:
        return f"gives wrong gradients for heads of {head_dim}"
    if not present():
        return "is not installed (pip install 'longctx[fa4]')"
    try:
        load()
    except Exception as error:  # half installed, its CUDA libraries refuse to load with any of them
        return f"is installed but does not load: {one_line(error, 200)}"
    return None


@functools.cache
def load() -> Any:
    """flash_attn.cute.interface, with its kernels kept on disk and its compiler quiet, whoever
    calls it (transformers does for vanilla and liger)."""
    _keep_kernels()
    interface = importlib.import_module("flash_attn.cute.interface")
    for function in vars(interface).values():
        kept = getattr(function, "__dict__", {}).get("compile_cache")
        if kept is not None:
            function.compile_cache = Kernels(kept)
            if hasattr(kept, "cache_path"):  # FOLDER / hash / this function
                NOTICE.folders["flash-attn-4"] = str(kept.cache_path.parents[1])
    return interface


class Kernels:
    """One of flash-attn-4's caches, which it asks for a kernel before it compiles one."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def __contains__(self, key: Any) -> bool:
        with suppress(OSError, RuntimeError):  # a full disk, a lock that nobody gives back
            if key in self._kept:
                return True
        NOTICE.compiled()
        _quiet()
        return False

    def __getitem__(self, key: Any) -> Any:
        return self._kept[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        with suppress(OSError, RuntimeError):  # it is in memory by then
            self._kept[key] = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept, name)


def _quiet() -> None:
    """CUTLASS warns of an argument that flash-attn-4 leaves empty. Called before every compilation:
    others may have reset the filters since the last one."""
    warnings.filterwarnings(
        "ignore",
        r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument",
        UserWarning,
        r"(.*\.)?cutlass\.",
    )


def _keep_kernels() -> None:
    """Asks flash-attn-4, which reads this when it is imported, to keep its kernels."""
    if os.environ.get(ENABLED, "1") != "1":
        return
    if FOLDER not in os.environ:
        folder = expanded(CACHE) / "flash-attn-4" / _identity()
        try:
            _claim(folder)
        except OSError as error:
            reason = error.strerror or error
            print_rank0(f"flash-attn-4's kernels are not kept in {folder}: {reason}")
            return
        os.environ[FOLDER] = str(folder)
    os.environ[ENABLED] = "1"


def _claim(folder: Path) -> None:
    """Makes the folder, which only its owner may write, since what lies there is run. OSError where
    it is another's, or takes no files or no locks."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError("others may write there")
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(lock)


def _identity() -> str:
    """Of what decides a kernel's code and is not in flash-attn-4's own names: a library whose code
    is compiled in, CUDA, the processor (a home may be shared), CUTLASS's settings."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    parts = [_version("quack-kernels"), torch.version.cuda, platform.machine(), _cpu(), settings]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _cpu() -> str:
    """The instructions that the processor has: the code around a kernel is compiled for them."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""
