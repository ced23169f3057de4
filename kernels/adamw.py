"""AdamW with decoupled weight decay, in place, on exact fp32 weights kept as bf16 and int16.

    g = scale grad                          m += (1 - beta1) (g - m)
    v += (1 - beta2) (g^2 - v)              bias_i = 1 - beta_i^step
    p -= lr weight_decay p + lr / bias1 m / (sqrt(v / bias2) + eps)

All in fp32. The update adds into p once, because 1 - lr weight_decay in fp32 is off by up to 2^-25
at every step, with one sign. m and v move by their distance from g and g^2, because beta2 = 0.999
in fp32 is so far from 0.999 that v would settle 1.3e-5 off. After 2000 steps against fp64
(beta2 0.999, lr 1e-3, decay 0.1), relative errors of p and v: 6.6e-7 and 3.7e-7; torch's unfused
fp32 AdamW 1.9e-5 and 9.2e-6.

The fp32 weight, the master, is stored in two parts: weight, bf16, is the master rounded to nearest
(ties away from zero), and remainder, int16, is what the master's bits exceed weight's by:

    master bits = (weight bits << 16) + remainder       -0x8000 <= remainder < 0x8000

The model computes with weight as it is, and no copy in another dtype exists. Every master joins
back to itself; NaN becomes the NaN 0x7FC0.

A remainder belongs to the weight that it was split from. Others may write weights between two
updates (a checkpoint, a moving average), in ways that no version counter sees. So each CHECKED
weights have a checksum: where it does not fit the weights that an update finds, their remainders
count as 0, and the new weights are the masters. It costs 4 bytes for 1024 weights.

Bytes read + written a parameter: weight 2 + 2, remainder 2 + 2, m 4 + 4, v 4 + 4, grad 2: 26.
With fp32 weights and gradients 28.

The result of an element depends on no other element: a tensor may be updated in pieces, and kernel
and reference agree bit by bit, because neither contracts a product and a sum into one rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_float,
    check_shape,
    on_device,
    runs_kernel,
    tl,
    triton,
)

_NAN = 0x7FC00000  # bits; others, such as CUDA's 0x7FFFFFFF, would round up to -0
CHECKED = 1024
"""Weights that share a checksum."""
_MIX_BITS, _MIX_PLACE, _MIX = 0x2C1B3C6D, 0x297A2D39, 0x1B873593
"""Odd factors of the checksum's hash; products wrap around in int32. The kernel repeats them."""
_AT_ONCE = 2**22
"""Weights that `weight_checksums` hashes at a time: their hashes take 16 MiB."""


def split_master(
    master: Tensor,  # (n,) fp32
) -> tuple[Tensor, Tensor]:  # weight (n,) bf16, remainder (n,) int16
    """The two parts of an fp32 weight.

    Raises ValueError for a wrong dtype.

    Source: TransformerEngine's FusedAdam, store_param_remainders.
    """
    check_float("master", master, torch.float32)
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    weight = (bits + 0x8000) >> 16
    remainder = (bits - (weight << 16)).to(torch.int16)
    return weight.to(torch.int16).view(torch.bfloat16), remainder


def join_master(
    weight: Tensor,  # (n,) bf16
    remainder: Tensor,  # (n,) int16
) -> Tensor:  # (n,) fp32
    """The fp32 weight of its two parts.

    Raises ValueError for a wrong shape or dtype.
    """
    check_float("weight", weight, torch.bfloat16)
    _check_remainder(weight, remainder)
    bits = weight.view(torch.int16).int() << 16
    return bits.add_(remainder).view(torch.float32)


def weight_checksums(
    weight: Tensor,  # (n,) bf16
) -> Tensor:  # (ceil(n / CHECKED),) int32
    """A checksum of each CHECKED weights, the last ones possibly fewer: the sum, modulo 2^32, of a
    hash of each weight's bits and place.

    Raises ValueError for a wrong dtype.
    """
    check_float("weight", weight, torch.bfloat16)
    place = torch.arange(CHECKED, dtype=torch.int32, device=weight.device)
    n = weight.numel()
    sums = torch.zeros(-(-n // CHECKED), dtype=torch.int32, device=weight.device)
    for first in range(0, n, _AT_ONCE):
        bits = weight[first : first + _AT_ONCE].view(torch.int16).int()
        whole = bits.numel() // CHECKED * CHECKED
        for part in (bits[:whole].view(-1, CHECKED), bits[whole:].view(1, -1)):
            if not part.numel():
                continue
            mixed = part * _MIX_BITS + place[: part.shape[1]] * _MIX_PLACE
            mixed = (mixed ^ (mixed >> 15)) * _MIX
            found = (mixed ^ (mixed >> 13)).sum(1).to(torch.int32)
            at = first // CHECKED + (0 if part.shape[1] == CHECKED else whole // CHECKED)
            sums[at : at + len(found)] = found
    return sums


def drop_stale_(
    remainder: Tensor,  # (n,) int16
    fits: Tensor,  # (ceil(n / CHECKED),) bool
) -> None:
    """Zeroes, in place, the remainders of each CHECKED weights whose checksum did not fit."""
    whole = remainder.numel() // CHECKED
    stale = ~fits
    remainder[: whole * CHECKED].view(-1, CHECKED).masked_fill_(stale[:whole, None], 0)
    remainder[whole * CHECKED :].masked_fill_(stale[whole:], 0)


class Options(NamedTuple):
    """The numbers of a parameter's AdamW step: its rate, decay and how often it was updated."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """The number of this step, from 1."""

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """decay, 1 - beta1, 1 - beta2, and (s, f) of the update s m / (sqrt(v) + f), which is the
        fraction above with both sides times sqrt(bias2)."""
        bias1, bias2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        step_size, floor = self.lr * math.sqrt(bias2) / bias1, self.eps * math.sqrt(bias2)
        decay = self.lr * self.weight_decay
        return decay, 1 - self.beta1, 1 - self.beta2, step_size, floor


def adamw_reference(
    weight: Tensor,  # (n,) bf16 or fp32
    remainder: Tensor | None,  # (n,) int16 for bf16
    exp_avg: Tensor,  # (n,) fp32
    exp_avg_sq: Tensor,  # (n,) fp32
    grad: Tensor,  # (n,) bf16 or fp32
    options: Options,
    *,
    scale: Tensor | None = None,  # () fp32
    checksums: Tensor | None = None,  # (ceil(n / CHECKED),) int32
) -> None:
    """The equations above in plain torch, in place.

    No lerp, addcmul or addcdiv: in the last elements of a tensor they round otherwise than in its
    SIMD part. No division by a number, which CUDA replaces by a product. The root is taken in fp64,
    because on the CPU torch's fp32 root is 1 ulp off for 17% of all numbers.
    """
    if remainder is not None and checksums is not None:
        drop_stale_(remainder, weight_checksums(weight) == checksums)
    decay, one_minus_beta1, one_minus_beta2, step_size, floor = options.numbers
    g = grad.float() if scale is None else grad.float() * scale
    exp_avg += (g - exp_avg) * one_minus_beta1
    exp_avg_sq += (g * g - exp_avg_sq) * one_minus_beta2
    root = exp_avg_sq.double().sqrt().float()
    update = exp_avg / (root + floor) * step_size
    p = weight if remainder is None else join_master(weight, remainder)
    p -= p * decay + update
    if remainder is not None:
        high, low = split_master(p)
        weight.copy_(high)
        remainder.copy_(low)
        if checksums is not None:
            checksums.copy_(weight_checksums(weight))


@triton.jit
def _checksum(high, place, mask):
    """Computes `weight_checksums` of one block, int32."""
    mixed = high * 0x2C1B3C6D + place * 0x297A2D39
    mixed = (mixed ^ (mixed >> 15)) * 0x1B873593
    mixed = mixed ^ (mixed >> 13)
    return tl.sum(tl.where(mask, mixed, 0), axis=0)


@triton.jit
def update_block(
    weight_ptr,  # (n,) int16 if SPLIT, else fp32
    remainder_ptr,  # (n,) int16, unused unless SPLIT
    exp_avg_ptr,  # (n,) fp32
    exp_avg_sq_ptr,  # (n,) fp32
    grad_ptr,  # (n,)
    scale_ptr,  # () fp32, unused unless HAS_SCALE
    checksums_ptr,  # (blocks,) int32, unused unless CHECKS
    block,  # int64, or what is beyond 2^31 elements wraps around
    numel,
    decay,
    one_minus_beta1,
    one_minus_beta2,
    step_size,
    floor,
    SPLIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    CHECKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates the weights of one checksum, whichever launch they belong to."""
    place = tl.arange(0, BLOCK)
    offs = block * BLOCK + place
    mask = offs < numel
    # All loads before the first store: a warp that waits for one has then asked for the others.
    g = tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
    if SPLIT:
        high = tl.load(weight_ptr + offs, mask=mask, other=0).to(tl.int32)
        low = tl.load(remainder_ptr + offs, mask=mask, other=0).to(tl.int32)
        if CHECKS:
            fits = tl.load(checksums_ptr + block) == _checksum(high, place, mask)
            low = tl.where(fits, low, 0)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    if HAS_SCALE:
        g = g * tl.load(scale_ptr)
    m = m + (g - m) * one_minus_beta1
    tl.store(exp_avg_ptr + offs, m, mask=mask)
    v = v + (g * g - v) * one_minus_beta2
    tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
    # Both round to nearest, as the CPU does: `/` and tl.sqrt are approximations on a GPU.
    update = tl.div_rn(m, tl.sqrt_rn(v) + floor) * step_size
    p = p - (p * decay + update)
    if SPLIT:
        # Another NaN could round to an infinity below, or carry into the sign.
        bits = tl.where(p != p, 0x7FC00000, p.to(tl.int32, bitcast=True))
        # To the nearest bf16, ties away from zero: `low` then fits in int16, and high + low is p.
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        tl.store(weight_ptr + offs, high.to(tl.int16), mask=mask)
        tl.store(remainder_ptr + offs, low.to(tl.int16), mask=mask)
        if CHECKS:
            tl.store(checksums_ptr + block, _checksum(high, place, mask))
    else:
        tl.store(weight_ptr + offs, p, mask=mask)


@triton.jit
def _adamw_kernel(
    weight_ptr,
    remainder_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    scale_ptr,
    checksums_ptr,  # (programs,)
    numel,
    decay,
    one_minus_beta1,
    one_minus_beta2,
    step_size,
    floor,
    SPLIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    CHECKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    update_block(
        *(weight_ptr, remainder_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, scale_ptr),
        *(checksums_ptr, tl.program_id(0).to(tl.int64), numel),
        *(decay, one_minus_beta1, one_minus_beta2, step_size, floor),
        *(SPLIT, HAS_SCALE, CHECKS, BLOCK),
    )


def _check_remainder(weight: Tensor, remainder: Tensor) -> None:
    check_shape("remainder", remainder, weight.shape)
    if remainder.dtype != torch.int16:
        raise ValueError(f"remainder must have dtype torch.int16, got {remainder.dtype}")


def _check(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    step: int,
    checksums: Tensor | None,
) -> None:
    if weight.dim() != 1:
        raise ValueError(f"weight must have shape (n,), got {tuple(weight.shape)}")
    for name, x in (("weight", weight), ("grad", grad)):
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name} must be bfloat16 or float32, got {x.dtype}")
    for name, x in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("grad", grad)):
        check_shape(name, x, weight.shape)
        if name != "grad":
            check_float(name, x, torch.float32)
    if weight.dtype == torch.bfloat16:
        if remainder is None:
            raise ValueError("a bfloat16 weight needs its remainder, got None")
        _check_remainder(weight, remainder)
    elif remainder is not None:
        raise ValueError(f"a float32 weight has no remainder, got one of {remainder.dtype}")
    if scale is not None:
        check_shape("scale", scale, ())
        check_float("scale", scale, torch.float32)
    if checksums is not None:
        if remainder is None:
            raise ValueError("checksums are of remainders, and a float32 weight has none")
        check_shape("checksums", checksums, (-(-weight.numel() // CHECKED),))
        if checksums.dtype != torch.int32:
            raise ValueError(f"checksums must have dtype torch.int32, got {checksums.dtype}")
    tensors = {"weight": weight, "remainder": remainder, "exp_avg": exp_avg}
    tensors |= {"exp_avg_sq": exp_avg_sq, "grad": grad, "checksums": checksums}
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(t.stride())}")
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}")


def adamw_(
    weight: Tensor,  # (n,) bf16 or fp32
    remainder: Tensor | None,  # (n,) int16 for bf16
    exp_avg: Tensor,  # (n,) fp32
    exp_avg_sq: Tensor,  # (n,) fp32
    grad: Tensor,  # (n,) bf16 or fp32
    options: Options,
    *,
    scale: Tensor | None = None,  # () fp32
    checksums: Tensor | None = None,  # (ceil(n / CHECKED),) int32
) -> None:
    """Makes one step on weight, its remainder and both moments, in place. Not differentiable.

    `scale`, a number on the device such as the clip factor, multiplies the
    gradient; None is 1. All (n,) tensors are contiguous and may be views into larger buffers.
    `checksums` are of the bf16 weights that the remainders belong to: where others stand now, the
    remainders count as 0. None: all remainders count.
    A gradient of inf or NaN makes the weight NaN.

    Raises ValueError for a wrong shape, dtype, device, layout or step, for a bf16 weight without
    its remainder and for an fp32 weight with one.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv 1711.05101); the
    remainder: TransformerEngine's FusedAdam, store_param_remainders.
    """
    _check(weight, remainder, exp_avg, exp_avg_sq, grad, scale, options.step, checksums)
    tensors = weight, remainder, exp_avg, exp_avg_sq, grad
    if not runs_kernel(*tensors, scale, checksums):
        return adamw_reference(*tensors, options, scale=scale, checksums=checksums)
    numel = weight.numel()
    if not numel:
        return
    with on_device(weight):
        _adamw_kernel[(triton.cdiv(numel, CONFIG.block),)](
            *((weight, weight) if remainder is None else (weight.view(torch.int16), remainder)),
            *(exp_avg, exp_avg_sq, grad, exp_avg if scale is None else scale),
            *(exp_avg if checksums is None else checksums, numel, *options.numbers),
            SPLIT=remainder is not None,
            HAS_SCALE=scale is not None,
            CHECKS=checksums is not None,
            BLOCK=CONFIG.block,
            num_warps=CONFIG.num_warps,
            enable_fp_fusion=CONFIG.fp_fusion,
        )


CONFIG = Config(block=CHECKED, num_warps=4, fp_fusion=False)
