"""Model FLOPs of a step, forward and backward: what MFU counts over the chip's peak.

    6 P T  +  6 * sum over layers of H d * sum over documents of (document length)^2

with P the parameters in matmuls (lm_head included, input embedding not), T the tokens, H query
heads of size d. The second term is causal attention: 2 matmuls of 2*L*L*d FLOPs per head in
forward, halved by causality, and twice that in backward. What backward computes again is no useful
work and does not count.
"""

from __future__ import annotations


def step_flops(*, parameters: float, tokens: int, attended: float) -> float:
    """Returns the model FLOPs of a step. `parameters` are those in matmuls; `attended` is the sum
    over layers of H d times the sum of `squared_length` over documents."""
    return 6.0 * parameters * tokens + 6.0 * attended


def matmul_parameters(total: int, frozen: int) -> int:
    """Returns the parameters that count in a step's FLOPs. Frozen ones count two thirds, since
    their matmuls compute no gradient of the weight: 4 FLOPs per token instead of 6."""
    return total - frozen // 3


def squared_length(document: int, window: int | None = None, before: int = 0) -> int:
    """Returns twice the pairs of tokens of a document that attend to each other, where a token with
    itself counts once: document^2, and with a window of W tokens 2 min(p, W - 1) + 1 at each
    position p.

    A document that continues a prompt of `before` tokens, which is computed once for all of its
    answers, adds the pairs of its own tokens with the prompt's, and none of the prompt's own: a
    prompt of P tokens with answers of A and B has P^2, A^2 + 2 A P and B^2 + 2 B P.
    """
    if before:
        return squared_length(before + document, window) - squared_length(before, window)
    if window is None or document <= window:
        return document**2
    # A window of 2 in a document of 4 gives 1 + 3 + 3 + 3 = 2^2 + 2 * 3 pairs.
    return window**2 + (document - window) * (2 * window - 1)


def mfu(flops: float, seconds: float, peak_flops: float) -> float:
    """Returns the model FLOPs utilisation: the used share of the chips' dense peak, in FLOP/s."""
    return flops / seconds / peak_flops
