"""Mamba 2's recurrence, the scan of a state space whose decay is one number a head, and its
gradients.

A head has a state S (P, N). A token has values x (P), a step dt and the decay e^(A dt); B and C (N)
are shared by the heads of a group:

    S_t = e^(A dt_t) S_(t-1) + dt_t x_t B_t^T          y_t = S_t C_t + D x_t

Tokens go in chunks. b is the sum of A dt from a chunk's first token to each, b_last that to its
last, S the state before the chunk, and S' the one behind it:

    y_i = e^b_i S C_i + sum_(j <= i) m_ij dt_j x_j + D x_i          m_ij = e^(b_i - b_j) C_i B_j
    S'  = e^b_last S + sum_j e^(b_last - b_j) dt_j x_j B_j^T

From dy, and from R, the gradient of S' (before it the chunks behind are summed as the states are,
backwards), w_ij = dt_j e^(b_i - b_j) dy_i x_j, and u_j = e^(b_last - b_j) R B_j:

    dx_j = dt_j v_j + D dy_j      v_j = sum_(i >= j) m_ij dy_i + u_j      ddt_j = x_j v_j
    dC_i = sum_(j <= i) w_ij B_j + e^b_i S^T dy_i
    dB_j = sum_(i >= j) w_ij C_i + dt_j e^(b_last - b_j) R^T x_j
    db_i = sum_(j < i) w_ij C_i B_j - sum_(k > i) w_ki C_k B_i + e^b_i C_i S^T dy_i - dt_i x_i u_i
    db_last += e^b_last S R + sum_j dt_j x_j u_j

    decays    one program a chunk and some heads: dt by head, and b
    states    one a head and block of the state goes through all chunks; also for R
    outputs   one a chunk and some heads of a group, which share C B^T
    inputs    the same: dx, ddt, db in part, dD
    shared    the same and a block of N: dB and dC, summed over its heads in fp32; the rest of db
    steps     as decays: from db to ddt and dA
    sums      one some heads: dA and dD over all chunks

Backward makes the states again: they are twice as large as x. What a transposed result of a matmul
would be needed for is computed as its own matmul (delta_rule.py says why).

Arithmetic is in fp32; m, w and the states are rounded before the next matmul, results once. All
sums over tokens have one order, in which chunks of steps 0 behind a row change no bit. Bytes a
token and head at 2 bytes an element, N = 128, P = 64, chunks of 64: 0.6 KB forward, 1.3 KB
backward.

Source: Transformers are SSMs (Mamba 2, arXiv 2405.21060).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_same,
    check_shape,
    dot,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    tl,
    triton,
)

WIDEST = 128
"""The widest heads, P. A state may have any number of columns, N."""
TILE = 16
"""P and N are multiples of it. Triton 3.6 compiles `outputs` wrongly for P = 24 and N = 40 on an
H200: three of four warps have wrong results. None of the multiples of 16 that were tried has."""


def has_kernels(P: int, N: int) -> bool:
    """Whether the kernels take heads of P columns with states of N."""
    return P <= WIDEST and P % TILE == N % TILE == 0


def scan_reference(
    x: Tensor,  # (rows, T, H, P)
    dt: Tensor,  # (rows, T, H)
    A: Tensor,  # (H,)
    B: Tensor,  # (rows, T, G, N)
    C: Tensor,  # (rows, T, G, N)
    D: Tensor | None = None,  # (H,)
    begin: Tensor | None = None,  # (rows, H, P, N)
    starts: Tensor | None = None,  # (chunks,) bool
) -> tuple[Tensor, Tensor]:
    """Returns the equations above in plain torch."""
    (rows, T, H, P), N, dtype = x.shape, B.shape[3], x.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def rounded(y: Tensor) -> Tensor:
        return y.to(dtype).to(wide)

    steps = _chunks(dt.to(wide)[..., None])  # (rows, chunks, H, CHUNK, ·)
    b = (A.to(wide)[:, None, None] * steps).cumsum(-2)
    values = _chunks(x.to(wide))
    keys, queries = (_chunks(y.to(wide).repeat_interleave(H // y.shape[2], 2)) for y in (B, C))
    until = (b[..., -1:, :] - b).exp() * steps
    added = rounded(until * values).mT @ keys  # (rows, chunks, H, P, N)
    if added.requires_grad:
        added.register_hook(rounded)  # R, which is read as the states are
    state = x.new_zeros(rows, H, P, N, dtype=wide) if begin is None else begin.to(wide)
    states = []
    for i in range(added.shape[1]):
        if starts is not None:
            state = state.masked_fill(starts[i], 0)
        states.append(state)
        state = b[:, i, :, -1:].exp() * state + added[:, i]
    decay = (b - b.mT).tril().exp().tril()
    y = rounded(decay * (queries @ keys.mT) * steps.mT) @ values
    y = y + b.exp() * (queries @ rounded(torch.stack(states, dim=1)).mT)
    y = y.transpose(2, 3).flatten(1, 2)[:, :T]
    y = y if D is None else y + D.to(wide)[:, None] * x.to(wide)
    return y.to(dtype), state


def _chunks(x: Tensor) -> Tensor:  # (rows, T, H, ·) -> (rows, chunks, H, CHUNK, ·)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).transpose(2, 3)


# --- kernels ---------------------------------------------------------------------------------

LOG2_E = tl.constexpr(1 / math.log(2))


@triton.jit
def _tokens(x_ptr, token, columns, stride, T, width):
    """Returns some columns of a chunk's tokens, (CHUNK, columns)."""
    mask = (token < T)[:, None] & (columns < width)
    return tl.load(x_ptr + token[:, None] * stride + columns, mask=mask, other=0.0)


@triton.jit
def _state(x_ptr, of_p, of_n, P, N):
    """Returns a block of a state (P, N)."""
    mask = (of_p < P)[:, None] & (of_n < N)
    return tl.load(x_ptr + of_p[:, None] * N + of_n, mask=mask, other=0.0)


@triton.jit
def _state_t(x_ptr, of_p, of_n, P, N):
    """A block of a state (P, N), read as its transpose."""
    mask = (of_n < N)[:, None] & (of_p < P)
    return tl.load(x_ptr + of_n[:, None] + of_p * N, mask=mask, other=0.0)


@triton.jit
def _products(a_ptr, b_ptr, token, stride_a, stride_b, T, N, CHUNK, BLOCK_N, BLOCKS_N):
    """Returns the products of a chunk's tokens in a with those in b, (CHUNK, CHUNK)."""
    made = tl.zeros((CHUNK, CHUNK), tl.float32)
    for i in range(BLOCKS_N):
        of_n = i * BLOCK_N + tl.arange(0, BLOCK_N)
        a = _tokens(a_ptr, token, of_n, stride_a, T, N)
        made = dot(a, tl.trans(_tokens(b_ptr, token, of_n, stride_b, T, N)), made)
    return made


@triton.jit
def _decays_kernel(
    dt_ptr,  # (rows, T, H) fp32
    rates_ptr,  # A (H,) fp32
    steps_ptr,  # dt, (rows, H, chunks CHUNK) fp32
    b_ptr,  # (rows, H, chunks CHUNK) fp32, in base 2
    T,
    H,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (heads < H)[None, :]
    at = (row * T + token)[:, None] * H + heads
    dt = tl.load(dt_ptr + at, mask=(token < T)[:, None] & real, other=0.0)
    rates = tl.load(rates_ptr + heads, mask=heads < H, other=0.0) * LOG2_E
    out = (row * H + heads)[None, :] * chunks * CHUNK + token[:, None]
    tl.store(steps_ptr + out, dt, mask=real)
    tl.store(b_ptr + out, tl.cumsum(dt * rates[None, :], 0), mask=real)


@triton.jit
def _steps_kernel(
    ddt_ptr,  # (rows, H, chunks CHUNK) fp32, without what b gives
    db_ptr,  # (PARTS, rows, H, chunks CHUNK) fp32
    steps_ptr,  # dt, (rows, H, chunks CHUNK) fp32
    rates_ptr,  # A (H,) fp32
    out_ptr,  # ddt (rows, T, H) fp32
    drates_ptr,  # dA (rows, H, chunks) fp32
    part,
    T,
    H,
    chunks,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (heads < H)[None, :]
    at = (row * H + heads)[None, :] * chunks * CHUNK + token[:, None]
    parts = db_ptr + at
    db = tl.load(parts, mask=real, other=0.0)
    for _ in range(PARTS - 1):
        parts += part
        db += tl.load(parts, mask=real, other=0.0)
    sums = tl.cumsum(db, 0, reverse=True)  # of b from a token to its chunk's last
    rates = tl.load(rates_ptr + heads, mask=heads < H, other=0.0)
    ddt = tl.load(ddt_ptr + at, mask=real, other=0.0) + rates[None, :] * sums
    out = (row * T + token)[:, None] * H + heads
    tl.store(out_ptr + out, ddt, mask=(token < T)[:, None] & real)
    drates = tl.sum(tl.load(steps_ptr + at, mask=real, other=0.0) * sums, axis=0)
    tl.store(drates_ptr + (row * H + heads) * chunks + chunk, drates, mask=heads < H)


@triton.jit
def _sums_kernel(
    drates_ptr,  # (rows, H, chunks) fp32
    dskip_ptr,  # (rows, H, chunks) fp32
    out_ptr,  # dA and dD, (2, H) fp32
    rows,
    H,
    chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    heads = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    drates, dskip = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(rows):
        for first in range(0, chunks, CHUNKS):
            chunk = first + tl.arange(0, CHUNKS)
            at = (row * H + heads)[:, None] * chunks + chunk
            mask = (heads < H)[:, None] & (chunk < chunks)
            drates += tl.sum(tl.load(drates_ptr + at, mask=mask, other=0.0), axis=1)
            dskip += tl.sum(tl.load(dskip_ptr + at, mask=mask, other=0.0), axis=1)
    tl.store(out_ptr + heads, drates, mask=heads < H)
    tl.store(out_ptr + H + heads, dskip, mask=heads < H)


@triton.jit
def _states_kernel(
    x_ptr,  # (rows, T, H, P)
    y_ptr,  # (rows, T, G, N)
    b_ptr,  # (rows, H, chunks CHUNK) fp32, in base 2
    dt_ptr,  # (rows, H, chunks CHUNK) fp32
    starts_ptr,  # (chunks,) bool
    begin_ptr,  # (rows, H, P, N) fp32
    states_ptr,  # (rows, chunks, H, P, N)
    end_ptr,  # (rows, H, P, N) fp32
    T,
    H,
    shared,
    P,
    N,
    chunks,
    x_row,
    x_token,
    y_row,
    y_token,
    BACKWARDS: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64) // H, tl.program_id(0) % H
    of_p, own = tl.arange(0, BLOCK_P), tl.arange(0, CHUNK)
    of_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = of_p[:, None] * N + of_n
    mask = (of_p < P)[:, None] & (of_n < N)
    x_ptr += row * x_row + head * P
    y_ptr += row * y_row + head // shared * N
    this = row * H + head
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if HAS_BEGIN:
        state = _state(begin_ptr + this * P * N, of_p, of_n, P, N)
    for i in range(chunks):
        chunk = chunks - 1 - i if BACKWARDS else i
        out = states_ptr + ((row * chunks + chunk) * H + head) * P * N
        tl.store(out + at, round_to(state, states_ptr.dtype.element_ty), mask=mask)
        token = chunk * CHUNK + own
        real = (of_p < P)[:, None] & (token < T)[None, :]
        x = tl.load(x_ptr + of_p[:, None] + token[None, :] * x_token, mask=real, other=0.0)
        at_token = this * chunks * CHUNK + token
        b = tl.load(b_ptr + at_token)
        b_last = tl.load(b_ptr + (this * chunks + chunk + 1) * CHUNK - 1)
        if BACKWARDS:
            weights = tl.math.exp2(b)
        else:
            weights = tl.math.exp2(b_last - b) * tl.load(dt_ptr + at_token)
        decay = tl.math.exp2(b_last)
        if HAS_STARTS:  # nothing goes from a document to the next, or back
            cut = chunk if BACKWARDS else chunk + 1
            kept = tl.where(tl.load(starts_ptr + cut, mask=cut < chunks, other=0), 0.0, 1.0)
            weights, decay = weights * kept, decay * kept
        x = round_to(x.to(tl.float32) * weights[None, :], x.dtype)
        state = dot(x, _tokens(y_ptr, token, of_n, y_token, T, N), state * decay)
    tl.store(end_ptr + this * P * N + at, state, mask=mask)


@triton.jit
def _outputs_kernel(
    x_ptr,  # (rows, T, H, P)
    b_ptr,  # (rows, H, chunks CHUNK) fp32, in base 2
    dt_ptr,  # (rows, H, chunks CHUNK) fp32
    keys_ptr,  # B (rows, T, G, N)
    queries_ptr,  # C (rows, T, G, N)
    skip_ptr,  # D (H,) fp32
    states_ptr,  # (rows, chunks, H, P, N)
    y_ptr,  # (rows, T, H, P)
    T,
    H,
    shared,
    P,
    N,
    chunks,
    x_row,
    x_token,
    keys_row,
    keys_token,
    queries_row,
    queries_token,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS_N: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // shared
    own, of_p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
    token = chunk * CHUNK + own
    keys_ptr += row * keys_row + group * N
    queries_ptr += row * queries_row + group * N
    made = _products(
        *(queries_ptr, keys_ptr, token, queries_token, keys_token),
        *(T, N, CHUNK, BLOCK_N, BLOCKS_N),
    )
    lower = own[:, None] >= own[None, :]
    for head in range(first, first + HEADS):
        at = (row * H + head) * chunks * CHUNK + token
        b, dt = tl.load(b_ptr + at), tl.load(dt_ptr + at)
        x = _tokens(x_ptr + row * x_row + head * P, token, of_p, x_token, T, P)
        state = states_ptr + ((row * chunks + chunk) * H + head) * P * N
        y = tl.zeros((CHUNK, BLOCK_P), tl.float32)
        for i in range(BLOCKS_N):
            of_n = i * BLOCK_N + tl.arange(0, BLOCK_N)
            queries = _tokens(queries_ptr, token, of_n, queries_token, T, N)
            y = dot(queries, _state_t(state, of_p, of_n, P, N), y)
        # A difference above the diagonal is positive and might overflow.
        decay = tl.math.exp2(tl.where(lower, b[:, None] - b[None, :], 0.0))
        within = tl.where(lower, made * decay * dt[None, :], 0.0)
        y = dot(round_to(within, x.dtype), x, y * tl.math.exp2(b)[:, None])
        y += tl.load(skip_ptr + head) * x.to(tl.float32)
        out = y_ptr + ((row * T + token)[:, None] * H + head) * P + of_p
        mask = (token < T)[:, None] & (of_p < P)
        tl.store(out, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inputs_kernel(
    x_ptr,  # (rows, T, H, P)
    dy_ptr,  # (rows, T, H, P)
    b_ptr,  # (rows, H, chunks CHUNK) fp32, in base 2
    dt_ptr,  # (rows, H, chunks CHUNK) fp32
    keys_ptr,  # B (rows, T, G, N)
    queries_ptr,  # C (rows, T, G, N)
    skip_ptr,  # D (H,) fp32
    ends_ptr,  # R (rows, chunks, H, P, N)
    dx_ptr,  # (rows, T, H, P)
    ddt_ptr,  # (rows, H, chunks CHUNK) fp32
    db_ptr,  # (rows, H, chunks CHUNK) fp32
    dskip_ptr,  # (rows, H, chunks) fp32
    T,
    H,
    shared,
    P,
    N,
    chunks,
    x_row,
    x_token,
    keys_row,
    keys_token,
    queries_row,
    queries_token,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS_N: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // shared
    own, of_p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
    token = chunk * CHUNK + own
    keys_ptr += row * keys_row + group * N
    queries_ptr += row * queries_row + group * N
    made = _products(  # (j, i)
        *(keys_ptr, queries_ptr, token, keys_token, queries_token),
        *(T, N, CHUNK, BLOCK_N, BLOCKS_N),
    )
    upper, above = own[:, None] <= own[None, :], own[:, None] < own[None, :]
    for head in range(first, first + HEADS):
        this = row * H + head
        at = this * chunks * CHUNK + token
        b, dt = tl.load(b_ptr + at), tl.load(dt_ptr + at)
        b_last = tl.load(b_ptr + (this * chunks + chunk + 1) * CHUNK - 1)
        x = _tokens(x_ptr + row * x_row + head * P, token, of_p, x_token, T, P)
        dy = _tokens(dy_ptr + (row * T * H + head) * P, token, of_p, H * P, T, P)
        state = ends_ptr + ((row * chunks + chunk) * H + head) * P * N
        u = tl.zeros((CHUNK, BLOCK_P), tl.float32)
        for i in range(BLOCKS_N):
            of_n = i * BLOCK_N + tl.arange(0, BLOCK_N)
            keys = _tokens(keys_ptr, token, of_n, keys_token, T, N)
            u = dot(keys, _state_t(state, of_p, of_n, P, N), u)
        u *= tl.math.exp2(b_last - b)[:, None]
        decay = tl.math.exp2(tl.where(upper, b[None, :] - b[:, None], 0.0))
        within = tl.where(upper, made * decay, 0.0)
        inner = dt * tl.sum(x.to(tl.float32) * u, axis=1)
        # The diagonal of w, which b cancels from, is left out of both sums.
        w = dot(x, tl.trans(dy), tl.zeros((CHUNK, CHUNK), tl.float32))
        w = tl.where(above, w * within * dt[:, None], 0.0)
        db = tl.sum(w, axis=0) - tl.sum(w, axis=1) - inner
        tl.store(db_ptr + at, db + tl.where(own == CHUNK - 1, tl.sum(inner), 0.0))
        v = dot(round_to(within, x.dtype), dy, u)
        wide_x, wide_dy = x.to(tl.float32), dy.to(tl.float32)
        tl.store(ddt_ptr + at, tl.sum(wide_x * v, axis=1))
        skip = tl.load(skip_ptr + head)
        out = dx_ptr + ((row * T + token)[:, None] * H + head) * P + of_p
        mask = (token < T)[:, None] & (of_p < P)
        dx = dt[:, None] * v + skip * wide_dy
        tl.store(out, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dskip_ptr + this * chunks + chunk, tl.sum(wide_x * wide_dy))


@triton.jit
def _shared_kernel(
    x_ptr,  # (rows, T, H, P)
    dy_ptr,  # (rows, T, H, P)
    b_ptr,  # (rows, H, chunks CHUNK) fp32, in base 2
    dt_ptr,  # (rows, H, chunks CHUNK) fp32
    keys_ptr,  # B (rows, T, G, N)
    queries_ptr,  # C (rows, T, G, N)
    states_ptr,  # S (rows, chunks, H, P, N)
    ends_ptr,  # R (rows, chunks, H, P, N)
    dkeys_ptr,  # (H / HEADS, rows, T, N) fp32
    dqueries_ptr,  # (H / HEADS, rows, T, N) fp32
    db_ptr,  # (blocks of N, rows, H, chunks CHUNK) fp32
    rows,
    T,
    H,
    shared,
    P,
    N,
    chunks,
    x_row,
    x_token,
    keys_row,
    keys_token,
    queries_row,
    queries_token,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS_N: tl.constexpr,
):
    chunk, row = tl.program_id(0), (tl.program_id(2) // BLOCKS_N).to(tl.int64)
    block, part = tl.program_id(2) % BLOCKS_N, tl.program_id(1)
    first = part * HEADS
    group = first // shared
    own, of_p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_P)
    of_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = chunk * CHUNK + own
    keys = _tokens(keys_ptr + row * keys_row + group * N, token, of_n, keys_token, T, N)
    queries_ptr += row * queries_row + group * N
    queries = _tokens(queries_ptr, token, of_n, queries_token, T, N)
    lower, upper = own[:, None] >= own[None, :], own[:, None] <= own[None, :]
    dkeys = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    dqueries = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    nothing = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    square = tl.zeros((CHUNK, CHUNK), tl.float32)
    for head in range(first, first + HEADS):
        this = row * H + head
        at = this * chunks * CHUNK + token
        b, dt = tl.load(b_ptr + at), tl.load(dt_ptr + at)
        b_last = tl.load(b_ptr + (this * chunks + chunk + 1) * CHUNK - 1)
        x = _tokens(x_ptr + row * x_row + head * P, token, of_p, x_token, T, P)
        dy = _tokens(dy_ptr + (row * T * H + head) * P, token, of_p, H * P, T, P)
        of_state = ((row * chunks + chunk) * H + head) * P * N
        begin = _state(states_ptr + of_state, of_p, of_n, P, N)
        end = _state(ends_ptr + of_state, of_p, of_n, P, N)

        decay = tl.math.exp2(tl.where(lower, b[:, None] - b[None, :], 0.0)) * dt[None, :]
        w = tl.where(lower, dot(dy, tl.trans(x), square) * decay, 0.0)  # (i, j)
        dqueries = dot(round_to(w, x.dtype), keys, dqueries)
        carried = dot(dy, begin, nothing) * tl.math.exp2(b)[:, None]
        dqueries += carried
        db = tl.sum(carried * queries.to(tl.float32), axis=1)

        decay = tl.math.exp2(tl.where(upper, b[None, :] - b[:, None], 0.0)) * dt[:, None]
        w = tl.where(upper, dot(x, tl.trans(dy), square) * decay, 0.0)  # (j, i)
        dkeys = dot(round_to(w, x.dtype), queries, dkeys)
        dkeys += dot(x, end, nothing) * (tl.math.exp2(b_last - b) * dt)[:, None]

        held = tl.sum(begin.to(tl.float32) * end.to(tl.float32)) * tl.math.exp2(b_last)
        db += tl.where(own == CHUNK - 1, held, 0.0)
        tl.store(db_ptr + block.to(tl.int64) * rows * H * chunks * CHUNK + at, db)
    out = ((part.to(tl.int64) * rows + row) * T + token)[:, None] * N + of_n
    mask = (token < T)[:, None] & (of_n < N)
    tl.store(dkeys_ptr + out, dkeys, mask=mask)
    tl.store(dqueries_ptr + out, dqueries, mask=mask)


# --- the op ----------------------------------------------------------------------------------


def scan(
    x: Tensor,  # (rows, T, H, P)
    dt: Tensor,  # (rows, T, H) fp32
    A: Tensor,  # (H,) fp32
    B: Tensor,  # (rows, T, G, N)
    C: Tensor,  # (rows, T, G, N)
    D: Tensor | None = None,  # (H,)
    begin: Tensor | None = None,  # (rows, H, P, N)
    starts: Tensor | None = None,  # (chunks,) bool
) -> tuple[Tensor, Tensor]:  # y (rows, T, H, P), the state behind the last token in fp32
    """Runs the recurrence over rows of tokens, from the state `begin` or from zeros. All arguments
    but `starts` get gradients. dt is a token's step, no less than zero, and A is negative. Heads go
    to groups in order, as many to each. `starts` says which chunks of CHUNK tokens a row's state is
    zero before: those that begin a document. A token whose step is 0 changes no other one.

    The kernels take 16 bits, heads of at most 128 columns, and sizes that are multiples of 16;
    plain torch takes the rest.

    Raises ValueError for a wrong shape, dtype or device.
    """
    _check(x, dt, A, B, C, D, begin)
    if starts is not None:
        check_shape("starts", starts, (triton.cdiv(x.shape[1], CHUNK),))
    runs = runs_kernel(x, dt, A, B, C, D, begin)
    if not runs or x.element_size() != 2 or not has_kernels(x.shape[-1], B.shape[-1]):
        return scan_reference(x, dt, A, B, C, D, begin, starts)
    skip = torch.zeros_like(A, dtype=torch.float32) if D is None else D.float()
    y, end = _Scan.apply(x, dt.float(), A.float(), B, C, skip, begin, starts)
    return y, end


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        skip: Tensor,
        begin: Tensor | None,
        starts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x, B, C = (_dense(y) for y in (x, B, C))
        steps, b = _decays(dt.contiguous(), A.contiguous())
        states, end = _states(x, B, b, steps, begin, starts)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch = _Launch("outputs", x, B, C)
        launch.start(_outputs_kernel, x, b, steps, B, C, skip, states, y)
        ctx.save_for_backward(x, steps, b, A, B, C, skip, begin, starts)
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_end: Tensor) -> tuple[Tensor | None, ...]:
        x, steps, b, A, B, C, skip, begin, starts = ctx.saved_tensors
        dy = dy.contiguous()
        states, _ = _states(x, B, b, steps, begin, starts)
        ends, d_begin = _states(dy, C, b, steps, d_end, starts, backwards=True)
        launch = _Launch("shared", x, B, C)
        db = b.new_empty(1 + launch.blocks_n, *b.shape)
        dx, ddt, dskip = _inputs(x, dy, steps, b, B, C, skip, ends, db[0])
        dB, dC = _shared(launch, x, dy, steps, b, B, C, states, ends, db[1:])
        ddt, dA, dD = _of_steps(ddt, db, steps, A, dskip, x.shape[1])
        return dx, ddt, dA, dB, dC, dD, None if begin is None else d_begin, None


def _dense(x: Tensor) -> Tensor:
    """A tensor (rows, T, heads, columns) whose tokens may lie at any stride, but are dense."""
    dense = x.stride(-1) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
    return x if dense else x.contiguous()


def _decays(
    dt: Tensor,  # (rows, T, H) fp32
    A: Tensor,  # (H,) fp32
) -> tuple[Tensor, Tensor]:  # (rows, H, chunks CHUNK) fp32
    """Returns steps by head, and the sums b in base 2."""
    rows, T, H = dt.shape
    chunks = triton.cdiv(T, CHUNK)
    steps, b = (dt.new_empty(rows, H, chunks * CHUNK) for _ in range(2))
    with on_device(dt):
        _decays_kernel[_by_heads(rows, H, chunks)](
            *(dt, A, steps, b, T, H, chunks), CHUNK=CHUNK, BLOCK=HEADS
        )
    return steps, b


def _of_steps(
    ddt: Tensor,  # (rows, H, chunks CHUNK) fp32
    db: Tensor,  # (parts, rows, H, chunks CHUNK) fp32
    steps: Tensor,  # (rows, H, chunks CHUNK) fp32
    A: Tensor,  # (H,) fp32
    dskip: Tensor,  # (rows, H, chunks) fp32
    T: int,
) -> tuple[Tensor, Tensor, Tensor]:  # ddt (rows, T, H), dA (H,), dD (H,)
    rows, H, chunks = dskip.shape
    made, drates, sums = ddt.new_empty(rows, T, H), torch.empty_like(dskip), A.new_empty(2, H)
    with on_device(ddt):
        _steps_kernel[_by_heads(rows, H, chunks)](
            *(ddt, db, steps, A, made, drates, db.stride(0), T, H, chunks),
            **dict(PARTS=len(db), CHUNK=CHUNK, BLOCK=HEADS),
        )
        _sums_kernel[(triton.cdiv(H, HEADS),)](
            *(drates, dskip, sums, rows, H, chunks), CHUNKS=CHUNK, BLOCK=HEADS
        )
    return made, sums[0], sums[1]


def _by_heads(rows: int, H: int, chunks: int) -> tuple[int, int, int]:
    return chunks, triton.cdiv(H, HEADS), rows


class _Launch:
    """The launch of a kernel that loops over a group's heads, for tensors of these shapes."""

    def __init__(self, name: str, x: Tensor, B: Tensor, C: Tensor) -> None:
        rows, T, H, P = x.shape
        G, N = B.shape[2:]
        shared, chunks, c = H // G, triton.cdiv(T, CHUNK), config(name, P)
        heads = max(n for n in range(1, min(shared, MOST_HEADS) + 1) if shared % n == 0)
        block_n = min(c.block, _block(N))
        self.parts, self.blocks_n = H // heads, triton.cdiv(N, block_n)
        self.grid = (chunks, self.parts, rows)
        self.sizes = (T, H, shared, P, N, chunks)
        self.how = dict(HEADS=heads, CHUNK=CHUNK, BLOCK_P=_block(P), BLOCK_N=block_n)
        self.how |= dict(BLOCKS_N=self.blocks_n, num_warps=c.num_warps)
        self.strides = (*x.stride()[:2], *B.stride()[:2], *C.stride()[:2])

    def start(self, kernel: Any, *tensors: Any, grid: tuple[int, ...] | None = None) -> None:
        """Starts the kernel on these tensors, which come before its sizes and strides."""
        with on_device(tensors[0]):
            kernel[grid or self.grid](*tensors, *self.sizes, *self.strides, **self.how)


def _block(columns: int) -> int:
    return max(16, triton.next_power_of_2(columns))


def _states(
    x: Tensor,  # (rows, T, H, P)
    y: Tensor,  # (rows, T, G, N)
    b: Tensor,  # (rows, H, chunks CHUNK)
    dt: Tensor,  # (rows, H, chunks CHUNK)
    begin: Tensor | None,  # (rows, H, P, N)
    starts: Tensor | None,  # (chunks,)
    *,
    backwards: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns sums of weighted x y^T (rows, chunks, H, P, N) that decay over each chunk: what they
    are before it, or with `backwards` behind it; and the last one in fp32, (rows, H, P, N)."""
    rows, T, H, P = x.shape
    N, chunks = y.shape[3], triton.cdiv(T, CHUNK)
    states = x.new_empty(rows, chunks, H, P, N)
    end = x.new_empty(rows, H, P, N, dtype=torch.float32)
    begin = None if begin is None else begin.float().contiguous()
    block_n = min(STATES.block, _block(N))
    with on_device(x):
        _states_kernel[(rows * H, triton.cdiv(N, block_n))](
            *(x, y, b, dt, starts, begin, states, end),
            *(T, H, H // y.shape[2], P, N, chunks, *x.stride()[:2], *y.stride()[:2]),
            BACKWARDS=backwards,
            HAS_BEGIN=begin is not None,
            HAS_STARTS=starts is not None,
            CHUNK=CHUNK,
            BLOCK_P=_block(P),
            BLOCK_N=block_n,
            num_warps=STATES.num_warps,
        )
    return states, end


def _inputs(
    x: Tensor,
    dy: Tensor,
    dt: Tensor,
    b: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor,
    ends: Tensor,
    db: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, ddt but for what b gives, and dD by chunk; writes what db has of them."""
    launch = _Launch("inputs", x, B, C)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    ddt = torch.empty_like(dt)
    dskip = b.new_empty(*b.shape[:2], launch.grid[0])
    launch.start(_inputs_kernel, x, dy, b, dt, B, C, skip, ends, dx, ddt, db, dskip)
    return dx, ddt, dskip


def _shared(
    launch: _Launch,
    x: Tensor,
    dy: Tensor,
    dt: Tensor,
    b: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    ends: Tensor,
    db: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns dB and dC; writes the parts of db that the states before and behind chunks give."""
    rows, T, G, N = B.shape
    dB, dC = (b.new_empty(launch.parts, rows, T, N) for _ in range(2))
    grid = (*launch.grid[:2], rows * launch.blocks_n)
    tensors = x, dy, b, dt, B, C, states, ends, dB, dC, db
    launch.start(_shared_kernel, *tensors, rows, grid=grid)

    def of_groups(made: Tensor) -> Tensor:
        return made.unflatten(0, (G, -1)).sum(1).to(B.dtype).permute(1, 2, 0, 3)

    return of_groups(dB), of_groups(dC)


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, begin: Tensor | None
) -> None:
    rows, T, H, P = x.shape
    G, N = B.shape[2:]
    for name, y, shape in (
        ("dt", dt, (rows, T, H)),
        ("A", A, (H,)),
        ("B", B, (rows, T, G, N)),
        ("C", C, (rows, T, G, N)),
        ("D", D, (H,)),
        ("begin", begin, (rows, H, P, N)),
    ):
        if y is not None:
            check_shape(name, y, shape)
    check_same("the dtype of B and C", [B.dtype, C.dtype], [x.dtype, x.dtype])
    if H % G:
        raise ValueError(f"{H} heads must be a multiple of {G} groups")


CHUNK = 64
MOST_HEADS = 16
"""The most heads that one program goes through."""
HEADS = 16
"""Heads of a program of the kernels that have no columns."""
STATES = Config(block=64, num_warps=8)
"""The configuration of the kernel of states. `block` is the number of columns of a state that a
program carries through all chunks."""
NARROW = {
    "outputs": Config(block=128, num_warps=4),
    "inputs": Config(block=64, num_warps=8),
    "shared": Config(block=32, num_warps=4),
}
"""The configurations for heads of at most 64 columns: the fastest on an H200 of those that spill no
register, with 48 heads of 64 columns and states of 128: 0.15, 0.48 and 0.51 ms for 16384 tokens.
`block` is the most columns of B and C that a program reads at a time, or sums."""
WIDE = Config(block=32, num_warps=8)


def config(name: str, P: int) -> Config:
    """Returns the configuration of one of these kernels for heads of P columns."""
    return NARROW[name] if P <= 64 else WIDE
