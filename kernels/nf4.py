"""Dequantises a weight that bitsandbytes holds in 4 bits: w = code[q] s, rounded once.

q is a number of 4 bits, two in a byte, the high one first; a scale s belongs to a block of weights.
Double quantisation (QLoRA: Dettmers et al. 2023, arXiv 2305.14314) gives scales 8 bits themselves:
s = code2[q2] s2 + offset, with a product that is rounded before the sum.

The bits are those of bitsandbytes' own kernels, which need three launches a weight and an fp32 copy
of its scales: 81 us for 14336 x 4096 on an H100, where this takes 56 (h100_nf4.json). A
thread turns 4 bytes into 8 weights, which it stores at once, and finds their scale itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_out,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)

WEIGHTS = 8
"""The number of weights in a word of 32 bits."""
CONFIG = Config(block=512, num_warps=4, fp_fusion=False)
"""`block` counts words."""


@triton.jit
def _dense_kernel(
    packed_ptr,  # (words,) int32, 8 weights each
    code_ptr,  # (16,) fp32
    scale_ptr,  # (blocks,) uint8 or fp32
    code2_ptr,  # (256,) fp32
    scale2_ptr,  # (blocks / block2,) fp32
    offset_ptr,  # () fp32
    out_ptr,  # (8 words,)
    words,
    BLOCK: tl.constexpr,  # words that share a scale
    BLOCK2: tl.constexpr,  # scales that share one
    DOUBLE: tl.constexpr,
    WORDS: tl.constexpr,
):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = word < words
    packed = tl.load(packed_ptr + word, mask=mask, other=0)
    at = word // BLOCK
    scale = tl.load(scale_ptr + at, mask=mask, other=0)
    if DOUBLE:
        scale2 = tl.load(scale2_ptr + at // BLOCK2, mask=mask, other=0.0)
        scale = tl.load(code2_ptr + scale.to(tl.int32)) * scale2 + tl.load(offset_ptr)
    i = tl.arange(0, 8)
    shift = i // 2 * 8 + (1 - i % 2) * 4
    q = (packed[:, None] >> shift[None, :]) & 15  # (WORDS, 8)
    w = round_to(tl.load(code_ptr + q) * scale[:, None], out_ptr.dtype.element_ty)
    at_w = word.to(tl.int64)[:, None] * 8 + i[None, :]
    tl.store(out_ptr + at_w, w, mask=mask[:, None])


def dense_nf4(packed: Tensor, state: Any, out: Tensor | None = None) -> Tensor:
    """Returns the weight whose bytes are `packed`, of the shape and dtype of `state`, bitsandbytes'
    QuantState; writes it to `out` if given. Not differentiable by autograd.

    CPU tensors, and what is no NF4 (FP4, blocks of less than 8 weights), are bitsandbytes' own.
    Raises ValueError for tensors on different devices and for an `out` that does not fit.
    """
    if out is not None:
        check_out(out, state.shape, state.dtype)
    inner = state.state2
    numbers = [state.absmax, state.code]
    numbers += [] if inner is None else [inner.absmax, inner.code, state.offset]
    block, rest = divmod(state.blocksize, WEIGHTS)
    words, more = divmod(math.prod(state.shape), WEIGHTS)
    if state.quant_type != "nf4" or rest or more or not runs_kernel(packed, out, *numbers):
        from bitsandbytes.functional import dequantize_4bit

        made = dequantize_4bit(packed, state)
        return made if out is None else out.copy_(made)
    if out is None:
        out = torch.empty(state.shape, dtype=state.dtype, device=packed.device)
    absmax, code, *inner_numbers = (x if x.dtype == torch.uint8 else x.float() for x in numbers)
    absmax2, code2, offset = inner_numbers or (code, code, code)
    with on_device(out):
        _dense_kernel[(triton.cdiv(words, CONFIG.block),)](
            *(packed.contiguous().view(-1).view(torch.int32), code, absmax, code2, absmax2, offset),
            *(out, words),
            BLOCK=block,
            BLOCK2=1 if inner is None else inner.blocksize,
            DOUBLE=inner is not None,
            WORDS=CONFIG.block,
            num_warps=CONFIG.num_warps,
            enable_fp_fusion=CONFIG.fp_fusion,
        )
    return out
