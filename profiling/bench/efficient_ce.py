"""A peer of the loss: the method of mgmalek's efficient_cross_entropy, written anew in plain torch.

That project (github.com/mgmalek/efficient_cross_entropy) is in no package index. Its method: rows
are cut into K parts; each part's logits are computed in the operands' dtype, widened to fp32 and
overwritten by their gradient, and the gradients of hidden states and weight are computed from it in
forward. Backward multiplies both by the upstream gradient. The weight's gradient is summed in the
operands' dtype, as there.

The loss and its gradient are one Triton kernel there and several of torch's here, so that a row of
this peer is slower than the project itself; products, memory and rounding are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX

PARTS = 8
"""K, the most that the project's own benchmark tries."""


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (T, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (T,)
        parts: int,
    ) -> Tensor:  # ()
        counts = labels != IGNORE_INDEX
        scale = 1 / counts.sum().clamp(min=1)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        losses = []
        rows = -(-len(hidden) // parts)
        for h, y, counted, d_h in zip(
            *(x.split(rows) for x in (hidden, labels, counts, d_hidden)), strict=True
        ):
            y = torch.where(counted, y, 0)[:, None]
            z = (h @ weight.t()).float()
            lse = z.logsumexp(dim=1, keepdim=True)
            losses.append((lse - z.gather(1, y)).squeeze(1) * counted)
            z.sub_(lse).exp_().scatter_add_(1, y, z.new_full(y.shape, -1.0))
            z.mul_((scale * counted)[:, None])
            g = z.to(hidden.dtype)
            torch.mm(g, weight, out=d_h)
            d_weight.addmm_(g.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        return torch.cat(losses).sum() * scale

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(d_loss), d_weight.mul_(d_loss), None, None


def efficient_cross_entropy(
    hidden: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,), not shifted
    parts: int = PARTS,
) -> Tensor:  # ()
    """Returns the mean cross-entropy over labels that are not ignored."""
    return _Loss.apply(hidden, weight, labels, parts)
