"""Gradients inside the chunks of a Gated DeltaNet: of q, k, w and the decay.

A chunk of tokens begins with the state h (K, V) of a head. b is the logarithm of its decay, summed
from the chunk's first token to each, and to its last in b_last; v are the values that the delta
rule has corrected by w, and h' is the state behind the chunk:

    o = scale (e^b q h + s v)      s_ij = q_i k_j e^(b_i - b_j), j <= i     v = u - w h
    h' = e^b_last h + (e^(b_last - b) k)^T v

From do, dh' and the whole gradient of v, dv, which reaches w alone here:

    ds_ij = scale e^(b_i - b_j) do_i v_j, j <= i              dw = - dv h^T
    dq = scale e^b do h^T + ds k
    dk = inner + ds^T q              inner = e^(b_last - b) v dh'^T
    db = dq q - dk k                 db_last += e^b_last h dh' + sum(inner k)

flash-linear-attention has this kernel, but Triton from 3.4 up to 3.7.1 compiles the transposed ds,
a matrix in the layout of a Hopper GPU's results, to wrong numbers (its issue 640), and the package
refuses to run there. Here ds^T is computed as v do^T: 64 x 64 x V more FLOPs in each chunk, a tenth
of all where K = V = 128, and no transposed result.

All arithmetic is in fp32, ds is rounded before the next matmul, and each result once. Bytes a token
and head at 2 bytes an element: 6 V + 10 K + 8, and 4 K V for each chunk.

Source: Gated Delta Networks (arXiv 2412.06464); the chunks are those of flash-linear-attention.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_same,
    check_shape,
    dot,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)

MOST = 256
"""The most columns of a head, of keys and of values."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def chunk_gradients_reference(
    q: Tensor,  # (B, T, H, K)
    k: Tensor,  # (B, T, H, K)
    v: Tensor,  # (B, T, G, V)
    do: Tensor,  # (B, T, G, V)
    dv: Tensor,  # (B, T, G, V)
    b: Tensor,  # (B, T, G), in base 2
    h: Tensor,  # (B, chunks, G, K, V)
    dh: Tensor,  # (B, chunks, G, K, V)
    scale: float,
    chunk: int,
    bounds: Tensor | None = None,  # (documents + 1,)
) -> Gradients:
    """Returns the equations above in plain torch, one document at a time."""
    if bounds is not None:
        tokens = q, k, v, do, dv, b
        return _of_documents(bounds.tolist(), tokens, (h, dh), scale, chunk)
    B, T, H, K = q.shape
    G, dtype = v.shape[2], torch.promote_types(q.dtype, torch.float32)
    wide_q, wide_k = (x.repeat_interleave(G // H, dim=2) for x in (q, k))
    # Padding has the last token's b, and zeros elsewhere.
    b = torch.cat([b, b[:, -1:].expand(B, -T % chunk, G)], dim=1)
    cut = (_chunks(x.to(dtype), chunk) for x in (wide_q, wide_k, v, do, dv, b[..., None]))
    q_, k_, v_, do_, dv_, b_ = cut  # (B, chunks, G, chunk, ·)
    ends, last = b_[..., -1:, :], (T - 1) % chunk
    h, dh = h.to(dtype), dh.to(dtype)
    decay = (b_ - b_.mT).tril().exp2().tril()
    ds = (scale * decay * (do_ @ v_.mT)).to(q.dtype).to(dtype)
    inner = (ends - b_).exp2() * (v_ @ dh.mT)
    dq = scale * b_.exp2() * (do_ @ h.mT) + ds @ k_
    dk = inner + ds.mT @ q_
    db = (dq * q_ - dk * k_).sum(-1)
    of_end = ends.exp2()[..., 0, 0] * (h * dh).sum((-1, -2)) + (inner * k_).sum((-1, -2))
    db[:, :-1, :, -1] += of_end[:, :-1]
    db[:, -1, :, last] += of_end[:, -1]
    wide = (x.transpose(2, 3).flatten(1, 2)[:, :T] for x in (dq, dk, -dv_ @ h.mT, db[..., None]))
    dq, dk, dw, db = wide
    of_heads = (x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return *of_heads, dw.to(q.dtype), db[..., 0]


def _of_documents(
    bounds: list[int],
    of_tokens: tuple[Tensor, ...],
    states: tuple[Tensor, Tensor],
    scale: float,
    chunk: int,
) -> Gradients:
    found, done = [], 0
    for start, stop in pairwise(bounds):
        chunks = slice(done, done := done - (start - stop) // chunk)
        q, k, v, do, dv, b = (x[:, start:stop] for x in of_tokens)
        h, dh = (x[:, chunks] for x in states)
        found.append(chunk_gradients_reference(q, k, v, do, dv, b, h, dh, scale, chunk))
    dq, dk, dw, db = (torch.cat(grads, dim=1) for grads in zip(*found, strict=True))
    return dq, dk, dw, db


def _chunks(x: Tensor, chunk: int) -> Tensor:  # (B, T, G, D) -> (B, chunks, G, chunk, D)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).transpose(2, 3)


@triton.jit
def _values(x_ptr, start, of_v, real, V):
    """Returns some columns of a chunk's values, (CHUNK, BLOCK_V)."""
    mask = real[:, None] & (of_v < V)
    return tl.load(x_ptr + start[:, None] + of_v, mask=mask, other=0.0)


@triton.jit
def _states(x_ptr, start, of_k, of_v, K, V):
    """A block of a state (K, V), read as its transpose, (BLOCK_V, BLOCK_K)."""
    mask = (of_v < V)[:, None] & (of_k < K)
    return tl.load(x_ptr + start + of_v[:, None] + of_k * V, mask=mask, other=0.0)


@triton.jit
def _chunk_kernel(
    q_ptr,  # (B, T, H, K)
    k_ptr,  # (B, T, H, K)
    v_ptr,  # (B, T, G, V)
    do_ptr,  # (B, T, G, V)
    dv_ptr,  # (B, T, G, V)
    b_ptr,  # (B, T, G) fp32
    h_ptr,  # (B, chunks, G, K, V)
    dh_ptr,  # (B, chunks, G, K, V)
    cut_ptr,  # (2, chunks): the first token of each, and the one behind its last
    dq_ptr,  # (B, T, G, K)
    dk_ptr,  # (B, T, G, K)
    dw_ptr,  # (B, T, G, K)
    db_ptr,  # (blocks of K, B, T, G) fp32
    B,
    T,
    H,
    G,
    K,
    V,
    scale,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS_V: tl.constexpr,
):
    chunk, block = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row, head = tl.program_id(1).to(tl.int64) // G, tl.program_id(1) % G
    own = tl.arange(0, CHUNK)
    token = tl.load(cut_ptr + chunk) + own
    stop = tl.load(cut_ptr + tl.num_programs(0) + chunk)
    real, last = token < stop, stop - 1
    place = row * T + token  # among the tokens of all rows
    of_k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    v_start = (place * G + head) * V
    state = ((row * tl.num_programs(0) + chunk) * G + head) * K * V
    at_k = (place * H + head // (G // H))[:, None] * K + of_k
    at_out = (place * G + head)[:, None] * K + of_k
    mask_k = real[:, None] & (of_k < K)

    dw = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for i in range(BLOCKS_V):
        of_v = i * BLOCK_V + tl.arange(0, BLOCK_V)
        dv = _values(dv_ptr, v_start, of_v, real, V)
        dw = dot(dv, _states(h_ptr, state, of_k, of_v, K, V), dw)
    tl.store(dw_ptr + at_out, round_to(-dw, dw_ptr.dtype.element_ty), mask=mask_k)

    b = tl.load(b_ptr + place * G + head, mask=real, other=0.0)
    q = tl.load(q_ptr + at_k, mask=mask_k, other=0.0)
    k = tl.load(k_ptr + at_k, mask=mask_k, other=0.0)
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    ds = tl.zeros((CHUNK, CHUNK), tl.float32)  # (i, j)
    for i in range(BLOCKS_V):
        of_v = i * BLOCK_V + tl.arange(0, BLOCK_V)
        do = _values(do_ptr, v_start, of_v, real, V)
        dq = dot(do, _states(h_ptr, state, of_k, of_v, K, V), dq)
        ds = dot(do, tl.trans(_values(v_ptr, v_start, of_v, real, V)), ds)
    # A difference above the diagonal is positive and might overflow.
    lower = (own[:, None] >= own[None, :]) & real[:, None]
    decay = tl.math.exp2(tl.where(lower, b[:, None] - b[None, :], 0.0))
    ds = tl.where(lower, ds * decay * scale, 0.0)
    dq = dot(round_to(ds, k.dtype), k, dq * (tl.math.exp2(b) * scale)[:, None])
    tl.store(dq_ptr + at_out, round_to(dq, dq_ptr.dtype.element_ty), mask=mask_k)
    db = tl.sum(dq * q, axis=1)

    inner = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    ds_t = tl.zeros((CHUNK, CHUNK), tl.float32)  # (j, i)
    of_state = 0.0
    for i in range(BLOCKS_V):
        of_v = i * BLOCK_V + tl.arange(0, BLOCK_V)
        v = _values(v_ptr, v_start, of_v, real, V)
        dh = _states(dh_ptr, state, of_k, of_v, K, V)
        inner = dot(v, dh, inner)
        ds_t = dot(v, tl.trans(_values(do_ptr, v_start, of_v, real, V)), ds_t)
        h = _states(h_ptr, state, of_k, of_v, K, V)
        of_state += tl.sum(h.to(tl.float32) * dh.to(tl.float32))
    b_last = tl.load(b_ptr + (row * T + last) * G + head)
    inner = inner * tl.where(real, tl.math.exp2(b_last - b), 0.0)[:, None]
    of_last = of_state * tl.math.exp2(b_last) + tl.sum(inner * k)
    upper = (own[:, None] <= own[None, :]) & real[None, :]
    decay = tl.math.exp2(tl.where(upper, b[None, :] - b[:, None], 0.0))
    ds_t = tl.where(upper, ds_t * decay * scale, 0.0)
    dk = dot(round_to(ds_t, q.dtype), q, inner)
    tl.store(dk_ptr + at_out, round_to(dk, dk_ptr.dtype.element_ty), mask=mask_k)
    db += tl.where(token == last, of_last, 0.0) - tl.sum(dk * k, axis=1)
    tl.store(db_ptr + (block.to(tl.int64) * B * T + place) * G + head, db, mask=real)


def chunk_gradients(
    q: Tensor,  # (B, T, H, K)
    k: Tensor,  # (B, T, H, K)
    v: Tensor,  # (B, T, G, V)
    do: Tensor,  # (B, T, G, V)
    dv: Tensor,  # (B, T, G, V)
    b: Tensor,  # (B, T, G) fp32, in base 2
    h: Tensor,  # (B, chunks, G, K, V)
    dh: Tensor,  # (B, chunks, G, K, V)
    scale: float,
    chunk: int,
    bounds: Tensor | None = None,  # (documents + 1,) of integers
) -> Gradients:  # dq, dk (B, T, H, K), dw (B, T, G, K), db (B, T, G) fp32
    """Returns the gradients of q, k, w and of b as a natural logarithm, in all chunks. Not
    differentiable.

    A head of q and k may serve several ones of v. `chunk` is a power of two from 16; the last
    chunk of a row may be shorter. With `bounds` there is one row, and its documents begin there;
    the last bound is T, and each document has chunks of its own. K and V are at most 256. The
    kernel takes 16 bits, plain torch the rest.

    Raises ValueError for a wrong shape, dtype or device.
    """
    B, T, H, K = q.shape
    G, V = v.shape[2:]
    if bounds is not None and B != 1:
        raise ValueError(f"documents with bounds lie in one row, got {B}")
    chunks = triton.cdiv(T, chunk) if bounds is None else h.shape[1]
    _check(B, T, H, G, K, V, chunks, q=q, k=k, v=v, do=do, dv=dv, b=b, h=h, dh=dh)
    if not runs_kernel(q, k, v, do, dv, b, h, dh) or q.element_size() > 2:
        return chunk_gradients_reference(q, k, v, do, dv, b, h, dh, scale, chunk, bounds)
    given = [x.contiguous() for x in (q, k, v, do, dv, b, h, dh)]
    c = CONFIG
    block_k, block_v = (min(c.block, max(16, triton.next_power_of_2(n))) for n in (K, V))
    blocks = triton.cdiv(K, block_k)
    # What heads of keys get from several ones of values is summed before it is rounded.
    of_keys = q.dtype if G == H else torch.float32
    dq, dk = (q.new_empty(B, T, G, K, dtype=of_keys) for _ in range(2))
    dw = q.new_empty(B, T, G, K)
    db = b.new_empty(blocks, B, T, G)
    with on_device(q):
        _chunk_kernel[(chunks, B * G, blocks)](
            *(*given, _cut(T, chunk, chunks, bounds, q.device), dq, dk, dw, db),
            *(B, T, H, G, K, V, scale),
            CHUNK=chunk,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            BLOCKS_V=triton.cdiv(V, block_v),
            num_warps=c.num_warps,
        )
    if G > H:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dw, db.sum(0)


def _cut(
    T: int, chunk: int, chunks: int, bounds: Tensor | None, device: torch.device
) -> Tensor:  # (2, chunks)
    """Returns the first token of each chunk, and the one behind its last. Nothing waits for what
    the bounds are."""
    if bounds is None:
        starts = torch.arange(0, T, chunk, device=device)
        return torch.stack([starts, (starts + chunk).clamp(max=T)])
    bounds = bounds.long()
    counts = (bounds.diff() + chunk - 1) // chunk
    ends, numbers = counts.cumsum(0), torch.arange(chunks, device=device)
    document = torch.searchsorted(ends, numbers, right=True)
    starts = bounds[document] + (numbers - ends[document] + counts[document]) * chunk
    return torch.stack([starts, torch.minimum(starts + chunk, bounds[document + 1])])


def _check(B: int, T: int, H: int, G: int, K: int, V: int, chunks: int, **tensors: Tensor) -> None:
    of_keys, of_values, states = (B, T, H, K), (B, T, G, V), (B, chunks, G, K, V)
    shapes = [of_keys, of_keys, of_values, of_values, of_values, (B, T, G), states, states]
    for (name, x), shape in zip(tensors.items(), shapes, strict=True):
        check_shape(name, x, shape)
        if name != "b":
            check_same("the dtype", [x.dtype], [tensors["q"].dtype])
    if G % H:
        raise ValueError(f"{G} heads of values must be a multiple of {H} heads of keys")
    if max(K, V) > MOST:
        raise ValueError(f"heads have at most {MOST} columns, got {K} and {V}")


CONFIG = Config(block=64, num_warps=4)
"""`block`: the most columns of keys that a program has, and of values that it reads at a time."""
