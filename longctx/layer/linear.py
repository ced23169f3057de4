"""Matmuls of the schedule: 16-bit operands, sums in fp32, results rounded once.

A weight's gradient is a sum over tiles of tokens, dW = sum_t dy_t' x_t. Adding bf16 tiles loses one
bit each time the number of tiles doubles. Here the sum stays in an fp32 buffer that the tensor
cores add into (`addmm` with an fp32 output), and is rounded to the weight's dtype at the end. A sum
of one tile is rounded by the tensor cores, which writes and reads 4 bytes less per weight (3% of a
step of Llama-3.1-8B at 8192 tokens).

A packed weight (packed_weights.py) is made dense once in forward and once in backward. In NF4 this
takes 0.23 ms per layer of 8B on an H100, and the layer's 16-bit weights occupy 0.41 GiB while it
computes. A layer's experts are made dense together: 1.13 GiB of Qwen3-30B-A3B.

T tokens, I features in, O features out; weights are (O, I), as Hugging Face stores them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import DEQUANTISE
from longctx.cost.sizes import Sizes
from longctx.cost.table import Buffer, Table, Work


def linear(
    x: Tensor,  # (T, I)
    weight: Tensor,  # (O, I)
    bias: Tensor | None = None,  # (O,)
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (T, O)
) -> Tensor:  # (T, O)
    """Returns scale (x weight' + bias), rounded once."""
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
    """Returns base + scale (x weight' + bias), rounded once. With a bias, or where base has
    another dtype than x (an fp32 residual stream), the result is rounded twice: the first time
    before base is added, since base is the larger term of a residual stream."""
    if base.dtype != x.dtype:
        product = linear(x, weight, bias)
        return torch.add(base, product if scale == 1.0 else product.to(base.dtype) * scale, out=out)
    if bias is None:
        return torch.addmm(base, x, weight.t(), alpha=scale, out=out)
    # torch.add's alpha is not used: CPUs round it to bf16, so that 1.7 becomes 1.703.
    return torch.add(base, linear(x, weight, bias, scale=scale), out=out)


def scaled_mm(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Returns scale a b, rounded once."""
    if scale == 1.0:
        return torch.mm(a, b, out=out)
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scale, out=out)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes out = a b, with out in fp32 or in the operands' dtype."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def addmm_(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a b to acc, which is fp32."""
    if a.is_cuda and a.dtype != acc.dtype:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        torch.addmm(acc, a.to(acc.dtype), b.to(acc.dtype), out=acc)


def stacked(weights: Sequence[Tensor]) -> Tensor:  # (O, I) each -> (sum of O, I)
    """Returns weights one under the other: a view where they lie so in memory, else a copy."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.data_ptr() != end:
            return torch.cat([*weights])
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


LARGE = 2**23
"""From this many elements of the result on, cuBLAS does not split a matmul's sum into parts that it
would add in 16 bits."""


def sum_dtype(weight: Tensor, tiles: int) -> torch.dtype:
    """The dtype in which a weight's gradient is summed over this many tiles."""
    rounds_once = tiles == 1 and weight.is_cuda and weight.numel() >= LARGE
    return weight.dtype if rounds_once else torch.float32


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b in fp32."""
    out = torch.empty(len(a), b.shape[1], dtype=torch.float32, device=a.device)
    mm(a, b, out=out)
    return out


class WeightGradient:
    """Sums a linear layer's weight and bias gradients over tiles of tokens, unless frozen."""

    def __init__(
        self,
        weight: bool,
        bias: bool = False,
        into: Tensor | None = None,  # (O, I): buffer for the sum of the weight's gradient
        dtype: torch.dtype = torch.float32,  # of that sum, if `into` is not given
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
        """Returns `scale` times the gradients of weight (O, I) and bias (O,); frees the sums."""
        sums = (self._weight, self._bias)
        self._weight = self._bias = None
        if scale != 1.0:
            for x in sums:
                if x is not None:
                    x.mul_(scale)
        weight, bias = (None if x is None else x.to(dtype) for x in sums)
        return weight, bias


# --- what they cost ---------------------------------------------------------------------------


def weight_sums(s: Sizes, kind: LayerKind, tokens: int, elements: int) -> int:
    """Bytes that weight gradients read and write while they are summed over tiles in fp32."""
    tiles = -(-tokens // s.cut(tokens).tile_tokens)
    return elements * kind.trains_weights * (8 * tiles + 2 if tiles > 1 else 2)


def dense_cost(kind: LayerKind) -> Table:
    """The cost of making a layer's quantised weights dense, in each direction."""
    made = Work(name="quantised weights made dense", nbytes=int(DEQUANTISE * kind.dense_bytes))
    there = [
        Buffer(name="a layer's dense weights", nbytes=kind.dense_bytes, during=during)
        for during in ("forward", "backward")
    ]
    return Table(forward=(made,), backward=(made,), buffers=(*there,))
