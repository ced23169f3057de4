"""Matmuls of mixture-of-experts layers, over slots that are sorted by expert.

A tile of t tokens, each of which goes to k of E experts, has n = t k slots. sort_slots.py sorts
them by expert, and `ends` (E,) are the places behind each expert's last: expert e has the segment
ends[e-1]:ends[e], which may be empty, and e(i) is the expert of place i.

    grouped_mm      y[i] = x[rows[i]] weight[e(i)]^T (+ bias[e(i)])    forward, the input's gradient
                           (+ u[i] b[e(i)]^T)                          where experts have adapters
    grouped_outer_  acc[e] (+)= sum_i a[rows_a[i]]^T b[rows_b[i]], i in e's segment    the weight's
    combine         out[t] = onto[t] + scale sum_j weights[t, j] z[places[t, j]]
    slot_dots       d[i] = <a[i], b[i]>                        the gradient of routing weights

Nothing waits for the GPU: segments are read by the kernels, and a grid is as large as the tiles of
any routing could be, n / ROWS + E. Programs beyond the last tile end at once. Rows are gathered
where they are loaded, so no copy of x with k rows a token is made. All sums are in fp32, each in
one order whatever else runs, and each result is rounded once. No atomics.

FLOPs of the first two: 2 n O K. Bytes at 2 an element: grouped_mm at least 2 (E O K + n (K + O)),
grouped_outer_ 2 n (O + K) and 8 E O K for fp32 sums that are added to. What an adapter of rank r
adds takes 2 n O r FLOPs and 2 n r bytes: y is not read again for it.

Shapes: m rows of an operand, O outputs and K inputs of an expert, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_float,
    check_rows,
    check_shape,
    dot,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)


class LowRank(NamedTuple):
    """The two factors of what experts' adapters add to the result of `grouped_mm`: u[i] b[e(i)]^T
    to row i, whose expert is e(i)."""

    u: Tensor
    """(n, r), a row for each place."""
    b: Tensor
    """(E, O, r), with any strides."""


# --- references ------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where x has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def grouped_mm_reference(
    x: Tensor,  # (m, K)
    weight: Tensor,  # (E, O, K)
    ends: Tensor,  # (E,)
    rows: Tensor | None = None,  # (n,)
    bias: Tensor | None = None,  # (E, O)
    low_rank: LowRank | None = None,
) -> Tensor:  # (n, O)
    """Returns the product of each segment in plain torch, rounded once; differentiable in x,
    weight, bias and low_rank."""
    cuts = ends.tolist()[:-1]

    def by_expert(rows: Tensor, matrices: Tensor) -> list[Tensor]:
        pairs = zip(rows.tensor_split(cuts), matrices.unbind(), strict=True)
        return [_wide(some) @ _wide(matrix).t() for some, matrix in pairs]

    products = by_expert(_gathered(x, rows), weight)
    if low_rank is not None:
        added = by_expert(*low_rank)
        products = [y + more for y, more in zip(products, added, strict=True)]
    if bias is not None:
        products = [y + _wide(b) for y, b in zip(products, bias.unbind(), strict=True)]
    return torch.cat([y.to(x.dtype) for y in products])


def grouped_outer_reference_(
    acc: Tensor,  # (E, O, K), written over or added to
    a: Tensor,  # (m_a, O)
    b: Tensor,  # (m_b, K)
    ends: Tensor,  # (E,)
    rows_a: Tensor | None,  # (n,)
    rows_b: Tensor | None,  # (n,)
    add: bool,
) -> None:
    """The sum of outer products of each segment in plain torch, rounded once."""
    cuts = ends.tolist()[:-1]
    lefts, rights = (_gathered(x, r).tensor_split(cuts) for x, r in ((a, rows_a), (b, rows_b)))
    for total, left, right in zip(acc.unbind(), lefts, rights, strict=True):
        if not add:
            total.copy_(_wide(left).t() @ _wide(right))
        elif len(left):
            total += _wide(left).t() @ _wide(right)


def combine_reference(
    z: Tensor,  # (n, D)
    places: Tensor,  # (t, k)
    weights: Tensor | None = None,  # (t, k)
    onto: Tensor | None = None,  # (t, D)
    scale: float = 1.0,
) -> Tensor:  # (t, D)
    """The weighted sum in plain torch, in fp32, not rounded; differentiable."""
    total = _wide(z).new_zeros(len(places), z.shape[1])
    for j, column in enumerate(places.unbind(1)):
        row = _wide(z.index_select(0, column))
        total = total + (row if weights is None else row * weights[:, j, None])
    total = total * scale
    return total if onto is None else onto + total


def slot_dots_reference(a: Tensor, b: Tensor) -> Tensor:
    """Returns <a[i], b[i]> of rows (n, D) in plain torch, in fp32."""
    return (_wide(a) * _wide(b)).sum(-1)


# --- kernels ---------------------------------------------------------------------------------


@triton.jit
def _grouped(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(m, n) of the tile with this number: GROUP tiles of m for each n, so that tiles that run at
    one time share both operands."""
    first = number // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = number % (GROUP * tiles_n)
    return first + within % size, within // size


@triton.jit
def _mm_tile(
    x_ptr,
    weight_ptr,  # (width, K), the expert's
    bias_ptr,  # (width,), the expert's
    b_ptr,  # (width, r), the expert's
    u_ptr,
    rows_ptr,
    out_ptr,
    first,
    end,
    n,
    width,
    K,
    r,
    stride_x,
    stride_weight,
    stride_u,
    stride_b,
    stride_rank,
    stride_out,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    BY_INPUTS: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    EVEN_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The products of ROWS places from `first`, before `end`, for the n-th BLOCK of columns."""
    place = first + tl.arange(0, ROWS)
    # Rows past the segment are computed from its last row and not stored: no mask in the loop.
    row = tl.minimum(place, end - 1)
    if HAS_ROWS:
        row = tl.load(rows_ptr + row)
    depth = tl.arange(0, DEPTH)
    column = n * BLOCK + tl.arange(0, BLOCK)
    # int64: a row of x passes 2^31 elements at a million rows of 2048.
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_x + depth[None, :]
    if BY_INPUTS:
        weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * stride_weight + depth[:, None]
    else:
        weight_ptrs = weight_ptr + depth.to(tl.int64)[:, None] * stride_weight + column[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        if EVEN_INPUTS:
            x = tl.load(x_ptrs)
            if EVEN_WIDTH:
                weight = tl.load(weight_ptrs)
            else:
                weight = tl.load(weight_ptrs, mask=column[None, :] < width, other=0.0)
        else:
            x = tl.load(x_ptrs, mask=depth[None, :] < K - k, other=0.0)
            there = (column[None, :] < width) & (depth[:, None] < K - k)
            weight = tl.load(weight_ptrs, mask=there, other=0.0)
        total = dot(x, weight, total)
        x_ptrs += DEPTH
        if BY_INPUTS:
            weight_ptrs += DEPTH
        else:
            weight_ptrs += DEPTH * stride_weight
    if RANKS:
        rank = tl.arange(0, RANKS)
        own = tl.minimum(place, end - 1).to(tl.int64)
        u_ptrs = u_ptr + own[:, None] * stride_u + rank[None, :]
        b_ptrs = b_ptr + column[None, :] * stride_b + rank[:, None] * stride_rank
        for k in tl.range(0, r, RANKS, num_stages=1):
            u = tl.load(u_ptrs, mask=rank[None, :] < r - k, other=0.0)
            there = (column[None, :] < width) & (rank[:, None] < r - k)
            total = dot(u, tl.load(b_ptrs, mask=there, other=0.0), total)
            u_ptrs += RANKS
            b_ptrs += RANKS * stride_rank
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * stride_out + column[None, :]
    mask = place[:, None] < end
    if not EVEN_WIDTH:
        mask = mask & (column[None, :] < width)
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_expert"])
def _mm_kernel(
    x_ptr,  # (m, K), rows at a stride
    weight_ptr,  # (E, width, K)
    bias_ptr,  # (E, width)
    b_ptr,  # (E, width, r)
    u_ptr,  # (n, r), rows at a stride
    ends_ptr,  # (E,) int32
    rows_ptr,  # (n,) int32
    out_ptr,  # (n, width), rows at a stride
    first_expert,  # of those that the weights are of
    experts,
    width,
    K,
    r,
    stride_x,
    stride_expert,
    stride_weight,
    stride_u,
    stride_b_expert,
    stride_b,
    stride_rank,
    stride_out,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    BY_INPUTS: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    EVEN_INPUTS: tl.constexpr,
    HALVES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    number, columns = tl.program_id(0), tl.cdiv(width, BLOCK)
    each = tl.arange(0, EXPERTS)
    ends_ptr += first_expert
    ends = tl.load(ends_ptr + each, mask=each < experts, other=0)
    has_start = (each + first_expert > 0) & (each < experts)
    starts = tl.load(ends_ptr + each - 1, mask=has_start, other=0)
    tiles = tl.where(each < experts, (ends - starts + ROWS - 1) // ROWS, 0)
    if number >= tl.sum(tiles) * columns:
        return
    # Experts whose tiles all lie before this one. Their number is this tile's expert: an expert
    # without slots lies before the tile that follows, since it ends where that begins.
    before = tl.cumsum(tiles, 0) * columns <= number
    expert = tl.sum(before.to(tl.int32))
    number -= tl.sum(tl.where(before, tiles, 0)) * columns
    mine = each == expert
    start, end = tl.sum(tl.where(mine, starts, 0)), tl.sum(tl.where(mine, ends, 0))
    m, n = _grouped(number, tl.sum(tl.where(mine, tiles, 0)), columns, GROUP)

    first = start + m * ROWS
    weight_ptr += expert.to(tl.int64) * stride_expert
    bias_ptr += expert * width
    b_ptr += expert.to(tl.int64) * stride_b_expert
    if HALVES:
        if end - first <= ROWS // 2:
            _mm_tile(
                *(x_ptr, weight_ptr, bias_ptr, b_ptr, u_ptr, rows_ptr, out_ptr),
                *(first, end, n, width, K, r),
                *(stride_x, stride_weight, stride_u, stride_b, stride_rank, stride_out),
                *(HAS_ROWS, HAS_BIAS, RANKS, BY_INPUTS),
                *(EVEN_WIDTH, EVEN_INPUTS, ROWS // 2, BLOCK, DEPTH, STAGES),
            )
            return
    _mm_tile(
        *(x_ptr, weight_ptr, bias_ptr, b_ptr, u_ptr, rows_ptr, out_ptr),
        *(first, end, n, width, K, r),
        *(stride_x, stride_weight, stride_u, stride_b, stride_rank, stride_out),
        *(HAS_ROWS, HAS_BIAS, RANKS, BY_INPUTS),
        *(EVEN_WIDTH, EVEN_INPUTS, ROWS, BLOCK, DEPTH, STAGES),
    )


@triton.jit
def _row_at(rows_ptr, place, end, HAS_ROWS: tl.constexpr):
    row = place
    if HAS_ROWS:
        row = tl.load(rows_ptr + place, mask=place < end, other=0)
    return row


@triton.jit
def _write(ptr, x, width, K, stride, ADD: tl.constexpr):
    """Writes the first width rows and K columns of x, or adds them to what is there."""
    row, column = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    ptrs, mask = ptr + row * stride + column, (row < width) & (column < K)
    if ADD:
        x += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, round_to(x, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _outer_kernel(
    a_ptr,  # (m_a, width), rows at a stride
    b_ptr,  # (m_b, K), rows at a stride
    ends_ptr,  # (E,) int32
    rows_a_ptr,  # (n,) int32
    rows_b_ptr,  # (n,) int32
    acc_ptr,  # (E, width, K), rows at a stride
    width,
    K,
    stride_a,
    stride_b,
    stride_expert,
    stride_acc,
    HAS_ROWS_A: tl.constexpr,
    HAS_ROWS_B: tl.constexpr,
    ADD: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    EVEN_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(width, ROWS), tl.cdiv(K, BLOCK)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    m, n = _grouped(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if ADD:
        if start == end:
            return
    row = m * ROWS + tl.arange(0, ROWS)
    column = n * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    # The rows of a step are loaded one step before its operands, whose addresses depend on them.
    next_a = _row_at(rows_a_ptr, start + depth, end, HAS_ROWS_A)
    next_b = _row_at(rows_b_ptr, start + depth, end, HAS_ROWS_B)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.range(start, end, DEPTH, num_stages=STAGES):
        there = i + depth < end
        # a is loaded as its transpose: a tl.trans would keep it out of sm_80's pipeline.
        there_a, there_b = there[None, :], there[:, None]
        if not EVEN_WIDTH:
            there_a = there_a & (row[:, None] < width)
        if not EVEN_INPUTS:
            there_b = there_b & (column[None, :] < K)
        a_ptrs = a_ptr + next_a.to(tl.int64)[None, :] * stride_a + row[:, None]
        b_ptrs = b_ptr + next_b.to(tl.int64)[:, None] * stride_b + column[None, :]
        a = tl.load(a_ptrs, mask=there_a, other=0.0)
        b = tl.load(b_ptrs, mask=there_b, other=0.0)
        next_a = _row_at(rows_a_ptr, i + DEPTH + depth, end, HAS_ROWS_A)
        next_b = _row_at(rows_b_ptr, i + DEPTH + depth, end, HAS_ROWS_B)
        total = dot(a, b, total)
    acc_ptr += expert.to(tl.int64) * stride_expert + m.to(tl.int64) * ROWS * stride_acc
    acc_ptr += n * BLOCK
    if ADD:
        # By halves: all of acc beside all of the sum is more than the registers hold.
        halves = tl.permute(tl.reshape(total, (ROWS, 2, BLOCK // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _write(acc_ptr, left, width - m * ROWS, K - n * BLOCK, stride_acc, ADD)
        inputs = K - n * BLOCK - BLOCK // 2
        _write(acc_ptr + BLOCK // 2, right, width - m * ROWS, inputs, stride_acc, ADD)
    else:
        _write(acc_ptr, total, width - m * ROWS, K - n * BLOCK, stride_acc, ADD)


@triton.jit
def _combine_kernel(
    z_ptr,  # (n, D), rows at a stride
    places_ptr,  # (t, PLACES) int32
    weights_ptr,  # (t, PLACES) fp32
    onto_ptr,  # (t, D), rows at a stride
    out_ptr,  # (t, D), rows at a stride; may be onto
    D,
    scale,
    stride_z,
    stride_onto,
    stride_out,
    HAS_WEIGHTS: tl.constexpr,
    HAS_ONTO: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < D
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(PLACES):
        place = tl.load(places_ptr + token * PLACES + j).to(tl.int64)
        z = tl.load(z_ptr + place * stride_z + offs, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            z *= tl.load(weights_ptr + token * PLACES + j)
        total += z
    total *= scale
    if HAS_ONTO:
        onto = tl.load(onto_ptr + token * stride_onto + offs, mask=mask, other=0.0)
        total = onto.to(tl.float32) + total
    out_ptrs = out_ptr + token * stride_out + offs
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dots_kernel(
    a_ptr,  # (n, D), rows at a stride
    b_ptr,  # (n, D), rows at a stride
    out_ptr,  # (n,) fp32
    n,
    D,
    stride_a,
    stride_b,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)[None, :]
    a_ptrs, b_ptrs = a_ptr + row[:, None] * stride_a + offs, b_ptr + row[:, None] * stride_b + offs
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        mask = (row[:, None] < n) & (start + offs < D)
        a = tl.load(a_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out_ptr + row, tl.sum(total, axis=1), mask=row < n)


# --- public functions ------------------------------------------------------------------------


def grouped_mm(
    x: Tensor,  # (m, K), rows at any stride
    weight: Tensor,  # (E, O, K), or (some experts, O, K); O or K at stride 1
    ends: Tensor,  # (E,) int32
    *,
    rows: Tensor | None = None,  # (n,) int32; None: row i of x for place i, and n = m
    bias: Tensor | None = None,  # (E, O); None: zeros
    low_rank: LowRank | None = None,
    out: Tensor | None = None,  # (n, O), rows at any stride, written
    first: int | None = None,
    config: TileConfig | None = None,
) -> Tensor:  # (n, O)
    """y[i] = x[rows[i]] weight[e(i)]^T + bias[e(i)] + u[i] b[e(i)]^T for every place i, in x's
    dtype. Not differentiable.

    bf16, fp16 or fp32, all of one dtype but bias; fp32 is multiplied as fp32 and not as TF32. The
    input's gradient is the same product with `weight.transpose(1, 2)`. ends[E-1] must be n: ends
    and rows are not checked, which would wait for the GPU. `config` replaces the tiles of
    `mm_config`.

    Weights of some experts, from the expert `first` on, with their biases and factors b, give the
    places of these experts, in the bits of a call with all of them. The other places of `out` stay
    as they are.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    experts, width, inputs = weight.shape
    check_shape("x", x, (x.shape[0], inputs))
    n = _check_segments(x, ends, experts if first is None else len(ends), rows=rows)
    first = first or 0
    if not 0 <= first <= len(ends) - experts:
        raise ValueError(f"{experts} experts from the one at {first} on are not among {len(ends)}")
    if out is None:
        out = x.new_empty(n, width)
    check_shape("out", out, (n, width))
    if weight.dtype != x.dtype or out.dtype != x.dtype:
        names = f"{x.dtype}, {weight.dtype} and {out.dtype}"
        raise ValueError(f"x, weight and out must have one dtype, got {names}")
    if bias is not None:
        check_shape("bias", bias, (experts, width))
    u, b = low_rank or (None, None)
    if u is not None and b is not None:
        _check_low_rank(u, b, x, (n, experts, width))
    if not runs_kernel(x, weight, ends, rows, bias, u, b, out):
        own, (begin, *_, stop) = _of_experts(ends, first, experts)
        places = slice(begin, stop)
        x, rows = (x[places], None) if rows is None else (x, rows[places])
        low_rank = None if low_rank is None else LowRank(low_rank.u[places], low_rank.b)
        out[places] = grouped_mm_reference(x, weight, own, rows, bias, low_rank)
        return out
    check_float("x", x)
    if bias is not None:
        check_float("bias", bias)
    check_rows("x", x)
    check_rows("out", out)
    by_inputs = weight.stride(2) == 1
    if not by_inputs and weight.stride(1) != 1:
        raise ValueError(
            f"weight must be contiguous in its last dimension or the one before, got strides "
            f"{tuple(weight.stride())}"
        )
    if config is None:
        config = mm_config(n, len(ends), width, x.element_size(), _shared_bytes(x))
    programs = (triton.cdiv(n, config.rows) + experts) * triton.cdiv(width, config.block)
    if n:
        with on_device(x):
            _mm_kernel[(programs,)](
                *(x, weight, x if bias is None else bias.contiguous()),
                *(x if b is None else b, x if u is None else u),
                *(ends, ends if rows is None else rows, out),
                *(first, experts, width, inputs, 0 if u is None else u.shape[1]),
                *(x.stride(0), weight.stride(0), weight.stride(1 if by_inputs else 2)),
                *(0 if u is None else u.stride(0), *((0, 0, 0) if b is None else b.stride())),
                out.stride(0),
                HAS_ROWS=rows is not None,
                HAS_BIAS=bias is not None,
                RANKS=0 if u is None else _ranks(u.shape[1]),
                BY_INPUTS=by_inputs,
                EVEN_WIDTH=width % config.block == 0,
                EVEN_INPUTS=inputs % config.depth == 0,
                HALVES=config.halves,
                EXPERTS=triton.next_power_of_2(experts),
                **config.constants(),
            )
    return out


def _of_experts(ends: Tensor, first: int, experts: int) -> tuple[Tensor, list[int]]:
    """Returns the ends of some experts among their own places; and where these begin and end."""
    bounds = [0, *ends.tolist()][first : first + experts + 1]
    return ends[first : first + experts] - bounds[0], bounds


def _check_low_rank(u: Tensor, b: Tensor, x: Tensor, sizes: tuple[int, int, int]) -> None:
    n, experts, width = sizes
    check_shape("u", u, (n, u.shape[-1]))
    check_shape("b", b, (experts, width, u.shape[-1]))
    check_rows("u", u)
    for name, tensor in (("u", u), ("b", b)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} must have dtype {x.dtype}, got {tensor.dtype}")


def _ranks(r: int) -> int:
    """Returns the ranks of an adapter that a program multiplies at a time."""
    return int(min(MOST_RANKS, max(LEAST_RANKS, triton.next_power_of_2(r))))


def grouped_outer_(
    acc: Tensor,  # (E, O, K), written over or added to; K at stride 1
    a: Tensor,  # (m_a, O), rows at any stride
    b: Tensor,  # (m_b, K), rows at any stride
    ends: Tensor,  # (E,) int32
    *,
    rows_a: Tensor | None = None,  # (n,) int32; None: row i of a for place i
    rows_b: Tensor | None = None,  # (n,) int32; None: row i of b for place i
    add: bool,
    config: TileConfig | None = None,
) -> Tensor:  # (E, O, K)
    """acc[e] = the sum over the segment of e of a[rows_a[i]]^T b[rows_b[i]], or, with `add`, that
    sum added to acc[e]. Returns acc. Not differentiable.

    a and b are bf16, fp16 or fp32, of one dtype. acc is fp32 or, without `add`, may have theirs. An
    expert without slots gets zeros, or with `add` is left as it is. ends[E-1] must be n: ends and
    rows are not checked, which would wait for the GPU. `config` replaces the tiles of
    `outer_config`.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    experts, width, inputs = acc.shape
    check_shape("a", a, (a.shape[0], width))
    check_shape("b", b, (b.shape[0], inputs))
    lengths = {
        _check_segments(a, ends, experts, rows_a=rows_a),
        _check_segments(b, ends, experts, rows_b=rows_b),
    }
    if len(lengths) > 1:
        raise ValueError(f"a and b must have as many rows as there are slots, got {lengths}")
    if b.dtype != a.dtype:
        raise ValueError(f"b must have dtype {a.dtype}, got {b.dtype}")
    wide = torch.promote_types(a.dtype, torch.float32)
    if acc.dtype != wide and (add or acc.dtype != a.dtype):
        needed = f"{wide}" if add else f"{wide} or {a.dtype}"
        raise ValueError(f"acc must have dtype {needed}, got {acc.dtype}")
    if not runs_kernel(acc, a, b, ends, rows_a, rows_b):
        grouped_outer_reference_(acc, a, b, ends, rows_a, rows_b, add)
        return acc
    check_float("a", a)
    for name, tensor in (("acc", acc), ("a", a), ("b", b)):
        check_rows(name, tensor)
    if config is None:
        n = next(iter(lengths))
        config = outer_config(n, experts, width, inputs, a.element_size(), _shared_bytes(a))
    programs = experts * triton.cdiv(width, config.rows) * triton.cdiv(inputs, config.block)
    with on_device(a):
        _outer_kernel[(programs,)](
            *(a, b, ends, ends if rows_a is None else rows_a, ends if rows_b is None else rows_b),
            *(acc, width, inputs, a.stride(0), b.stride(0), acc.stride(0), acc.stride(1)),
            HAS_ROWS_A=rows_a is not None,
            HAS_ROWS_B=rows_b is not None,
            ADD=add,
            EVEN_WIDTH=width % config.rows == 0,
            EVEN_INPUTS=inputs % config.block == 0,
            **config.constants(),
        )
    return acc


def combine(
    z: Tensor,  # (n, D), rows at any stride
    places: Tensor,  # (t, k) int32
    *,
    weights: Tensor | None = None,  # (t, k) fp32; None: ones
    onto: Tensor | None = None,  # (t, D), rows at any stride
    scale: float = 1.0,
    out: Tensor | None = None,  # (t, D), rows at any stride, written; may be onto
) -> Tensor:  # (t, D)
    """out[t] = onto[t] + scale (weights[t, 0] z[places[t, 0]] + ... + weights[t, k-1] z[...]).

    Each operation is rounded to fp32, in the order of j, so the bits are those of
    `combine_reference` on any device; the result is rounded once. It has the dtype of `out`, else
    of `onto`, else of z, each bf16, fp16 or fp32. Places are not checked. Not differentiable.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    t, k = places.shape
    D = z.shape[1]
    if weights is not None:
        check_shape("weights", weights, (t, k))
    if onto is not None:
        check_shape("onto", onto, (t, D))
    if out is None:
        out = (z if onto is None else onto).new_empty(t, D)
    check_shape("out", out, (t, D))
    if not runs_kernel(z, places, weights, onto, out):
        return out.copy_(combine_reference(z, places, weights, onto, scale))
    for name, tensor in (("z", z), ("onto", onto), ("out", out)):
        if tensor is not None:
            check_float(name, tensor)
            check_rows(name, tensor)
    _check_int32("places", places)
    if weights is not None:
        check_float("weights", weights, torch.float32)
        weights = weights.contiguous()
    block = min(1024, triton.next_power_of_2(D))
    if t and D:
        with on_device(z):
            _combine_kernel[(t, triton.cdiv(D, block))](
                *(z, places.contiguous(), z if weights is None else weights),
                *(z if onto is None else onto, out, D, float(scale), z.stride(0)),
                *(0 if onto is None else onto.stride(0), out.stride(0)),
                HAS_WEIGHTS=weights is not None,
                HAS_ONTO=onto is not None,
                PLACES=k,
                BLOCK=block,
                num_warps=COMBINE.num_warps,
                enable_fp_fusion=COMBINE.fp_fusion,
            )
    return out


def slot_dots(
    a: Tensor,  # (n, D), rows at any stride
    b: Tensor,  # (n, D), rows at any stride
) -> Tensor:  # (n,) fp32
    """The dot products <a[i], b[i]> of rows, in fp32. Not differentiable.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    n, D = a.shape
    check_shape("b", b, (n, D))
    if not runs_kernel(a, b):
        return slot_dots_reference(a, b)
    for name, tensor in (("a", a), ("b", b)):
        check_float(name, tensor)
        check_rows(name, tensor)
    out = torch.empty(n, dtype=torch.float32, device=a.device)
    if n:
        with on_device(a):
            _dots_kernel[(triton.cdiv(n, DOTS.rows),)](
                *(a, b, out, n, D, a.stride(0), b.stride(0)),
                ROWS=DOTS.rows,
                BLOCK=DOTS.block,
                num_warps=DOTS.num_warps,
            )
    return out


def _check_segments(x: Tensor, ends: Tensor, experts: int, **named: Tensor | None) -> int:
    """Checks `ends` and the one named tensor of rows; returns the number of places."""
    check_shape("ends", ends, (experts,))
    _check_int32("ends", ends)
    ((name, rows),) = named.items()
    if rows is None:
        return x.shape[0]
    check_shape(name, rows, (rows.numel(),))
    _check_int32(name, rows)
    return len(rows)


def _check_int32(name: str, x: Tensor) -> None:
    if x.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {x.dtype}")
    if x.dim() == 1 and x.numel() > 1 and x.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")


# --- configurations --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TileConfig(Config):
    """The tiles of a matmul: each is `rows` x `block` elements of the result."""

    depth: int
    """Products that are summed in one step."""
    group: int = 8
    """Tiles of rows that run at the same time before the next tile of columns."""
    halves: bool = False
    """`grouped_mm` computes half a tile where a segment's last rows are no more than that."""

    def constants(self) -> dict[str, int]:
        """Returns tile sizes, stages and warps by the names that the matmul kernels take."""
        sizes = {"ROWS": self.rows, "BLOCK": self.block, "DEPTH": self.depth}
        how = {"GROUP": self.group, "STAGES": self.num_stages, "num_warps": self.num_warps}
        return sizes | how

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory that the operands of all stages take."""
        return self.num_stages * (self.rows + self.block) * self.depth * itemsize


FP32 = TileConfig(rows=64, block=64, depth=16, num_warps=4, num_stages=3)
"""Without tensor cores; with a depth of 32 ptxas spills some registers for sm_80."""
LARGE_SHARED_BYTES = 160 * 1024
"""A program may have so much on A100 (163 KiB) and H100 (227 KiB), but not on cards of 99 KiB."""


def _shared_bytes(x: Tensor) -> int:
    if not x.is_cuda:
        return LARGE_SHARED_BYTES
    # Missing from some of torch's builds; every card since sm_80 has the default.
    properties = torch.cuda.get_device_properties(x.device)
    return getattr(properties, "shared_memory_per_block_optin", 99 * 1024)


def mm_config(
    n: int, experts: int, width: int, itemsize: int = 2, shared_bytes: int = LARGE_SHARED_BYTES
) -> TileConfig:
    """Returns the tiles of `grouped_mm` for n slots of `experts` experts."""
    if itemsize == 4:
        return FP32
    if n < 96 * experts:  # a tile of 128 would be empty by half
        return TileConfig(rows=64, block=128, depth=64, num_warps=4, num_stages=4)
    if width > 128 and shared_bytes >= LARGE_SHARED_BYTES:
        return TileConfig(rows=128, block=256, depth=64, num_warps=8, num_stages=3, halves=True)
    return TileConfig(rows=128, block=128, depth=64, num_warps=8, num_stages=3, halves=True)


def outer_config(
    n: int,
    experts: int,
    width: int,
    inputs: int,
    itemsize: int = 2,
    shared_bytes: int = LARGE_SHARED_BYTES,
) -> TileConfig:
    """Returns the tiles of `grouped_outer_` for n slots and this number of experts. If an expert
    has few slots, more than one program per multiprocessor hides the sums that are read and
    written."""
    if itemsize == 4:
        return FP32
    is_long = n >= 1024 * experts
    if is_long and min(width, inputs) > 128 and shared_bytes >= LARGE_SHARED_BYTES:
        return TileConfig(rows=128, block=256, depth=64, num_warps=8, num_stages=3)
    return TileConfig(rows=128, block=128, depth=64, num_warps=8, num_stages=3)


LEAST_RANKS, MOST_RANKS = 16, 32
"""The inner dimension of a matmul on tensor cores is at least 16; more than 32 would not fit into
an A100's registers beside the tiles."""
COMBINE = Config(block=1024, num_warps=4, fp_fusion=False)
DOTS = Config(block=512, num_warps=4, rows=4)
