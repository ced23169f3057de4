"""Makes a weight in FP8 dense: w = v s, a product in fp32 that is rounded once.

v is a number of 8 bits, e4m3 (Micikevicius et al. 2022, arXiv 2209.05433); a scale s in fp32
belongs to a block of rows and columns. DeepSeek, Qwen and MiniMax publish models with blocks of 128
x 128, others with a scale a matrix or a row; blocks at the ends may have less. Where transformers'
`Fp8Dequantize` takes a weight, which has no smaller blocks there, the bits are its own. 8.002 bits
a weight, 3 bytes in 16 bits.

The bits of v are moved to those of an fp32 number, whose exponent is then off by 120: GPUs before
Hopper's know no e4m3. A thread turns 8 bytes into 8 weights, which it stores at once; it finds
their scale, which they share, once.
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
CONFIG = Config(block=4096, num_warps=4)
"""`block` counts weights."""
MOST_WIDTH = 512
"""The most columns of a piece."""


@triton.jit
def _dense_kernel(
    packed_ptr,  # (pieces, WIDTH / EACH) integers of EACH weights
    scale_ptr,  # (rows / M, G, L) fp32
    out_ptr,  # (pieces, WIDTH), PIECES a row
    pieces,
    M,
    G,
    L,
    of_rows,  # rows and columns that share a scale
    of_columns,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,  # 8, or 1
    BLOCK: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * (BLOCK // EACH) + tl.arange(0, BLOCK // EACH)
    piece = (word // (WIDTH // EACH)).to(tl.int32)
    mask = piece < pieces
    row = piece // PIECES
    of = (row // M * G + row % M // of_rows) * L + piece % PIECES * WIDTH // of_columns
    s = tl.load(scale_ptr + of, mask=mask, other=0.0)
    i = tl.arange(0, EACH)
    x = tl.load(packed_ptr + word, mask=mask, other=0)
    x = (x[:, None] >> (8 * i)[None, :]).to(tl.int8).to(tl.int32)  # (BLOCK / EACH, EACH)
    # The sign moves as a bit: -v of a compiled kernel is 0 - v, which has no zero below zero.
    bits = (x << 20) & -0x78100000
    v = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    v = tl.where(tl.abs(v) > 448.0, float("nan"), v)
    w = round_to(v * s[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + word[:, None] * EACH + i[None, :], w, mask=mask[:, None])


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
    width = _width(K, block[1])
    pieces = rows * (K // width)
    words = codes.view(-1)
    each = 8 if width % 8 == 0 and words.storage_offset() % 8 == 0 else 1
    if each == 8:
        words = words.view(torch.int64)
    with on_device(out):
        _dense_kernel[(triton.cdiv(pieces, CONFIG.block // width),)](
            *(words, scale, out, pieces, M, *grid, *block),
            PIECES=K // width,
            WIDTH=width,
            EACH=each,
            BLOCK=CONFIG.block,
            num_warps=CONFIG.num_warps,
        )
    return out


def _width(columns: int, shared: int) -> int:
    """Returns the columns of a piece, a power of two: it divides a row's, and those that share a
    scale, unless all do."""
    both = math.gcd(columns, shared) if shared < columns else columns
    return min(both & -both, MOST_WIDTH)


def _in_torch(codes: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor) -> Tensor:
    *_, M, K = codes.shape
    scales = scale.view(-1, *scale.shape[-2:])
    flat, room = codes.view(-1, K), out.view(-1, K)
    for start in range(0, len(flat), PIECE):
        row = torch.arange(start, min(start + PIECE, len(flat)), device=flat.device)
        own = scales[row // M, row % M // block[0]].repeat_interleave(block[1], 1)[:, :K]
        room[row[0] : row[-1] + 1] = flat[row].view(torch.float8_e4m3fn).float() * own
    return out
