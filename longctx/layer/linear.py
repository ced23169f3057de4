"""Matmuls of the schedule: 16-bit operands, sums in fp32, results rounded once.

A weight's gradient is a sum over tiles of tokens, dW = sum_t dy_t' x_t. Adding bf16 tiles loses a
bit with every doubling of their number; here the sum stays in an fp32 buffer that the matrix unit
adds into (`addmm` with an fp32 output), and is rounded to the weight's dtype at the end. A sum of
one tile is rounded by the matrix unit: 4 bytes a weight written and read less (3% of a step of
Llama-3.1-8B at 8192 tokens).

A quantised weight (NF4) is made dense once a pass, forward and backward: 0.4 ms a layer of 8B,
which is then 0.41 GiB of 16-bit weights while it computes.

T tokens, I features in, O features out; weights as Hugging Face holds them, (O, I).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.cost.fitted import DEQUANTISE
from longctx.cost.sizes import Sizes
from longctx.cost.table import Table, Work


def linear(
    x: Tensor,  # (T, I)
    weight: Tensor,  # (O, I)
    bias: Tensor | None = None,  # (O,)
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (T, O)
) -> Tensor:  # (T, O)
    """scale (x weight' + bias), rounded once"""
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale, out=out)
    if out is not None:
        assert scale == 1.0
        return torch.mm(x, weight.t(), out=out)
    return scaled_mm(x, weight.t(), scale)


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
    return torch.add(base, linear(x, weight, bias, scale=scale), out=out)


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


def dense(weight: Any) -> Any:
    """A weight (O, I) that bitsandbytes has quantised to 4 bits, as its own layers compute with it;
    any other as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.detach(), state)


LARGE = 2**23
"""Elements of a matmul's result whose sum cuBLAS does not split, to add the parts in 16 bits."""


def sum_dtype(weight: Tensor, tiles: int) -> torch.dtype:
    """Of the sum that becomes a weight's gradient."""
    rounds_once = tiles == 1 and weight.is_cuda and weight.numel() >= LARGE
    return weight.dtype if rounds_once else torch.float32


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a b, in fp32"""
    out = torch.empty(len(a), b.shape[1], dtype=torch.float32, device=a.device)
    mm(a, b, out=out)
    return out


class WeightGradient:
    """The gradient of a linear layer's weight and bias over tiles of tokens; nothing if frozen."""

    def __init__(
        self,
        weight: bool,
        bias: bool = False,
        into: Tensor | None = None,  # (O, I): where the weight's adds up
        dtype: torch.dtype = torch.float32,  # of this sum, without `into`
    ) -> None:
        self._wants_weight, self._wants_bias = weight, bias
        self._into, self._dtype = into, dtype
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, dy: Tensor, x: Tensor) -> None:  # (T, O), (T, I)
        if self._wants_weight:
            if self._weight is None:
                shape = (dy.shape[1], x.shape[1])
                if self._into is None:
                    self._into = torch.empty(shape, dtype=self._dtype, device=x.device)
                self._weight, self._into = self._into, None
                mm(dy.t(), x, out=self._weight)
            else:
                addmm_(self._weight, dy.t(), x)
        if self._wants_bias:
            total = dy.sum(0, dtype=torch.float32)
            self._bias = total if self._bias is None else self._bias.add_(total)

    def round(self, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor | None, Tensor | None]:
        """`scale` times the weight's (O, I) and the bias's (O,) gradient; frees the sums."""
        sums = (self._weight, self._bias)
        self._weight = self._bias = None
        if scale != 1.0:
            for x in sums:
                if x is not None:
                    x.mul_(scale)
        weight, bias = (None if x is None else x.to(dtype) for x in sums)
        return weight, bias


# --- what they cost ---------------------------------------------------------------------------


def weight_sums(s: Sizes, tokens: int, elements: int) -> int:
    """Bytes that weight gradients read and write as they add up over tiles in fp32."""
    tiles = -(-tokens // s.cut(tokens).tile_tokens)
    return elements * s.trains_weights * (8 * tiles + 2 if tiles > 1 else 2)


def dense_cost(s: Sizes) -> Table:
    """Of quantised weights that are made dense."""
    made = Work(name="quantised weights made dense", nbytes=int(DEQUANTISE * s.dense_bytes))
    return Table(forward=(made,), backward=(made,))
