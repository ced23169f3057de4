"""Rotary position embedding by tables of cosines and sines, in Hugging Face's shapes.

For the pair (j, j + d/2) of a head of size d, with the row of its token in the tables:

    x_j'       = x_j cos_j - x_{j+d/2} sin_j
    x_{j+d/2}' = x_{j+d/2} cos_j + x_j sin_j                     j < d/2

The second half of a row of the tables repeats the first, as transformers' rotary embeddings make
them, and is not read. The gradient is the same rotation with -sin, so only the tables are saved,
which all layers share. Bytes per token: each element of q and k is read and written once, 4 (H + K)
d at 2 bytes an element, and half of both tables is read. `longctx.rope` needs no tables, and writes
over q and k; here the results are new, because the function that this one stands in for leaves its
arguments alone.

All arithmetic is in fp32, rounded once. Hugging Face's function rounds each product and sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.annotate import annotated
from longctx.kernels.launch import (
    check_float,
    check_rows,
    check_shape,
    once_differentiable,
    runs_kernel,
)
from longctx.kernels.rope import launch, rotated_reference


def rope_tables_reference(
    x: Tensor,  # (T, H, d)
    cos: Tensor,  # (T, d)
    sin: Tensor,  # (T, d)
    *,
    inverse: bool = False,
) -> Tensor:  # (T, H, d)
    """Returns the rotation of one tensor in plain torch; differentiable in x."""
    wide, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    c, s = (table[:, None, :half].to(wide) for table in (cos, -sin if inverse else sin))
    return rotated_reference(x, c, s)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 (heads first) or 2, got {unsqueeze_dim!r}")
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or x.shape[3] % 2 or x.shape[3] == 0:
            order = "(B, heads, S, even d)" if unsqueeze_dim == 1 else "(B, S, heads, even d)"
            raise ValueError(f"{name} must have shape {order}, got {tuple(x.shape)}")
        check_rows(name, x)
        if q.dtype != torch.float64:
            check_float(name, x, q.dtype)
    B, S, d = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
    of_k = list(q.shape)
    of_k[unsqueeze_dim] = k.shape[unsqueeze_dim]
    check_shape("k", k, of_k)
    for name, x in (("cos", cos), ("sin", sin)):
        check_shape(name, x, (1 if x.dim() and len(x) == 1 else B, S, d))
        if x.dtype != torch.float64:
            check_float(name, x)
        if x.requires_grad:
            raise ValueError(f"{name} gets no gradient, so it must not require one: detach it")


def _rotated(
    q: Tensor,  # (B, S, H, d)
    k: Tensor,  # (B, S, K, d)
    cos: Tensor,  # (B, S, d) or (1, S, d)
    sin: Tensor,  # (B, S, d) or (1, S, d)
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Returns q and k rotated, in one launch, or in one a batch row where the tokens of these do
    not lie at one stride, as in contiguous (B, H, S, d)."""
    q_out, k_out = (x.new_empty(x.shape) for x in (q, k))
    on_kernel = runs_kernel(q, k, cos, sin) and q.dtype != torch.float64
    tables = (x.expand(len(q), -1, -1) for x in (cos, sin))
    for a, b, a_out, b_out, *both in _rows(q, k, q_out, k_out, *tables):
        if on_kernel:
            c, s = (x.contiguous() for x in both)
            launch(a, b, a_out, b_out, (c, s), tables=True, inverse=inverse)
        else:
            for x, out in ((a, a_out), (b, b_out)):
                out.copy_(rope_tables_reference(x, *both, inverse=inverse))
    return q_out, k_out


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:  # (B, S, ...)
    """Yields the tensors as (B S, ...), or a batch row at a time if q or k allows no such view."""
    B, S = tensors[0].shape[:2]
    if B == 1 or all(x.stride(0) == S * x.stride(1) for x in tensors[:2]):
        yield tuple(x.flatten(0, 1) for x in tensors)
    else:
        yield from zip(*tensors, strict=True)


class _RopeTables(torch.autograd.Function):
    @staticmethod
    @annotated("rope")
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.heads_first = heads_first
        return _turned(q, k, cos, sin, heads_first, inverse=False)

    @staticmethod
    @once_differentiable
    @annotated("rope")
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk))
        cos, sin = ctx.saved_tensors
        grads = _turned(dq, dk, cos, sin, ctx.heads_first, inverse=True)
        return *grads, None, None, None


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """`_rotated` for heads before or after tokens. In memory, tokens come first in the results, as
    a projection leaves them."""
    if not heads_first:
        return _rotated(q, k, cos, sin, inverse)
    q, k = _rotated(q.transpose(1, 2), k.transpose(1, 2), cos, sin, inverse)
    return q.transpose(1, 2), k.transpose(1, 2)


def apply_rotary_pos_emb(
    q: Tensor,  # (B, H, S, d), or (B, S, H, d) for unsqueeze_dim=2
    k: Tensor,  # (B, K, S, d), or (B, S, K, d)
    cos: Tensor,  # (B, S, d) or (1, S, d)
    sin: Tensor,  # (B, S, d) or (1, S, d)
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """q and k rotated by tables, differentiable in both: transformers' function of this name, as
    its Llama has it. Nothing is overwritten.

    Shapes: q is (B, H, S, d) and k (B, K, S, d), d even, both of one dtype (bf16, fp16, fp32 or
    fp64), which the results have, too; with `unsqueeze_dim=2` heads come after tokens. cos and sin
    are (B, S, d), or (1, S, d) for all rows, in any of these dtypes, as `model.model.rotary_emb`
    returns them: the second half of a row repeats the first, which alone is read. They get no
    gradient. `longctx.rope` makes its angles from positions, and needs no tables.

    Raises ValueError for a wrong shape, dtype, device or layout.

    Example:
        >>> import longctx, torch
        >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)  # 2 rows of 5 tokens
        >>> angles = torch.arange(5.0)[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
        >>> table = torch.cat((angles, angles), dim=-1)[None]  # (1, 5, 8)
        >>> turned, _ = longctx.apply_rotary_pos_emb(q, k, table.cos(), table.sin())
        >>> turned.shape, torch.equal(turned[:, :, 0], q[:, :, 0])  # position 0 rotates nothing
        (torch.Size([2, 4, 5, 8]), True)

    Source: Su et al., RoFormer (arXiv 2104.09864); halves paired as in Hugging Face's Llama.
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    return _RopeTables.apply(q, k, cos, sin, unsqueeze_dim == 1)
