"""The activation of an MLP, times `up` where it has a gate, and its gradient.

    y = a(gate)                    product = y up, or y without `up`

    silu   a = gate s,   s = sigmoid(gate)                      Llama's MLP
    gelu   a = gate s,   s = sigmoid(z)                         Gemma's; StarCoder 2's without up
           z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3)
    relu2  a = s^2,      s = max(gate, 0)                       Nemotron's, without up
    sigmoid  a = s,      s = sigmoid(gate)                      the gate of attention's output

    d_gate = d_product up a'       a' = s (1 + gate (1 - s) z'), with z' = 1 for silu; 2 s for
    d_up   = d_product y           relu2; s (1 - s) for sigmoid

The gate may have a factor c, as Falcon-H1's: c gate stands in its place, and d_gate is c times that
of c gate.

gelu is the approximation by tanh, since (1 + tanh(z / 2)) / 2 = sigmoid(z). Beyond 100, where s is
0 or 1 in fp32, z is that of 100, so that nothing overflows but the square of relu2 itself.

Saved: gate and up. Backward overwrites them with their gradients, so it allocates nothing. It can
also write the recomputed product, which the gradient of the down projection's weight needs. All
arithmetic is in fp32 and each result is rounded once. Bytes read and written per token at 2 bytes
an element: forward 6 F, backward 10 F (12 F with the product); without up 4 F, and 6 F (8 F).

gate and up may be two tensors or the two halves of one buffer: rows may lie at any stride.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    as_rows,
    check_float,
    check_no_leaf,
    check_shape,
    once_differentiable,
    over_tiles,
    round_to,
    runs_kernel,
    tl,
    triton,
)

Activation = Literal["silu", "gelu_tanh", "relu2", "sigmoid"]
SCALE, CUBE, LARGEST = 1.5957691216057308, 0.044715, 100.0


def swiglu_reference(
    gate: Tensor,  # (..., F)
    up: Tensor | None = None,  # (..., F)
    activation: Activation = "silu",
    gate_scale: float = 1.0,
) -> Tensor:  # (..., F)
    """Returns the product of the equations above in plain torch, rounded once; differentiable."""
    wide = gate if gate.dtype == torch.float64 else gate.float()
    wide = wide if gate_scale == 1.0 else wide * gate_scale
    if activation == "relu2":
        y = wide.relu().square()
    elif activation == "gelu_tanh":
        y = torch.nn.functional.gelu(wide, approximate="tanh")
    elif activation == "sigmoid":
        y = wide.sigmoid()
    else:
        y = torch.nn.functional.silu(wide)
    return (y if up is None else y * up).to(gate.dtype)


def _activated_reference(x: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, s, a' / s) of the equations above."""
    if activation == "relu2":
        s = x.relu()
        return s * s, s, torch.full_like(x, 2)
    if activation == "sigmoid":
        s = x.sigmoid()
        return s, s, 1 - s
    if activation == "silu":
        s = x.sigmoid()
        return x * s, s, 1 + x * (1 - s)
    near = x.clamp(-LARGEST, LARGEST)
    s = (SCALE * (near + CUBE * near**3)).sigmoid()
    return x * s, s, 1 + near * (1 - s) * SCALE * (1 + 3 * CUBE * near**2)


def _backward_reference_(
    d_product: Tensor,  # (T, F)
    gate: Tensor,  # (T, F)
    up: Tensor | None,  # (T, F)
    product: Tensor | None,  # (T, F)
    activation: Activation,
    gate_scale: float,
) -> None:
    g, d = gate.float(), d_product.float()
    g = g if gate_scale == 1.0 else g * gate_scale
    y, s, slope = _activated_reference(g, activation)
    # All results are computed before the first write: `.float()` does not copy fp32 tensors, so g,
    # u and d can be the caller's own memory, and product may alias d_product.
    if up is None:
        d_gate = d * (s * slope)
        # As forward gave it: g * s may differ from torch's gelu in the last digit.
        made = swiglu_reference(gate, None, activation, gate_scale)
    else:
        u = up.float()
        d_gate, d_up, made = d * u * s * slope, d * y, y * u
        up.copy_(d_up)
    gate.copy_(d_gate if gate_scale == 1.0 else d_gate * gate_scale)
    if product is not None:
        product.copy_(made)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Returns (y, s, a' / s) of the equations above."""
    if ACTIVATION == "relu2":
        s = tl.where(x < 0, 0.0, x)  # a maximum would turn NaN into 0
        slope, y = 2.0, s * s
    elif ACTIVATION == "gelu_tanh":
        # LARGEST, CUBE and SCALE, as numbers. A minimum and a maximum would turn NaN into a number.
        near = tl.where(x > 100.0, 100.0, tl.where(x < -100.0, -100.0, x))
        square = 0.044715 * near * near
        s = tl.sigmoid(1.5957691216057308 * near * (1 + square))
        slope = 1 + near * (1 - s) * 1.5957691216057308 * (1 + 3 * square)
        y = x * s
    elif ACTIVATION == "sigmoid":
        s = tl.sigmoid(x)
        slope, y = 1 - s, s
    else:
        s = tl.sigmoid(x)
        slope, y = 1 + x * (1 - s), x * s
    return y, s, slope


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
    HAS_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64: row * stride passes 2^31 at 160,000 rows of 14336.
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < F)
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    if GATE_SCALE != 1.0:
        gate *= GATE_SCALE
    product, _, _ = _activated(gate, ACTIVATION)
    if HAS_UP:
        product *= tl.load(up_ptr + row * stride_up + offs, mask=mask, other=0.0).to(tl.float32)
    product = round_to(product, out_ptr.dtype.element_ty)
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
    HAS_UP: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE_SCALE: tl.constexpr,
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
    if GATE_SCALE != 1.0:
        gate *= GATE_SCALE
    if HAS_UP:
        up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    d_product = tl.load(d_product_ptr + row * stride_d_product + offs, mask=mask, other=0.0)
    d_product = d_product.to(tl.float32)
    y, s, slope = _activated(gate, ACTIVATION)
    if HAS_UP:
        product, d_gate = y * up, d_product * up * s * slope
    else:
        product, d_gate = y, d_product * (s * slope)
    if GATE_SCALE != 1.0:
        d_gate *= GATE_SCALE
    if HAS_PRODUCT:
        tl.store(product_ptr + row * stride_product + offs, round_to(product, dtype), mask=mask)
    tl.store(gate_ptrs, round_to(d_gate, dtype), mask=mask)
    if HAS_UP:
        tl.store(up_ptrs, round_to(d_product * y, dtype), mask=mask)


def _check(gate: Tensor, activation: str, **others: Tensor | None) -> None:
    if activation not in get_args(Activation):
        names = ", ".join(get_args(Activation))
        raise ValueError(f"activation must be one of {names}, got {activation!r}")
    check_float("gate", gate)
    for name, other in others.items():
        if other is not None:
            check_shape(name, other, gate.shape)
            check_float(name, other, gate.dtype)


def swiglu_forward(
    gate: Tensor,  # (..., F)
    up: Tensor | None = None,  # (..., F)
    *,
    out: Tensor | None = None,  # (..., F), may alias gate or up
    activation: Activation = "silu",
    gate_scale: float = 1.0,
) -> Tensor:  # (..., F)
    """activation(gate_scale * gate) * up, or without `up`. Not differentiable by autograd.

    Raises ValueError for a wrong name, shape, dtype, device or layout.
    """
    _check(gate, activation, up=up, out=out)
    out = gate.new_empty(gate.shape) if out is None else out
    if not runs_kernel(gate, up, out):
        return out.copy_(swiglu_reference(gate, up, activation, gate_scale))
    g, o = as_rows("gate", gate), as_rows("out", out)
    # The kernel wants a pointer, but does not read it: HAS_UP is False.
    u = g if up is None else as_rows("up", up)
    if out.numel():
        how = dict(HAS_UP=up is not None, ACTIVATION=activation, GATE_SCALE=gate_scale)
        F = g.shape[1]
        over_tiles(_forward_kernel, (g, u, o), F, default_config(F), **how)
    return out


def swiglu_backward_(
    d_product: Tensor,  # (..., F)
    gate: Tensor,  # (..., F), becomes d_gate
    up: Tensor | None = None,  # (..., F), becomes d_up
    *,
    product: Tensor | None = None,  # (..., F), may alias d_product
    activation: Activation = "silu",
    gate_scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """(d_gate, d_up), written over gate and up; `product`, if given, receives what forward gave.

    Raises ValueError for a wrong name, shape, dtype, device or layout.
    """
    _check(gate, activation, up=up, d_product=d_product, product=product)
    d, g = as_rows("d_product", d_product), as_rows("gate", gate)
    u = g if up is None else as_rows("up", up)
    p = d if product is None else as_rows("product", product)
    if not runs_kernel(d_product, gate, up, product):
        wanted = None if product is None else p
        _backward_reference_(d, g, None if up is None else u, wanted, activation, gate_scale)
        return gate, up
    if gate.numel():
        how = dict(HAS_UP=up is not None, ACTIVATION=activation, GATE_SCALE=gate_scale)
        how |= dict(HAS_PRODUCT=product is not None)
        F = g.shape[1]
        over_tiles(_backward_kernel, (d, g, u, p), F, default_config(F), **how)
    return gate, up


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, *([] if up is None else [up]))
        ctx.activation = activation
        return swiglu_forward(gate, up, activation=activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        # A new version makes autograd raise if anything reads gate or up again, for instance a
        # second backward, whose result would otherwise be silently wrong.
        torch.autograd.graph.increment_version(saved)
        parts = [x.detach() for x in saved]
        return *swiglu_backward_(d_product.contiguous(), *parts, activation=ctx.activation), None


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
    gradient or a view of one. In backward, autograd raises RuntimeError if another operation saved
    gate or up, or if backward runs twice.

    Example:
        >>> import longctx, torch
        >>> x = torch.ones(2, 5, 8)
        >>> projection = torch.nn.Linear(8, 2 * 16)  # gate and up in one matmul
        >>> gate, up = projection(x).chunk(2, dim=-1)
        >>> longctx.swiglu(gate, up).shape
        torch.Size([2, 5, 16])

    Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
    """
    return _activate(gate, up, "silu")


def geglu(
    gate: Tensor,  # (..., F)
    up: Tensor,  # (..., F)
) -> Tensor:  # (..., F)
    """gelu(gate) * up with gelu approximated by tanh, differentiable in both. Backward overwrites
    gate and up.

    Shapes, dtypes, what is saved and the errors raised are those of `longctx.swiglu`: gate, up and
    the result are (..., F), and neither gate nor up may be a leaf that requires a gradient,
    or a view of one.

    Example:
        >>> import longctx, torch
        >>> longctx.geglu(torch.tensor([1.0]), torch.tensor([2.0]))  # 2 gelu(1)
        tensor([1.6824])
    """
    return _activate(gate, up, "gelu_tanh")


def activate(
    gate: Tensor,  # (..., F)
    activation: Activation,
) -> Tensor:  # (..., F)
    """silu(gate), gelu(gate) approximated by tanh, or relu(gate)^2 ("relu2"), differentiable.
    Backward overwrites gate.

    Shapes, dtypes, what is saved and the errors raised are those of `longctx.swiglu`, without up.

    Sources: So et al., Primer (arXiv 2109.08668); Hendrycks and Gimpel, GELU (arXiv 1606.08415).
    """
    return _activate(gate, None, activation)


def _activate(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    _check(gate, activation, up=up)
    for name, x in (("gate", gate), ("up", up)):
        if x is not None:
            check_no_leaf(name, x, "overwritten in backward")
    return _Activated.apply(gate, up, activation)


@cache
def default_config(F: int) -> Config:
    block = min(2048, max(128, triton.next_power_of_2(F)))
    return Config(block=block, num_warps=4, rows=2048 // block)
