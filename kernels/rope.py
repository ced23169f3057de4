"""Rotary position embedding of queries and keys: in place, in one launch, without a table of sines.

For the pair (j, j + d/2) of a head of size d at position p (HF's rotate-half layout), or with
`interleaved` for the neighbours (2j, 2j + 1), as in GLM-4 and Cohere:

    angle = p * inv_freq_j, in fp32
    c, s = attention_scaling * cos(angle), attention_scaling * sin(angle)
    x_j'       = x_j c - x_{j+d/2} s
    x_{j+d/2}' = x_{j+d/2} c + x_j s

attention_scaling is HF's factor of that name: 1 for plain RoPE, above 1 for YaRN, for instance.

A token of an image may have several positions, of time, height and width: p of pair j is then row
rows_j of positions (R, T), as in Qwen2-VL's multimodal RoPE.

The gradient is the same rotation with -s (`inverse=True`), so only the positions are saved. Bytes
per token: each element of q and k is read once and written once, 4 (H + K) d at 2 bytes an element.

One program handles all heads of a token, so the sine and cosine of an angle are computed once. The
angle is formed in fp32, bit for bit as HF does it: at position 4 million that rounding alone can
change it by 0.25 rad. The sine of such a large angle needs the angle modulo pi/2 with more digits
than fp32 has, so the quotient and the remainder are computed in fp64 (error 1e-9 at 4 million) and
the polynomial in fp32. HF rounds cos and sin to the model's dtype; here they stay in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.annotate import annotated
from longctx.kernels.launch import (
    Config,
    check_float,
    check_no_leaf,
    check_rows,
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    tl,
    triton,
)


def rope_reference(
    x: Tensor,  # (T, H, d)
    position_ids: Tensor,  # (T,); with rows (R, T)
    inv_freq: Tensor,  # (d / 2,) fp32
    attention_scaling: float = 1.0,
    *,
    inverse: bool = False,
    interleaved: bool = False,
    rows: Tensor | None = None,  # (d / 2,)
) -> Tensor:  # (T, H, d)
    """Returns the rotation of one tensor in plain torch; differentiable."""
    read = position_ids[:, None] if rows is None else position_ids[rows.long()].t()
    angle = read.to(inv_freq.dtype)[:, None] * inv_freq  # (T, 1, d/2)
    c, s = attention_scaling * angle.cos(), attention_scaling * (-angle if inverse else angle).sin()
    return rotated_reference(x, c, s, interleaved)


def rotated_reference(
    x: Tensor,  # (..., d)
    c: Tensor,  # (..., d / 2)
    s: Tensor,  # (..., d / 2)
    interleaved: bool = False,
) -> Tensor:  # (..., d)
    """The last two of the equations above, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, c.dtype))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    rotated = a * c - b * s, b * c + a * s
    if interleaved:
        return torch.stack(rotated, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(rotated, dim=-1).to(x.dtype)


@triton.jit
def _sin_cos(angle):
    """Returns (sin, cos) of fp32 angles up to 1e8, to fp32 accuracy."""
    # In fp32, quarter * pi / 2 of an angle of 1e6 would be rounded to a step of 0.06.
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarter * 1.5707963267948966).to(tl.float32)  # in [-pi/4, pi/4]
    t = r * r
    # Polynomials fitted at Chebyshev points of [-pi/4, pi/4]: errors 1e-8 (sin) and 8e-10 (cos).
    sin = r + r * t * (
        -0.16666664649833968 + t * (0.008332745664123299 + t * -0.0001958730861286321)
    )
    cos = 0.041666664646523195 + t * (-0.0013888300362642637 + t * 2.4547348651772008e-05)
    cos = 1.0 - 0.5 * t + t * t * cos
    quadrant = quarter.to(tl.int64).to(tl.int32) & 3
    odd = (quadrant & 1) == 1
    s = tl.where(odd, cos, sin)
    c = tl.where(odd, sin, cos)
    return tl.where(quadrant >= 2, -s, s), tl.where((quadrant == 1) | (quadrant == 2), -c, c)


@triton.jit
def _rotate(
    in_ptr,
    out_ptr,
    tokens,  # (TOKENS, 1, 1)
    in_bounds,  # (TOKENS, 1, 1)
    cos,  # (TOKENS, 1, HALF_BLOCK)
    sin,  # (TOKENS, 1, HALF_BLOCK)
    stride_token,
    stride_head,
    stride_out_token,
    stride_out_head,
    heads,
    half,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    head = tl.arange(0, HEADS_BLOCK)[None, :, None]
    dtype = out_ptr.dtype.element_ty
    in_ptr += tokens * stride_token + head * stride_head
    out_ptr += tokens * stride_out_token + head * stride_out_head
    rows = in_bounds & (head < heads)
    if INTERLEAVED:
        # Loaded and stored whole: stores of every other element run at 7% of the copy rate.
        offs = tl.arange(0, 2 * HALF_BLOCK)[None, None, :]
        mask = rows & (offs < 2 * half)
        x = tl.load(in_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [TOKENS, HEADS_BLOCK, HALF_BLOCK, 2]))
        rotated = tl.join(a * cos - b * sin, b * cos + a * sin)
        rotated = tl.reshape(rotated, [TOKENS, HEADS_BLOCK, 2 * HALF_BLOCK])
        tl.store(out_ptr + offs, round_to(rotated, dtype), mask=mask)
    else:
        offs = tl.arange(0, HALF_BLOCK)[None, None, :]
        mask = rows & (offs < half)
        a = tl.load(in_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(in_ptr + offs + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offs, round_to(a * cos - b * sin, dtype), mask=mask)
        tl.store(out_ptr + offs + half, round_to(b * cos + a * sin, dtype), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,  # (T, H, d)
    k_ptr,  # (T, K, d)
    q_out_ptr,  # (T, H, d), may be q
    k_out_ptr,  # (T, K, d), may be k
    positions_ptr,  # (T,); if TABLES, cosines (T, d)
    inv_freq_ptr,  # (d / 2,) fp32; if TABLES, sines (T, d)
    rows_ptr,  # (d / 2,) int32; used if ROWS: positions are (R, T) then
    T,
    H,
    K,
    half,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_q_out_token,
    stride_q_out_head,
    stride_k_out_token,
    stride_k_out_head,
    stride_table,
    attention_scaling,
    TABLES: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    in_bounds = tokens < T
    offs = tl.arange(0, HALF_BLOCK)[None, None, :]
    if TABLES:
        row, mask = tokens * stride_table + offs, in_bounds & (offs < half)
        cos = tl.load(positions_ptr + row, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(inv_freq_ptr + row, mask=mask, other=0.0).to(tl.float32)
    else:
        if ROWS:
            row = tl.load(rows_ptr + offs, mask=offs < half, other=0).to(tl.int64)
            places, mask = row * T + tokens, in_bounds & (offs < half)
        else:
            places, mask = tokens, in_bounds
        positions = tl.load(positions_ptr + places, mask=mask, other=0).to(tl.float32)
        inv_freq = tl.load(inv_freq_ptr + offs, mask=offs < half, other=0.0)
        sin, cos = _sin_cos(positions * inv_freq)
    cos *= attention_scaling
    # Backward's matrix is the transpose: the angle is negated, the scaling stays.
    sin *= -attention_scaling if INVERSE else attention_scaling
    _rotate(
        q_ptr,
        q_out_ptr,
        tokens,
        in_bounds,
        cos,
        sin,
        stride_q_token,
        stride_q_head,
        stride_q_out_token,
        stride_q_out_head,
        H,
        half,
        INTERLEAVED,
        TOKENS,
        Q_BLOCK,
        HALF_BLOCK,
    )
    _rotate(
        k_ptr,
        k_out_ptr,
        tokens,
        in_bounds,
        cos,
        sin,
        stride_k_token,
        stride_k_head,
        stride_k_out_token,
        stride_k_out_head,
        K,
        half,
        INTERLEAVED,
        TOKENS,
        K_BLOCK,
        HALF_BLOCK,
    )


def _check(
    q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor, rows: Tensor | None = None
) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 3 or x.shape[2] % 2 or x.shape[2] == 0:
            raise ValueError(f"{name} must have shape (T, heads, even d), got {tuple(x.shape)}")
        check_float(name, x, q.dtype)
        check_rows(name, x)
    check_shape("k", k, (q.shape[0], k.shape[1], q.shape[2]))
    if rows is None:
        check_shape("position_ids", position_ids, q.shape[:1])
    else:
        check_shape("position_ids", position_ids, (len(position_ids), len(q)))
        check_shape("rows", rows, (q.shape[2] // 2,))
        if rows.dtype != torch.int32:
            raise ValueError(f"rows must be int32, got {rows.dtype}")
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"position_ids must be int64 or int32, got {position_ids.dtype}")
    check_shape("inv_freq", inv_freq, (q.shape[2] // 2,))
    check_float("inv_freq", inv_freq, torch.float32)


def _rotate_into(
    q: Tensor,  # (T, H, d)
    k: Tensor,  # (T, K, d)
    q_out: Tensor,  # (T, H, d), may be q
    k_out: Tensor,  # (T, K, d), may be k
    position_ids: Tensor,  # (T,)
    inv_freq: Tensor,  # (d / 2,) fp32
    attention_scaling: float,
    inverse: bool,
    interleaved: bool,
    rows: Tensor | None = None,  # (d / 2,) int32
) -> None:
    _check(q, k, position_ids, inv_freq, rows)
    how: dict[str, Any] = dict(inverse=inverse, interleaved=interleaved, rows=rows)
    given = (position_ids, inv_freq) if rows is None else (position_ids, inv_freq, rows)
    if not runs_kernel(q, k, q_out, k_out, *given):
        for x, out in ((q, q_out), (k, k_out)):
            out.copy_(rope_reference(x, position_ids, inv_freq, attention_scaling, **how))
        return
    angles = position_ids.contiguous(), inv_freq.contiguous()
    launch(q, k, q_out, k_out, angles, attention_scaling, **how)


def launch(
    q: Tensor,  # (T, H, d)
    k: Tensor,  # (T, K, d)
    q_out: Tensor,  # (T, H, d), may be q
    k_out: Tensor,  # (T, K, d), may be k
    angles: tuple[
        Tensor, Tensor
    ],  # position_ids and inv_freq; for tables, cosines and sines (T, d)
    attention_scaling: float = 1.0,
    *,
    tables: bool = False,
    inverse: bool = False,
    interleaved: bool = False,
    rows: Tensor | None = None,  # (d / 2,) int32
) -> None:
    """Starts the kernel, which rotates q and k into q_out and k_out; `angles` are contiguous."""
    (T, H, d), K = q.shape, k.shape[1]
    if T and H and K:
        config = default_config(H, d)
        with on_device(q):
            _rope_kernel[(triton.cdiv(T, config.rows),)](
                *(q, k, q_out, k_out, *angles, rows, T, H, K, d // 2),
                *(*q.stride()[:2], *k.stride()[:2], *q_out.stride()[:2], *k_out.stride()[:2]),
                *(angles[0].shape[-1] if tables else 0, attention_scaling),
                TABLES=tables,
                ROWS=rows is not None,
                INVERSE=inverse,
                INTERLEAVED=interleaved,
                TOKENS=config.rows,
                Q_BLOCK=triton.next_power_of_2(H),
                K_BLOCK=triton.next_power_of_2(K),
                HALF_BLOCK=config.block,
                num_warps=config.num_warps,
            )


@annotated("rope")
def rope_(
    q: Tensor,  # (T, H, d)
    k: Tensor,  # (T, K, d)
    position_ids: Tensor,  # (T,) int64 or int32; with rows (R, T)
    inv_freq: Tensor,  # (d / 2,) fp32
    attention_scaling: float = 1.0,
    *,
    inverse: bool = False,
    interleaved: bool = False,
    rows: Tensor | None = None,  # (d / 2,) int32: the row of positions that each pair reads
) -> None:
    """Rotates q and k in place. With `inverse` it rotates the other way, as their gradients need.

    Tokens and heads may lie at any stride, as in the parts of a fused q|k|v buffer. Not
    differentiable by autograd. Raises ValueError for a wrong shape, dtype, device or layout.
    """
    how = attention_scaling, inverse, interleaved, rows
    _rotate_into(q, k, q, k, position_ids, inv_freq, *how)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        position_ids: Tensor,
        inv_freq: Tensor,
        attention_scaling: float,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(position_ids, inv_freq)
        ctx.attention_scaling, ctx.interleaved = attention_scaling, interleaved
        q, k = q.detach(), k.detach()
        rope_(q, k, position_ids, inv_freq, attention_scaling, interleaved=interleaved)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        position_ids, inv_freq = ctx.saved_tensors
        # Not in place: autograd may have given the same gradient tensor to another operation too.
        dq, dk = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk))
        dq_in, dk_in = torch.empty_like(dq), torch.empty_like(dk)
        how = ctx.attention_scaling, True, ctx.interleaved
        _rotate_into(dq, dk, dq_in, dk_in, position_ids, inv_freq, *how)
        return dq_in, dk_in, None, None, None, None


def rope(
    q: Tensor,  # (T, H, d)
    k: Tensor,  # (T, K, d)
    position_ids: Tensor,  # (T,) int64 or int32
    inv_freq: Tensor,  # (d / 2,) fp32
    attention_scaling: float = 1.0,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k rotated by their positions, differentiable in both. Overwrites q and k.

    Shapes: q is (T, H, d) and k is (T, K, d), d even, both of one dtype (bf16, fp16 or fp32). The
    results have these shapes and share memory with q and k. Tokens and heads may lie at any stride.
    position_ids is (T,) and inv_freq (d / 2,); attention_scaling multiplies the results.
    `interleaved` pairs neighbours instead of halves.

    Saves only position_ids and inv_freq.

    Raises ValueError for a wrong shape, dtype, device or layout, and for a leaf that requires a
    gradient or a view of one. In backward, autograd raises RuntimeError if another operation saved
    the old values of q or k.

    Example:
        >>> import longctx, torch
        >>> q, k = torch.ones(5, 8, 4), torch.ones(5, 2, 4)  # 5 tokens, 8 query and 2 key heads
        >>> inv_freq = 10000.0 ** -(torch.arange(0, 4, 2) / 4)
        >>> position_ids = torch.tensor([0, 1, 2, 0, 1])  # two packed documents
        >>> q, k = longctx.rope(q, k, position_ids, inv_freq)
        >>> bool((q[0] == 1).all() and (q[1] == q[4]).all())  # position 0 rotates nothing
        True

    Source: Su et al., RoFormer (arXiv 2104.09864); halves paired as in Hugging Face's Llama.
    """
    for name, x in (("q", q), ("k", k)):
        check_no_leaf(name, x, "overwritten")
    _check(q, k, position_ids, inv_freq)
    q_out, k_out = _Rope.apply(q, k, position_ids, inv_freq, attention_scaling, interleaved)
    torch.autograd.graph.increment_version((q, k))
    return q_out, k_out


@cache
def default_config(H: int, d: int) -> Config:
    half = triton.next_power_of_2(d // 2)
    elements = triton.next_power_of_2(H) * half
    return Config(block=half, num_warps=4, rows=max(1, 2048 // elements))
