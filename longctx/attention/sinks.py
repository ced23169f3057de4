"""Attention sinks of a head group, whatever backend attends (kernels/sinks.py has the equations).

A sink belongs to the whole softmax of a query, so it is added once. flash-attn-4 and plain torch
have it in their softmax (`Attention.fuses_sinks`), and round o once. For other backends, and where
documents, prompts, images or padding are merged of several calls, it is added to the final o and
lse, and o is rounded twice. Their error grows by this, most in the gradients of sinks and of biases
of k, which are what sums of opposite terms leave.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longctx.kernels.sinks import add_sinks_, sinks_grad


class Sinks(NamedTuple):
    """The sinks of some heads."""

    logits: Tensor  # (H,)
    grad: Tensor | None = None  # (H,) fp32: backward adds to it; None if they are frozen

    def of(self, heads: slice) -> Sinks:
        return Sinks(self.logits[heads], None if self.grad is None else self.grad[heads])


def merge_sinks_(o: Tensor, lse: Tensor, sinks: Sinks | None) -> None:  # (T, H, d), (H, T)
    """Adds the sinks, if there are any, to the result of attention without them."""
    if sinks is not None:
        add_sinks_(o, lse, sinks.logits)


def add_grad_(sinks: Sinks | None, do: Tensor, o: Tensor, lse: Tensor) -> None:
    """Adds to the gradient of trained sinks, from o (T, H, d) and lse (H, T) with sinks. It must
    run before backward writes dq over o."""
    if sinks is not None and sinks.grad is not None:
        sinks.grad.add_(sinks_grad(do, o, lse, sinks.logits))
