"""A linear layer whose weight is packed, for whoever calls it as a module: Hugging Face's layers, a
mixer, an adapter's wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longctx.kernels.launch import once_differentiable
from longctx.layer.packed_weights import dense


class PackedLinear(nn.Linear):
    """Computes x W' + bias with a weight that is made dense in forward and, for the gradient of x,
    once more in backward: no dense weight outlives the call."""

    @classmethod
    def like(cls, linear: nn.Linear) -> PackedLinear:
        """Returns a layer of the same sizes with the same bias, whose weight is still to come."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, bias=False)
        made.bias = linear.bias
        return made.train(linear.training)

    @property
    def W_q(self) -> Tensor:
        """PEFT takes a layer with this name for one of HQQ's, whose `dequantize` it calls: DoRA's
        lengths of rows would be those of bytes."""
        return self.weight

    def dequantize(self) -> nn.Parameter:
        """Returns the dense weight (O, I)."""
        return nn.Parameter(dense(self.weight), requires_grad=False)

    def unpack_(self) -> None:
        """Becomes an ordinary linear layer of the dense weight."""
        self.weight = self.dequantize()
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:  # (..., I) -> (..., O)
        y: Tensor = _PackedLinear.apply(x, self.weight, self.bias)
        return y


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., I)
        weight: Tensor,  # the bytes of (O, I), frozen
        bias: Tensor | None,  # (O,)
    ) -> Tensor:  # (..., O)
        ctx.weight = weight
        return F.linear(x, dense(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dy @ dense(ctx.weight).to(dy.dtype)
        bias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, bias
