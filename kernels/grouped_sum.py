"""The gradients of experts' biases: sums of rows over slots that are sorted by expert.

    acc[e] (+)= sum_i weights[i] a[rows[i]], i in e's segment

The letters, the segments and their `ends` are those of grouped_mm.py. One program sums some columns
of one expert over its whole segment, in fp32 and in the order of the slots. No atomics, and nothing
waits for the GPU. Bytes at 2 an element: 2 n O, which are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_float,
    check_rows,
    check_shape,
    on_device,
    runs_kernel,
    tl,
    triton,
)


def grouped_sum_reference_(
    acc: Tensor,  # (E, O)
    a: Tensor,  # (m, O)
    ends: Tensor,  # (E,)
    rows: Tensor | None,  # (n,)
    weights: Tensor | None,  # (n,)
    add: bool,
) -> None:
    """The sums in plain torch, in the dtype of acc."""
    slots = a.to(acc.dtype) if rows is None else a.to(acc.dtype).index_select(0, rows)
    if weights is not None:
        slots = slots * weights[:, None].to(acc.dtype)
    segments = slots.tensor_split(ends.tolist()[:-1])
    sums = torch.stack([segment.sum(0) for segment in segments])
    acc.copy_(acc + sums if add else sums)


@triton.jit
def _sum_kernel(
    a_ptr,  # (m, width), rows at a stride
    ends_ptr,  # (E,) int32
    rows_ptr,  # (n,) int32
    weights_ptr,  # (n,) fp32
    acc_ptr,  # (E, width)
    width,
    stride_a,
    HAS_ROWS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(start, end, ROWS):
        place = i + tl.arange(0, ROWS)
        row = place
        if HAS_ROWS:
            row = tl.load(rows_ptr + place, mask=place < end, other=0)
        ptrs = a_ptr + row.to(tl.int64)[:, None] * stride_a + column[None, :]
        there = (place[:, None] < end) & (column[None, :] < width)
        a = tl.load(ptrs, mask=there, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            a *= tl.load(weights_ptr + place, mask=place < end, other=0.0)[:, None]
        total += a
    acc_ptrs = acc_ptr + expert.to(tl.int64) * width + column
    sums = tl.sum(total, axis=0)
    if ADD:
        sums += tl.load(acc_ptrs, mask=column < width, other=0.0)
    tl.store(acc_ptrs, sums, mask=column < width)


def grouped_sum_(
    acc: Tensor,  # (E, O) fp32, contiguous, written over or added to
    a: Tensor,  # (m, O), rows at any stride
    ends: Tensor,  # (E,) int32
    *,
    rows: Tensor | None = None,  # (n,) int32; None: row i of a for place i, and n = m
    weights: Tensor | None = None,  # (n,) fp32; None: ones
    add: bool,
) -> Tensor:  # (E, O)
    """acc[e] = the sum over the segment of e of weights[i] a[rows[i]], or, with `add`, that sum
    added to acc[e]. Returns acc. Not differentiable.

    a is bf16, fp16 or fp32; in plain torch it may be fp64, and acc with it. An expert without slots
    gets zeros, or with `add` is left as it is. ends[E-1] must be n: ends and rows are not checked,
    which would wait for the GPU.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    experts, width = acc.shape
    n = len(a if rows is None else rows)
    check_shape("a", a, (len(a), width))
    check_shape("ends", ends, (experts,))
    if weights is not None:
        check_shape("weights", weights, (n,))
    if not runs_kernel(acc, a, ends, rows, weights):
        grouped_sum_reference_(acc, a, ends, rows, weights, add)
        return acc
    check_float("acc", acc, torch.float32)
    check_float("a", a)
    check_rows("a", a)
    if weights is not None:
        check_float("weights", weights, torch.float32)
        weights = weights.contiguous()
    if not acc.is_contiguous():
        raise ValueError(f"acc must be contiguous, got strides {tuple(acc.stride())}")
    if acc.numel():
        with on_device(a):
            _sum_kernel[(experts, triton.cdiv(width, CONFIG.block))](
                *(a, ends, ends if rows is None else rows, acc if weights is None else weights),
                *(acc, width, a.stride(0)),
                HAS_ROWS=rows is not None,
                HAS_WEIGHTS=weights is not None,
                ADD=add,
                ROWS=CONFIG.rows,
                BLOCK=CONFIG.block,
                num_warps=CONFIG.num_warps,
            )
    return acc


CONFIG = Config(block=64, num_warps=4, rows=32)
