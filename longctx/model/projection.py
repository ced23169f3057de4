"""Matrix products of the schedule: 16-bit operands, sums in fp32, weight gradients rounded once.

A weight's gradient is a sum over tiles of tokens, dW = sum_t dy_t' x_t. Adding bf16 tiles loses a
bit with every doubling of their number; here the sum stays in an fp32 buffer that the matrix unit
adds into (`addmm` with an fp32 output), and is rounded to the weight's dtype at the end.

T tokens, I features in, O features out; weights as Hugging Face holds them, (O, I).
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear(
    x: Tensor,  # (T, I)
    weight: Tensor,  # (O, I)
    bias: Tensor | None = None,  # (O,)
    *,
    out: Tensor | None = None,  # (T, O)
) -> Tensor:  # (T, O)
    """x weight' + bias"""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def linear_add(
    base: Tensor,  # (T, O)
    x: Tensor,  # (T, I)
    weight: Tensor,  # (O, I)
    bias: Tensor | None = None,  # (O,)
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (T, O), may be base
) -> Tensor:  # (T, O)
    """base + scale (x weight' + bias), rounded once; with a bias twice, the first time without
    base, which is the larger part of a residual stream, and so it is into an fp32 stream."""
    if base.dtype != x.dtype:
        product = linear(x, weight, bias)
        return torch.add(base, product if scale == 1.0 else product.to(base.dtype) * scale, out=out)
    if bias is None:
        return torch.addmm(base, x, weight.t(), alpha=scale, out=out)
    # Not by torch.add's own factor, which is rounded to bf16 on CPUs: 1.7 becomes 1.703.
    product = torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale)
    return torch.add(base, product, out=out)


def scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b, rounded once."""
    if scale == 1.0:
        return a @ b
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scale)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, with out in fp32 or in the operands' dtype."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def addmm_(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a b, with acc in fp32."""
    if a.is_cuda and a.dtype != acc.dtype:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        torch.addmm(acc, a.to(acc.dtype), b.to(acc.dtype), out=acc)


class WeightGradient:
    """The gradient of a linear map's weight and bias over tiles of tokens; nothing if frozen."""

    def __init__(
        self,
        weight: bool,
        bias: bool = False,
        into: Tensor | None = None,  # (O, I) fp32: where the weight's adds up
    ) -> None:
        self._wants_weight, self._wants_bias = weight, bias
        self._into = into
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, dy: Tensor, x: Tensor) -> None:  # (T, O), (T, I)
        if self._wants_weight:
            if self._weight is None:
                shape = (dy.shape[1], x.shape[1])
                if self._into is None:
                    self._into = torch.empty(shape, dtype=torch.float32, device=x.device)
                self._weight, self._into = self._into, None
                mm(dy.t(), x, out=self._weight)
            else:
                addmm_(self._weight, dy.t(), x)
        if self._wants_bias:
            total = dy.sum(0, dtype=torch.float32)
            self._bias = total if self._bias is None else self._bias.add_(total)

    def round(self, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor | None, Tensor | None]:
        """`scale` times the weight's (O, I) and the bias's (O,) gradient; frees the fp32 sums."""
        sums = (self._weight, self._bias)
        self._weight = self._bias = None
        if scale != 1.0:
            for x in sums:
                if x is not None:
                    x.mul_(scale)
        weight, bias = (None if x is None else x.to(dtype) for x in sums)
        return weight, bias
