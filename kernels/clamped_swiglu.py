"""gpt-oss's gated activation, of gate and up in neighbouring columns, and its gradient.

    g = min(gate, limit)       u = max(-limit, min(up, limit))       s = sigmoid(alpha g)

    product = (u + 1) g s
    d_gate  = d_product (u + 1) s (1 + alpha g (1 - s))    where gate <= limit, else 0
    d_up    = d_product g s                                where -limit <= up <= limit, else 0

`made` (..., 2 F) has gate in its even columns and up in its odd ones, as gpt-oss's weights give
them. It is read once, and backward writes the gradients over it. All arithmetic is in fp32 and each
result is rounded once. Bytes read and written per token at 2 bytes an element: forward 6 F,
backward 10 F. Rows may lie at any stride.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    as_rows,
    check_float,
    check_shape,
    over_tiles,
    round_to,
    runs_kernel,
    tl,
    triton,
)


class Clamped(NamedTuple):
    """The constants of the equations above."""

    alpha: float
    limit: float


def clamped_swiglu_reference(
    made: Tensor,  # (..., 2 F)
    clamped: Clamped,
) -> Tensor:  # (..., F)
    """Returns the product of the equations above in plain torch, rounded once; differentiable."""
    wide = made.to(torch.promote_types(made.dtype, torch.float32))
    gate, up = wide[..., ::2], wide[..., 1::2]
    gate = gate.clamp(max=clamped.limit)
    up = up.clamp(-clamped.limit, clamped.limit)
    return ((up + 1) * gate * (clamped.alpha * gate).sigmoid()).to(made.dtype)


def _backward_reference_(
    d_product: Tensor,  # (T, F)
    made: Tensor,  # (T, 2 F)
    clamped: Clamped,
) -> None:
    wide = torch.promote_types(made.dtype, torch.float32)
    gate, up, d = made[:, ::2].to(wide), made[:, 1::2].to(wide), d_product.to(wide)
    g, u = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    s = (clamped.alpha * g).sigmoid()
    d_gate = d * (u + 1) * s * (1 + clamped.alpha * g * (1 - s))
    d_up = d * g * s
    made[:, ::2] = d_gate.masked_fill(gate > clamped.limit, 0)
    made[:, 1::2] = d_up.masked_fill(up.abs() > clamped.limit, 0)


@triton.jit
def _at(blocks_per_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a program's rows (ROWS, 1), and its columns of `made` (1, 2 BLOCK) and of the
    product."""
    # int64: row * stride passes 2^31 at 400,000 slots of 5760.
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (tl.program_id(0) % blocks_per_row) * BLOCK
    pair, offs = (2 * first + tl.arange(0, 2 * BLOCK))[None, :], (first + tl.arange(0, BLOCK))[None]
    return row, pair, offs


@triton.jit
def _parts(made_ptrs, mask, alpha, limit, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up as they are and as g and u, and s, (ROWS, BLOCK) each."""
    made = tl.load(made_ptrs, mask=mask, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(made, (ROWS, BLOCK, 2)))
    # A minimum and a maximum would turn NaN into a number.
    g = tl.where(gate > limit, limit, gate)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up, g, u, tl.sigmoid(alpha * g)


@triton.jit
def _forward_kernel(
    made_ptr,  # (T, 2 F)
    out_ptr,  # (T, F)
    T,
    F,
    blocks_per_row,
    stride_made,
    stride_out,
    alpha,
    limit,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, pair, offs = _at(blocks_per_row, ROWS, BLOCK)
    ptrs, mask = made_ptr + row * stride_made + pair, (row < T) & (pair < 2 * F)
    _, _, g, u, s = _parts(ptrs, mask, alpha, limit, ROWS, BLOCK)
    product = round_to((u + 1) * g * s, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + offs, product, mask=(row < T) & (offs < F))


@triton.jit
def _backward_kernel(
    d_product_ptr,  # (T, F)
    made_ptr,  # (T, 2 F), becomes the gradients
    T,
    F,
    blocks_per_row,
    stride_d_product,
    stride_made,
    alpha,
    limit,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, pair, offs = _at(blocks_per_row, ROWS, BLOCK)
    ptrs, mask = made_ptr + row * stride_made + pair, (row < T) & (pair < 2 * F)
    gate, up, g, u, s = _parts(ptrs, mask, alpha, limit, ROWS, BLOCK)
    d_ptrs = d_product_ptr + row * stride_d_product + offs
    d = tl.load(d_ptrs, mask=(row < T) & (offs < F), other=0.0).to(tl.float32)
    d_gate = d * (u + 1) * s * (1 + alpha * g * (1 - s))
    d_gate = tl.where(gate > limit, 0.0, d_gate)
    d_up = tl.where((up > limit) | (up < -limit), 0.0, d * g * s)
    grads = tl.reshape(tl.join(d_gate, d_up), (ROWS, 2 * BLOCK))
    tl.store(ptrs, round_to(grads, made_ptr.dtype.element_ty), mask=mask)


def clamped_swiglu_forward(
    made: Tensor,  # (..., 2 F)
    clamped: Clamped,
    *,
    out: Tensor | None = None,  # (..., F), written
) -> Tensor:  # (..., F)
    """The product of the equations above. Not differentiable by autograd.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    shape = _halved(made)
    out = made.new_empty(shape) if out is None else out
    check_shape("out", out, shape)
    if not runs_kernel(made, out):
        return out.copy_(clamped_swiglu_reference(made, clamped))
    check_float("made", made)
    check_float("out", out, made.dtype)
    m, o = as_rows("made", made), as_rows("out", out)
    if out.numel():
        over_tiles(_forward_kernel, (m, o), o.shape[1], CONFIG, *map(float, clamped))
    return out


def clamped_swiglu_backward_(
    d_product: Tensor,  # (..., F)
    made: Tensor,  # (..., 2 F), becomes the gradients
    clamped: Clamped,
) -> Tensor:  # (..., 2 F)
    """The gradients of gate and up, written over `made`, which is returned.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    check_shape("d_product", d_product, _halved(made))
    d, m = as_rows("d_product", d_product), as_rows("made", made)
    if not runs_kernel(d_product, made):
        _backward_reference_(d, m, clamped)
        return made
    check_float("made", made)
    check_float("d_product", d_product, made.dtype)
    if made.numel():
        over_tiles(_backward_kernel, (d, m), d.shape[1], CONFIG, *map(float, clamped))
    return made


def _halved(made: Tensor) -> tuple[int, ...]:
    """Returns the shape (..., F) of the product of `made` (..., 2 F)."""
    F, rest = divmod(made.shape[-1], 2)
    if rest:
        raise ValueError(f"made must have gate and up for each feature, got {tuple(made.shape)}")
    return *made.shape[:-1], F


CONFIG = Config(block=512, num_warps=4, rows=2)
