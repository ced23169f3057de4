"""Cross-entropy of logits that stay: the loss of each row in one kernel, and in another one, from
the log of its sum of exponentials, the row's gradient.

The equations are those of cross_entropy.py, whose kernel writes the gradient as it reads. Here
forward keeps lse, 4 bytes a row, so that no program waits for another one: forward has a program a
row, which reads it block by block, and backward one for each block. Bytes: each logit is read
twice, and its gradient is written once, 6 bytes a logit in bf16.

Each lane of forward's block keeps the maximum so far and the sum of exponentials below it, which
are combined at the end of the row: the loop has no reduction, and one exponential a logit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.kernels.cross_entropy import cap, check_logits, cross_entropy_reference
from longctx.kernels.launch import (
    check_float,
    check_rows,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)
from longctx.kernels.log_softmax import (
    add_logits,
    gradient_config,
    lse_of,
    scaled,
    values_config,
)

_IGNORED = tl.constexpr(IGNORE_INDEX)


class Terms(NamedTuple):
    """The terms of the loss besides the label's log-probability: smoothing, softcap, squared
    lse."""

    label_smoothing: float = 0.0
    softcap: float | None = None
    lse_square_scale: float = 0.0

    def check(self) -> None:
        """Raises ValueError for a softcap that is not positive."""
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}")

    @property
    def numbers(self) -> tuple[float, float, float]:
        """The kernels' arguments."""
        cap = 1.0 if self.softcap is None else self.softcap
        return self.label_smoothing, cap, self.lse_square_scale

    @property
    def flags(self) -> dict[str, bool]:
        """The kernels' constants that say which terms are there."""
        return {
            "HAS_SMOOTHING": self.label_smoothing != 0,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_LSE_SQUARE": self.lse_square_scale != 0,
        }


PLAIN = Terms()


@triton.jit
def _loss_kernel(
    logits_ptr,  # (T, V)
    labels_ptr,  # (T,)
    loss_ptr,  # (T,) fp32
    lse_ptr,  # (T,) fp32
    V,
    stride_logits,
    label_smoothing,
    softcap,
    lse_square_scale,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LSE_SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    label = tl.load(labels_ptr + row)
    known = (label >= 0) & (label < V)
    z_y = tl.load(logits_ptr + tl.where(known, label, 0), mask=known, other=float("nan"))
    z_y = z_y.to(tl.float32)
    if HAS_SOFTCAP:
        z_y = cap(z_y, softcap)

    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # sum of exp(z - top)
    z_sum = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < V
        z = tl.load(
            logits_ptr + offs, mask=mask, other=float("-inf"), eviction_policy="evict_first"
        ).to(tl.float32)
        if HAS_SOFTCAP:
            z = tl.where(mask, cap(z, softcap), float("-inf"))
        if HAS_SMOOTHING:
            z_sum += tl.where(mask, z, 0.0)
        top, total = add_logits(top, total, z)

    lse = lse_of(top, total)
    loss = lse - (1 - label_smoothing) * z_y
    if HAS_SMOOTHING:
        loss -= label_smoothing * tl.sum(z_sum, axis=0) / V
    if HAS_LSE_SQUARE:
        loss += lse_square_scale * lse * lse
    tl.store(loss_ptr + row, tl.where(label == _IGNORED, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _gradient_kernel(
    logits_ptr,  # (T, V)
    d_logits_ptr,  # (T, V), may be logits
    labels_ptr,  # (T,)
    lse_ptr,  # (T,) fp32
    scale_ptr,  # (T,) fp32
    V,
    stride_logits,
    stride_d_logits,
    label_smoothing,
    softcap,
    lse_square_scale,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LSE_SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < V
    z = tl.load(
        logits_ptr + row * stride_logits + offs, mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    label, lse = tl.load(labels_ptr + row), tl.load(lse_ptr + row)
    scale = tl.load(scale_ptr + row)
    if HAS_SOFTCAP:
        z = cap(z, softcap)
    p_scale = scale
    if HAS_LSE_SQUARE:
        p_scale *= 1 + 2 * lse_square_scale * lse
    grad = p_scale * tl.exp(z - lse)
    grad -= tl.where(offs == label, scale * (1 - label_smoothing), 0.0)
    if HAS_SMOOTHING:
        grad -= scale * label_smoothing / V
    if HAS_SOFTCAP:
        grad *= 1 - (z / softcap) * (z / softcap)
    # An ignored row has no gradient even where its logits are NaN, as padding's may be.
    grad = tl.where(label == _IGNORED, 0.0, grad)
    d_logits_ptr += row * stride_d_logits
    grad = round_to(grad, d_logits_ptr.dtype.element_ty)
    tl.store(d_logits_ptr + offs, grad, mask=mask, eviction_policy="evict_first")


def cross_entropy_rows(
    logits: Tensor,  # (T, V) bf16, fp16, fp32, or fp64, which plain torch computes
    labels: Tensor,  # (T,) int64
    terms: Terms = PLAIN,
) -> tuple[Tensor, Tensor]:  # (T,) fp32 each (fp64 for fp64 logits)
    """Returns the loss and the lse of each row. A label outside [0, V) gives NaN.

    Not differentiable by autograd: `longctx.head.logits_loss` is its autograd.Function. Raises
    ValueError for a wrong shape, dtype, value, device or layout.
    """
    check_logits(logits, labels)
    terms.check()
    if logits.dtype == torch.float64 or not runs_kernel(logits, labels):
        loss = cross_entropy_reference(logits, labels, **terms._asdict())
        return loss, scaled(logits, softcap=terms.softcap).logsumexp(dim=1)
    T, V = logits.shape
    loss, lse = (torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(2))
    if T:
        config = values_config(V)
        with on_device(logits):
            _loss_kernel[(T,)](
                *(logits, labels.contiguous(), loss, lse, V, logits.stride(0), *terms.numbers),
                **terms.flags,
                BLOCK=config.block,
                STAGES=config.num_stages,
                num_warps=config.num_warps,
                maxnreg=config.maxnreg,
            )
    return loss, lse


def cross_entropy_rows_gradient(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,) int64
    lse: Tensor,  # (T,): of these logits
    scale: Tensor,  # (T,) fp32
    d_logits: Tensor,  # (T, V), may be logits itself
    terms: Terms = PLAIN,
) -> None:
    """Writes the gradient of sum(scale loss) by the logits, rounded once.

    Raises ValueError for a wrong shape, dtype, value, device or layout.
    """
    check_logits(logits, labels)
    terms.check()
    T, V = logits.shape
    for name, x in (("lse", lse), ("scale", scale)):
        check_shape(name, x, (T,))
    check_shape("d_logits", d_logits, (T, V))
    check_rows("d_logits", d_logits)
    if logits.dtype == torch.float64 or not runs_kernel(logits, labels, lse, scale, d_logits):
        given: dict[str, Any] = {"d_logits": d_logits, "scale": scale, **terms._asdict()}
        cross_entropy_reference(logits, labels, **given)
        return
    check_float("d_logits", d_logits)
    if T:
        config = gradient_config(V)
        with on_device(logits):
            _gradient_kernel[(T, triton.cdiv(V, config.block))](
                *(logits, d_logits, labels.contiguous(), lse.contiguous(), scale.contiguous(), V),
                *(logits.stride(0), d_logits.stride(0), *terms.numbers),
                **terms.flags,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )
