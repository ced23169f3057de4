"""Reads a checkpoint back: without running code from it, and without a second copy in memory.

The optimizer's states are mapped from their file, so that pages are read as they are copied to
the GPU and host memory never holds them all; on the CPU the mapped pages (private, copy on write)
are themselves the states. transformers reads every .pt file with `weights_only=True`; a file that
asks for more than tensors and plain values, or is damaged, is one clear error.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from torch.utils.serialization import config as torch_files
from transformers import TrainerState

from longctx.config import UserError

_DAMAGE = (SafetensorError, OSError, EOFError, RuntimeError, ValueError, LookupError)
STATE = "trainer_state.json"
MANIFEST = "manifest.json"


def damage(checkpoint: Path) -> str | None:
    """What is missing or cut off in a checkpoint, in a few words; None for a whole one."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        TrainerState(**state)
        range(state["global_step"])
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (OSError, ValueError, LookupError, TypeError):
        return f"{STATE} is unreadable"
    try:
        sizes_bytes = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).items()
    except FileNotFoundError:
        return None  # written by another program
    except (OSError, ValueError, AttributeError):
        return f"{MANIFEST} is unreadable"
    for name, size_bytes in sizes_bytes:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size_bytes:
            return f"{name} has {path.stat().st_size} of {size_bytes} bytes"
    return None


@contextmanager
def mapped_files() -> Iterator[None]:
    """`torch.load` maps files instead of reading them into memory."""
    with torch_files.patch("load.mmap", True):  # type: ignore[attr-defined]
        yield


@contextmanager
def reading(checkpoint: str | Path | None) -> Iterator[None]:
    """Turns what a damaged or malicious checkpoint raises into a UserError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{checkpoint} holds a file that is damaged or would run code when read; nothing of it "
            "was run: resume from another checkpoint"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (*_DAMAGE, CheckpointException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot resume from {checkpoint} ({type(error).__name__}: {reason}): resume from "
            "another checkpoint"
        ) from error
