"""Builds of DeepSpeed's C++ operators: one at a time, and a killed one stops no other.

DeepSpeed compiles what it needs (CPU Adam, asynchronous I/O) on first use, through torch, which
marks a build by a file that others wait for, silently and for ever if the builder was killed. So
runs of longctx build in a folder of their own, one for each version, under a lock that the kernel
drops with its process: a marker that is there when the lock is held was left by a killed build.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.utils.cpp_extension import get_default_build_root

from longctx.errors import UserError

SERVES = "deepspeed_shm_comm"
"""DeepSpeed's name of an operator that it compiles for a minute in each process group without a
GPU. Inference alone calls it, and takes torch's all-reduce where it is not there."""


def build_one_at_a_time() -> None:
    """Makes DeepSpeed build in our folder and under our lock, and nothing that training never
    calls. Raises UserError where that folder cannot be written."""
    import deepspeed
    from deepspeed.ops.op_builder.builder import OpBuilder

    folder = extensions_folder(deepspeed.__version__)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    load = OpBuilder.load
    if hasattr(load, "__wrapped__"):  # done before
        return
    lock = FileLock(folder / ".lock")

    @functools.wraps(load)
    def load_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.name == SERVES:
            return None
        with lock:  # taken once more by an operator that loads another one
            (folder / self.name / "lock").unlink(missing_ok=True)
            return load(self, *args, **kwargs)

    OpBuilder.load = load_alone


def extensions_folder(deepspeed_version: str) -> Path:
    """Returns the folder of this version's builds, made if need be; inside TORCH_EXTENSIONS_DIR if
    that is set, else in torch's default."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).absolute()
    if root.name.startswith("longctx-torch"):  # a process that was started by one of ours
        root = root.parent
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = f"longctx-torch{torch.__version__}-deepspeed{deepspeed_version}-{python}"
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"DeepSpeed builds its operators in {folder}, which cannot be written "
            f"({error.strerror}): set TORCH_EXTENSIONS_DIR to another folder"
        ) from error
    return folder
