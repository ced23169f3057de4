"""Makes a weight in FP8 dense: w = v s, a product in fp32 that is rounded once.

v is a number of 8 bits, e4m3 (Micikevicius et al. 2022, arXiv 2209.05433); a scale s in fp32
belongs to a block of rows and columns. DeepSeek, Qwen and MiniMax publish models with blocks of 128
x 128, others with a scale a matrix or a row; blocks at the ends may have less. Where transformers'
`Fp8Dequantize` takes a weight, which has no smaller blocks there, the bits are its own. 8.002 bits
a weight, 3 bytes in 16 bits.

The bits of v are moved to those of an fp32 number, whose exponent is then off by 120: GPUs before
Hopper's know no e4m3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_out,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)

PIECE = 1 << 12
"""The most rows that plain torch makes dense at a time."""
CONFIG = Config(block=512, num_warps=4, rows=4)
"""A program has 4 rows of 512 columns."""


@triton.jit
def _dense_kernel(
    packed_ptr,  # (rows, K) uint8
    scale_ptr,  # (rows / M, G, L) fp32
    out_ptr,  # (rows, K)
    rows,
    M,
    K,
    G,
    L,
    of_rows,  # rows and columns that share a scale
    of_columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < K)
    at = row.to(tl.int64)[:, None] * K + column
    x = tl.load(packed_ptr + at, mask=mask, other=0).to(tl.int32)
    # The sign moves as a bit: -v of a compiled kernel is 0 - v, which has no zero below zero.
    bits = ((x & 0x80) << 24) | ((x & 0x7F) << 20)
    v = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    v = tl.where((x & 0x7F) == 0x7F, float("nan"), v)
    of = (row // M * G + row % M // of_rows)[:, None] * L + column // of_columns
    s = tl.load(scale_ptr + of, mask=mask, other=0.0)
    tl.store(out_ptr + at, round_to(v * s, out_ptr.dtype.element_ty), mask=mask)


def dense_fp8(
    packed: Tensor,  # (..., M, K) uint8 or float8_e4m3fn
    scale: Tensor,  # (..., blocks of M, blocks of K) fp32
    block: tuple[int, int],  # rows and columns
    dtype: torch.dtype,
    out: Tensor | None = None,  # (..., M, K)
) -> Tensor:  # (..., M, K)
    """Returns the dense weight in bf16, fp16 or fp32, which it writes to `out` if given. Not
    differentiable.

    Raises ValueError for wrong shapes or dtypes, and for an `out` that does not fit.
    """
    *lead, M, K = shape = tuple(packed.shape)
    if packed.dtype not in (torch.uint8, torch.float8_e4m3fn) or scale.dtype != torch.float32:
        raise ValueError(f"e4m3 and scales in fp32 are needed, got {packed.dtype}, {scale.dtype}")
    grid = math.ceil(M / block[0]), math.ceil(K / block[1])
    check_shape("scale", scale, (*lead, *grid))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    check_out(out, shape, dtype)
    codes, scale = packed.contiguous().view(torch.uint8), scale.contiguous()
    rows = math.prod(lead) * M
    if not runs_kernel(codes, scale, out):
        return _in_torch(codes, scale, block, out)
    with on_device(out):
        _dense_kernel[(triton.cdiv(rows, CONFIG.rows), triton.cdiv(K, CONFIG.block))](
            *(codes, scale, out, rows, M, K, *grid, *block),
            ROWS=CONFIG.rows,
            BLOCK=CONFIG.block,
            num_warps=CONFIG.num_warps,
        )
    return out


def _in_torch(codes: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor) -> Tensor:
    *_, M, K = codes.shape
    scales = scale.view(-1, *scale.shape[-2:])
    flat, room = codes.view(-1, K), out.view(-1, K)
    for start in range(0, len(flat), PIECE):
        row = torch.arange(start, min(start + PIECE, len(flat)), device=flat.device)
        own = scales[row // M, row % M // block[0]].repeat_interleave(block[1], 1)[:, :K]
        room[row[0] : row[-1] + 1] = flat[row].view(torch.float8_e4m3fn).float() * own
    return out
