"""A machine's rates: FLOPs and bytes per second."""

from __future__ import annotations

from typing import NamedTuple

from longctx.cost.fitted import CAPPED_SCORES, GROUPED, SMALL_HEADS, TOWERS, WIDE_HEADS

RATE_SHARES: dict[str, tuple[str, float]] = {
    "grouped": ("matmul", GROUPED),
    "mixer": ("matmul", 1.0),
    "tower": ("matmul", TOWERS),
}
"""Maps the name of a rate that works may have to a measured rate and a share of it. The share is a
number of fitted.py. What mixers compute besides their matmuls is counted in FLOPs of matmuls
(`MIXERS`)."""

SECONDS = "seconds"
"""The rate of works whose seconds were measured themselves: their FLOPs are these seconds."""


class AttentionRates(NamedTuple):
    """FLOP/s of causal attention, forward and backward."""

    forward: float
    backward: float


def of_heads(
    rates: AttentionRates, backend: str, head_dim: int, capped: bool = False
) -> AttentionRates:
    """Returns what `rates`, of heads of 128, are for heads of another size, and for scores with a
    softcap."""
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
    """FLOP/s, and bytes per second."""

    flops: float
    """FLOP/s of large matmuls."""
    link_bytes: float
    """Bytes copied to the host per second while as many are copied back."""
    memory_bytes: float
    """Bytes read and written on the GPU per second."""
    attention: AttentionRates
    """Rates of the attention backend that runs, for documents as long as the batch's."""

    def of(self, rate: str) -> float:
        """Returns the FLOP/s of a work's rate: a measured one, or a share of one. Raises KeyError
        for any other name, since work at no rate would cost nothing."""
        measured = {
            "matmul": self.flops,
            "attention": self.attention.forward,
            "attention backward": self.attention.backward,
            SECONDS: 1.0,
        }
        name, share = share_of(rate)
        return share * measured[name]


def share_of(rate: str) -> tuple[str, float]:
    """Returns the measured rate that a work's rate is a share of, and the share: all of itself, if
    it is measured."""
    return RATE_SHARES.get(rate, (rate, 1.0))
