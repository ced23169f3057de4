"""The gates of a Gated DeltaNet, from two small projections of each token: the logarithm of the
state's decay, and how strongly the token is written to the state.

    g = - e^A softplus(a + d)         beta = m sigmoid(b)          A, d: a head's own; m: 1 or 2

    da = - dg e^A sigmoid(a + d)      db = dbeta beta (1 - beta / m)
    dd = sum da                       dA = sum dg g                over tokens

torch takes some ten passes over these small tensors in forward and fifteen in backward, each of
them a launch. All arithmetic is in fp32 and each result is rounded once; g is in fp32. Sums over
tokens are made in a part for each program, and these are added in a fixed order: no atomics. Saved
are a, b, A and d.

Source: Gated Delta Networks (arXiv 2412.06464); the decay is that of Mamba 2 (arXiv 2405.21060).
"""

from __future__ import annotations

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

Gates = tuple[Tensor, Tensor]


def delta_gates_reference(
    a: Tensor,  # (..., H)
    b: Tensor,  # (..., H)
    A_log: Tensor,  # (H,)
    bias: Tensor,  # (H,)
    most: float = 1.0,
) -> Gates:  # (..., H) each
    """Returns g and beta in plain torch; differentiable."""
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -A_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + bias.to(wide))
    return g, (most * b.to(wide).sigmoid()).to(b.dtype)


@triton.jit
def _softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + e) with e = e^-|x|. Where e is small, 1 + e has lost bits
    of it, and a GPU's logarithm loses more. With s = e / (2 + e), at most 1/3, log(1 + e) is
    2 artanh(s), whose series has 7 terms in fp32."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 9 + t * (1.0 / 11 + t * (1.0 / 13))
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _gates_kernel(
    a_ptr,  # (N, H), rows at a stride
    b_ptr,  # (N, H), rows at a stride
    A_ptr,  # (H,)
    bias_ptr,  # (H,)
    g_ptr,  # (N, H) fp32
    beta_ptr,  # (N, H)
    N,
    H,
    stride_a,
    stride_b,
    most,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, BLOCK)[None, :]
    mask = (row < N) & (head < H)
    A = tl.load(A_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * stride_a + head, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * stride_b + head, mask=mask, other=0.0).to(tl.float32)
    tl.store(g_ptr + row * H + head, -tl.exp(A) * _softplus(a + bias), mask=mask)
    beta = round_to(most * tl.sigmoid(b), beta_ptr.dtype.element_ty)
    tl.store(beta_ptr + row * H + head, beta, mask=mask)


@triton.jit
def _gates_grad_kernel(
    dg_ptr,  # (N, H) fp32
    dbeta_ptr,  # (N, H)
    a_ptr,  # (N, H), rows at a stride
    b_ptr,  # (N, H), rows at a stride
    A_ptr,  # (H,)
    bias_ptr,  # (H,)
    da_ptr,  # (N, H)
    db_ptr,  # (N, H)
    parts_ptr,  # (programs, 2, H) fp32: of dA and dd
    N,
    H,
    stride_a,
    stride_b,
    most,
    HAS_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, BLOCK)[None, :]
    mask = (row < N) & (head < H)
    A = tl.load(A_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * stride_a + head, mask=mask, other=0.0).to(tl.float32) + bias
    dg = tl.load(dg_ptr + row * H + head, mask=mask, other=0.0).to(tl.float32)
    da = -dg * tl.exp(A) * tl.sigmoid(a)
    tl.store(da_ptr + row * H + head, round_to(da, da_ptr.dtype.element_ty), mask=mask)
    b = tl.load(b_ptr + row * stride_b + head, mask=mask, other=0.0).to(tl.float32)
    dbeta = tl.load(dbeta_ptr + row * H + head, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(b)
    db = round_to(dbeta * most * s * (1 - s), db_ptr.dtype.element_ty)
    tl.store(db_ptr + row * H + head, db, mask=mask)
    if HAS_SUMS:
        part = parts_ptr + tl.program_id(0) * 2 * H + head
        of_A = tl.sum(-dg * tl.exp(A) * _softplus(a), axis=0, keep_dims=True)
        tl.store(part, of_A, mask=head < H)
        tl.store(part + H, tl.sum(da, axis=0, keep_dims=True), mask=head < H)


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor, shape: torch.Size, most: float
    ) -> Gates:
        ctx.save_for_backward(a, b, A_log, bias)
        ctx.most = most
        (N, H), c = a.shape, config(a.shape[1])
        g, beta = a.new_empty(shape, dtype=torch.float32), b.new_empty(shape)
        if N:
            with on_device(a):
                _gates_kernel[(triton.cdiv(N, c.rows),)](
                    *(a, b, A_log, bias, g, beta, N, H, a.stride(0), b.stride(0), most),
                    ROWS=c.rows,
                    BLOCK=c.block,
                    num_warps=c.num_warps,
                )
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
        a, b, A_log, bias = ctx.saved_tensors
        (N, H), c = a.shape, config(a.shape[1])
        da, db = a.new_empty(N, H), b.new_empty(N, H)
        programs, trains = triton.cdiv(N, c.rows), any(ctx.needs_input_grad[2:4])
        parts = a.new_empty(programs if trains else 0, 2, H, dtype=torch.float32)
        if N:
            with on_device(a):
                _gates_grad_kernel[(programs,)](
                    *(dg.contiguous(), dbeta.contiguous(), a, b, A_log, bias, da, db, parts),
                    *(N, H, a.stride(0), b.stride(0), ctx.most),
                    HAS_SUMS=trains,
                    ROWS=c.rows,
                    BLOCK=c.block,
                    num_warps=c.num_warps,
                )
        if not trains:
            return da, db, None, None, None, None
        of_A, of_bias = parts.sum(0)
        return da, db, of_A.to(A_log.dtype), of_bias.to(bias.dtype), None, None


def delta_gates(
    a: Tensor,  # (..., H)
    b: Tensor,  # (..., H)
    A_log: Tensor,  # (H,)
    bias: Tensor,  # (H,)
    *,
    most: float = 1.0,
) -> Gates:  # (..., H) each
    """g in fp32 and beta, which is at most `most`, in the dtype of b; differentiable in all four.

    bf16, fp16 or fp32. a and b are copied first if their rows are not at one stride. Raises
    ValueError for a wrong shape, dtype or device.
    """
    H = a.shape[-1]
    check_shape("b", b, a.shape)
    check_shape("A_log", A_log, (H,))
    check_shape("bias", bias, (H,))
    if not runs_kernel(a, b, A_log, bias):
        return delta_gates_reference(a, b, A_log, bias, most)
    for name, x in {"a": a, "b": b, "A_log": A_log, "bias": bias}.items():
        check_float(name, x)
    result: Gates = _DeltaGates.apply(
        *(_rows(a), _rows(b), A_log.contiguous(), bias.contiguous(), a.shape, most)
    )
    return result


def _rows(x: Tensor) -> Tensor:  # (..., H) -> (N, H)
    try:
        return as_rows("x", x)
    except ValueError:
        return x.reshape(-1, x.shape[-1]).contiguous()


def config(H: int) -> Config:
    """Returns a configuration with 1024 elements per program."""
    block = triton.next_power_of_2(H)
    return Config(block=block, num_warps=4, rows=max(1, 1024 // block))
