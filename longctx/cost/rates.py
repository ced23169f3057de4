"""A machine's rates: FLOPs and bytes per second."""

from __future__ import annotations

from typing import NamedTuple

from longctx.cost.fitted import CAPPED_SCORES, GROUPED, SMALL_HEADS, TOWERS, WIDE_HEADS

RATE_SHARES: dict[str, tuple[str, float]] = {
    "grouped": ("matmul", GROUPED),
    "mixer": ("matmul", 1.0),
    "tower": ("matmul", TOWERS),
}
"""Maps names of rates that works may have to a measured rate and a share of it (fitted.py). What
mixers compute besides their matmuls is counted in FLOPs of matmuls (`MIXERS`)."""

SECONDS = "seconds"
"""The rate of works whose seconds were measured: their `flops` are seconds."""


class AttentionRates(NamedTuple):
    """FLOP/s of causal attention, forward and backward."""

    forward: float
    backward: float


def of_heads(
    rates: AttentionRates, backend: str, head_dim: int, capped: bool = False
) -> AttentionRates:
    """Returns the rates of heads of another size, or of scores with a softcap, where `rates` are
    those of heads of 128."""
    whole = (1.0, 1.0)
    if head_dim < 128:
        shares, near = (SMALL_HEADS, SMALL_HEADS), 64
    elif head_dim > 128:
        shares, near = WIDE_HEADS.get(backend, whole), 256
    else:
        shares, near = whole, 128
    caps = CAPPED_SCORES.get(backend, {}).get(near, whole) if capped else whole
    pairs = zip(rates, shares, caps, strict=True)
    return AttentionRates(*(rate * share * cap for rate, share, cap in pairs))


class Rates(NamedTuple):
    """FLOPs and bytes per second of a machine."""

    flops: float
    """FLOP/s of large matmuls."""
    link_bytes: float
    """Bytes per second copied to the host, with equal traffic back."""
    memory_bytes: float
    """Bytes per second read from or written to the GPU's memory."""
    attention: AttentionRates
    """Rates of the attention backend that runs, for documents of the batch's length."""

    def of(self, rate: str) -> float:
        """Returns the FLOP/s at which a work runs: a measured rate, or a share of one. Raises
        KeyError for an unknown name, since work without a rate would cost nothing."""
        measured = {
            "matmul": self.flops,
            "attention": self.attention.forward,
            "attention backward": self.attention.backward,
            SECONDS: 1.0,
        }
        name, share = share_of(rate)
        return share * measured[name]


def share_of(rate: str) -> tuple[str, float]:
    """Returns a measured rate's name and the share of it that a work's rate is; 1 for a measured
    rate itself."""
    return RATE_SHARES.get(rate, (rate, 1.0))
