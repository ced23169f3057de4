"""An adapter's fp32 numbers in 16 bits that lose nothing of fp32's first 16.

Its factors A (r, I) and B (O, r):

    high = 16 bits of x       low = 16 bits of x - high

written as [high; high; low] along r, for both of an adapter in one kernel; plain torch has eight.
What its first product gave:

    u = factor (low-rank sums of two parts)      high = 16 bits of u       low = 16 bits of u - high

written side by side, [high | low | high], for the product that follows (layer/projection.py). In
plain torch that is six kernels of a few microseconds, 350 times a layer of Llama-3.1-8B with
adapters on all seven linear maps and 131072 tokens; here it is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    as_rows,
    check_float,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)


def spread_reference(
    sums: Tensor,  # (T, 2 r) fp32
    factor: float,
    dtype: torch.dtype,
) -> Tensor:  # (T, 3 r)
    """Computes the equations in plain torch."""
    u = sums.chunk(2, 1)[0].add(sums.chunk(2, 1)[1]).mul_(factor)
    high = u.to(dtype)
    return torch.cat([high, (u - high).to(dtype), high], 1)


@triton.jit
def _spread_kernel(
    sums_ptr,  # (T, 2 rank) fp32
    out_ptr,  # (T, 3 rank)
    T,
    rank,
    stride_sums,
    factor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < rank)
    part = sums_ptr + row * stride_sums + offs
    u = tl.load(part, mask=mask, other=0.0) + tl.load(part + rank, mask=mask, other=0.0)
    u = u * factor
    high = round_to(u, out_ptr.dtype.element_ty)
    low = round_to(u - high.to(tl.float32), out_ptr.dtype.element_ty)
    out = out_ptr + row * (3 * rank) + offs
    tl.store(out, high, mask=mask)
    tl.store(out + rank, low, mask=mask)
    tl.store(out + 2 * rank, high, mask=mask)


def spread_factors_reference(
    a: Tensor,  # (r, I) fp32
    b: Tensor,  # (O, r) fp32
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # (3 r, I), (O, 3 r)
    """Computes the equations in plain torch."""
    found = []
    for x, dim in ((a, 0), (b, 1)):
        high = x.to(dtype)
        found.append(torch.cat([high, high, (x - high).to(dtype)], dim))
    return found[0], found[1]


@triton.jit
def _spread_one(x_ptr, out_ptr, block, numel, columns, BLOCK: tl.constexpr):
    """Spreads BLOCK elements of rows of `columns`, each of which becomes three."""
    offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    high = round_to(x, out_ptr.dtype.element_ty)
    low = round_to(x - high.to(tl.float32), out_ptr.dtype.element_ty)
    out = out_ptr + offs // columns * (3 * columns) + offs % columns
    tl.store(out, high, mask=mask)
    tl.store(out + columns, high, mask=mask)
    tl.store(out + 2 * columns, low, mask=mask)


@triton.jit
def _factors_kernel(
    a_ptr,  # (a_numel,) fp32: one row
    a_out_ptr,  # (3 a_numel,)
    b_ptr,  # (b_numel / rank, rank) fp32
    b_out_ptr,  # (b_numel / rank, 3 rank)
    a_numel,
    b_numel,
    rank,
    BLOCK: tl.constexpr,
):
    block, of_a = tl.program_id(0), tl.cdiv(a_numel, BLOCK)
    if block < of_a:
        _spread_one(a_ptr, a_out_ptr, block, a_numel, a_numel, BLOCK)
    else:
        _spread_one(b_ptr, b_out_ptr, block - of_a, b_numel, rank, BLOCK)


def spread_factors(
    a: Tensor,  # (r, I) fp32
    b: Tensor,  # (O, r) fp32
    dtype: torch.dtype,  # of 16 bits
) -> tuple[Tensor, Tensor]:  # (3 r, I), (O, 3 r)
    """[high; high; low] of both factors along their rank. Not differentiable by autograd.

    Raises ValueError for a wrong shape, dtype or device.
    """
    check_float("a", a, torch.float32)
    check_float("b", b, torch.float32)
    rank, inputs = a.shape
    check_shape("b", b, (len(b), rank))
    if not runs_kernel(a, b):
        return spread_factors_reference(a, b, dtype)
    a, b = a.contiguous(), b.contiguous()
    outs = a.new_empty(3 * rank, inputs, dtype=dtype), b.new_empty(len(b), 3 * rank, dtype=dtype)
    check_float("out", outs[0])
    block = FACTORS.block
    if programs := triton.cdiv(a.numel(), block) + triton.cdiv(b.numel(), block):
        with on_device(a):
            _factors_kernel[(programs,)](
                *(a, outs[0], b, outs[1], a.numel(), b.numel(), rank),
                BLOCK=block,
                num_warps=FACTORS.num_warps,
            )
    return outs


FACTORS = Config(block=1024, num_warps=4)


def spread_sums(
    sums: Tensor,  # (T, 2 r) fp32; rows may lie at any stride
    factor: float,
    dtype: torch.dtype,  # of 16 bits
) -> Tensor:  # (T, 3 r)
    """[high | low | high] of factor (sums[:, :r] + sums[:, r:]). Not differentiable by autograd.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    check_float("sums", sums, torch.float32)
    rows, width = sums.shape
    if width % 2:
        raise ValueError(f"sums must have two parts of one width, got shape {tuple(sums.shape)}")
    if not runs_kernel(sums):
        return spread_reference(sums, factor, dtype)
    sums, rank = as_rows("sums", sums), width // 2
    out = torch.empty(rows, 3 * rank, dtype=dtype, device=sums.device)
    check_float("out", out)
    if out.numel():
        block = triton.next_power_of_2(rank)
        lines = max(1, 2048 // block)
        with on_device(sums):
            _spread_kernel[(triton.cdiv(rows, lines),)](
                *(sums, out, rows, rank, sums.stride(0), factor),
                ROWS=lines,
                BLOCK=block,
                num_warps=4,
            )
    return out
