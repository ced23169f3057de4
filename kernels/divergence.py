"""Divergence of a student's softmax from a teacher's over two rows of logits, one row a token, and
its gradient by the student's logits.

For logits x (T, V) of the student and X (T, V) of the teacher, a temperature t and, for each,
z = softcap * tanh(x / softcap) / t if it has a softcap, else z = x / t; p = softmax(z) and
q = softmax(Z):

    beta = 0       D = sum_j q_j log(q_j / p_j)                        forward KL, KL(q | p)
    beta = 1       D = sum_j p_j log(p_j / q_j)                        reverse KL, KL(p | q)
    else           D = beta KL(q | m) + (1 - beta) KL(p | m)           m = beta q + (1 - beta) p

    t dx_j = g (p_j - q_j)                                             (1 - (t z_j / softcap)^2)
             g p_j (log(p_j / q_j) - D)
             g (1 - beta) p_j (log(p_j / m_j) - KL(p | m))

which is the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1) with the
ends that its authors and TRL give it. The factor 1 / t is the caller's (see `Objective.divisor` in
longctx/head/stream.py); the teacher has no gradient.

The first kernel has one program a row, which reads both rows twice: once for the two lse (as
log_softmax.py does), once for D and what the gradient subtracts. The second reads both and writes
the gradient. Bytes: 16 a pair of fp32 logits, then 8 and the gradient's 2 in bf16.

With d = log(q_j / p_j) and e = exp(-|d|), all logarithms of ratios come from one exponential and
one logarithm that cannot overflow: log(q_j / m_j) = -log(beta + (1 - beta) e) where d > 0, and
log(p_j / m_j) = -log(1 - beta + beta e) where d <= 0; the other one differs by d. The ends add
p_j - q_j (or q_j - p_j), whose sum is 0: then no term is negative, and errors of lse cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.cross_entropy import cap, check_logits
from longctx.kernels.launch import (
    INTERPRETED,
    Config,
    check_rows,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)
from longctx.kernels.log_softmax import add_logits, lse_of, scaled


class Divergence(NamedTuple):
    """The values of each row, in fp32 (fp64 for fp64 logits)."""

    value: Tensor  # (T,)
    offset: Tensor  # (T,): what the gradient subtracts, D or KL(p | m)
    lse: Tensor  # (T,)
    teacher_lse: Tensor  # (T,)

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> Divergence:
        """Returns room for the values of `rows` rows."""
        return cls(*(torch.empty(rows, dtype=dtype, device=device) for _ in range(4)))


class How(NamedTuple):
    """The options of a divergence, which all rows share."""

    beta: float
    temperature: float = 1.0
    softcap: float | None = None
    teacher_softcap: float | None = None


def divergence_reference(logits: Tensor, teacher: Tensor, how: How) -> Divergence:  # (T, V) each
    """Returns the values in plain torch; differentiable by autograd."""
    z = scaled(logits, how.temperature, how.softcap)
    teacher_z = scaled(teacher, how.temperature, how.teacher_softcap)
    log_p, log_q = z.log_softmax(dim=1), teacher_z.log_softmax(dim=1)
    offset: Tensor
    if how.beta == 0:
        value = offset = _kl(log_q, log_p)
    elif how.beta == 1:
        value = offset = _kl(log_p, log_q)
    else:
        beta = z.new_tensor(how.beta)
        log_m = torch.logaddexp(log_q + beta.log(), log_p + (-beta).log1p())
        offset = _kl(log_p, log_m)
        value = beta * _kl(log_q, log_m) + (1 - beta) * offset
    return Divergence(value, offset, z.logsumexp(dim=1), teacher_z.logsumexp(dim=1))


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a | b) of each row; words without probability in a have no part in it."""
    a = log_a.exp()
    return torch.where(a > 0, a * (log_a - log_b), 0.0).sum(dim=1)


def divergence_gradient_reference(
    logits: Tensor,  # (T, V)
    teacher: Tensor,  # (T, V)
    values: Divergence,
    d_values: Tensor,  # (T,)
    how: How,
) -> Tensor:  # (T, V) fp32, or fp64 for fp64 logits
    """Returns t dx of the equations above in plain torch."""
    z = scaled(logits, how.temperature, how.softcap)
    log_p = z - values.lse[:, None]
    log_q = scaled(teacher, how.temperature, how.teacher_softcap) - values.teacher_lse[:, None]
    p = log_p.exp()
    if how.beta == 0:
        grad = p - log_q.exp()
    elif how.beta == 1:
        grad = p * (log_p - log_q - values.offset[:, None])
    else:
        beta = z.new_tensor(how.beta)
        log_m = torch.logaddexp(log_q + beta.log(), log_p + (-beta).log1p())
        grad = (1 - beta) * p * (log_p - log_m - values.offset[:, None])
    if how.beta != 0:
        grad = torch.where(p > 0, grad, 0.0)
    if how.softcap is not None:
        grad *= 1 - (z * (how.temperature / how.softcap)) ** 2
    return (grad * d_values[:, None]).masked_fill_((d_values == 0)[:, None], 0)


@triton.jit
def _load(ptr, offs, mask, inverse_temperature, softcap, HAS_SOFTCAP: tl.constexpr):
    """(z of the equations, x after its cap); z is -inf past the vocabulary."""
    x = tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        x = cap(x, softcap)
    return tl.where(mask, x * inverse_temperature, float("-inf")), x


@triton.jit
def _log_ratios(log_p, log_q, beta):
    """Returns (log(p / m), log(q / m))."""
    d = log_q - log_p
    e = tl.exp(-tl.abs(d))
    low = -tl.log(tl.where(d > 0, beta + (1 - beta) * e, 1 - beta + beta * e))
    return tl.where(d > 0, low - d, low), tl.where(d > 0, low, low + d)


@triton.jit
def _values_kernel(
    logits_ptr,  # (T, V)
    teacher_ptr,  # (T, V)
    value_ptr,  # (T,) fp32
    offset_ptr,  # (T,) fp32
    lse_ptr,  # (T,) fp32
    teacher_lse_ptr,  # (T,) fp32
    V,
    stride_logits,
    stride_teacher,
    beta,
    inverse_temperature,
    softcap,
    teacher_softcap,
    END: tl.constexpr,  # 0 or 1 for these beta, else -1
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    teacher_ptr += row * stride_teacher
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    teacher_top = tl.full((BLOCK,), -1e30, tl.float32)
    teacher_total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        z, _ = _load(logits_ptr, offs, mask, inverse_temperature, softcap, HAS_SOFTCAP)
        top, total = add_logits(top, total, z)
        z, _ = _load(
            teacher_ptr, offs, mask, inverse_temperature, teacher_softcap, HAS_TEACHER_SOFTCAP
        )
        teacher_top, teacher_total = add_logits(teacher_top, teacher_total, z)
    lse, teacher_lse = lse_of(top, total), lse_of(teacher_top, teacher_total)

    of_student = tl.zeros((BLOCK,), tl.float32)  # sum of p log(p / m), or of a whole KL
    of_teacher = tl.zeros((BLOCK,), tl.float32)  # sum of q log(q / m)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        z, _ = _load(logits_ptr, offs, mask, inverse_temperature, softcap, HAS_SOFTCAP)
        log_p, p = z - lse, tl.exp(z - lse)
        z, _ = _load(
            teacher_ptr, offs, mask, inverse_temperature, teacher_softcap, HAS_TEACHER_SOFTCAP
        )
        log_q, q = z - teacher_lse, tl.exp(z - teacher_lse)
        if END == 0:
            of_student += tl.where(q > 0, q * (log_q - log_p), 0.0) - q + p
        elif END == 1:
            of_student += tl.where(p > 0, p * (log_p - log_q), 0.0) - p + q
        else:
            log_p_m, log_q_m = _log_ratios(log_p, log_q, beta)
            of_student += tl.where(p > 0, p * log_p_m, 0.0)
            of_teacher += tl.where(q > 0, q * log_q_m, 0.0)
    offset = tl.sum(of_student, axis=0)
    value = offset
    if END < 0:
        value = beta * tl.sum(of_teacher, axis=0) + (1 - beta) * offset
    tl.store(value_ptr + row, value)
    tl.store(offset_ptr + row, offset)
    tl.store(lse_ptr + row, lse)
    tl.store(teacher_lse_ptr + row, teacher_lse)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # (T, V)
    teacher_ptr,  # (T, V)
    d_logits_ptr,  # (T, V), may be logits
    offset_ptr,  # (T,) fp32
    lse_ptr,  # (T,) fp32
    teacher_lse_ptr,  # (T,) fp32
    d_values_ptr,  # (T,) fp32
    V,
    stride_logits,
    stride_teacher,
    stride_d_logits,
    beta,
    inverse_temperature,
    softcap,
    teacher_softcap,
    END: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < V
    logits_ptr += row * stride_logits
    teacher_ptr += row * stride_teacher
    z, x = _load(logits_ptr, offs, mask, inverse_temperature, softcap, HAS_SOFTCAP)
    log_p = z - tl.load(lse_ptr + row)
    z, _ = _load(teacher_ptr, offs, mask, inverse_temperature, teacher_softcap, HAS_TEACHER_SOFTCAP)
    log_q = z - tl.load(teacher_lse_ptr + row)
    p, offset = tl.exp(log_p), tl.load(offset_ptr + row)
    if END == 0:
        grad = p - tl.exp(log_q)
    elif END == 1:
        grad = tl.where(p > 0, p * (log_p - log_q - offset), 0.0)
    else:
        log_p_m, _ = _log_ratios(log_p, log_q, beta)
        grad = tl.where(p > 0, (1 - beta) * p * (log_p_m - offset), 0.0)
    if HAS_SOFTCAP:
        grad *= 1 - (x / softcap) * (x / softcap)
    weight = tl.load(d_values_ptr + row)
    # A row without a weight has no gradient even where its logits are NaN, as padding's may be.
    grad = round_to(tl.where(weight != 0, weight * grad, 0.0), d_logits_ptr.dtype.element_ty)
    tl.store(d_logits_ptr + row * stride_d_logits + offs, grad, mask=mask)


def divergence(
    logits: Tensor,  # (T, V) bf16, fp16, fp32, or fp64, which plain torch computes
    teacher: Tensor,  # (T, V)
    how: How,
) -> Divergence:
    """The divergence of each row, and what its gradient needs.

    Not differentiable by autograd: `longctx.head.distillation` calls it piece by piece. Raises
    ValueError for a wrong shape, dtype, device or layout.
    """
    _check(logits, teacher)
    if logits.dtype == torch.float64 or not runs_kernel(logits, teacher):
        return divergence_reference(logits, teacher, how)
    T, V = logits.shape
    found = Divergence.empty(T, torch.float32, logits.device)
    if T:
        config = values_config(V)
        with on_device(logits):
            _values_kernel[(T,)](
                *(logits, teacher, *found, V, logits.stride(0), teacher.stride(0)),
                **_flags(how),
                BLOCK=config.block,
                STAGES=config.num_stages,
                num_warps=config.num_warps,
            )
    return found


def divergence_gradient(
    logits: Tensor,  # (T, V)
    teacher: Tensor,  # (T, V)
    values: Divergence,  # of these logits
    d_logits: Tensor,  # (T, V), may be logits itself
    d_values: Tensor,  # (T,) fp32
    how: How,
) -> None:
    """Writes `temperature` times the gradient of sum(d_values * value) by the student's logits,
    rounded once. A row whose weight is 0 gets 0.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    _check(logits, teacher)
    check_shape("d_logits", d_logits, logits.shape)
    check_rows("d_logits", d_logits)
    if logits.dtype == torch.float64 or not runs_kernel(logits, teacher, d_logits):
        d_logits.copy_(divergence_gradient_reference(logits, teacher, values, d_values, how))
        return
    T, V = logits.shape
    if T:
        config = gradient_config(V)
        with on_device(logits):
            _gradient_kernel[(T, triton.cdiv(V, config.block))](
                *(logits, teacher, d_logits),
                *(x.contiguous() for x in (*values[1:], d_values)),
                *(V, logits.stride(0), teacher.stride(0), d_logits.stride(0)),
                **_flags(how),
                BLOCK=config.block,
                num_warps=config.num_warps,
            )


def _flags(how: How) -> dict[str, float | int | bool]:
    return {
        "beta": how.beta,
        "inverse_temperature": 1 / how.temperature,
        "softcap": how.softcap or 1.0,
        "teacher_softcap": how.teacher_softcap or 1.0,
        "END": int(how.beta) if how.beta in (0, 1) else -1,
        "HAS_SOFTCAP": how.softcap is not None,
        "HAS_TEACHER_SOFTCAP": how.teacher_softcap is not None,
    }


def _check(logits: Tensor, teacher: Tensor) -> None:
    check_logits(logits)
    check_shape("teacher", teacher, logits.shape)
    check_rows("teacher", teacher)
    if (teacher.dtype == torch.float64) != (logits.dtype == torch.float64):
        raise ValueError(f"teacher must not be {teacher.dtype} beside logits of {logits.dtype}")


def values_config(V: int) -> Config:
    """Four programs of 256 threads fit a multiprocessor's registers, each with two blocks of 4 KB
    of both rows on their way. Chosen by count (more threads' lanes spill), not measured."""
    if INTERPRETED:  # whose loops cost much more than its vectors
        return Config(block=max(128, triton.next_power_of_2(V) // 2), num_warps=4)
    block = min(1024, max(128, triton.next_power_of_2(V)))
    return Config(block=block, num_warps=8 if block == 1024 else 4, num_stages=3)


def gradient_config(V: int) -> Config:
    """Returns a configuration in which a program takes 8 KB of each row's fp32 logits."""
    return Config(block=min(2048, max(128, triton.next_power_of_2(V))), num_warps=4)
