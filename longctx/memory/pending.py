"""The bytes that torch's optimizers and engines allocate on the GPU in a run's first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


def trained_bytes_on_gpu(parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of trained parameters on the GPU."""
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and p.is_cuda)


class Pending(NamedTuple):
    """Bytes that the first step allocates on the GPU."""

    states: int = 0
    """Bytes that stay allocated beside the activations of all later steps."""
    gradients: int = 0
    """Bytes that are allocated as activations are freed, unless a step has several batches."""


def pending_bytes(parameters: Iterable[Tensor]) -> Pending:
    """Returns the bytes of Adam's two moments and of gradients, in the weights' dtype."""
    trained = trained_bytes_on_gpu(parameters)
    return Pending(2 * trained, trained)
