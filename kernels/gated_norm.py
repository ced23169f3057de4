"""RMSNorm of what a mixer computes, times the SiLU of its gate.

    n = x / rms(x)          y = w n a,    a = gate s,    s = sigmoid(gate)

    d_gate = dy w n s (1 + gate (1 - s))          dw = sum dy n a          d_n = dy w a
    dx = (d_n - n mean(d_n n)) / rms(x)

transformers computes it in some ten passes over fp32 tensors. Here all arithmetic is in fp32 within
one pass, and each result is rounded once. Saved: x, gate and w. The sums of dw are made in a part
for each program, and these are added in a fixed order: no atomics. Bytes an element at 2 bytes: 6
forward, 10 backward.

Source: Gated Delta Networks (arXiv 2412.06464); Gated RMSNorm is Mamba 2's (arXiv 2405.21060), with
the gate behind the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_eps,
    check_float,
    check_same,
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    sm_count,
    tl,
    triton,
)

WIDEST = 1024


def gated_norm_reference(
    x: Tensor,  # (..., D)
    gate: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (..., D)
    """The first line of equations in plain torch, rounded once; differentiable."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, g = x.to(dtype), gate.to(dtype)
    n = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight.to(dtype) * n * torch.nn.functional.silu(g)).to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr,  # (N, D)
    gate_ptr,  # (N, D)
    weight_ptr,  # (D,)
    out_ptr,  # (N, D)
    N,
    D,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < N) & (column < D)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * D + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * D + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    y = weight * (x * rstd) * gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * D + column, round_to(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (N, D)
    x_ptr,  # (N, D)
    gate_ptr,  # (N, D)
    weight_ptr,  # (D,)
    dx_ptr,  # (N, D)
    d_gate_ptr,  # (N, D)
    parts_ptr,  # (programs, D) fp32
    N,
    D,
    eps,
    HAS_DW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + first
        mask = (row < N) & (column < D)
        at = row * D + column
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        n, s = x * rstd, tl.sigmoid(gate)
        d_gate = dy * weight * n * s * (1 + gate * (1 - s))
        tl.store(d_gate_ptr + at, round_to(d_gate, d_gate_ptr.dtype.element_ty), mask=mask)
        of_n = dy * gate * s
        if HAS_DW:
            dw += of_n * n
        of_n *= weight
        dx = (of_n - n * (tl.sum(of_n * n, axis=1, keep_dims=True) / D)) * rstd
        tl.store(dx_ptr + at, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
    if HAS_DW:
        out = parts_ptr + tl.program_id(0) * D + column
        tl.store(out, tl.sum(dw, axis=0, keep_dims=True), mask=column < D)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, D = eps, x.shape[-1]
        out = torch.empty_like(x)
        if rows := x.numel() // D:
            c = config(D)
            with on_device(x):
                _forward_kernel[(triton.cdiv(rows, c.rows),)](
                    *(x, gate, weight, out, rows, D, eps),
                    ROWS=c.rows,
                    BLOCK=c.block,
                    num_warps=c.num_warps,
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        D, trains = x.shape[-1], ctx.needs_input_grad[2]
        dx, d_gate = torch.empty_like(x), torch.empty_like(gate)
        rows, c = x.numel() // D, config(D)
        programs = min(triton.cdiv(rows, c.rows), c.programs_per_sm * sm_count(x))
        parts = x.new_empty(programs if trains else 0, D, dtype=torch.float32)
        if rows:
            with on_device(x):
                _backward_kernel[(programs,)](
                    *(dy.contiguous(), x, gate, weight, dx, d_gate),
                    *(parts if trains else dx, rows, D, ctx.eps),
                    HAS_DW=trains,
                    ROWS=c.rows,
                    BLOCK=c.block,
                    num_warps=c.num_warps,
                )
        return dx, d_gate, parts.sum(0).to(weight.dtype) if trains else None, None


def gated_norm(
    x: Tensor,  # (..., D)
    gate: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
) -> Tensor:  # (..., D)
    """RMSNorm of x over the last dimension times the SiLU of gate; differentiable in all three.

    bf16, fp16 or fp32, x and gate of one dtype, D at most 1024. Saves x, gate and weight; x and
    gate are copied first if they are not contiguous. Raises ValueError for a wrong shape, dtype or
    device.
    """
    D = x.shape[-1]
    check_shape("gate", gate, x.shape)
    check_shape("weight", weight, (D,))
    check_eps(eps)
    check_same("the dtype of gate", [gate.dtype], [x.dtype])
    if not runs_kernel(x, gate, weight):
        return gated_norm_reference(x, gate, weight, eps)
    if D > WIDEST:
        raise ValueError(f"x has at most {WIDEST} columns, got {D}")
    for name, tensor in {"x": x, "weight": weight}.items():
        check_float(name, tensor)
    result: Tensor = _GatedNorm.apply(x.contiguous(), gate.contiguous(), weight.contiguous(), eps)
    return result


def config(D: int) -> Config:
    """2048 elements a program, in rows of the next power of two."""
    block = triton.next_power_of_2(D)
    return Config(block=block, num_warps=4, rows=max(1, 2048 // block), programs_per_sm=4)
