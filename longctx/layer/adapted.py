"""A linear layer with a LoRA adapter as one function of autograd, for modules that the schedule
runs as they are: mixers (parts/mixer.py).

PEFT converts x to the adapter's fp32, multiplies in fp32, and adds the result to y in passes of
their own. Here the equations and roundings are those of projection.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import once_differentiable
from longctx.layer.adapters.lora import Lora, Low, LowGradient
from longctx.layer.packed_weights import dense
from longctx.layer.projection import Projection


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., I)
        weight: Tensor,  # (O, I)
        bias: Tensor | None,  # (O,)
        a: Tensor,  # (r, I)
        b: Tensor,  # (O, r)
        scale: float,
    ) -> Tensor:  # (..., O)
        low = Low.of(a, b, Lora(scale=scale), x.dtype)
        ctx.given = weight, low
        ctx.save_for_backward(x)
        rows = x.reshape(-1, x.shape[-1])
        y = Projection(dense(weight), bias, low)(rows, slice(0, len(rows)))
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (weight, low) = ctx.saved_tensors, ctx.given
        projection = Projection(dense(weight), None, low)
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        tile = slice(0, len(rows))
        v = low.inner_grad(dy)
        dx = projection.input_grad(dy, v, tile).view_as(x) if ctx.needs_input_grad[0] else None
        names = [name for name, i in (("a", 3), ("b", 4)) if ctx.needs_input_grad[i]]
        sums = LowGradient(low, names)
        sums.add(dy, rows, None, v, tile)
        found = sums.finish()
        return dx, None, None, found["a"], found["b"], None


def adapted_linear(
    x: Tensor,  # (..., I)
    weight: Tensor,  # (O, I), frozen
    bias: Tensor | None,  # (O,), frozen
    a: Tensor,  # (r, I)
    b: Tensor,  # (O, r)
    scale: float,
) -> Tensor:  # (..., O)
    """x W' + bias + s x A' B', differentiable in x, A and B. W is of the dtype of x, or in 4 bits
    as bitsandbytes has it: then it is made dense in each direction."""
    result: Tensor = _AdaptedLinear.apply(x, weight, bias, a, b, scale)
    return result
