"""A machine's rates: FLOPs and bytes per second."""

from __future__ import annotations

from typing import NamedTuple


class AttentionRates(NamedTuple):
    """FLOP/s of causal attention, forward and backward."""

    forward: float
    backward: float


class Rates(NamedTuple):
    """FLOP/s, and bytes per second."""

    flops: float
    """FLOP/s of large matmuls."""
    link_bytes: float
    """Bytes copied to the host per second while as many are copied back."""
    memory_bytes: float
    """Bytes read and written on the GPU per second."""
    attention: AttentionRates
    """Rates of the attention backend that runs, for documents as long as the batch's."""
