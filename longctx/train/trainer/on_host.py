"""The bounds of a batch's documents stay on the host, where they are read.

A patched model asks where documents begin. Read back from the GPU, in `position_ids`, the answer
comes after all that the GPU was given before, and the GPU then waits for what the host launches
next: once a step, which short rows feel. A collator knows the answer on the host. It hands the
bounds on as arrays of NumPy, which no loader moves, and they become tensors where the model is
called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx.attention.documents import Documents

BOUNDS = "cu_seq_lens_q"
READ = (BOUNDS, "parents")
"""Arguments of a patched model that it reads on the host."""


@dataclass(frozen=True)
class BoundsOnHost:
    """A collator whose batches say where documents begin, in host memory, unless a mask says it or
    positions do not (those of images)."""

    collate: Callable[[Any], Any]

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if "attention_mask" in batch:
            return batch
        found = {k: batch[k] for k in READ if _is_here(batch.get(k))}
        positions = batch.get("position_ids")
        if BOUNDS not in batch and _is_here(positions) and positions.dim() == 2:
            found[BOUNDS] = Documents.from_position_ids(positions).cu_seqlens
        return {**batch, **{k: x.numpy() for k, x in found.items()}}


def _is_here(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch for the model, in which arrays are tensors on the host."""
    return {k: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for k, x in batch.items()}
