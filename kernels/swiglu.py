"""The gated activation of Llama's MLP, silu(gate) * up, and its gradient.

    s = sigmoid(gate)              product = gate s up
    d_gate = d_product up s (1 + gate (1 - s))
    d_up   = d_product gate s

Saved: gate and up. Backward overwrites them with their gradients, so it allocates nothing. It can
also write the recomputed product, which the gradient of the down projection's weight needs. All
arithmetic is in fp32 and each result is rounded once. Bytes read and written per token at 2 bytes
an element: forward 6 F, backward 10 F (12 F with the product).

gate and up may be two tensors or the two halves of one buffer: rows may lie at any stride.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    as_rows,
    check_float,
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    tl,
    triton,
)


def swiglu_reference(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
) -> Tensor:  # (..., F)
    """The first equation above in plain torch, rounded once; differentiable."""
    wide = gate if gate.dtype == torch.float64 else gate.float()
    return (torch.nn.functional.silu(wide) * up).to(gate.dtype)


def _backward_reference_(
    d_product: Tensor,  # (T, F)
    gate: Tensor,  # (T, F)
    up: Tensor,  # (T, F)
    product: Tensor | None,  # (T, F)
) -> None:
    g, u, d = gate.float(), up.float(), d_product.float()
    s = g.sigmoid()
    silu = g * s
    # All results are computed before the first write: `.float()` does not copy fp32 tensors, so g,
    # u and d can be the caller's own memory, and product may alias d_product.
    d_gate, d_up, gated = d * u * s * (1 + g * (1 - s)), d * silu, silu * u
    gate.copy_(d_gate)
    up.copy_(d_up)
    if product is not None:
        product.copy_(gated)


@triton.jit
def _forward_kernel(
    gate_ptr,  # (T, F)
    up_ptr,  # (T, F)
    out_ptr,  # (T, F)
    T,
    F,
    blocks_per_row,
    stride_gate,
    stride_up,
    stride_out,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < F)
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + offs, mask=mask, other=0.0).to(tl.float32)
    product = round_to(gate * tl.sigmoid(gate) * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + offs, product, mask=mask)


@triton.jit
def _backward_kernel(
    d_product_ptr,  # (T, F)
    gate_ptr,  # (T, F), becomes d_gate
    up_ptr,  # (T, F), becomes d_up
    product_ptr,  # (T, F), may alias d_product
    T,
    F,
    blocks_per_row,
    stride_d_product,
    stride_gate,
    stride_up,
    stride_product,
    HAS_PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < F)
    dtype = gate_ptr.dtype.element_ty
    gate_ptrs = gate_ptr + row * stride_gate + offs
    up_ptrs = up_ptr + row * stride_up + offs
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    d_product = tl.load(d_product_ptr + row * stride_d_product + offs, mask=mask, other=0.0)
    d_product = d_product.to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    if HAS_PRODUCT:
        tl.store(product_ptr + row * stride_product + offs, round_to(silu * up, dtype), mask=mask)
    d_gate = d_product * up * s * (1 + gate * (1 - s))
    tl.store(gate_ptrs, round_to(d_gate, dtype), mask=mask)
    tl.store(up_ptrs, round_to(d_product * silu, dtype), mask=mask)


def _check(gate: Tensor, **others: Tensor | None) -> None:
    check_float("gate", gate)
    for name, other in others.items():
        if other is not None:
            check_shape(name, other, gate.shape)
            check_float(name, other, gate.dtype)


def swiglu_forward(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
    out: Tensor | None = None,  # (..., F), may alias gate or up
) -> Tensor:  # (..., F)
    """silu(gate) * up. Not differentiable by autograd.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    _check(gate, up=up, out=out)
    out = gate.new_empty(gate.shape) if out is None else out
    if not runs_kernel(gate, up, out):
        return out.copy_(swiglu_reference(gate, up))
    g, u, o = as_rows("gate", gate), as_rows("up", up), as_rows("out", out)
    T, F = g.shape

    if out.numel():
        config = default_config(F)
        with on_device(gate):
            blocks = triton.cdiv(F, config.block)
            _forward_kernel[(triton.cdiv(T, config.rows) * blocks,)](
                g,
                u,
                o,
                T,
                F,
                blocks,
                g.stride(0),
                u.stride(0),
                o.stride(0),
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
    return out


def swiglu_backward_(
    d_product: Tensor,  # (..., F)
    gate: Tensor,  # (..., F), becomes d_gate
    up: Tensor,  # (..., F), becomes d_up
    *,
    product: Tensor | None = None,  # (..., F), may alias d_product
) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up), written over gate and up; `product`, if given, receives silu(gate) * up.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    _check(gate, up=up, d_product=d_product, product=product)
    rows = [as_rows(n, t) for n, t in (("d_product", d_product), ("gate", gate), ("up", up))]
    d, g, u = rows
    p = d if product is None else as_rows("product", product)
    if not runs_kernel(d_product, gate, up, product):
        _backward_reference_(d, g, u, None if product is None else p)
        return gate, up
    T, F = g.shape

    if gate.numel():
        config = default_config(F)
        with on_device(gate):
            blocks = triton.cdiv(F, config.block)
            _backward_kernel[(triton.cdiv(T, config.rows) * blocks,)](
                d,
                g,
                u,
                p,
                T,
                F,
                blocks,
                d.stride(0),
                g.stride(0),
                u.stride(0),
                p.stride(0),
                HAS_PRODUCT=product is not None,
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
    return gate, up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        # A new version makes autograd raise if anything reads gate or up again, for instance a
        # second backward, whose result would otherwise be silently wrong.
        torch.autograd.graph.increment_version((gate, up))
        return swiglu_backward_(d_product.contiguous(), gate.detach(), up.detach())


def swiglu(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
) -> Tensor:  # (..., F)
    """silu(gate) * up, differentiable in both. Backward overwrites gate and up.

    Shapes: gate, up and the result are (..., F), in bf16, fp16 or fp32, all of one dtype. gate and
    up may be views whose rows lie at one stride, such as the halves of one buffer.

    Saves gate and up, and writes their gradients over them in backward, so no other operation may
    need their values by then.

    Raises ValueError for a wrong shape, dtype, device or layout, and for a leaf that requires a
    gradient. In backward, autograd raises RuntimeError if another operation saved gate or up, or if
    backward runs twice.

    Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
    """
    _check(gate, up=up)
    for name, x in (("gate", gate), ("up", up)):
        if x.is_leaf and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} is overwritten in backward, so it must not be a leaf, got one"
            )
    return _SwiGLU.apply(gate, up)


@cache
def default_config(F: int) -> Config:
    block = min(2048, max(128, triton.next_power_of_2(F)))
    return Config(block=block, num_warps=4, rows=2048 // block)
