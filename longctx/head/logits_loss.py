"""Cross-entropy of logits that the caller has computed; the gradient takes the logits' own memory.

    loss_i = cross-entropy of row i, with label smoothing, softcap and the square of lse
    loss   = sum_i w_i loss_i / sum_i w_i          w_i = weight[label_i], else 1; 0 where ignored

Forward reads the logits and leaves them as they are. Backward reads them again and writes their
gradient over them, scaled by the upstream gradient of each row, so that it is rounded once. Saved:
the logits, which exist anyway, the labels, and a number a row (kernels/cross_entropy_rows.py).
(Liger's kernel writes the gradient in forward, so that code which reads the logits in between gets
gradients, and scales it in backward.)

The memory is not free for the gradient if the logits are a leaf or a view of one, or if rows share
memory (`expand`): the gradient then gets other memory. If another operation has saved the logits,
autograd raises RuntimeError when that operation's backward comes after ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.head.logits import LazyLogits
from longctx.head.stream import (
    Reduction,
    check_between,
    check_class_weight,
    check_labels,
    check_number,
    check_positive,
    check_reduction,
    ignoring,
    refuse_others,
    weighted_mean,
)
from longctx.kernels.annotate import annotated
from longctx.kernels.cross_entropy_rows import (
    Terms,
    cross_entropy_rows,
    cross_entropy_rows_gradient,
)
from longctx.kernels.launch import check_float, check_rows, once_differentiable


class _CrossEntropy(torch.autograd.Function):
    """Computes the loss of each row, (B, S)."""

    @staticmethod
    @annotated("loss")
    def forward(
        ctx: Any,
        logits: Tensor,  # (B, S, V)
        labels: Tensor,  # (B, S)
        in_place: bool,
        terms: Terms,
    ) -> Tensor:
        found = [cross_entropy_rows(x, y, terms) for x, y in _parts(logits, labels)]
        losses, lse = (torch.cat(x).view(labels.shape) for x in zip(*found, strict=True))
        ctx.save_for_backward(logits, labels, lse)
        ctx.in_place, ctx.terms = in_place, terms
        return losses

    @staticmethod
    @once_differentiable
    @annotated("loss")
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:  # (B, S)
        logits, labels, lse = ctx.saved_tensors
        if ctx.in_place:
            # A new version makes autograd raise if anything reads the saved logits again, for
            # instance a second backward, whose result would otherwise be silently wrong.
            torch.autograd.graph.increment_version(logits)
        logits = logits.detach()
        d_logits = logits if ctx.in_place else torch.empty_like(logits)
        for x, y, of_rows, scale, d_x in _parts(logits, labels, lse, d_losses, d_logits):
            cross_entropy_rows_gradient(x, y, of_rows, scale, d_x, ctx.terms)
        return d_logits, None, None, None


def _parts(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:  # (B, S, ...)
    """Yields views of the logits as (T, V), with the rows of the other tensors: all at once, or one
    batch row after the other if these do not lie at one stride, as in `logits[:, :-1]`."""
    B, S, _ = logits.shape
    if B > 1 and logits.stride(0) != S * logits.stride(1):
        yield from zip(logits, *others, strict=True)
    else:
        yield tuple(x.flatten(0, 1) for x in (logits, *others))


def cross_entropy(
    logits: Tensor,  # (T, V) or (B, S, V)
    labels: Tensor,  # (T,) or (B, S), already aligned with logits: nothing is shifted here
    *,
    weight: Tensor | None = None,  # (V,)
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    **others: Any,
) -> Tensor:  # () fp32, or of labels' shape for reduction="none"
    """Cross-entropy of logits that are there, differentiable in them. Backward overwrites logits.

    Shapes: logits is (T, V) with labels (T,), or (B, S, V) with labels (B, S). logits are bf16,
    fp16, fp32 or fp64, contiguous in their last dimension; labels are int64, in [0, V) or
    `ignore_index`, and any other label gives NaN. The loss is fp32 (fp64 for fp64 logits), of shape
    (), or of labels' shape for `reduction="none"`. Where the logits come from an lm_head,
    `longctx.linear_cross_entropy` needs none of them.

    The sum over labels that are not ignored is divided by their number ("mean"), or by nothing
    ("sum"). Without any label that counts the loss is 0. `weight` has a factor for each class, and
    the mean is divided by the factors' sum, as in torch.nn.functional.cross_entropy.
    `label_smoothing`, in [0, 1], is torch's. `softcap` bounds the logits by
    softcap * tanh(logits / softcap). `lse_square_scale` adds that factor times the square of the
    log of the sum of exponentials (PaLM's z-loss) to each loss.

    Saves logits, and writes their gradient over them in backward: clone what you read afterwards.
    Logits that are a leaf, a view of one, or expanded are left alone, and their gradient takes
    memory of its own. In backward, autograd raises RuntimeError if another operation still needs
    the logits that it saved, or if backward runs twice.

    Raises ValueError for a wrong shape, dtype, value or layout, for `weight` together with
    `label_smoothing` or `lse_square_scale`, and for `others`, arguments of Liger-Kernel's loss that
    it does not have, with what to do instead.

    Example:
        >>> import longctx, torch
        >>> hidden, head = torch.randn(2, 5, 8), torch.nn.Linear(8, 16)
        >>> labels = torch.tensor([[3, 1, 4, 1, -100], [2, 7, 1, -100, -100]])
        >>> loss = longctx.cross_entropy(head(hidden), labels)  # mean of 7
        >>> loss.backward()
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden).mT, labels))
        True
    """
    refuse_others("cross_entropy", others)
    if isinstance(logits, LazyLogits):
        logits = logits.read()
    _check(logits, labels, weight, reduction, label_smoothing, softcap, lse_square_scale)
    terms = Terms(label_smoothing, softcap, lse_square_scale)
    targets = ignoring(labels, ignore_index)
    batch = (logits, targets) if logits.dim() == 3 else (logits[None], targets[None])
    losses = _CrossEntropy.apply(*batch, _is_spare(logits), terms).view(labels.shape)
    return weighted_mean(losses, targets, weight, reduction)


def _is_spare(logits: Tensor) -> bool:
    """Whether backward may overwrite the memory: it is no leaf's, and no two rows share it."""
    owner = logits if logits._base is None else logits._base
    expanded = any(logits.shape[i] > 1 and not logits.stride(i) for i in range(logits.dim()))
    return not owner.is_leaf and not expanded


def _check(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    lse_square_scale: float,
) -> None:
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits must have shape (T, V) or (B, S, V), got {tuple(logits.shape)}")
    if logits.dtype != torch.float64:
        check_float("logits", logits)
    check_rows("logits", logits)
    check_labels(labels, logits)
    check_reduction(reduction)
    check_number(lse_square_scale=lse_square_scale)
    check_between("label_smoothing", label_smoothing, "[0, 1]")
    check_positive(softcap=softcap)
    vocab = logits.shape[-1]
    check_class_weight("weight", weight, logits, vocab, label_smoothing, lse_square_scale)
