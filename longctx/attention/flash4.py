"""Prepares flash-attn-4 for training: checks which GPUs it has kernels for, caches its compiled
kernels on disk, and silences a warning of its compiler.

These compute capabilities have a kernel for documents and grouped heads, by the assertions in
flash_attn/cute/interface.py of 4.0.0b36 (only 9.0 was measured here):

    forward    8.x  9.x  10.x  11.x  12.x
    backward        9.x  10.x  11.x  12.x (not deterministic)

flash-attn-4 caches compiled kernels only on request, and by default in /tmp. The files are native
code, named by a hash of its own sources, the versions of Python, CUTLASS and TVM FFI, and the
kernel's parameters. Here they lie in a folder that only this user may write, named by a hash of
everything else that decides them (`_identity`). If that folder cannot be used, each run compiles
again, but none fails. FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED and _CACHE_DIR, where set, are obeyed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import warnings
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from longctx.errors import one_line, print_rank0
from longctx.kernels.compiling import NOTICE
from longctx.packages import pip_install
from longctx.system import CACHE, cpu_line, expanded, version_of

TRAINABLE = (9, 10, 11, 12)
"""Major compute capabilities with kernels for forward and backward."""
CHOSEN = (9, 10)
"""Major compute capabilities on which `auto` chooses flash-attn-4: it was written for Hopper and
data-centre Blackwell. On 12.x it runs Ampere's instructions, as torch's own kernels do."""

WITH_SINKS = (9, 10, 11)
"""Major compute capabilities whose kernels have attention sinks in their softmax, forward and
backward, and give the gradient of sinks: so assert lines 2297 and 2454 of
flash_attn/cute/interface.py (4.0.0b36), where heads of 256 have a backward without them on 10.x and
11.x. Elsewhere sinks are merged into the result (attention/sinks.py)."""

SMALLEST_HEAD = 24
"""The smallest head size with right gradients. For 8 and 16 their errors are as large as the
gradients (4.0.0b36 on an H200); for 24, 32, 192 and 256 they are right."""

LARGEST_HEAD = 256
"""The largest head size with a kernel."""

ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def present() -> bool:
    """Whether the package is installed, found without an import. flash-attn 2 has its name, too."""
    spec = util.find_spec("flash_attn")
    places = (spec and spec.submodule_search_locations) or ()
    return any(Path(place, "cute", "interface.py").is_file() for place in places)


def why_not(device: torch.device, head_dim: int = 128, softcap: bool = False) -> str | None:
    """Returns a short reason why flash-attn-4 cannot train heads of this size, with scores that are
    capped or not, on this GPU; None if it can."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in TRAINABLE:
        return f"has no backward kernel for this GPU (sm_{major}{minor})"
    if head_dim < SMALLEST_HEAD:
        return f"gives wrong gradients for heads of {head_dim}"
    if head_dim > LARGEST_HEAD:
        return f"has no kernel for heads of {head_dim}"
    if softcap and (major == 12 or (major in (10, 11) and head_dim == 256)):
        return f"has no backward kernel for capped scores on this GPU (sm_{major}{minor})"
    if not present():
        return f"is not installed ({pip_install('flash-attn-4')})"
    try:
        load()
    except Exception as error:  # a half-installed CUDA library may raise any type of error
        return f"is installed but does not load: {one_line(error, 200)}"
    return None


def takes_sinks(device: torch.device, head_dim: int) -> bool:
    """Whether the kernels for this GPU and for heads of this size add sinks in their softmax."""
    major, _ = torch.cuda.get_device_capability(device)
    return major in WITH_SINKS and (major == 9 or head_dim != 256)


@functools.cache
def load() -> Any:
    """Imports flash_attn.cute.interface with its kernels cached on disk and its compiler quiet,
    also for other callers (transformers calls it for vanilla and liger)."""
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
    """Wraps one of flash-attn-4's caches, in which it looks for a kernel before it compiles one."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def __contains__(self, key: Any) -> bool:
        with suppress(OSError, RuntimeError):  # a full disk, a lock that is never released
            if key in self._kept:
                return True
        NOTICE.compiled()
        _quiet()
        return False

    def __getitem__(self, key: Any) -> Any:
        return self._kept[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        with suppress(OSError, RuntimeError):  # if the disk fails, the kernel is still in memory
            self._kept[key] = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept, name)


def _quiet() -> None:
    """Silences CUTLASS's warning about an argument that flash-attn-4 leaves empty. It is called
    before every compilation, since other code may have reset the filters."""
    warnings.filterwarnings(
        "ignore",
        r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument",
        UserWarning,
        r"(.*\.)?cutlass\.",
    )


def _keep_kernels() -> None:
    """Sets the variables that make flash-attn-4, when it is imported, cache its kernels on disk."""
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
    """Makes the folder, which only its owner may write, since files in it are run. Raises OSError
    if it belongs to another user, or if files or locks cannot be made in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError("others may write there")
    with suppress(Timeout), FileLock(folder / ".lock", timeout=0, mode=0o600):
        pass  # taken by another run that starts now: locks can be made


def _identity() -> str:
    """Hashes everything that decides a kernel's code but is not in flash-attn-4's file names: a
    library compiled in, CUDA, the processor (a home may be shared) and CUTLASS's settings."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    # The processor's instruction sets: code around a kernel is compiled for them.
    cpu = cpu_line("flags", "Features")
    parts = [version_of("quack-kernels"), torch.version.cuda, platform.machine(), cpu, settings]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
