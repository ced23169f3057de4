"""The gated activations silu(gate) * up, of Llama's MLP, and gelu(gate) * up, of Gemma's, and their
gradients.

    s = sigmoid(z)                 product = gate s up
    d_gate = d_product up s (1 + gate (1 - s) z')
    d_up   = d_product gate s

    silu   z = gate                                           z' = 1
    gelu   z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3)        z' its derivative

gelu is the approximation by tanh, since (1 + tanh(z / 2)) / 2 = sigmoid(z). Beyond 100, where s is
0 or 1 in fp32, z is that of 100, so that nothing overflows.

Saved: gate and up. Backward overwrites them with their gradients, so it allocates nothing. It can
also write the recomputed product, which the gradient of the down projection's weight needs. All
arithmetic is in fp32 and each result is rounded once. Bytes read and written per token at 2 bytes
an element: forward 6 F, backward 10 F (12 F with the product).

gate and up may be two tensors or the two halves of one buffer: rows may lie at any stride.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

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

Activation = Literal["silu", "gelu_tanh"]
SCALE, CUBE, LARGEST = 1.5957691216057308, 0.044715, 100.0


def swiglu_reference(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
    activation: Activation = "silu",
) -> Tensor:  # (..., F)
    """The first equation above in plain torch, rounded once; differentiable."""
    wide = gate if gate.dtype == torch.float64 else gate.float()
    if activation == "gelu_tanh":
        return (torch.nn.functional.gelu(wide, approximate="tanh") * up).to(gate.dtype)
    return (torch.nn.functional.silu(wide) * up).to(gate.dtype)


def gelu_sigmoid_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """s, and 1 + x (1 - s) z', of gelu."""
    near = x.clamp(-LARGEST, LARGEST)
    s = (SCALE * (near + CUBE * near**3)).sigmoid()
    return s, 1 + near * (1 - s) * SCALE * (1 + 3 * CUBE * near**2)


def _backward_reference_(
    d_product: Tensor,  # (T, F)
    gate: Tensor,  # (T, F)
    up: Tensor,  # (T, F)
    product: Tensor | None,  # (T, F)
    activation: Activation,
) -> None:
    g, u, d = gate.float(), up.float(), d_product.float()
    s, slope = g.sigmoid(), 1 + g * (1 - g.sigmoid())
    if activation == "gelu_tanh":
        s, slope = gelu_sigmoid_reference(g)
    silu = g * s
    # All results are computed before the first write: `.float()` does not copy fp32 tensors, so g,
    # u and d can be the caller's own memory, and product may alias d_product.
    d_gate, d_up, gated = d * u * s * slope, d * silu, silu * u
    gate.copy_(d_gate)
    up.copy_(d_up)
    if product is not None:
        product.copy_(gated)


@triton.jit
def gelu_sigmoid(x):
    """s, and 1 + x (1 - s) z', of gelu."""
    # LARGEST, CUBE and SCALE, as numbers. A minimum and a maximum would turn NaN into a number.
    near = tl.where(x > 100.0, 100.0, tl.where(x < -100.0, -100.0, x))
    square = 0.044715 * near * near
    s = tl.sigmoid(1.5957691216057308 * near * (1 + square))
    return s, 1 + near * (1 - s) * 1.5957691216057308 * (1 + 3 * square)


@triton.jit
def _sigmoid(gate, GELU: tl.constexpr):
    """s, and 1 + gate (1 - s) z'."""
    if GELU:
        s, slope = gelu_sigmoid(gate)
    else:
        s = tl.sigmoid(gate)
        slope = 1 + gate * (1 - s)
    return s, slope


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
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < F)
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + offs, mask=mask, other=0.0).to(tl.float32)
    s, _ = _sigmoid(gate, GELU)
    product = round_to(gate * s * up, out_ptr.dtype.element_ty)
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
    GELU: tl.constexpr,
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
    s, slope = _sigmoid(gate, GELU)
    silu = gate * s
    if HAS_PRODUCT:
        tl.store(product_ptr + row * stride_product + offs, round_to(silu * up, dtype), mask=mask)
    d_gate = d_product * up * s * slope
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
    activation: Activation = "silu",
) -> Tensor:  # (..., F)
    """activation(gate) * up. Not differentiable by autograd.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    _check(gate, up=up, out=out)
    out = gate.new_empty(gate.shape) if out is None else out
    if not runs_kernel(gate, up, out):
        return out.copy_(swiglu_reference(gate, up, activation))
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
                GELU=activation == "gelu_tanh",
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
    activation: Activation = "silu",
) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up), written over gate and up; `product`, if given, receives what forward gave.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    _check(gate, up=up, d_product=d_product, product=product)
    rows = [as_rows(n, t) for n, t in (("d_product", d_product), ("gate", gate), ("up", up))]
    d, g, u = rows
    p = d if product is None else as_rows("product", product)
    if not runs_kernel(d_product, gate, up, product):
        _backward_reference_(d, g, u, None if product is None else p, activation)
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
                GELU=activation == "gelu_tanh",
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
    return gate, up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return swiglu_forward(gate, up, activation=activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        # A new version makes autograd raise if anything reads gate or up again, for instance a
        # second backward, whose result would otherwise be silently wrong.
        torch.autograd.graph.increment_version((gate, up))
        d_product, how = d_product.contiguous(), ctx.activation
        return *swiglu_backward_(d_product, gate.detach(), up.detach(), activation=how), None


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

    Example:
        >>> import longctx, torch
        >>> x = torch.ones(2, 5, 8)
        >>> projection = torch.nn.Linear(8, 2 * 16)  # gate and up in one matmul
        >>> gate, up = projection(x).chunk(2, dim=-1)
        >>> longctx.swiglu(gate, up).shape
        torch.Size([2, 5, 16])

    Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
    """
    return _gated(gate, up, "silu")


def geglu(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
) -> Tensor:  # (..., F)
    """gelu(gate) * up with gelu approximated by tanh, differentiable in both. Backward overwrites
    gate and up.

    Shapes, dtypes, what is saved and the errors raised are those of `longctx.swiglu`: gate, up and
    the result are (..., F), and neither gate nor up may be a leaf that requires a gradient.

    Example:
        >>> import longctx, torch
        >>> longctx.geglu(torch.tensor([1.0]), torch.tensor([2.0]))  # 2 gelu(1)
        tensor([1.6824])
    """
    return _gated(gate, up, "gelu_tanh")


def _gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    _check(gate, up=up)
    for name, x in (("gate", gate), ("up", up)):
        if x.is_leaf and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} is overwritten in backward, so it must not be a leaf, got one"
            )
    return _Gated.apply(gate, up, activation)


@cache
def default_config(F: int) -> Config:
    block = min(2048, max(128, triton.next_power_of_2(F)))
    return Config(block=block, num_warps=4, rows=2048 // block)
