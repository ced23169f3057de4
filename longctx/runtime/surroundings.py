"""What an engine, a trainer or the caller of `patch` knows around a patched model.

Each of them tells a runtime once, before the first batch:

    patch            strict
    a trainer        passes, task, label_smoothing
    its engine       shards, pending_bytes, moves_weights, needs_input_gradient, link_bytes
    images           image_bytes, eager_images (images/room_for_images.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longctx.attention.shards import Shards
from longctx.memory.pending import Pending, pending_bytes
from longctx.settings import TaskName


def _plain_pending(model: Any) -> Pending:
    return pending_bytes(model.parameters())


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Facts that no model and no option of `patch` holds."""

    strict: bool = False
    """Whether a call of training that the schedule does not cover is an error."""
    passes: int = 1
    """Batches of a step."""
    task: TaskName = "sft"
    """What a step trains for, by which its loss is counted."""
    label_smoothing: float = 0.0
    """The share of each label's weight that goes to all tokens, in training."""
    shards: Shards | None = None
    """The ranks that share each row with this one."""
    pending_bytes: Callable[[Any], Pending] = _plain_pending
    """Tells what else the first step will claim on the GPU; an engine knows better."""
    moves_weights: bool = False
    """Whether an engine's hooks bring each layer's weights, which a graph would leave out."""
    needs_input_gradient: bool = False
    """Whether an engine's hooks around the first layer wait for the gradient of its input."""
    link_bytes: float | None = None
    """Bytes per second over the link to the host while other processes use theirs; None: measured
    alone."""
    image_bytes: int = 0
    """GPU bytes of a batch's images while the layers run: their features and pixels."""
    eager_images: str = ""
    """Why no layer of a batch with images may be recorded, where batches have images."""
