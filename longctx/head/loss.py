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
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Table, Work
from longctx.head.pieces import RowCount, Rows
from longctx.head.stream import (
    Objective,
    check_count,
    check_labels,
    check_number,
    check_positive,
    checked_head,
    logits_budget,
    reduced,
)
from longctx.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_forward


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
) -> Tensor:  # scalar
    """Computes the loss by ordinary autograd, with all logits held, for tests and readers."""
    logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2)  # (T, V)
    z = (logits if logits.dtype == torch.float64 else logits.float()) / logits_scaling
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    y = labels.flatten()
    loss = torch.nn.functional.cross_entropy(
        z, y, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )
    if num_items is not None:
        return loss / num_items
    return loss / max(1, int((y != IGNORE_INDEX).sum())) if reduction == "mean" else loss


class _CrossEntropy(Objective):
    in_place = True

    def __init__(self, logits_scaling: float, options: dict[str, Any]) -> None:
        self.divisor, self._options = logits_scaling, options

    def prepare(self, rows: Rows, dtype: torch.dtype) -> None:
        self._labels = rows.labels
        self.values = (torch.empty(len(rows), dtype=dtype, device=rows.labels.device),)

    def forward(
        self, logits: list[Tensor], part: slice, d_logits: Tensor | None, scale: Tensor
    ) -> None:
        (z,), labels = logits, self._labels[part]
        if self.divisor != 1.0:
            z /= self.divisor
        losses = cross_entropy_forward(z, labels, d_logits=d_logits, scale=scale, **self._options)
        self.values[0][part] = losses


def linear_cross_entropy(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S), already aligned with hidden: nothing is shifted here
    *,
    bias: Tensor | None = None,  # (V,)
    num_items: int | Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logits_scaling: float = 1.0,
    logits_bytes: int | None = None,
    counted: RowCount | None = None,
) -> Tensor:  # () fp32
    """Cross-entropy of hidden @ weight.T + bias, differentiable in hidden, weight and bias.

    Shapes: hidden is (T, D) with labels (T,), or (B, S, D) with labels (B, S); weight is (V, D) and
    bias (V,). hidden and weight have one dtype, bf16, fp16 or fp32; labels are int64, in [0, V) or
    -100. The loss is fp32, of shape ().

    Labels of -100 are ignored. The sum over the others is divided by `num_items` if given (the
    count over a whole gradient accumulation, HF's `num_items_in_batch`), else by their number
    (`reduction="mean"`), else by nothing (`"sum"`). Without any label that counts the loss is 0.
    `label_smoothing`, in [0, 1], is torch.nn.functional.cross_entropy's. `softcap` bounds the
    logits by softcap * tanh(logits / softcap), `logits_scaling` divides them before that,
    `logits_bytes` bounds the logits held at a time (default: `default_logits_bytes`).
    `counted` is of these labels, from whoever had them earlier: the host does not wait for the GPU
    then.

    Without gradients (torch.no_grad, or nothing that requires them) none are computed. Backward may
    run once: a second one is a RuntimeError. Raises ValueError for a wrong shape, dtype or value.

    Example:
        >>> import longctx, torch
        >>> hidden = torch.zeros(1, 3, 8, requires_grad=True)
        >>> weight = torch.zeros(16, 8)  # of an lm_head with 16 tokens, all as likely
        >>> labels = torch.tensor([[5, 9, -100]])
        >>> longctx.linear_cross_entropy(hidden, weight, labels).item()  # log(16)
        2.77258...
    """
    trained = weight.requires_grad
    head = checked_head(hidden, weight, bias)
    check_labels(labels, hidden)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    check_count(num_items)
    check_number(label_smoothing=label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    check_positive(softcap=softcap, logits_scaling=logits_scaling)
    logits_bytes = logits_budget(logits_bytes, weight, trained)
    rows = Rows(labels.flatten(), len(weight), counted)
    count = 1 if num_items is None and reduction == "sum" else num_items
    options = {"label_smoothing": label_smoothing, "softcap": softcap}
    return reduced(_CrossEntropy(logits_scaling, options), head, rows, count, logits_bytes)


# --- what it costs ---------------------------------------------------------------------------


def loss_cost(s: Sizes, batch: Batch) -> Table:
    """The cost of the loss. Logits are written and read twice in fp32, their gradient is written
    and read twice in 16 bits, and lm_head's gradient is summed in fp32 over groups of rows.
    Backward rounds that gradient when what forward read is gone."""
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
