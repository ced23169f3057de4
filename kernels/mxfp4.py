"""Makes a weight in MXFP4 dense: w = v 2^(s - 127), exact in bf16 and fp32.

v is a number of 4 bits, e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign. Two are in a byte, the low
one first; a byte s belongs to 32 of them in a row. 4.25 bits a weight. The models of gpt-oss are
published so. Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.

The bits are those of transformers' `convert_moe_packed_tensors`, but for s = 255, which is no
number in the standard. A thread turns 4 bytes into 8 weights, which it stores at once: their bits
are put together from those of v, and no table is read. 2.53 bytes a weight in 16 bits.
"""

from __future__ import annotations

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

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
"""The number of weights that share a scale."""
PIECE = 2**22
"""The most bytes that plain torch makes dense at a time."""
CONFIG = Config(block=512, num_warps=4)
"""`block` counts words of 32 bits, 8 weights each."""


@triton.jit
def _dense_kernel(
    packed_ptr,  # (words,) int32, 8 weights each
    scale_ptr,  # (words / 4,) uint8
    out_ptr,  # (8 words,)
    words,
    WORDS: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word < words
    packed = tl.load(packed_ptr + word, mask=mask, other=0)
    scale = tl.load(scale_ptr + word // 4, mask=mask, other=0).to(tl.int32)
    power = tl.where(scale == 0, 0x00400000, scale << 23)  # 2^-127 has no exponent of its own
    power = tl.where(scale == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    i = tl.arange(0, 8)
    q = (packed[:, None] >> (4 * i)[None, :]) & 15  # (WORDS, 8)
    exponent, mantissa = (q >> 1) & 3, q & 1
    bits = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent == 0, mantissa * 0x3F000000, bits) | ((q >> 3) << 31)
    w = bits.to(tl.float32, bitcast=True) * power[:, None]
    out = out_ptr + word[:, None] * 8 + i[None, :]
    tl.store(out, round_to(w, out_ptr.dtype.element_ty), mask=mask[:, None])


def dense_mxfp4(
    packed: Tensor,  # (..., K / 2) uint8
    scale: Tensor,  # (..., K / 32) uint8
    dtype: torch.dtype,
    out: Tensor | None = None,  # (..., K)
) -> Tensor:  # (..., K)
    """Returns the dense weight in bf16, fp16 or fp32, which it writes to `out` if given. Not
    differentiable. fp16 has no number for most scales, and then rounds or is infinite.

    Raises ValueError for wrong shapes or dtypes, and for an `out` that does not fit.
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    for name, x in (("packed", packed), ("scale", scale)):
        if x.dtype != torch.uint8:
            raise ValueError(f"{name} must be bytes (uint8), got {x.dtype}")
    if shape[-1] % BLOCK:
        raise ValueError(f"{shape[-1]} columns must be a multiple of {BLOCK}")
    check_shape("scale", scale, (*shape[:-1], shape[-1] // BLOCK))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    check_out(out, shape, dtype)
    packed, scale = packed.contiguous(), scale.contiguous()
    if not runs_kernel(packed, scale, out):
        return _in_torch(packed, scale, out)
    words = packed.numel() // 4
    with on_device(out):
        _dense_kernel[(triton.cdiv(words, CONFIG.block),)](
            *(packed.view(-1).view(torch.int32), scale, out, words),
            WORDS=CONFIG.block,
            num_warps=CONFIG.num_warps,
        )
    return out


def _in_torch(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=packed.device)
    pieces = (x.view(-1, n) for x, n in ((packed, BLOCK // 2), (scale, 1), (out, BLOCK)))
    for codes, s, room in zip(*(x.split(PIECE * 2 // BLOCK) for x in pieces), strict=True):
        v = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
        power = (s.int() << 23).masked_fill(s == 0, 0x00400000).masked_fill(s == 255, 0x7FC00000)
        room.copy_(v * power.view(torch.float32))
    return out
