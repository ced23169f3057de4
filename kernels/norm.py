"""RMSNorm and LayerNorm of x, and their gradients, which may be added to that of a residual.

    mu = mean_j x_j for LayerNorm, 0 for RMSNorm         c = x - mu
    rstd = (mean_j c_j^2 + eps)^(-1/2)        n = c rstd
    y = round(n) * w               as in Llama: n is rounded to x's dtype, then multiplied by w
    y = n * w + bias               all in fp32, rounded once (LayerNorm, `llama_rounding=False`)
    w = weight + offset            in fp32; Gemma and Nemotron store a weight whose offset is 1

    d_n = dy * w
    dx  = d_residual + rstd (d_n - mean_j(d_n) - n mean_j(d_n n))     RMSNorm has no mean_j(d_n)
    dw += sum over rows of dy * n, in fp32 (n rounded as in forward)
    db += sum over rows of dy, in fp32

Saved: only the input. Backward has to read it anyway, so it recomputes mu and rstd. The mean is
subtracted before the squares are summed: the difference of mean squares would lose all digits where
the mean is large beside the deviation. Bytes read and written per token at 2 bytes an element:
forward 4 D, backward 6 D (8 D with a residual's gradient).

Backward starts a fixed number of programs. Each takes several blocks of rows, one after the other,
and keeps its partial sums of dw and db in registers. The partial sums are then added in a fixed
order, so dw and db are the same in every run.

The weight may be fp32 where x has 16 bits, as in autocast: y and dy are fp32 then, as a product of
the two is, or have 16 bits, as the caller gives them. The bias has the weight's dtype.

Rows may be the heads of a wider buffer, x (T, H, d) with a stride for tokens and one for heads. Or
they are parts of wider rows, whose rstd is given to forward: OLMo 2 has norms over all heads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.annotate import annotated
from longctx.kernels.launch import (
    Config,
    as_rows,
    check_eps,
    check_float,
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    row_start,
    row_strides,
    rows_or_heads,
    runs_kernel,
    sm_count,
    tl,
    triton,
)

MAX_HIDDEN = 32768
"""Largest D. A row is held in registers; above 8192 elements backward spills some (sm_80)."""


def norm_reference(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
    *,
    bias: Tensor | None = None,  # (D,)
    centred: bool = False,
    llama_rounding: bool = True,
    offset: float = 0.0,
    rstd: Tensor | None = None,  # (...)
) -> Tensor:  # (..., D)
    """Returns y of the equations above in plain torch, in the weight's dtype; differentiable."""
    wide = x if x.dtype == torch.float64 else x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    if rstd is None:
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    n = wide * rstd[..., None]
    dtype = weight.dtype
    if offset:
        weight = weight.to(n.dtype) + offset
    if llama_rounding and not centred:
        return (n.to(x.dtype) * weight).to(dtype)
    y = n * weight.to(n.dtype)
    return (y if bias is None else y + bias.to(n.dtype)).to(dtype)


def _backward_reference(
    dy: Tensor,  # (T, D)
    x: Tensor,  # (T, D)
    weight: Tensor,  # (D,)
    eps: float,
    centred: bool,
    llama_rounding: bool,
    offset: float,
    d_residual: Tensor | None,  # (T, D)
    dw: Tensor | None,  # (D,) fp32
    db: Tensor | None,  # (D,) fp32
) -> Tensor:  # (T, D)
    wide, d_n = x.float(), dy.float() * (weight.float() + offset)
    if centred:
        n = wide - wide.mean(-1, keepdim=True)
        rstd = torch.rsqrt(torch.linalg.vecdot(n, n)[..., None] / n.shape[-1] + eps)
        n *= rstd
        dots = torch.linalg.vecdot(d_n, n)[..., None] / n.shape[-1]
        dx = d_n.sub_(d_n.mean(-1, keepdim=True)).addcmul_(n, dots, value=-1).mul_(rstd)
    else:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        n = wide * rstd
        dx = rstd * (d_n - n * (d_n * n).mean(-1, keepdim=True))
        n = n.to(x.dtype).float() if llama_rounding else n
    if dw is not None:
        dw += (dy.float() * n).sum(0)
    if db is not None:
        db += dy.float().sum(0)
    return (dx if d_residual is None else dx + d_residual.float()).to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr,  # (T, D)
    weight_ptr,  # (D,)
    bias_ptr,  # (D,)
    rstd_ptr,  # (T,) fp32
    out_ptr,  # (T, D)
    T,
    D,
    stride_x,
    stride_x_head,
    stride_out,
    stride_out_head,
    eps,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RSTD: tl.constexpr,
    LLAMA_ROUNDING: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64: rows * stride passes 2^31 at 600,000 rows of 4096.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (rows < T) & (offs < D)
    x_start = row_start(rows, stride_x, stride_x_head, HEADS)
    x = tl.load(x_ptr + x_start + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=offs < D, other=0.0).to(tl.float32)
    # A constexpr, so that an offset of 0 costs no addition.
    if OFFSET != 0.0:
        weight += OFFSET
    if CENTRED:
        # Idle elements are set back to 0: they would be -mean, and count in the variance.
        x = tl.where(offs < D, x - tl.sum(x, axis=1, keep_dims=True) / D, 0.0)
    if HAS_RSTD:
        rstd = tl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    n = x * rstd
    if LLAMA_ROUNDING:
        n = round_to(n, x_ptr.dtype.element_ty).to(tl.float32)
    y = n * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs, mask=offs < D, other=0.0).to(tl.float32)
    y = round_to(y, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row_start(rows, stride_out, stride_out_head, HEADS) + offs, y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (T, D)
    x_ptr,  # (T, D)
    weight_ptr,  # (D,)
    d_residual_ptr,  # (T, D)
    out_ptr,  # (T, D), may alias dy or d_residual
    dw_partial_ptr,  # (programs, D) fp32
    db_partial_ptr,  # (programs, D) fp32
    T,
    D,
    stride_dy,
    stride_dy_head,
    stride_x,
    stride_x_head,
    stride_d_residual,
    stride_out,
    stride_out_head,
    eps,
    CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DW: tl.constexpr,
    HAS_DB: tl.constexpr,
    LLAMA_ROUNDING: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    weight = tl.load(weight_ptr + offs, mask=offs < D, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight += OFFSET
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    # The next rows are fetched while these are reduced, and the sums of a pair (the means, then
    # squares and dots) do not depend on each other. One row at a time, with the second sum after
    # the first, reaches 0.67 of the copy rate.
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, T, step, num_stages=STAGES):
        rows = tl.arange(0, ROWS)[:, None].to(tl.int64) + first  # (ROWS, 1)
        mask = (rows < T) & (offs < D)
        x_start = row_start(rows, stride_x, stride_x_head, HEADS)
        dy_start = row_start(rows, stride_dy, stride_dy_head, HEADS)
        x = tl.load(x_ptr + x_start + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_start + offs, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual_offs = rows * stride_d_residual + offs
            d_residual = tl.load(d_residual_ptr + residual_offs, mask=mask, other=0.0)
        d_n = dy * weight
        if CENTRED:
            mean = tl.sum(x, axis=1, keep_dims=True) / D
            d_mean = tl.sum(d_n, axis=1, keep_dims=True) / D
            x = tl.where(offs < D, x - mean, 0.0)
        squares = tl.sum(x * x, axis=1, keep_dims=True)
        dots = tl.sum(d_n * x, axis=1, keep_dims=True)
        rstd = tl.rsqrt(squares / D + eps)
        n = x * rstd
        if CENTRED:
            d_n -= d_mean
        dx = rstd * (d_n - n * (rstd * dots / D))
        if HAS_RESIDUAL:
            dx += d_residual.to(tl.float32)
        out_start = row_start(rows, stride_out, stride_out_head, HEADS)
        tl.store(out_ptr + out_start + offs, round_to(dx, out_ptr.dtype.element_ty), mask)
        if HAS_DW:
            if LLAMA_ROUNDING:
                # Forward multiplied the rounded n by the weight, so dw is its sum with dy.
                n = round_to(n, x_ptr.dtype.element_ty).to(tl.float32)
            dw += dy * n
        if HAS_DB:
            db += dy
    partial_offs = tl.program_id(0).to(tl.int64) * D + offs
    if HAS_DW:
        tl.store(dw_partial_ptr + partial_offs, tl.sum(dw, axis=0, keep_dims=True), mask=offs < D)
    if HAS_DB:
        tl.store(db_partial_ptr + partial_offs, tl.sum(db, axis=0, keep_dims=True), mask=offs < D)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, y: str = "", **others: Tensor | None
) -> None:
    """Raises ValueError for a wrong shape, dtype or device. The other tensors have x's dtype, but
    the one that `y` names may have the weight's."""
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have shape (..., D), got ()")
    D = x.shape[-1]
    if not 0 < D <= MAX_HIDDEN:
        raise ValueError(f"x must have 1 to {MAX_HIDDEN} elements a row, got {D}")
    if tuple(weight.shape) != (D,):
        raise ValueError(
            f"weight must have shape ({D},), got {tuple(weight.shape)} for x of {tuple(x.shape)}"
        )
    check_float("weight", weight, None if weight.dtype == torch.float32 else x.dtype)
    if bias is not None:
        check_shape("bias", bias, (D,))
        check_float("bias", bias, weight.dtype)
    for name, other in others.items():
        if other is not None:
            check_shape(name, other, x.shape)
            wide = name == y and other.dtype != x.dtype
            check_float(name, other, weight.dtype if wide else x.dtype)


@annotated("norm")
def norm_forward(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
    *,
    bias: Tensor | None = None,  # (D,)
    out: Tensor | None = None,  # (..., D)
    centred: bool = False,
    llama_rounding: bool = True,
    offset: float = 0.0,
    rstd: Tensor | None = None,  # (...) fp32
) -> Tensor:  # (..., D)
    """RMSNorm of x, or if `centred` LayerNorm, written to `out` if given. Not differentiable by
    autograd.

    The result has the weight's dtype, or that of `out`, which may be x's. `rstd`, if given, is that
    of wider rows of which x has a part. LayerNorm ignores `llama_rounding`. Raises ValueError for a
    wrong shape, dtype, device or layout.
    """
    _check(x, weight, bias, "out", out=out)
    if rstd is not None:
        check_shape("rstd", rstd, x.shape[:-1])
        check_float("rstd", rstd, torch.float32)
    out = torch.empty_like(x, dtype=weight.dtype) if out is None else out
    if not runs_kernel(x, weight, bias, out, rstd):
        how: dict[str, Any] = dict(centred=centred, llama_rounding=llama_rounding, offset=offset)
        return out.copy_(norm_reference(x, weight, eps, bias=bias, rstd=rstd, **how))

    x_rows, out_rows = rows_or_heads(("x", x), ("out", out))
    D, weight = x.shape[-1], weight.contiguous()
    T, heads = x.numel() // D, x_rows.shape[1] if x_rows.dim() == 3 else 1

    if T:
        config = forward_config(D)
        with on_device(x):
            _forward_kernel[(triton.cdiv(T, config.rows),)](
                *(x_rows, weight, weight if bias is None else bias.contiguous()),
                *(weight if rstd is None else rstd.contiguous(), out_rows, T, D),
                *(*row_strides(x_rows), *row_strides(out_rows), eps),
                CENTRED=centred,
                HAS_BIAS=bias is not None,
                HAS_RSTD=rstd is not None,
                LLAMA_ROUNDING=llama_rounding and not centred,
                OFFSET=offset,
                HEADS=heads,
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
    return out


@annotated("norm")
def norm_backward(
    dy: Tensor,  # (..., D)
    x: Tensor,  # (..., D), what forward normalised
    weight: Tensor,  # (D,)
    eps: float,
    *,
    d_residual: Tensor | None = None,  # (..., D)
    dw: Tensor | None = None,  # (D,) fp32
    db: Tensor | None = None,  # (D,) fp32
    out: Tensor | None = None,  # (..., D), may alias dy or d_residual
    centred: bool = False,
    llama_rounding: bool = True,
    offset: float = 0.0,
) -> Tensor:  # (..., D)
    """The gradient of x, plus `d_residual` if given. The gradients of weight and bias are *added*
    to `dw` and `db`, if given, so that tiles of a long sequence can share them.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    _check(x, weight, None, "dy", dy=dy, d_residual=d_residual, out=out)
    for name, sums in (("dw", dw), ("db", db)):
        if sums is not None:
            check_shape(name, sums, weight.shape)
            check_float(name, sums, torch.float32)
    out = torch.empty_like(x) if out is None else out
    if not runs_kernel(dy, x, weight, d_residual, dw, db, out):
        dy, rows = dy.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1])
        added = None if d_residual is None else d_residual.reshape(rows.shape)
        how = (centred, llama_rounding, offset)
        return out.copy_(
            _backward_reference(dy, rows, weight, eps, *how, added, dw, db).view(x.shape)
        )

    flags = dict(CENTRED=centred, LLAMA_ROUNDING=llama_rounding and not centred, OFFSET=offset)
    _launch_backward(dy, x, weight.contiguous(), d_residual, out, dw, db, eps, **flags)
    return out


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    d_residual: Tensor | None,
    out: Tensor,
    dw: Tensor | None,
    db: Tensor | None,
    eps: float,
    **flags: Any,
) -> None:
    if d_residual is None:
        x_rows, dy_rows, out_rows = rows_or_heads(("x", x), ("dy", dy), ("out", out))
        # The kernel wants a pointer, but does not read it: HAS_RESIDUAL is False.
        residual_rows = x_rows
    else:
        x_rows, dy_rows, out_rows = as_rows("x", x), as_rows("dy", dy), as_rows("out", out)
        residual_rows = as_rows("d_residual", d_residual)
    D = x.shape[-1]
    T, heads = x.numel() // D, x_rows.shape[1] if x_rows.dim() == 3 else 1
    if not T:
        return
    config = backward_config(D, dy.element_size())
    with on_device(x):
        programs = min(triton.cdiv(T, config.rows), sm_count(x) * config.programs_per_sm)
        # A row for each program, and no atomics: their order, and so dw's bits, would vary.
        dw_partial, db_partial = (
            weight if sums is None else sums.new_empty(programs, D) for sums in (dw, db)
        )
        _backward_kernel[(programs,)](
            *(dy_rows, x_rows, weight, residual_rows, out_rows, dw_partial, db_partial, T, D),
            *(*row_strides(dy_rows), *row_strides(x_rows), residual_rows.stride(0)),
            *(*row_strides(out_rows), eps),
            **flags,
            HAS_RESIDUAL=d_residual is not None,
            HAS_DW=dw is not None,
            HAS_DB=db is not None,
            HEADS=heads,
            STAGES=config.num_stages,
            ROWS=config.rows,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
        for sums, partial in ((dw, dw_partial), (db, db_partial)):
            if sums is not None:
                sums.add_(partial.sum(0))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, how: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.how = eps, how
        return norm_forward(x, weight, eps, bias=bias, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dw, db = (
            torch.zeros_like(weight, dtype=torch.float32) if needed else None
            for needed in ctx.needs_input_grad[1:3]
        )
        dx = norm_backward(dy.contiguous(), x, weight, ctx.eps, dw=dw, db=db, **ctx.how)
        d_weight, d_bias = (None if sums is None else sums.to(weight.dtype) for sums in (dw, db))
        return dx, d_weight, d_bias, None, None


def rms_norm(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float = 1e-6,
    *,
    llama_rounding: bool = True,
    offset: float = 0.0,
) -> Tensor:  # (..., D)
    """x / rms(x) * (weight + offset) over the last dimension, differentiable in x and weight.

    Shapes: x and the result are (..., D) with 1 <= D <= 32768, weight is (D,); bf16, fp16 or fp32,
    all of one dtype, or x alone in 16 bits, where the result is fp32. rms(x) = sqrt(mean(x^2) +
    eps). With `llama_rounding` the normalised x is rounded to x's dtype before the multiplication,
    as Hugging Face's LlamaRMSNorm does; without it only the result is rounded. Gemma's norms have
    `offset=1.0` and no `llama_rounding`.

    Saves x and weight; x is copied first if it is not contiguous. A frozen weight costs nothing in
    backward. Raises ValueError for a wrong shape, dtype or device.

    Example:
        >>> import longctx, torch
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> longctx.rms_norm(x, torch.ones(2), eps=0.0)  # rms(x) = sqrt(12.5)
        tensor([[0.8485, 1.1314]])

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467).
    """
    _check(x, weight)
    check_eps(eps)
    how = dict(llama_rounding=llama_rounding, offset=offset)
    return _Norm.apply(x.contiguous(), weight, None, eps, how)


def layer_norm(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float = 1e-5,
    *,
    bias: Tensor | None = None,  # (D,)
    offset: float = 0.0,
) -> Tensor:  # (..., D)
    """(x - mean(x)) / std(x) * (weight + offset) + bias over the last dimension, differentiable in
    x, weight and bias.

    Shapes: x and the result are (..., D) with 1 <= D <= 32768, weight and bias are (D,); bf16, fp16
    or fp32, all of one dtype, or x alone in 16 bits, where the result is fp32. std(x) =
    sqrt(mean((x - mean(x))^2) + eps). Only the result is rounded.

    Saves x and weight; x is copied first if it is not contiguous. A frozen weight or bias costs
    nothing in backward. Raises ValueError for a wrong shape, dtype or device.

    Example:
        >>> import longctx, torch
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> longctx.layer_norm(x, torch.ones(2), eps=0.0, bias=torch.tensor([0.0, 10.0]))
        tensor([[-1., 11.]])

    Source: Ba, Kiros and Hinton, Layer Normalization (arXiv 1607.06450).
    """
    _check(x, weight, bias)
    check_eps(eps)
    how = dict(centred=True, offset=offset)
    return _Norm.apply(x.contiguous(), weight, bias, eps, how)


@cache
def forward_config(D: int) -> Config:
    block = triton.next_power_of_2(D)
    return Config(block=block, num_warps=min(16, max(4, block // 1024)), rows=max(1, 2048 // block))


@cache
def backward_config(D: int, itemsize: int = 2) -> Config:
    block = triton.next_power_of_2(D)
    # Prefetched rows lie in shared memory, so wide rows get fewer stages: three stages of 32 KiB
    # rows would need 192 KiB.
    row_bytes = block * itemsize
    return Config(
        block=block,
        num_warps=min(16, max(4, block // 512)),
        rows=max(1, 2048 // block),
        programs_per_sm=2 if row_bytes <= 16384 else 1,
        num_stages=3 if row_bytes <= 16384 else 2 if row_bytes <= 32768 else 1,
    )
