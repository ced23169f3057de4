"""RMSNorm of what a mixer computes, times the SiLU of its gate; or of the product of both.

    n = x / rms(x)          y = w n a,    a = gate s,    s = sigmoid(gate)

    d_gate = dy w n s (1 + gate (1 - s))          dw = sum dy n a          d_n = dy w a
    dx = (d_n - n mean(d_n n)) / rms(x)

With the gate first n is that of x a, whose gradient dn is what is dx above:

    n = x a / rms(x a)      y = w n

    d_gate = dn x s (1 + gate (1 - s))            dw = sum dy n            dx = dn a

transformers computes it in some ten passes over fp32 tensors. Here all arithmetic is in fp32 within
one pass, and each result is rounded once. Saved: x, gate and w. The sums of dw are made in a part
for each program, and these are added in a fixed order: no atomics. Bytes an element at 2 bytes: 6
forward, 10 backward.

Source: Gated Delta Networks (arXiv 2412.06464); with the gate first Mamba 2 (arXiv 2405.21060).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    as_rows,
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

WIDEST = 8192
"""The most columns of a group."""


def gated_norm_reference(
    x: Tensor,  # (..., D)
    gate: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
    *,
    gate_first: bool = False,
    groups: int = 1,
) -> Tensor:  # (..., D)
    """Returns y of the equations in plain torch, rounded once; differentiable."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, a = x.to(dtype), torch.nn.functional.silu(gate.to(dtype))
    wide = (wide * a if gate_first else wide).unflatten(-1, (groups, -1))
    n = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = weight.to(dtype) * n.flatten(-2)
    return (y if gate_first else y * a).to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr,  # (N, groups, D)
    gate_ptr,  # (N, groups, D)
    weight_ptr,  # (groups, D)
    out_ptr,  # (N, groups, D)
    N,
    D,
    groups,
    stride_gate,
    eps,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column, group = tl.arange(0, BLOCK)[None, :], tl.program_id(1)
    mask = (row < N) & (column < D)
    at = (row * groups + group) * D + column
    weight = tl.load(weight_ptr + group * D + column, mask=column < D, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at_gate = row * stride_gate + group * D + column
    gate = tl.load(gate_ptr + at_gate, mask=mask, other=0.0).to(tl.float32)
    a = gate * tl.sigmoid(gate)
    if GATE_FIRST:
        x *= a
    y = weight * x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    if not GATE_FIRST:
        y *= a
    tl.store(out_ptr + at, round_to(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (N, groups, D)
    x_ptr,  # (N, groups, D)
    gate_ptr,  # (N, groups, D)
    weight_ptr,  # (groups, D)
    dx_ptr,  # (N, groups, D)
    d_gate_ptr,  # (N, groups, D)
    parts_ptr,  # (programs, groups, D) fp32
    N,
    D,
    groups,
    stride_gate,
    eps,
    HAS_DW: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column, group = tl.arange(0, BLOCK)[None, :], tl.program_id(1)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + first
        mask = (row < N) & (column < D)
        at = (row * groups + group) * D + column
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        at_gate = row * stride_gate + group * D + column
        gate = tl.load(gate_ptr + at_gate, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        a = gate * s
        normed = x * a if GATE_FIRST else x
        rstd = tl.rsqrt(tl.sum(normed * normed, axis=1, keep_dims=True) / D + eps)
        n = normed * rstd
        of_n = dy if GATE_FIRST else dy * a
        if HAS_DW:
            dw += of_n * n
        # Read again for each row: it would fill the registers of a long one.
        weight = tl.load(weight_ptr + group * D + column, mask=column < D, other=0.0)
        of_n *= weight.to(tl.float32)
        dx = (of_n - n * (tl.sum(of_n * n, axis=1, keep_dims=True) / D)) * rstd
        d_a = dx * x if GATE_FIRST else dy * weight * n
        d_gate = d_a * s * (1 + gate * (1 - s))
        tl.store(d_gate_ptr + at, round_to(d_gate, d_gate_ptr.dtype.element_ty), mask=mask)
        if GATE_FIRST:
            dx *= a
        tl.store(dx_ptr + at, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
    if HAS_DW:
        out = parts_ptr + (tl.program_id(0) * groups + group) * D + column
        tl.store(out, tl.sum(dw, axis=0, keep_dims=True), mask=column < D)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., groups D)
        gate: Tensor,  # (N, groups D)
        weight: Tensor,  # (groups D,)
        eps: float,
        gate_first: bool,
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.how = eps, gate_first, groups
        D, out = x.shape[-1] // groups, torch.empty_like(x)
        if len(gate):
            c = config(D)
            with on_device(x):
                _forward_kernel[(triton.cdiv(len(gate), c.rows), groups)](
                    *(x, gate, weight, out, len(gate), D, groups, gate.stride(0), eps),
                    GATE_FIRST=gate_first,
                    ROWS=c.rows,
                    BLOCK=c.block,
                    num_warps=c.num_warps,
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, gate, weight), (eps, gate_first, groups) = ctx.saved_tensors, ctx.how
        D, N, trains = x.shape[-1] // groups, len(gate), ctx.needs_input_grad[2]
        dx, d_gate = torch.empty_like(x), gate.new_empty(gate.shape)
        c = config(D)
        programs = min(triton.cdiv(N, c.rows), triton.cdiv(c.programs_per_sm * sm_count(x), groups))
        parts = x.new_empty(programs if trains else 0, groups * D, dtype=torch.float32)
        if N:
            with on_device(x):
                _backward_kernel[(programs, groups)](
                    *(dy.contiguous(), x, gate, weight, dx, d_gate),
                    *(parts if trains else dx, N, D, groups, gate.stride(0), eps),
                    HAS_DW=trains,
                    GATE_FIRST=gate_first,
                    ROWS=c.rows,
                    BLOCK=c.block,
                    num_warps=c.num_warps,
                )
        dw = parts.sum(0).to(weight.dtype) if trains else None
        return dx, d_gate, dw, None, None, None


def gated_norm(
    x: Tensor,  # (..., D)
    gate: Tensor,  # (..., D)
    weight: Tensor,  # (D,)
    eps: float,
    *,
    gate_first: bool = False,
    groups: int = 1,
) -> Tensor:  # (..., D)
    """RMSNorm of x times the SiLU of gate, or with `gate_first` of their product, over each group
    of columns; differentiable in all three.

    bf16, fp16 or fp32, x and gate of one dtype, at most 8192 columns a group. Saves x, gate and
    weight; x is copied first if it is not contiguous, and gate if its rows are not at one stride.
    Raises ValueError for a wrong shape, dtype or device.
    """
    D = x.shape[-1]
    check_shape("gate", gate, x.shape)
    check_shape("weight", weight, (D,))
    check_eps(eps)
    check_same("the dtype of gate", [gate.dtype], [x.dtype])
    if D % groups:
        raise ValueError(f"{D} columns are no multiple of {groups} groups")
    if not runs_kernel(x, gate, weight):
        return gated_norm_reference(x, gate, weight, eps, gate_first=gate_first, groups=groups)
    if D // groups > WIDEST:
        raise ValueError(f"a group has at most {WIDEST} columns, got {D // groups}")
    for name, tensor in {"x": x, "weight": weight}.items():
        check_float(name, tensor)
    try:
        rows = as_rows("gate", gate)
    except ValueError:
        rows = gate.reshape(-1, D).contiguous()
    given = x.contiguous(), rows, weight.contiguous()
    result: Tensor = _GatedNorm.apply(*given, eps, gate_first, groups)
    return result


def config(D: int) -> Config:
    """Returns a configuration with 2048 elements per program, in rows of the next power of two, or
    one longer row."""
    block = triton.next_power_of_2(D)
    warps = min(8, max(4, block // 512))
    return Config(block=block, num_warps=warps, rows=max(1, 2048 // block), programs_per_sm=4)
