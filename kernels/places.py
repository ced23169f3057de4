"""out[t] = the sum of x[p] over the places p of token t, in fp32, always in the same order.

Keys that were copied for several documents (attention/copied.py) have gradients at several places.
torch's index_add_ sums them with atomics, in an order that changes, and rounds each sum to 16 bits.
One kernel takes the gradients of keys and values: it reads each place once, and writes each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.kernels.launch import (
    as_rows,
    check_float,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)


def sum_places_reference(
    x: Tensor,  # (M, ...)
    places: Tensor,  # (T, n) int32; -1: none
) -> Tensor:  # (T, ...)
    """Returns the sum in plain torch. Rows of x that are in no place may hold anything."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(len(places), *x.shape[1:], dtype=wide, device=x.device)
    for column in places.long().unbind(1):
        there = (column >= 0).view(-1, *(1 for _ in x.shape[1:]))
        total += x.index_select(0, column.clamp(min=0)).masked_fill(~there, 0)
    return total.to(x.dtype)


@triton.jit
def _places_kernel(
    a_ptr,  # (M, width)
    b_ptr,  # (M, width)
    places_ptr,  # (T, PLACES)
    a_out_ptr,  # (T, width), rows at a stride
    b_out_ptr,  # (T, width), rows at a stride
    width,
    stride_a_out,
    stride_b_out,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PLACES):
        place = tl.load(places_ptr + row * PLACES + i).to(tl.int64)
        at = place * width + offs
        there = mask & (at >= 0)
        a += tl.load(a_ptr + at, mask=there, other=0.0).to(tl.float32)
        b += tl.load(b_ptr + at, mask=there, other=0.0).to(tl.float32)
    a_out = a_out_ptr + row * stride_a_out + offs
    b_out = b_out_ptr + row * stride_b_out + offs
    tl.store(a_out, round_to(a, a_out_ptr.dtype.element_ty), mask=mask)
    tl.store(b_out, round_to(b, b_out_ptr.dtype.element_ty), mask=mask)


def sum_places(
    copies: Sequence[Tensor],  # two of (M, K, d), contiguous
    places: Tensor,  # (T, n) int32; -1: none
    out: Sequence[Tensor],  # two of (T, K, d), rows at any stride, written
) -> None:
    """Writes the sum of each token's places, for two tensors. Not differentiable by autograd.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    tokens, count = places.shape
    for x, y in zip(copies, out, strict=True):
        check_shape("out", y, (tokens, *x.shape[1:]))
    if not runs_kernel(*copies, *out):
        for x, y in zip(copies, out, strict=True):
            y.copy_(sum_places_reference(x, places))
        return
    for x, y in zip(copies, out, strict=True):
        check_float("copies", x)
        check_float("out", y, x.dtype)
    a, b = (x.contiguous().flatten(1) for x in copies)
    a_out, b_out = (_rows(y) for y in out)
    width = a.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    if a_out.numel():
        with on_device(a):
            _places_kernel[(tokens, triton.cdiv(width, block))](
                *(a, b, places.contiguous(), a_out, b_out),
                *(width, a_out.stride(0), b_out.stride(0)),
                PLACES=count,
                BLOCK=block,
                num_warps=4,
            )


def _rows(out: Tensor) -> Tensor:
    """A view of out (T, K, d), whose heads lie side by side, as (T, K d)."""
    T, K, d = out.shape
    if out.stride(2) != 1 or (K > 1 and out.stride(1) != d):
        raise ValueError(
            f"out must have its heads side by side, got shape {tuple(out.shape)} with strides "
            f"{tuple(out.stride())}"
        )
    return as_rows("out", out.as_strided((T, K * d), (out.stride(0), 1), out.storage_offset()))
