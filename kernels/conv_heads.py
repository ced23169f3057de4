"""The short convolution of a Gated DeltaNet with what follows it: the SiLU, and the norms of the
heads of q and k. Mamba 2's is the same without norms, with a bias.

    c = causal_conv(x, w, b)    y = c s,   s = sigmoid(c)

    out = y r,  r = 1 / sqrt(sum y^2 + eps) over a head         of q and k
    out = y                                                     of v, and of Mamba 2's x, B and C

    dy = r (dout - out sum(dout out))                           or dout
    dc = dy s (1 + c (1 - s))                                   dx, dw, db: causal_conv's, from dc

x has the columns of q, k and v side by side, as one linear layer gives them; each comes out by
itself, as the delta rule reads them. torch takes a pass for each of these steps, and saves what is
between them. Saved here are x and w: c is computed again.

All arithmetic is in fp32; each result is rounded once, and dc before it is convolved. Bytes a token
at 2 bytes an element: 4 C forward and 10 C backward, 12 C where the filters are trained.

Source: Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.kernels.causal_conv import MOST_TAPS, causal_conv_reference, conv_gradients
from longctx.kernels.launch import (
    Config,
    check_float,
    check_rows,
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    tl,
    triton,
)

WIDEST = 512
"""The most columns of a head that is normed."""
EPS = 1e-6
"""The number that is added to a head's sum of squares, as in flash-linear-attention."""


class Part(NamedTuple):
    """Some columns of x, as q, k or v."""

    heads: int
    width: int
    """Columns of a head."""
    normed: bool


Outputs = tuple[Tensor, ...]
"""Each part, (B, T, heads, width), and if it is asked for what the next row begins with,
(B, K - 1, C)."""


def conv_heads_reference(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K)
    parts: Sequence[Part],
    positions: Tensor | None = None,  # (T,)
    begin: Tensor | None = None,  # (B, K - 1, C)
    ends: bool = False,
    bias: Tensor | None = None,  # (C,)
) -> Outputs:
    """Returns the equations in plain torch, rounded once; differentiable."""
    wide = torch.promote_types(x.dtype, torch.float32)
    given = x if begin is None else torch.cat([begin, x], dim=1)
    bias = None if bias is None else bias.to(wide)
    c = causal_conv_reference(given.to(wide), weight.to(wide), bias, positions)
    y = torch.nn.functional.silu(c[:, given.shape[1] - x.shape[1] :])
    found = []
    for part, own in zip(parts, y.split([p.heads * p.width for p in parts], -1), strict=True):
        own = own.unflatten(-1, (part.heads, part.width))
        if part.normed:
            own = own * (own.square().sum(-1, keepdim=True) + EPS).rsqrt()
        found.append(own.to(x.dtype))
    return (*found, _end(x, begin, weight.shape[1])) if ends else tuple(found)


def _end(x: Tensor, begin: Tensor | None, taps: int) -> Tensor:  # (B, K - 1, C)
    """Returns a copy of the last tokens that a filter reaches: a view would keep all alive."""
    B, T, C = x.shape
    if T >= taps - 1:
        return x[:, T - taps + 1 :].clone()
    begin = x.new_zeros(B, taps - 1, C) if begin is None else begin
    return torch.cat([begin[:, T:], x], dim=1)


@triton.jit
def _heads_kernel(
    x_ptr,  # (B, T, heads width), rows and tokens at a stride, as begin
    weight_ptr,  # (heads width, K)
    bias_ptr,  # (heads width,)
    begin_ptr,  # (B, K - 1, heads width)
    positions_ptr,  # (T,)
    dout_ptr,  # (B, T, heads width)
    out_ptr,  # (B, T, heads width), tokens at a stride: the result, or dc
    T,
    heads,
    width,
    stride_row,
    stride_token,
    stride_begin_row,
    stride_begin_token,
    stride_out,
    eps,
    NORMED: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, blocks = tl.program_id(2).to(tl.int64), tl.cdiv(width, BLOCK)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    of_head = tl.program_id(1) % blocks * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) // blocks * width + of_head
    inside = (token < T) & (of_head < width)
    c = tl.zeros((TOKENS, BLOCK), tl.float32)
    if HAS_BIAS:
        c += tl.load(bias_ptr + channel, mask=of_head < width, other=0.0).to(tl.float32)
    for j in tl.static_range(TAPS):
        at = token + (j - TAPS + 1)
        mask = inside & (at >= 0)
        if HAS_POSITIONS:
            position = tl.load(positions_ptr + token, mask=token < T, other=0)
            mask = mask & (position >= TAPS - 1 - j)
        x = tl.load(x_ptr + row * stride_row + at * stride_token + channel, mask=mask, other=0.0)
        if HAS_BEGIN:
            begin = begin_ptr + row * stride_begin_row + (at + TAPS - 1) * stride_begin_token
            x += tl.load(begin + channel, mask=inside & (at < 0), other=0.0)
        w = tl.load(weight_ptr + channel * TAPS + j, mask=of_head < width, other=0.0)
        c += x.to(tl.float32) * w.to(tl.float32)
    s = tl.sigmoid(c)
    y = c * s
    if NORMED:
        r = tl.rsqrt(tl.sum(y * y, axis=1, keep_dims=True) + eps)
        y *= r
    if GRADIENT:
        dout = dout_ptr + (row * T + token) * heads * width + channel
        dy = tl.load(dout, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            dy = r * (dy - y * tl.sum(dy * y, axis=1, keep_dims=True))
        y = dy * s * (1 + c * (1 - s))
    out = out_ptr + (row * T + token) * stride_out + channel
    tl.store(out, round_to(y, out_ptr.dtype.element_ty), mask=inside)


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parts: Sequence[Part],
        positions: Tensor | None,
        begin: Tensor | None,
        ends: bool,
    ) -> Outputs:
        ctx.save_for_backward(x, weight, bias, positions, begin)
        ctx.parts = parts
        outs = tuple(x.new_empty(*x.shape[:2], part.heads * part.width) for part in parts)
        for part, own, out in zip(parts, _columns(parts), outs, strict=True):
            _launch(part, own, x, weight, bias, begin, positions, None, out)
        heads = (
            out.unflatten(-1, (part.heads, part.width))
            for part, out in zip(parts, outs, strict=True)
        )
        return (*heads, _end(x, begin, weight.shape[1])) if ends else tuple(heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, positions, begin = ctx.saved_tensors
        dc = x.new_empty(x.shape)
        d_end = douts[len(ctx.parts) :]
        for part, own, dout in zip(ctx.parts, _columns(ctx.parts), douts, strict=False):
            dout = dout.contiguous()
            _launch(part, own, x, weight, bias, begin, positions, dout, dc[..., own])
        trains = any(ctx.needs_input_grad[1:3])
        dx, d_begin, sums = conv_gradients(dc, x, weight, positions, begin, trains=trains)
        if d_end:
            tokens = min(x.shape[1], weight.shape[1] - 1)
            dx[:, x.shape[1] - tokens :] += d_end[0][:, weight.shape[1] - 1 - tokens :]
            if d_begin is not None:
                d_begin[:, tokens:] += d_end[0][:, : weight.shape[1] - 1 - tokens]
        if sums is None:
            return dx, None, None, None, None, d_begin, None
        dw, db = sums[:, :-1].to(weight.dtype), None if bias is None else sums[:, -1].to(bias.dtype)
        return dx, dw, db, None, None, d_begin, None


def _columns(parts: Sequence[Part]) -> Iterator[slice]:
    """Yields the columns of each part."""
    first = 0
    for part in parts:
        yield slice(first, first := first + part.heads * part.width)


def _launch(
    part: Part,
    own: slice,
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K)
    bias: Tensor | None,  # (C,)
    begin: Tensor | None,  # (B, K - 1, C)
    positions: Tensor | None,  # (T,)
    dout: Tensor | None,  # (B, T, heads, width)
    out: Tensor,  # (B, T, heads width)
) -> None:
    if not out.numel():
        return
    B, T, _ = x.shape
    x, weight = x[..., own], weight[own]
    first = x if begin is None else begin[..., own]
    # Without a norm all columns are alike, those of one head.
    heads, width = (part.heads, part.width) if part.normed else (1, part.heads * part.width)
    block = triton.next_power_of_2(width) if part.normed else CONFIG.block
    rows = max(1, CONFIG.rows * CONFIG.block // block)
    grid = triton.cdiv(T, rows), heads * triton.cdiv(width, block), B
    with on_device(x):
        _heads_kernel[grid](
            *(x, weight, weight if bias is None else bias[own]),
            *(first, weight if positions is None else positions),
            *(x if dout is None else dout, out, T, heads, width),
            *(*x.stride()[:2], *first.stride()[:2], out.stride(1), EPS),
            NORMED=part.normed,
            GRADIENT=dout is not None,
            HAS_BIAS=bias is not None,
            HAS_BEGIN=begin is not None,
            HAS_POSITIONS=positions is not None,
            TAPS=weight.shape[1],
            TOKENS=rows,
            BLOCK=block,
            num_warps=CONFIG.num_warps,
        )


def conv_heads(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K)
    parts: Sequence[Part],
    positions: Tensor | None = None,  # (T,) int32
    begin: Tensor | None = None,  # (B, K - 1, C)
    *,
    ends: bool = False,
    bias: Tensor | None = None,  # (C,)
) -> Outputs:
    """The parts of x behind the convolution of each channel with its own filter, the SiLU, and of
    those that are normed, over each head, the norm; differentiable in x, weight, bias and begin.

    bf16, fp16 or fp32, all of one dtype, K at most 8, heads of at most 512 columns where they are
    normed. Rows and tokens of x and begin may lie at any stride. `positions` are those of a row's
    tokens in their documents; `begin` is what stands before the row, if it is not zeros; `ends`
    asks for what stands before the next one. Raises ValueError for a wrong shape, dtype, device or
    layout.
    """
    B, T, C = x.shape
    taps, columns = weight.shape[-1], sum(part.heads * part.width for part in parts)
    check_shape("weight", weight, (C, taps))
    if not 1 <= taps <= MOST_TAPS:
        raise ValueError(f"a filter has 1 to {MOST_TAPS} taps, got {taps}")
    if columns != C:
        raise ValueError(f"the parts have {columns} columns, and x {C}")
    if bias is not None:
        check_shape("bias", bias, (C,))
    if positions is not None:
        check_shape("positions", positions, (T,))
    if begin is not None:
        check_shape("begin", begin, (B, taps - 1, C))
    if not runs_kernel(x, weight):
        return conv_heads_reference(x, weight, parts, positions, begin, ends, bias)
    widest = max((part.width for part in parts if part.normed), default=0)
    if widest > WIDEST:
        raise ValueError(f"a head that is normed has at most {WIDEST} columns, got {widest}")
    for name, tensor in {"x": x, "weight": weight, "bias": bias, "begin": begin}.items():
        if tensor is not None:
            check_float(name, tensor, x.dtype)
    check_rows("x", x)
    if begin is not None:
        check_rows("begin", begin)
    given = x, weight.contiguous(), bias, tuple(parts), positions, begin, ends
    result: Outputs = _ConvHeads.apply(*given)
    return result


CONFIG = Config(block=128, num_warps=4, rows=32)
"""A program has 32 tokens of 128 channels, or of a head as many elements."""
