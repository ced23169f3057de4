"""Log-probabilities of labels under a softmax over rows of logits, one row a token, with what else
is known of the distribution from the same read.

For logits x (T, V), labels y (T,), a temperature t and z = softcap * tanh(x / softcap) / t if a
softcap is given (so the cap comes before the temperature), else z = x / t:

    lse         = log sum_j exp(z_j)                    p_j = exp(z_j - lse)
    log_prob    = z_y - lse
    entropy     = -sum_j p_j log p_j
    mean_logit  = mean_j z_j
    is_top1     = whether z_y is the largest z_j, and the first of them

    t dx_j = (g ([j = y] - p_j) - h p_j (log p_j + entropy)) (1 - (t z_j / softcap)^2)

for the gradients g of log_prob and h of entropy. mean_logit and is_top1 have none. The factor 1 / t
is the caller's (see `Objective.divisor` in longctx/head/stream.py).

lse and entropy are kept, 8 bytes a token. Bytes: the first kernel reads each logit once (fp32: 4
bytes a logit), the second reads it and writes its gradient (fp32 to bf16: 6).

The first kernel has one program a row. Each lane of its block keeps the maximum so far, the sum of
exponentials below it and the first moment of their exponents, and lanes are combined at the end of
the row, so that the loop has no reduction and one exponential a logit. With r = z - max <= 0,

    log_prob = z_y - max - log(sum e^r)         entropy = log(sum e^r) - sum(r e^r) / sum e^r

where both terms of the entropy are positive: nothing cancels, at logits of any size.
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


class LogProbs(NamedTuple):
    """The values of each row, in fp32 (fp64 for fp64 logits)."""

    log_probs: Tensor  # (T,)
    entropy: Tensor  # (T,)
    mean_logits: Tensor  # (T,)
    is_top1: Tensor  # (T,) bool
    lse: Tensor  # (T,)

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> LogProbs:
        """Returns room for the values of `rows` rows."""
        kinds = (dtype, dtype, dtype, torch.bool, dtype)
        return cls(*(torch.empty(rows, dtype=kind, device=device) for kind in kinds))


def scaled(x: Tensor, temperature: float = 1.0, softcap: float | None = None) -> Tensor:
    """Returns z of the equations above, in fp32 (fp64 for fp64 logits)."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return x if temperature == 1.0 else x / temperature


def log_softmax_reference(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,) int64
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> LogProbs:
    """Returns the values in plain torch; differentiable by autograd."""
    z = scaled(logits, temperature, softcap)
    outside = (labels < 0) | (labels >= z.shape[1])
    y = labels.masked_fill(outside, 0)[:, None]  # (T, 1)
    log_p = z.log_softmax(dim=1)
    log_p_y = log_p.gather(1, y).squeeze(1).masked_fill(outside, float("nan"))
    terms = torch.where(log_p == float("-inf"), 0.0, log_p.exp() * log_p)
    is_top1 = (z.argmax(dim=1) == labels) & ~outside
    return LogProbs(log_p_y, -terms.sum(dim=1), z.mean(dim=1), is_top1, z.logsumexp(dim=1))


def log_softmax_gradient_reference(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,)
    values: LogProbs,
    d_log_probs: Tensor | None,  # (T,)
    d_entropy: Tensor | None,  # (T,)
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:  # (T, V) fp32, or fp64 for fp64 logits
    """Returns t dx of the equations above in plain torch."""
    z = scaled(logits, temperature, softcap)
    log_p = z - values.lse[:, None]
    p = log_p.exp()
    grad, live = torch.zeros_like(p), torch.zeros_like(labels, dtype=torch.bool)
    if d_log_probs is not None:
        live |= d_log_probs != 0
        grad.addcmul_(p, d_log_probs[:, None], value=-1)
        grad[torch.arange(len(p), device=p.device), labels.clamp(min=0)] += d_log_probs
    if d_entropy is not None:
        live |= d_entropy != 0
        terms = torch.where(p > 0, p * (log_p + values.entropy[:, None]), 0.0)
        grad -= terms * d_entropy[:, None]
    if softcap is not None:
        grad *= 1 - (z * (temperature / softcap)) ** 2
    return grad.masked_fill_(~live[:, None], 0)


@triton.jit
def add_logits(top, total, z):
    """Adds logits to the maximum so far and the sum of exp(z - top), lane by lane. top begins at
    -1e30, since (-inf) - (-inf) would be NaN."""
    # Either the new logit is the maximum, and the sum shrinks, or it is added to it.
    step = z - top
    e = tl.exp(-tl.abs(step))
    total = tl.where(step > 0, total * e + 1, total + e)
    return tl.maximum(top, z), total


@triton.jit
def lse_of(top, total):
    """The log of a row's sum of exponentials, from those of its lanes."""
    row_top = tl.max(top, axis=0)
    return row_top + tl.log(tl.sum(total * tl.exp(top - row_top), axis=0))


@triton.jit
def _values_kernel(
    logits_ptr,  # (T, V)
    labels_ptr,  # (T,)
    log_probs_ptr,  # (T,) fp32
    entropy_ptr,  # (T,) fp32
    mean_logits_ptr,  # (T,) fp32
    is_top1_ptr,  # (T,) int8
    lse_ptr,  # (T,) fp32
    V,
    stride_logits,
    inverse_temperature,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    label = tl.load(labels_ptr + row)
    known = (label >= 0) & (label < V)
    label = tl.where(known, label, 0).to(tl.int32)
    z_y = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    if HAS_SOFTCAP:
        z_y = cap(z_y, softcap)
    z_y *= inverse_temperature

    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # sum of exp(z - top)
    moment = tl.zeros((BLOCK,), tl.float32)  # sum of (z - top) exp(z - top)
    z_sum = tl.zeros((BLOCK,), tl.float32)
    before = tl.full((BLOCK,), float("-inf"), tl.float32)  # largest z in front of the label's
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        z = tl.load(
            logits_ptr + offs, mask=mask, other=float("-inf"), eviction_policy="evict_first"
        ).to(tl.float32)
        if HAS_SOFTCAP:
            z = cap(z, softcap)
        z = tl.where(mask, z * inverse_temperature, float("-inf"))
        z_sum += tl.where(mask, z, 0.0)
        before = tl.maximum(before, tl.where(offs < label, z, float("-inf")))
        # As `add_logits`, whose exponential serves the moment, too.
        step = z - top
        e = tl.exp(-tl.abs(step))
        rises = step > 0
        moment = tl.where(
            rises, e * (moment - total * step), moment + tl.where(e > 0, e * step, 0.0)
        )
        total = tl.where(rises, total * e + 1, total + e)
        top = tl.maximum(top, z)

    row_top = tl.max(top, axis=0)
    weights = tl.exp(top - row_top)
    row_total = tl.sum(total * weights, axis=0)
    row_moment = tl.sum(weights * (moment + total * (top - row_top)), axis=0)
    log_total = tl.log(row_total)
    is_top1 = known & (z_y >= row_top) & (z_y > tl.max(before, axis=0))
    tl.store(log_probs_ptr + row, z_y - row_top - log_total)
    tl.store(entropy_ptr + row, log_total - row_moment / row_total)
    tl.store(mean_logits_ptr + row, tl.sum(z_sum, axis=0) / V)
    tl.store(is_top1_ptr + row, is_top1.to(tl.int8))
    tl.store(lse_ptr + row, row_top + log_total)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # (T, V)
    d_logits_ptr,  # (T, V), may be logits
    labels_ptr,  # (T,)
    lse_ptr,  # (T,) fp32
    entropy_ptr,  # (T,) fp32
    d_log_probs_ptr,  # (T,) fp32, or None
    d_entropy_ptr,  # (T,) fp32, or None
    V,
    stride_logits,
    stride_d_logits,
    inverse_temperature,
    softcap,
    HAS_LOG_PROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < V
    x = tl.load(
        logits_ptr + row * stride_logits + offs, mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    if HAS_SOFTCAP:
        x = cap(x, softcap)
    log_p = x * inverse_temperature - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    grad = tl.zeros((BLOCK,), tl.float32)
    live = tl.full((), 0, tl.int1)
    if HAS_LOG_PROBS:
        weight = tl.load(d_log_probs_ptr + row)
        grad += tl.where(offs == tl.load(labels_ptr + row), weight, 0.0) - weight * p
        live |= weight != 0
    if HAS_ENTROPY:
        weight = tl.load(d_entropy_ptr + row)
        grad -= tl.where(p > 0, weight * p * (log_p + tl.load(entropy_ptr + row)), 0.0)
        live |= weight != 0
    if HAS_SOFTCAP:
        grad *= 1 - (x / softcap) * (x / softcap)
    # A row without a weight has no gradient even where its logits are NaN, as padding's may be.
    grad = round_to(tl.where(live, grad, 0.0), d_logits_ptr.dtype.element_ty)
    d_logits_ptr += row * stride_d_logits
    tl.store(d_logits_ptr + offs, grad, mask=mask, eviction_policy="evict_first")


def log_softmax(
    logits: Tensor,  # (T, V) bf16, fp16, fp32, or fp64, which plain torch computes
    labels: Tensor,  # (T,) int64
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> LogProbs:
    """The values above of each row; a label outside [0, V) gives NaN and is not top-1.

    Not differentiable by autograd: `longctx.head.log_probs` calls it piece by piece. Raises
    ValueError for a wrong shape, dtype, device or layout.
    """
    check_logits(logits, labels)
    if logits.dtype == torch.float64 or not runs_kernel(logits, labels):
        return log_softmax_reference(logits, labels, temperature=temperature, softcap=softcap)
    T, V = logits.shape
    found = LogProbs.empty(T, torch.float32, logits.device)
    if T:
        config = values_config(V)
        with on_device(logits):
            _values_kernel[(T,)](
                *(logits, labels.contiguous(), found.log_probs, found.entropy, found.mean_logits),
                *(found.is_top1.view(torch.int8), found.lse, V, logits.stride(0)),
                *(1 / temperature, 1.0 if softcap is None else softcap),
                HAS_SOFTCAP=softcap is not None,
                BLOCK=config.block,
                STAGES=config.num_stages,
                num_warps=config.num_warps,
                maxnreg=config.maxnreg,
            )
    return found


def log_softmax_gradient(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,) int64
    values: LogProbs,  # of these logits
    d_logits: Tensor,  # (T, V), may be logits itself
    d_log_probs: Tensor | None = None,  # (T,) fp32
    d_entropy: Tensor | None = None,  # (T,) fp32
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> None:
    """Writes `temperature` times the gradient of sum(d_log_probs log_probs + d_entropy entropy) by
    the logits, rounded once. A row whose weights are 0 gets 0.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    check_logits(logits, labels)
    T, V = logits.shape
    check_shape("d_logits", d_logits, (T, V))
    check_rows("d_logits", d_logits)
    if logits.dtype == torch.float64 or not runs_kernel(logits, labels, d_logits):
        found = log_softmax_gradient_reference(
            logits, labels, values, d_log_probs, d_entropy, temperature=temperature, softcap=softcap
        )
        d_logits.copy_(found)
        return
    if T:
        config = gradient_config(V)
        with on_device(logits):
            _gradient_kernel[(T, triton.cdiv(V, config.block))](
                *(logits, d_logits, labels.contiguous()),
                *(values.lse.contiguous(), values.entropy.contiguous()),
                None if d_log_probs is None else d_log_probs.contiguous(),
                None if d_entropy is None else d_entropy.contiguous(),
                *(V, logits.stride(0), d_logits.stride(0)),
                *(1 / temperature, 1.0 if softcap is None else softcap),
                HAS_LOG_PROBS=d_log_probs is not None,
                HAS_ENTROPY=d_entropy is not None,
                HAS_SOFTCAP=softcap is not None,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )


def values_config(V: int) -> Config:
    """Three programs of 256 threads fit a multiprocessor's registers, each with two blocks of 8 KB
    of logits on their way. Chosen by count (34 KB on their way hide the latency of the memory at
    full rate), not measured."""
    if INTERPRETED:  # whose loops cost much more than its vectors
        return Config(block=max(128, triton.next_power_of_2(V) // 2), num_warps=4)
    block = min(2048, max(128, triton.next_power_of_2(V)))
    return Config(block=block, num_warps=8 if block == 2048 else 4, num_stages=3, maxnreg=80)


def gradient_config(V: int) -> Config:
    """Returns a configuration in which a program takes 16 KB of fp32 logits."""
    return Config(block=min(4096, max(128, triton.next_power_of_2(V))), num_warps=8)
