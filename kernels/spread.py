"""What an adapter's first product gave, in 16 bits that lose nothing of fp32's first 16.

    u = factor (low-rank sums of two parts)      high = 16 bits of u       low = 16 bits of u - high

written side by side, [high | low | high], for the product that follows (model/projection.py). In
plain torch that is six kernels of a few microseconds, 350 times a layer of Llama-3.1-8B with
adapters on all seven linear maps and 131072 tokens; here it is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.launch import (
    as_rows,
    check_float,
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
    """The equations in plain torch."""
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
