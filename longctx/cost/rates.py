"""What a machine does in a second."""

from __future__ import annotations

from typing import NamedTuple


class AttentionRates(NamedTuple):
    """FLOP/s of causal attention, forward and backward."""

    forward: float
    backward: float


class Rates(NamedTuple):
    """FLOP/s and bytes in a second."""

    flops: float
    """Of large matmuls."""
    link_bytes: float
    """Copied to the host while as much comes from it."""
    memory_bytes: float
    """Read and written on the GPU."""
    attention: AttentionRates
    """Of the backend that runs, for documents as long as those of the batch."""
