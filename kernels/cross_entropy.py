"""Softmax cross-entropy over rows of logits: the loss of each row and, in the same launch, its
gradient.

For logits x (N, V) and labels y (N,), with z = softcap * tanh(x / softcap) if a softcap is given,
else z = x:

    lse    = log sum_j exp(z_j)                                        p_j = exp(z_j - lse)
    loss   = lse - (1 - eps) z_y - eps mean_j(z_j) + z_loss lse^2      (eps: label smoothing)
    d x_j  = scale ((1 + 2 z_loss lse) p_j - (1 - eps) [j = y] - eps / V) (1 - (z_j / softcap)^2)

Nothing is saved: the gradient may be written over the logits themselves (same dtype) or into a
buffer of another dtype, so that fp32 logits become one bf16 gradient with a single rounding. A row
whose label is IGNORE_INDEX has loss 0 and gradient 0; a label outside [0, V) gives loss NaN.

Bytes per row: the logits are read twice (running maximum and sum, then the gradient) and the
gradient is written once. One program walks one row, whose second read partly comes from L2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.launch import (
    Config,
    check_float,
    check_rows,
    check_shape,
    choose,
    on_device,
    round_to,
    runs_kernel,
    tl,
    triton,
)

IGNORE_INDEX = -100


def cross_entropy_reference(
    logits: Tensor,  # (N, V)
    labels: Tensor,  # (N,) int64
    *,
    d_logits: Tensor | None = None,  # (N, V), may be logits itself
    scale: Tensor | None = None,  # () fp32
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:  # (N,) fp32, or fp64 for fp64 logits
    """The equations above in plain torch."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    ignored, outside = labels == IGNORE_INDEX, (labels < 0) | (labels >= z.shape[1])
    y = labels.masked_fill(outside, 0)[:, None]  # (N, 1)
    lse = z.logsumexp(dim=1)
    z_y = z.gather(1, y).squeeze(1).masked_fill_(outside, float("nan"))
    loss = lse - (1 - label_smoothing) * z_y + z_loss * lse**2
    if label_smoothing:
        loss -= label_smoothing * z.mean(dim=1)
    if d_logits is not None:
        grad = torch.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
        grad -= label_smoothing / z.shape[1]
        grad.scatter_add_(1, y, torch.full_like(grad[:, :1], label_smoothing - 1))
        if softcap is not None:
            grad *= 1 - (z / softcap) ** 2
        if scale is not None:
            grad *= scale
        d_logits.copy_(grad.masked_fill_(ignored[:, None], 0))
    return loss.masked_fill(ignored, 0)


@triton.jit
def _cap(x, softcap):
    """softcap * tanh(x / softcap)"""
    return softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # (N, V)
    d_logits_ptr,  # (N, V), may alias logits
    labels_ptr,  # (N,)
    loss_ptr,  # (N,) fp32
    scale_ptr,  # () fp32
    V,
    stride_logits,
    stride_d_logits,
    label_smoothing,
    z_loss,
    softcap,
    HAS_GRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    offs = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    ignored = label == -100
    in_range = (label >= 0) & (label < V)
    x_y = tl.load(logits_ptr + label, mask=in_range, other=float("nan")).to(tl.float32)
    z_y = _cap(x_y, softcap) if HAS_SOFTCAP else x_y

    # Every lane keeps its own maximum and sum, so that no iteration waits for a reduction over the
    # row. The maximum starts at a finite value: (-inf) - (-inf) would be NaN in a lane past the
    # end.
    lane_max = tl.full([BLOCK], -1e30, tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    lane_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        mask = start + offs < V
        # Kept in L2 for the second pass where it fits; what the second pass touches is not.
        z = tl.load(
            logits_ptr + start + offs,
            mask=mask,
            other=float("-inf"),
            eviction_policy="evict_last",
        ).to(tl.float32)
        if HAS_SOFTCAP:
            z = tl.where(mask, _cap(z, softcap), float("-inf"))
        if HAS_SMOOTHING:
            lane_total += tl.where(mask, z, 0.0)
        new_max = tl.maximum(lane_max, z)
        lane_sum = lane_sum * tl.exp(lane_max - new_max) + tl.exp(z - new_max)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    lse = row_max + tl.log(tl.sum(lane_sum * tl.exp(lane_max - row_max), axis=0))

    loss = lse - (1 - label_smoothing) * z_y + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss -= label_smoothing * tl.sum(lane_total, axis=0) / V
    tl.store(loss_ptr + row, tl.where(ignored, 0.0, loss))

    if HAS_GRAD:
        d_logits_ptr += row * stride_d_logits
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr)
        scale = tl.where(ignored, 0.0, scale)
        p_scale = scale * (1 + 2 * z_loss * lse)
        y_scale = scale * (1 - label_smoothing)
        for start in range(0, V, BLOCK):
            mask = start + offs < V
            z = tl.load(
                logits_ptr + start + offs,
                mask=mask,
                other=float("-inf"),
                eviction_policy="evict_first",
            ).to(tl.float32)
            if HAS_SOFTCAP:
                z = _cap(z, softcap)
            grad = p_scale * tl.exp(z - lse) - tl.where(start + offs == label, y_scale, 0.0)
            if HAS_SMOOTHING:
                grad -= scale * label_smoothing / V
            if HAS_SOFTCAP:
                grad *= 1 - (z / softcap) * (z / softcap)
            grad = round_to(grad, d_logits_ptr.dtype.element_ty)
            tl.store(d_logits_ptr + start + offs, grad, mask=mask, eviction_policy="evict_first")


def cross_entropy(
    logits: Tensor,  # (N, V) bf16, fp16 or fp32
    labels: Tensor,  # (N,) int64
    *,
    d_logits: Tensor | None = None,  # (N, V), may be logits itself
    scale: Tensor | None = None,  # () fp32
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:  # (N,) fp32
    """Per-row loss; if `d_logits` is given, `scale` times the gradient of the summed loss is
    written there.

    Not differentiable by autograd: `longctx.loss` calls it chunk by chunk. Raises ValueError for a
    wrong shape, dtype, device or layout.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (N, V), got {tuple(logits.shape)}")
    N, V = logits.shape
    check_float("logits", logits)
    check_rows("logits", logits)
    check_shape("labels", labels, (N,))
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    if d_logits is not None:
        check_shape("d_logits", d_logits, (N, V))
        check_float("d_logits", d_logits)
        check_rows("d_logits", d_logits)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if not runs_kernel(logits, labels, d_logits, scale):
        return cross_entropy_reference(
            logits,
            labels,
            d_logits=d_logits,
            scale=scale,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
        )

    loss = torch.empty(N, dtype=torch.float32, device=logits.device)
    labels = labels.contiguous()

    def launch(config: Config) -> None:
        _cross_entropy_kernel[(N,)](
            logits,
            logits if d_logits is None else d_logits,
            labels,
            loss,
            scale,
            V,
            logits.stride(0),
            logits.stride(0) if d_logits is None else d_logits.stride(0),
            label_smoothing,
            z_loss,
            1.0 if softcap is None else softcap,
            HAS_GRAD=d_logits is not None,
            HAS_SCALE=scale is not None,
            HAS_SMOOTHING=label_smoothing != 0,
            HAS_SOFTCAP=softcap is not None,
            BLOCK=config.block,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    default = default_config(V, label_smoothing == 0 and softcap is None)
    candidates = [Config(block=b, num_warps=w) for b in (2048, 4096, 8192) for w in (4, 8, 16)]
    if N:
        with on_device(logits):
            key = (triton.next_power_of_2(V), logits.dtype)
            launch(choose("cross_entropy", key, default, candidates, launch, [logits]))
    return loss


def default_config(V: int, plain: bool = True) -> Config:
    """One row per multiprocessor at a time (1024 threads) leaves L2 room for the second read."""
    largest = 16384 if plain else 4096  # smoothing and soft-capping need more registers a thread
    block = min(largest, max(128, triton.next_power_of_2(V)))
    return Config(block=block, num_warps=32 if block == 16384 else 8 if block >= 4096 else 4)
