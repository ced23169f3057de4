"""lm_head and cross-entropy as one operation, by the streaming head (stream.py).

    logits = hidden @ weight.T + bias              (T, V), never held whole
    loss   = sum_i cross_entropy(logits_i, labels_i) / count

The gradients are computed in forward, chunk by chunk, and backward only scales them:

    d_logits = softmax(logits) - onehot(labels)    written by the kernel that computes the loss
    d_hidden = d_logits @ weight
    d_weight = sum over chunks of d_logits.T @ hidden, accumulated in fp32

FLOPs per token that counts: 6 V D (2 V D without gradients). Saved for backward: d_hidden (T, D)
and the fp32 d_weight (V, D), which is rounded once, in backward, together with the scale. The scale
1 / count is split into a mantissa, applied before d_logits is rounded, and a power of two, applied
in backward.

The 16-bit gradients of a piece are compacted into the first half of its own logits.

Losses that are wanted one by one (`reduction="none"`, weights of classes) have weights that only
backward knows. Forward keeps the lse of each row then, and backward computes the logits again,
unless the head is frozen (stream.py has the FLOPs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Table, Work
from longctx.head.pieces import LogitsPiece, RowCount, Rows
from longctx.head.stream import (
    Objective,
    Reduction,
    check_between,
    check_class_weight,
    check_count,
    check_labels,
    check_number,
    check_positive,
    check_reduction,
    checked_head,
    ignoring,
    logits_budget,
    per_row,
    reduced,
    refuse_others,
    weighted_mean,
)
from longctx.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_forward
from longctx.kernels.cross_entropy_rows import (
    Terms,
    cross_entropy_rows,
    cross_entropy_rows_gradient,
)


def linear_cross_entropy_reference(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S)
    *,
    bias: Tensor | None = None,
    num_items: int | Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logits_scaling: float = 1.0,
    lse_square_scale: float = 0.0,
) -> Tensor:  # scalar
    """Computes the loss by ordinary autograd, with all logits held, for tests and readers."""
    logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2)  # (T, V)
    z = (logits if logits.dtype == torch.float64 else logits.float()) / logits_scaling
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    y = labels.flatten()
    loss = torch.nn.functional.cross_entropy(
        z, y, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )
    loss = loss + lse_square_scale * z[y != IGNORE_INDEX].logsumexp(-1).square().sum()
    if num_items is not None:
        return loss / num_items
    return loss / max(1, int((y != IGNORE_INDEX).sum())) if reduction == "mean" else loss


class _CrossEntropy(Objective):
    """The loss of each row, for a loss that sums them: all rows have one gradient."""

    in_place = True

    def __init__(self, logits_scaling: float, terms: Terms) -> None:
        self.divisor, self._terms = logits_scaling, terms

    def prepare(self, rows: Rows, dtype: torch.dtype) -> None:
        self._labels = rows.labels
        self.values = (torch.empty(len(rows), dtype=dtype, device=rows.labels.device),)

    def forward(self, piece: LogitsPiece, scale: Tensor) -> None:
        more: dict[str, Any] = {"d_logits": piece.d_logits, "scale": scale, **self._terms._asdict()}
        self.values[0][piece.part] = cross_entropy_forward(*self._scaled(piece), **more)

    def _scaled(self, piece: LogitsPiece) -> tuple[Tensor, Tensor]:
        """Returns the divided logits and the labels."""
        (z,) = piece.logits
        return z if self.divisor == 1.0 else z.div_(self.divisor), self._labels[piece.part]


class _EachCrossEntropy(_CrossEntropy):
    """The loss of each row, for losses that weigh each row by its own gradient."""

    in_place = False  # its gradient's kernel has no order in which rows of logits are read

    def prepare(self, rows: Rows, dtype: torch.dtype) -> None:
        super().prepare(rows, dtype)
        self._lse = torch.empty_like(self.values[0])

    def forward(self, piece: LogitsPiece, scale: Tensor) -> None:
        if piece.d_logits is not None:
            return super().forward(piece, scale)
        found = cross_entropy_rows(*self._scaled(piece), self._terms)
        self.values[0][piece.part], self._lse[piece.part] = found

    def backward(self, piece: LogitsPiece, d_values: Sequence[Tensor | None]) -> None:
        (scale,) = d_values
        assert scale is not None and piece.d_logits is not None
        given = *self._scaled(piece), self._lse[piece.part], scale, piece.d_logits
        cross_entropy_rows_gradient(*given, self._terms)


def linear_cross_entropy(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S), already aligned with hidden: nothing is shifted here
    *,
    bias: Tensor | None = None,  # (V,)
    ce_weight: Tensor | None = None,  # (V,)
    ignore_index: int = IGNORE_INDEX,
    num_items: int | Tensor | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logits_scaling: float = 1.0,
    lse_square_scale: float = 0.0,
    logits_bytes: int | None = None,
    counted: RowCount | None = None,
    **others: Any,
) -> Tensor:  # () fp32, or of labels' shape for reduction="none"
    """Cross-entropy of hidden @ weight.T + bias, differentiable in hidden, weight and bias.

    Shapes: hidden is (T, D) with labels (T,), or (B, S, D) with labels (B, S); weight is (V, D) and
    bias (V,). hidden and weight have one dtype, bf16, fp16 or fp32; labels are int64, in [0, V) or
    `ignore_index`. The loss is fp32, of shape (), or of labels' shape for `reduction="none"`.

    Labels of `ignore_index` are left out. The sum over the others is divided by `num_items` if
    given (the count over a whole gradient accumulation, HF's `num_items_in_batch`), else by their
    number (`reduction="mean"`), else by nothing (`"sum"`). Without any label that counts the loss
    is 0. `ce_weight` has a factor for each class, and the mean is divided by the factors' sum, as
    in torch.nn.functional.cross_entropy. `label_smoothing`, in [0, 1], is torch's. `softcap` bounds
    the logits by softcap * tanh(logits / softcap), `logits_scaling` divides them before that,
    `lse_square_scale` adds that factor times the square of the log of the sum of exponentials
    (PaLM's z-loss) to each loss, `logits_bytes` bounds the logits held at a time (default:
    `default_logits_bytes`). `counted` is the count of these labels, if the caller has made it: the
    host does not wait for the GPU then.

    Without gradients (torch.no_grad, or nothing that requires them) none are computed. Backward may
    run once: a second one is a RuntimeError. With `ce_weight` or `reduction="none"` it computes the
    logits again unless weight and bias are frozen.

    Raises ValueError for a wrong shape, dtype or value, for `ce_weight` together with
    `label_smoothing`, `lse_square_scale` or `num_items`, and for `others`, arguments of
    Liger-Kernel's and Apple's losses that it does not have, with what to do instead.

    Example:
        >>> import longctx, torch
        >>> hidden = torch.zeros(1, 3, 8, requires_grad=True)
        >>> weight = torch.zeros(16, 8)  # of an lm_head with 16 tokens, all as likely
        >>> labels = torch.tensor([[5, 9, -100]])
        >>> longctx.linear_cross_entropy(hidden, weight, labels).item()  # log(16)
        2.77258...
    """
    refuse_others("linear_cross_entropy", others)
    head = checked_head(hidden, weight, bias)
    check_labels(labels, hidden)
    check_count(num_items)
    check_positive(softcap=softcap, logits_scaling=logits_scaling)
    check_number(lse_square_scale=lse_square_scale)
    check_between("label_smoothing", label_smoothing, "[0, 1]")
    check_reduction(reduction)
    of_classes = "ce_weight", ce_weight, weight, len(weight)
    check_class_weight(*of_classes, label_smoothing, lse_square_scale)
    logits_bytes = logits_budget(logits_bytes, weight)
    labels = ignoring(labels, ignore_index)
    rows = Rows(labels.flatten(), len(weight), counted)
    terms = Terms(label_smoothing, softcap, lse_square_scale)
    if ce_weight is None and reduction != "none":
        count = 1 if num_items is None and reduction == "sum" else num_items
        return reduced(_CrossEntropy(logits_scaling, terms), head, rows, count, logits_bytes)
    if num_items is not None:
        raise ValueError("num_items goes with neither ce_weight nor reduction='none'")
    (losses,) = per_row(_EachCrossEntropy(logits_scaling, terms), head, rows, logits_bytes)
    return weighted_mean(losses.view(labels.shape), labels, ce_weight, reduction)


# --- what it costs ---------------------------------------------------------------------------


def loss_cost(s: Sizes, batch: Batch) -> Table:
    """Returns the cost of the loss. Logits are written and read twice in fp32, their gradient is
    written and read twice in 16 bits, and lm_head's gradient is summed in fp32 over groups of rows.
    Backward rounds that gradient after forward's operands were freed."""
    tokens, unit = batch.labelled, s.unit(batch.tokens)
    rows = loss_rows(s, batch.tokens)
    head = s.hidden * s.vocab * s.trains_head
    forward = {
        "the same, normed": unit,
        "logits": min(s.cut(batch.tokens).logits_bytes, 4 * tokens * s.vocab),
        # hidden and its gradient, where labels that do not count are left out
        "rows of the loss": 2 * min(tokens, rows) * s.hidden * s.itemsize,
    }
    backward = {"the same, rounded": s.itemsize * head}
    buffers = {
        "last layer's output": unit,
        "its gradient": unit,
        "lm_head's gradient, fp32": 4 * head,
        **max(forward, backward, key=lambda alive: sum(alive.values())),
    }
    return Table(
        forward=(
            Work(
                name="loss",
                flops=(6 if s.trains_head else 4) * tokens * s.vocab * s.hidden,
                nbytes=18.0 * tokens * s.vocab + 8 * -(-tokens // rows) * head,
            ),
        ),
        buffers=tuple(Buffer(name=k, nbytes=n, during="loss") for k, n in buffers.items()),
    )


def loss_rows(s: Sizes, tokens: int) -> int:
    """Returns the rows of a group of pieces."""
    lines = s.cut(tokens).logits_bytes // (2 * s.vocab)
    return max(1, lines * 7 // 8 if s.itemsize < 4 else lines // 2)
