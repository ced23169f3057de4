"""The activation of an MLP without a gate, and its gradient: Nemotron's and StarCoder 2's.

    relu2       y = max(x, 0)^2                y' = 2 max(x, 0)
    gelu_tanh   y = x s,  s = sigmoid(z)       y' = s (1 + x (1 - s) z')

    dx = dy y'

z, which approximates gelu by tanh, is in swiglu.py. Nothing overflows but the square itself.

Saved: x. Backward overwrites it with dx, so it allocates nothing. It can also write the recomputed
y, which the gradient of the down projection's weight needs. All arithmetic is in fp32 and each
result is rounded once. Bytes read and written per token at 2 bytes an element: forward 4 F,
backward 6 F (8 F with y). Rows may lie at any stride.
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
    check_shape,
    on_device,
    once_differentiable,
    round_to,
    runs_kernel,
    tl,
    triton,
)
from longctx.kernels.swiglu import gelu_sigmoid, gelu_sigmoid_reference

Activation = Literal["relu2", "gelu_tanh"]


def activation_reference(
    x: Tensor,  # (..., F)
    activation: Activation,
) -> Tensor:  # (..., F)
    """y of the equations above in plain torch, rounded once; differentiable."""
    wide = x if x.dtype == torch.float64 else x.float()
    if activation == "relu2":
        return wide.relu().square().to(x.dtype)
    return torch.nn.functional.gelu(wide, approximate="tanh").to(x.dtype)


def _backward_reference_(
    dy: Tensor,  # (T, F)
    x: Tensor,  # (T, F)
    activation: Activation,
    y: Tensor | None,  # (T, F)
) -> None:
    wide = x.float()
    if activation == "relu2":
        slope = 2 * wide.relu()
    else:
        s, factor = gelu_sigmoid_reference(wide)
        slope = s * factor
    # Both results are computed before the first write: y may alias dy.
    dx, activated = dy.float() * slope, activation_reference(x, activation)
    x.copy_(dx)
    if y is not None:
        y.copy_(activated)


@triton.jit
def _value_and_slope(x, ACTIVATION: tl.constexpr):
    """(y, y')."""
    if ACTIVATION == "relu2":
        positive = tl.where(x < 0, 0.0, x)  # a maximum would turn NaN into 0
        y, slope = positive * positive, 2 * positive
    else:
        s, factor = gelu_sigmoid(x)
        y, slope = x * s, s * factor
    return y, slope


@triton.jit
def _forward_kernel(
    x_ptr,  # (T, F)
    out_ptr,  # (T, F), may be x
    T,
    F,
    blocks_per_row,
    stride_x,
    stride_out,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < F)
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    y, _ = _value_and_slope(x, ACTIVATION)
    tl.store(out_ptr + row * stride_out + offs, round_to(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (T, F)
    x_ptr,  # (T, F), becomes dx
    y_ptr,  # (T, F), may alias dy
    T,
    F,
    blocks_per_row,
    stride_dy,
    stride_x,
    stride_y,
    HAS_Y: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    offs = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    mask = (row < T) & (offs < F)
    dtype = x_ptr.dtype.element_ty
    x_ptrs = x_ptr + row * stride_x + offs
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dy + offs, mask=mask, other=0.0).to(tl.float32)
    y, slope = _value_and_slope(x, ACTIVATION)
    if HAS_Y:
        tl.store(y_ptr + row * stride_y + offs, round_to(y, dtype), mask=mask)
    tl.store(x_ptrs, round_to(dy * slope, dtype), mask=mask)


def _check(x: Tensor, activation: str, **others: Tensor | None) -> None:
    if activation not in get_args(Activation):
        names = ", ".join(get_args(Activation))
        raise ValueError(f"activation must be one of {names}, got {activation!r}")
    check_float("x", x)
    for name, other in others.items():
        if other is not None:
            check_shape(name, other, x.shape)
            check_float(name, other, x.dtype)


def activation_forward(
    x: Tensor,  # (..., F)
    activation: Activation,
    *,
    out: Tensor | None = None,  # (..., F), may be x
) -> Tensor:  # (..., F)
    """y of the equations above, written to `out` if given. Not differentiable by autograd.

    Raises ValueError for a wrong name, shape, dtype, device or layout.
    """
    _check(x, activation, out=out)
    out = x.new_empty(x.shape) if out is None else out
    if not runs_kernel(x, out):
        return out.copy_(activation_reference(x, activation))
    x_rows, out_rows = as_rows("x", x), as_rows("out", out)
    T, F = x_rows.shape

    if x.numel():
        config = default_config(F)
        with on_device(x):
            blocks = triton.cdiv(F, config.block)
            _forward_kernel[(triton.cdiv(T, config.rows) * blocks,)](
                x_rows,
                out_rows,
                T,
                F,
                blocks,
                x_rows.stride(0),
                out_rows.stride(0),
                ACTIVATION=activation,
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
    return out


def activation_backward_(
    dy: Tensor,  # (..., F)
    x: Tensor,  # (..., F), becomes dx
    activation: Activation,
    *,
    y: Tensor | None = None,  # (..., F), may alias dy
) -> Tensor:  # (..., F)
    """dx, written over x; `y`, if given, receives what forward returned.

    Raises ValueError for a wrong name, shape, dtype, device or layout.
    """
    _check(x, activation, dy=dy, y=y)
    dy_rows, x_rows = as_rows("dy", dy), as_rows("x", x)
    y_rows = dy_rows if y is None else as_rows("y", y)
    if not runs_kernel(dy, x, y):
        _backward_reference_(dy_rows, x_rows, activation, None if y is None else y_rows)
        return x
    T, F = x_rows.shape

    if x.numel():
        config = default_config(F)
        with on_device(x):
            blocks = triton.cdiv(F, config.block)
            _backward_kernel[(triton.cdiv(T, config.rows) * blocks,)](
                dy_rows,
                x_rows,
                y_rows,
                T,
                F,
                blocks,
                dy_rows.stride(0),
                x_rows.stride(0),
                y_rows.stride(0),
                HAS_Y=y is not None,
                ACTIVATION=activation,
                ROWS=config.rows,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
    return x


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation_forward(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        # Autograd raises if anything reads x again, for instance a second backward.
        torch.autograd.graph.increment_version((x,))
        return activation_backward_(dy.contiguous(), x.detach(), ctx.activation), None


def activate(
    x: Tensor,  # (..., F)
    activation: Activation,
) -> Tensor:  # (..., F)
    """relu(x)^2 ("relu2") or gelu(x) approximated by tanh ("gelu_tanh"), differentiable. Backward
    overwrites x.

    Shapes: x and the result are (..., F), in bf16, fp16 or fp32; rows of x may lie at one stride.

    Saves x, and writes its gradient over it in backward, so no other operation may need its values
    by then.

    Raises ValueError for a wrong name, dtype, device or layout, and for a leaf that requires a
    gradient. In backward, autograd raises RuntimeError if another operation saved x, or if backward
    runs twice.

    Sources: So et al., Primer (arXiv 2109.08668); Hendrycks and Gimpel, GELU (arXiv 1606.08415).
    """
    _check(x, activation)
    if x.is_leaf and x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x is overwritten in backward, so it must not be a leaf, got one")
    return _Activation.apply(x, activation)


@cache
def default_config(F: int) -> Config:
    """SwiGLU's."""
    block = min(2048, max(128, triton.next_power_of_2(F)))
    return Config(block=block, num_warps=4, rows=2048 // block)
