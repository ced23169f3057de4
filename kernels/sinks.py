"""Attention sinks: one logit for each head, which takes part in the softmax and has no value.

They are added to the result of attention without them, o (T, H, d) and lse (H, T), in place:

    lse' = logaddexp(lse, sink)          o' = o exp(lse - lse')

Attention's backward with o' and lse' gives the gradients of q, k and v: its p = exp(s - lse') and
D = rowsum(do o') are those of the softmax with the sink. A sink's value is 0, so that its own
gradient, p (dp - D) summed over tokens, is

    d_sink = - sum_t exp(sink - lse'_t) D_t

All arithmetic is in fp32. o' is rounded once more than o was. Sums over tokens are made in parts of
a fixed size, and these are added in a fixed order: no atomics.

Bytes per token at 2 bytes an element: 4 H d to add sinks, 4 H d for their gradient.

Source: gpt-oss (arXiv 2508.10925), after StreamingLLM (arXiv 2309.17453).
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_float,
    check_rows,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)


def add_sinks_reference_(
    o: Tensor,  # (T, H, d)
    lse: Tensor,  # (H, T)
    sinks: Tensor,  # (H,)
) -> None:
    """Computes the first two equations in plain torch, in place."""
    joined = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    o.copy_(o * (lse - joined).exp().t()[:, :, None])
    lse.copy_(joined)


def sinks_grad_reference(
    do: Tensor,  # (T, H, d)
    o: Tensor,  # (T, H, d)
    lse: Tensor,  # (H, T)
    sinks: Tensor,  # (H,)
) -> Tensor:  # (H,)
    """Returns the third equation in plain torch, in the dtype of lse."""
    p = (sinks[:, None].to(lse.dtype) - lse).exp()
    d = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
    return -(p * d.t()).sum(1)


@triton.jit
def _add_kernel(
    o_ptr,  # (T, H, d), tokens and heads at a stride
    lse_ptr,  # (H, T) fp32, heads at a stride
    sinks_ptr,  # (H,)
    T,
    d,
    stride_token,
    stride_head,
    stride_lse,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    offs = tl.arange(0, BLOCK)[None, :]
    lse_ptrs = lse_ptr + head * stride_lse + token
    lse = tl.load(lse_ptrs, mask=token < T, other=0.0)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    # The larger one is taken out, so that no exponential overflows. lse may be -inf.
    most = tl.where(lse > sink, lse, sink)
    joined = most + tl.log(tl.exp(lse - most) + tl.exp(sink - most))
    o_ptrs = o_ptr + token[:, None] * stride_token + head * stride_head + offs
    mask = (token[:, None] < T) & (offs < d)
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(lse - joined)[:, None]
    tl.store(o_ptrs, round_to(o, o_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptrs, joined, mask=token < T)


@triton.jit
def _grad_kernel(
    do_ptr,  # (T, H, d), tokens and heads at a stride
    o_ptr,  # (T, H, d), tokens and heads at a stride
    lse_ptr,  # (H, T) fp32, heads at a stride
    sinks_ptr,  # (H,)
    parts_ptr,  # (H, parts) fp32
    T,
    d,
    stride_do_token,
    stride_do_head,
    stride_o_token,
    stride_o_head,
    stride_lse,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (token[:, None] < T) & (offs < d)
    do_ptrs = do_ptr + token[:, None] * stride_do_token + head * stride_do_head + offs
    o_ptrs = o_ptr + token[:, None] * stride_o_token + head * stride_o_head + offs
    do = tl.load(do_ptrs, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)
    # exp(sink - inf) is 0: tokens past the end add nothing.
    lse = tl.load(lse_ptr + head * stride_lse + token, mask=token < T, other=float("inf"))
    p = tl.exp(tl.load(sinks_ptr + head).to(tl.float32) - lse)
    total = tl.sum(p * tl.sum(do * o, axis=1))
    tl.store(parts_ptr + head * tl.num_programs(0) + tl.program_id(0), -total)


def add_sinks_(
    o: Tensor,  # (T, H, d), written
    lse: Tensor,  # (H, T) fp32, written
    sinks: Tensor,  # (H,)
) -> None:
    """Adds sinks to the result of attention. Not differentiable.

    o and sinks are bf16, fp16 or fp32; of o, tokens and heads may lie at any strides. In plain
    torch o may be fp64, and lse with it.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    T, H, d = _check(lse, sinks, o=o)
    if not runs_kernel(o, lse, sinks):
        return add_sinks_reference_(o, lse, sinks)
    _check_kernel(lse, sinks, o=o)
    if o.numel():
        with on_device(o):
            _add_kernel[(triton.cdiv(T, CONFIG.rows), H)](
                *(o, lse, sinks.contiguous(), T, d, o.stride(0), o.stride(1), lse.stride(0)),
                TOKENS=CONFIG.rows,
                BLOCK=triton.next_power_of_2(d),
                num_warps=CONFIG.num_warps,
            )


def sinks_grad(
    do: Tensor,  # (T, H, d)
    o: Tensor,  # (T, H, d), with sinks
    lse: Tensor,  # (H, T) fp32, with sinks
    sinks: Tensor,  # (H,)
) -> Tensor:  # (H,) fp32
    """The gradient of sinks. Not differentiable. Raises ValueError as `add_sinks_`."""
    T, H, d = _check(lse, sinks, do=do, o=o)
    if not runs_kernel(do, o, lse, sinks):
        return sinks_grad_reference(do, o, lse, sinks)
    _check_kernel(lse, sinks, do=do, o=o)
    parts = lse.new_empty(H, triton.cdiv(T, CONFIG.rows))
    if o.numel():
        with on_device(o):
            _grad_kernel[(parts.shape[1], H)](
                *(do, o, lse, sinks.contiguous(), parts, T, d, do.stride(0), do.stride(1)),
                *(o.stride(0), o.stride(1), lse.stride(0)),
                TOKENS=CONFIG.rows,
                BLOCK=triton.next_power_of_2(d),
                num_warps=CONFIG.num_warps,
            )
    return parts.sum(1)


def _check(lse: Tensor, sinks: Tensor, **others: Tensor) -> tuple[int, int, int]:
    """Checks the shapes, and returns T, H and d."""
    T, H, d = next(iter(others.values())).shape
    check_shape("lse", lse, (H, T))
    check_shape("sinks", sinks, (H,))
    for name, x in others.items():
        check_shape(name, x, (T, H, d))
    return T, H, d


def _check_kernel(lse: Tensor, sinks: Tensor, **others: Tensor) -> None:
    check_float("lse", lse, torch.float32)
    check_float("sinks", sinks)
    check_rows("lse", lse)
    for name, x in others.items():
        check_float(name, x)
        check_rows(name, x)


CONFIG = Config(block=64, num_warps=4, rows=64)
"""A program has 64 tokens of one head; `block` is a head's size in gpt-oss."""
