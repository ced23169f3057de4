"""Sums of the squares of a tensor's elements, one fp32 number a chunk of them.

    sums[c] = sum of x_i^2 over chunk c's elements i        |x| = sqrt(sum of sums, in fp64)

Each chunk is summed in one order, whatever kernel does it: first LANES sums side by side, of every
LANES-th element, then these by pairs, 1 + 2, 3 + 4, ..., and so on. So a sum has the same bits for
a tensor alone, among many, in pieces that begin with a chunk, and on a CPU. The relative error is
at most (CHUNK / LANES + 10) 2^-24.

Bytes read an element: 2 or 4. `square_sums` needs nothing on the host but a launch, so a gradient
that leaves is measured on the way; `many_square_sums` takes one launch for all that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from longctx.kernels.launch import Config, check_same, on_device, runs_kernel, tl, triton
from longctx.kernels.many import NUMEL, ROW, are_aligned, find_row, launches, pointer_at, size_at

LANES = 1024
"""Elements of a chunk that are squared at a time. A chunk is a multiple of them."""
CHUNK = 8192
"""Elements that are summed to one number; fewer if pieces are no multiples of this."""
_ADDRESS, _SUMS = 2, 3
"""Words of a row: the address of the tensor, and the number of its first sum."""


def square_sums_reference(
    x: Tensor,  # any shape, bf16 or fp32
    chunk: int = CHUNK,
) -> Tensor:  # (ceil(n / chunk),) fp32
    """The sums in plain torch."""
    chunks = -(-x.numel() // chunk)
    padded = torch.zeros(chunks * chunk, dtype=torch.float32, device=x.device)
    padded[: x.numel()] = x.detach().reshape(-1)
    lanes = padded.new_zeros(chunks, LANES)
    for part in padded.view(chunks, chunk // LANES, LANES).unbind(1):
        lanes += part * part
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


@triton.jit
def _chunk_sum(x_ptr, start, numel, chunk, LANES: tl.constexpr, HALVINGS: tl.constexpr):
    """Sums the squares of the chunk that begins at start."""
    place = tl.arange(0, LANES)
    lanes = tl.zeros((LANES,), tl.float32)
    for first in range(start, tl.minimum(start + chunk, numel), LANES):
        offs = first + place
        x = tl.load(x_ptr + offs, mask=offs < numel, other=0.0).to(tl.float32)
        lanes += x * x
    # tl.sum over all lanes would add in an order that depends on how wide the loads are.
    for _ in tl.static_range(HALVINGS):
        lanes = tl.sum(tl.reshape(lanes, (lanes.shape[0] // 2, 2)), axis=1)
    return tl.sum(lanes, axis=0)


@triton.jit
def _one_kernel(
    x_ptr,  # (n,)
    sums_ptr,  # (programs,) fp32
    numel,
    chunk,
    LANES: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * chunk
    total = _chunk_sum(x_ptr, start, numel, chunk, LANES, HALVINGS)
    tl.store(sums_ptr + tl.program_id(0), total)


@triton.jit(do_not_specialize=["rows"])
def _many_kernel(
    table_ptr,  # (rows, ROW) int64
    sums_ptr,  # (all chunks,) fp32
    rows,
    chunk,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    row = find_row(table_ptr, rows)
    number = tl.program_id(0) - tl.load(row)  # of the chunk in its tensor
    x_ptr, numel = pointer_at(row + 2, DTYPE, ALIGNED), size_at(row + 1, ALIGNED)
    total = _chunk_sum(x_ptr, number * chunk, numel, chunk, LANES, HALVINGS)
    tl.store(sums_ptr + tl.load(row + 3) + number, total)


def _check(x: Tensor, chunk: int) -> None:
    if x.dtype is not torch.float32 and x.dtype is not torch.bfloat16:
        raise ValueError(f"x must be bfloat16 or float32, got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {tuple(x.stride())}")
    if chunk < LANES or chunk % LANES:
        raise ValueError(f"a chunk must be a multiple of {LANES} elements, got {chunk}")


def square_sums(
    x: Tensor,  # any shape, bf16 or fp32
    chunk: int = CHUNK,
) -> Tensor:  # (ceil(n / chunk),) fp32
    """The sum of squares of each `chunk` elements of a contiguous tensor; the last ones may be
    fewer. Not differentiable.

    Raises ValueError for a wrong dtype or layout, and for a chunk that is no multiple of LANES.
    """
    _check(x, chunk)
    if not runs_kernel(x):
        return square_sums_reference(x, chunk)
    sums = torch.empty(-(-x.numel() // chunk), dtype=torch.float32, device=x.device)
    if len(sums):
        with on_device(x):
            _one_kernel[(len(sums),)](x, sums, x.numel(), chunk, **HOW)
    return sums


def many_square_sums(
    tensors: Sequence[Tensor],  # any shapes, bf16 or fp32
    chunk: int = CHUNK,
) -> tuple[Tensor, list[int]]:  # (all chunks,) fp32; where each tensor's sums begin, and the end
    """`square_sums` of many tensors on one device, one after the other, with the same bits. One
    launch for each dtype that occurs, and one more where addresses are not aligned.

    Raises ValueError as `square_sums` does, and for tensors on several devices or none at all.
    """
    for x in tensors:
        _check(x, chunk)
    numels = [*map(Tensor.numel, tensors)]
    starts = [0, *accumulate(-(-numel // chunk) for numel in numels)]
    where = [x.device for x in tensors]
    check_same("device of a tensor", where, where[:1] * len(where))
    if not runs_kernel(tensors[0]):
        return torch.cat([square_sums_reference(x, chunk) for x in tensors]), starts
    device = tensors[0].device
    sums = torch.empty(starts[-1], dtype=torch.float32, device=device)
    table = np.zeros((len(tensors), ROW), np.int64)
    table[:, NUMEL] = numels
    table[:, _ADDRESS] = [*map(Tensor.data_ptr, tensors)]
    table[:, _SUMS] = starts[:-1]
    kinds = 2 * np.array([x.dtype is torch.float32 for x in tensors])
    kinds += are_aligned(table[:, [NUMEL, _ADDRESS]])
    with on_device(sums):
        for kind, rows, programs in launches(table, kinds, chunk, device):
            how = dict(DTYPE=tl.float32 if kind & 2 else tl.bfloat16, ALIGNED=bool(kind & 1))
            _many_kernel[(programs,)](rows, sums, len(rows), chunk, **how, **HOW)
    return sums, starts


CONFIG = Config(block=LANES, num_warps=4, fp_fusion=False)
HOW = dict(
    LANES=CONFIG.block,
    HALVINGS=LANES.bit_length() - 2,
    num_warps=CONFIG.num_warps,
    enable_fp_fusion=CONFIG.fp_fusion,
)
