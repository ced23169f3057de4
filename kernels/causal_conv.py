"""The short causal convolution of a mixer: each channel has its own filter of K taps.

    y[t, c] = bias[c] + sum_j w[c, j] x[t - K + 1 + j, c]            j < K; x is 0 before the row

    dx[t] = sum_j w[j] dy[t + K - 1 - j]     dw[j] = sum_t dy[t] x[t - K + 1 + j]     db = sum_t dy

Of several documents in a row, each begins with zeros: given the position p[t] of each token in its
document, the sums have the terms alone with which K - 1 - j <= p of the token of y or dy.

Tokens are rows here, as the linear layers around a mixer write and read them. torch's convolution
takes channels as rows: tensors are transposed for it, and the gradient that it leaves behind a
state of K - 1 tokens lies at an odd stride, with which no matmul reads 16 bytes at a time.

All arithmetic is in fp32 and each result is rounded once. Sums over tokens are made in parts of a
fixed size, and these are added in a fixed order: no atomics. Bytes a token at 2 bytes an element:
4 C forward and 4 C backward, 6 C where the filters are trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_float,
    check_rows,
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    tl,
    triton,
)

MOST_TAPS = 8


def causal_conv_reference(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K)
    bias: Tensor | None = None,  # (C,)
    positions: Tensor | None = None,  # (T,)
) -> Tensor:  # (B, T, C)
    """Returns the first equation in plain torch, rounded once; differentiable."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if positions is not None:
        return _of_documents(x.to(wide), weight.to(wide), bias, positions).to(x.dtype)
    filters, given = weight[:, None].to(wide), None if bias is None else bias.to(wide)
    how: dict[str, Any] = dict(padding=weight.shape[1] - 1, groups=len(weight))
    y = torch.conv1d(x.to(wide).mT, filters, given, **how)
    return y[..., : x.shape[1]].mT.to(x.dtype)


def _of_documents(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    (T,), taps = positions.shape, weight.shape[1]
    before = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    y = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)
    for j in range(taps):
        there = (positions >= taps - 1 - j)[:, None]
        y = y + weight[:, j] * before[:, j : j + T].where(there, 0)
    return y


@triton.jit
def _forward_kernel(
    x_ptr,  # (B, T, C), rows and tokens at a stride
    weight_ptr,  # (C, K)
    bias_ptr,  # (C,)
    positions_ptr,  # (T,)
    out_ptr,  # (B, T, C)
    T,
    C,
    stride_row,
    stride_token,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, channel = tl.program_id(2).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    y = tl.zeros((TOKENS, BLOCK), tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    for j in tl.static_range(TAPS):
        at = token + (j - TAPS + 1)
        mask = (at >= 0) & (at < T) & (channel < C)
        if HAS_POSITIONS:
            position = tl.load(positions_ptr + token, mask=token < T, other=0)
            mask = mask & (position >= TAPS - 1 - j)
        x = tl.load(x_ptr + row * stride_row + at * stride_token + channel, mask=mask, other=0.0)
        w = tl.load(weight_ptr + channel * TAPS + j, mask=channel < C, other=0.0)
        y += x.to(tl.float32) * w.to(tl.float32)
    out = out_ptr + (row * T + token) * C + channel
    tl.store(out, round_to(y, out_ptr.dtype.element_ty), mask=(token < T) & (channel < C))


@triton.jit
def _backward_kernel(
    dy_ptr,  # (B, T, C), rows and tokens at a stride
    x_ptr,  # (B, T, C), rows and tokens at a stride
    weight_ptr,  # (C, K)
    begin_ptr,  # (B, K - 1, C), rows and tokens at a stride
    positions_ptr,  # (T,)
    dx_ptr,  # (B, T, C)
    d_begin_ptr,  # (B, K - 1, C)
    parts_ptr,  # (B, programs, C, K + 1) fp32: of dw and, last, of db
    T,
    C,
    stride_dy_row,
    stride_dy_token,
    stride_x_row,
    stride_x_token,
    stride_begin_row,
    stride_begin_token,
    HAS_DW: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, channel = tl.program_id(2).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    if HAS_BEGIN:
        token -= TAPS - 1
    real = (token >= 0) & (token < T) & (channel < C)
    before = (token < 0) & (channel < C)
    at_begin = token + (TAPS - 1)
    part = (row * tl.num_programs(0) + tl.program_id(0)) * C + channel
    dx = tl.zeros((TOKENS, BLOCK), tl.float32)
    for j in tl.static_range(TAPS):
        at = token + (TAPS - 1 - j)
        mask = (at >= 0) & (at < T) & (channel < C)
        if HAS_POSITIONS:
            position = tl.load(positions_ptr + at, mask=at < T, other=0)
            mask = mask & (position >= TAPS - 1 - j)
        dy = tl.load(
            dy_ptr + row * stride_dy_row + at * stride_dy_token + channel, mask=mask, other=0.0
        )
        w = tl.load(weight_ptr + channel * TAPS + j, mask=channel < C, other=0.0)
        dx += dy.to(tl.float32) * w.to(tl.float32)
        if HAS_DW:
            # Token t of dy, moved by the tap, meets x at this program's own tokens.
            x = tl.load(
                x_ptr + row * stride_x_row + token * stride_x_token + channel, mask=real, other=0.0
            )
            if HAS_BEGIN:
                begin = begin_ptr + row * stride_begin_row + at_begin * stride_begin_token + channel
                x += tl.load(begin, mask=before, other=0.0)
            dw = tl.sum(dy.to(tl.float32) * x.to(tl.float32), axis=0)
            tl.store(parts_ptr + part * (TAPS + 1) + j, dw, mask=channel < C)
            if j == TAPS - 1:
                db = tl.sum(dy.to(tl.float32), axis=0)
                tl.store(parts_ptr + part * (TAPS + 1) + TAPS, db, mask=channel < C)
    dx = round_to(dx, dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + (row * T + token) * C + channel, dx, mask=real)
    if HAS_BEGIN:
        d_begin = d_begin_ptr + (row * (TAPS - 1) + at_begin) * C + channel
        tl.store(d_begin, dx, mask=before)


def conv_gradients(
    dy: Tensor,  # (B, T, C)
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K), contiguous
    positions: Tensor | None = None,  # (T,)
    begin: Tensor | None = None,  # (B, K - 1, C): what x is before the row, if it is not 0
    *,
    trains: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns dx (B, T, C), d_begin (B, K - 1, C), and if the filters are trained (C, K + 1) in
    fp32: dw and, in the last column, db. Only on a device whose kernels run. Rows and tokens of dy,
    x and begin lie at any stride."""
    B, T, C = x.shape
    taps = weight.shape[1]
    grid = _grid(B, T + (0 if begin is None else taps - 1), C)
    dx = x.new_empty(B, T, C)
    d_begin = None if begin is None else x.new_empty(B, taps - 1, C)
    parts = x.new_empty(B, grid[0], C, taps + 1, dtype=torch.float32) if trains else None
    if dx.numel():
        first = x if begin is None else begin
        with on_device(x):
            _backward_kernel[grid](
                *(dy, x, weight, first, weight if positions is None else positions),
                *(dx, dx if d_begin is None else d_begin, dx if parts is None else parts, T, C),
                *(*dy.stride()[:2], *x.stride()[:2], *first.stride()[:2]),
                HAS_DW=trains,
                HAS_BEGIN=begin is not None,
                HAS_POSITIONS=positions is not None,
                TAPS=taps,
                TOKENS=CONFIG.rows,
                BLOCK=CONFIG.block,
                num_warps=CONFIG.num_warps,
            )
    return dx, d_begin, None if parts is None else parts.sum((0, 1))


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        B, T, C = x.shape
        out = x.new_empty(B, T, C)
        if out.numel():
            given = (weight if each is None else each for each in (bias, positions))
            with on_device(x):
                _forward_kernel[_grid(B, T, C)](
                    *(x, weight, *given, out, T, C, *x.stride()[:2]),
                    HAS_BIAS=bias is not None,
                    HAS_POSITIONS=positions is not None,
                    TAPS=weight.shape[1],
                    TOKENS=CONFIG.rows,
                    BLOCK=CONFIG.block,
                    num_warps=CONFIG.num_warps,
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, positions = ctx.saved_tensors
        taps, trains = weight.shape[1], any(ctx.needs_input_grad[1:])
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx, _, sums = conv_gradients(dy, x, weight, positions, trains=trains)
        if sums is None:
            return dx, None, None, None
        sums = sums.to(weight.dtype)
        return dx, sums[:, :taps], sums[:, taps] if ctx.needs_input_grad[2] else None, None


def causal_conv(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K)
    bias: Tensor | None = None,  # (C,)
    positions: Tensor | None = None,  # (T,) int32
) -> Tensor:  # (B, T, C)
    """The convolution of each channel with its own filter; differentiable in x, weight and bias.

    bf16, fp16 or fp32, all of one dtype, K at most 8. Rows and tokens of x may lie at any stride.
    `positions` are those of a row's tokens in their documents, the same in every row; without them
    a row is one document. Saves x, weight and positions. Raises ValueError for a wrong shape,
    dtype, device or layout.
    """
    B, T, C = x.shape
    taps = weight.shape[-1]
    check_shape("weight", weight, (C, taps))
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    if not 1 <= taps <= MOST_TAPS:
        raise ValueError(f"a filter has 1 to {MOST_TAPS} taps, got {taps}")
    if bias is not None:
        check_shape("bias", bias, (C,))
    if positions is not None:
        check_shape("positions", positions, (T,))
    if not runs_kernel(*given.values()):
        return causal_conv_reference(x, weight, bias, positions)
    for name, tensor in given.items():
        check_float(name, tensor, x.dtype)
    check_rows("x", x)
    result: Tensor = _CausalConv.apply(x, weight.contiguous(), bias, positions)
    return result


def _grid(B: int, T: int, C: int) -> tuple[int, int, int]:
    return triton.cdiv(T, CONFIG.rows), triton.cdiv(C, CONFIG.block), B


CONFIG = Config(block=128, num_warps=4, rows=32)
"""A program has 32 tokens of 128 channels; the taps before its first come from the cache."""
