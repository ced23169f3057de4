"""Divergence of a student from a teacher over the vocabulary, from the hidden states and heads of
both, by the streaming head (stream.py): what distillation trains on.

    p = softmax((hidden @ weight.T + bias) / temperature)                          student
    q = softmax((teacher_hidden @ teacher_weight.T + teacher_bias) / temperature)  teacher

    linear_kl     KL(q | p), forward, or KL(p | q), reverse
    linear_jsd    beta KL(q | m) + (1 - beta) KL(p | m), m = beta q + (1 - beta) p

FLOPs per token that counts, for V entries, D features of the student and E of the teacher:

                                    forward              backward
    values alone                    2 V (D + E)
    mean or sum                     2 V (3 D + E)        0
    per token, frozen head          2 V (2 D + E)        0
    per token, else                 2 V (D + E)          2 V (3 D + E)

Of the student at most d_hidden (T, D) and the fp32 d_weight (V, D) are saved, or all hidden states
and heads where logits are computed again. No logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.head.pieces import Head, LogitsPiece, Rows
from longctx.head.stream import (
    KeptObjective,
    Reduction,
    check_between,
    check_count,
    check_device,
    check_labels,
    check_positive,
    check_reduction,
    checked_head,
    logits_budget,
    per_row,
    reduced,
)
from longctx.kernels import divergence as kernel
from longctx.kernels.divergence import How


def linear_jsd_reference(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    teacher_hidden: Tensor,  # (T, E) or (B, S, E)
    teacher_weight: Tensor,  # (V, E)
    labels: Tensor | None = None,  # (T,) or (B, S)
    *,
    beta: float = 0.5,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Computes `linear_jsd` by ordinary autograd, with all logits held, for tests and readers."""
    logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2)  # (T, V)
    with torch.no_grad():
        teacher = torch.nn.functional.linear(teacher_hidden, teacher_weight, teacher_bias)
    how = How(beta, temperature, softcap, teacher_softcap)
    values = kernel.divergence_reference(logits, teacher.flatten(0, -2), how).value
    counts = torch.ones_like(values, dtype=torch.bool)
    if labels is not None:
        counts = labels.flatten() != IGNORE_INDEX
        values = values.masked_fill(~counts, 0)
    if reduction == "none":
        return values.view(hidden.shape[:-1])
    if num_items is not None:
        return values.sum() / num_items
    return values.sum() / (max(1, int(counts.sum())) if reduction == "mean" else 1)


class _Divergence(KeptObjective):
    kind, outputs = kernel.Divergence, ("value",)

    def __init__(self, how: How) -> None:
        self._how, self.divisor = how, how.temperature

    def find(self, piece: LogitsPiece, labels: Tensor) -> kernel.Divergence:
        student, teacher = piece.logits
        return kernel.divergence(student, teacher, self._how)

    def write_gradient(
        self, piece: LogitsPiece, labels: Tensor, found: Any, d_values: Sequence[Tensor | None]
    ) -> None:
        assert piece.d_logits is not None
        (student, teacher), (weights,) = piece.logits, d_values
        assert weights is not None
        kernel.divergence_gradient(student, teacher, found, piece.d_logits, weights, self._how)


def linear_jsd(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    teacher_hidden: Tensor,  # (T, E) or (B, S, E)
    teacher_weight: Tensor,  # (V, E)
    labels: Tensor | None = None,  # (T,) or (B, S), aligned with hidden; None: all tokens count
    *,
    beta: float = 0.5,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V,)
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_bytes: int | None = None,
) -> Tensor:  # () fp32, or (T,) or (B, S) for reduction="none"
    """Generalised Jensen-Shannon divergence of a student's distribution p from a teacher's q.

    Shapes: hidden is (T, D) or (B, S, D), teacher_hidden (T, E) or (B, S, E), weight (V, D),
    teacher_weight (V, E), the biases (V,) and labels (T,) or (B, S), int64. The loss is fp32, of
    shape (), or of the labels' shape for `reduction="none"`.

    It is beta KL(q | m) + (1 - beta) KL(p | m) with m = beta q + (1 - beta) p; at beta=0 it is
    KL(q | p), forward KL, and at beta=1 KL(p | q), reverse KL. `labels` say only which tokens
    count: those of -100 do not, and cost nothing. The sum over the others is divided by `num_items`
    if given (the count over a whole gradient accumulation), else by their number
    (`reduction="mean"`), else by nothing (`"sum"`); `"none"` returns each token's, 0 where it does
    not count. `softcap` bounds a head's logits by softcap * tanh(logits / softcap) before the
    temperature divides both heads'. A model's own divisor of logits (Granite's `logits_scaling`)
    belongs to its hidden states. `logits_bytes` bounds the logits held at a time.

    Differentiable in hidden, weight and bias; the teacher gets no gradient. D and E may differ, and
    so may the 16- or 32-bit dtypes of student and teacher. With a sum or mean backward may run
    once. Raises ValueError for a wrong shape, dtype or value, and for vocabularies that differ.

    Example:
        >>> import longctx, torch
        >>> hidden, weight = torch.randn(3, 8), torch.randn(16, 8)
        >>> taught, teacher_weight = torch.randn(3, 32), torch.randn(16, 32)
        >>> loss = longctx.linear_jsd(hidden, weight, taught, teacher_weight, beta=0.5)
        >>> 0 < loss.item() < 0.6932  # log(2) is the most it can be for beta=0.5
        True
        >>> agreed = longctx.linear_jsd(hidden, weight, hidden, weight)  # its own teacher
        >>> abs(agreed.item()) < 1e-6
        True

    Source: GKD (arXiv 2306.13649); the values are those of TRL's
    `GKDTrainer.generalized_jsd_loss`.
    """
    how = How(beta, temperature, softcap, teacher_softcap)
    student, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    return _divergence(student, teacher, labels, how, reduction, num_items, logits_bytes)


def linear_kl(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    teacher_hidden: Tensor,  # (T, E) or (B, S, E)
    teacher_weight: Tensor,  # (V, E)
    labels: Tensor | None = None,  # (T,) or (B, S), aligned with hidden; None: all tokens count
    *,
    reverse: bool = False,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V,)
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_bytes: int | None = None,
    **unknown: NoReturn,
) -> Tensor:  # () fp32, or (T,) or (B, S) for reduction="none"
    """Kullback-Leibler divergence of a student's distribution p from a teacher's q: KL(q | p), or
    with `reverse` KL(p | q).

    Shapes, options, precision and errors are those of `longctx.linear_jsd`, whose `beta=0` and
    `beta=1` these two are: hidden is (T, D) or (B, S, D), teacher_hidden (T, E) or (B, S, E),
    weight (V, D) and teacher_weight (V, E). Raises TypeError for an unknown option.

    Example:
        >>> import longctx, torch
        >>> head = torch.eye(2)  # hidden states are logits
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
        >>> longctx.linear_kl(student, head, teacher, head)  # KL(q | p), p = (1/2, 1/2)
        tensor(0.1109)
        >>> longctx.linear_kl(student, head, teacher, head, reverse=True)  # KL(p | q)
        tensor(0.1201)
    """
    if "beta" in unknown:
        raise TypeError("linear_kl has no beta: reverse=True is linear_jsd's beta=1")
    if unknown:
        raise TypeError(f"linear_kl has no option {next(iter(unknown))!r}")
    how = How(1.0 if reverse else 0.0, temperature, softcap, teacher_softcap)
    student, teacher = (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias)
    return _divergence(student, teacher, labels, how, reduction, num_items, logits_bytes)


_Given = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states (T, D) or (B, S, D), weight (V, D) and bias (V,) of one head."""


def _divergence(
    student: _Given,
    teacher: _Given,
    labels: Tensor | None,  # (T,) or (B, S)
    how: How,
    reduction: Reduction,
    num_items: int | Tensor | None,
    logits_bytes: int | None,
) -> Tensor:  # (), or (T,) or (B, S)
    hidden, weight, _ = student
    head = checked_head(*student, float64=True)
    heads = *head, *_checked_teacher(hidden, head, teacher)
    if labels is None:
        labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    check_labels(labels, hidden)
    check_between("beta", how.beta, "[0, 1]")
    check_reduction(reduction)
    check_count(num_items)
    if reduction == "none" and num_items is not None:
        raise ValueError("num_items divides a sum: it is impossible with reduction='none'")
    softcaps = {"softcap": how.softcap, "teacher_softcap": how.teacher_softcap}
    check_positive(temperature=how.temperature, **softcaps)
    logits_bytes = logits_budget(logits_bytes, weight)
    rows = Rows(labels.flatten(), len(weight))
    if reduction == "none":
        return per_row(_Divergence(how), heads, rows, logits_bytes)[0].view(labels.shape)
    count = 1 if num_items is None and reduction == "sum" else num_items
    return reduced(_Divergence(how), heads, rows, count, logits_bytes)


def _checked_teacher(hidden: Tensor, student: Head, teacher: _Given) -> Head:
    """Returns the teacher's head without gradients. Raises ValueError unless it fits the student's
    rows, vocabulary and precision."""
    teacher_hidden, teacher_weight, bias = teacher
    bias = None if bias is None else bias.detach()
    given = teacher_hidden.detach(), teacher_weight.detach(), bias
    head = checked_head(*given, of="teacher_", float64=True)
    check_device(hidden, teacher_hidden=teacher_hidden)
    if len(head.weight) != len(student.weight):
        raise ValueError(
            f"student and teacher must have one vocabulary, got {len(student.weight)} entries in "
            f"weight and {len(head.weight)} in teacher_weight"
        )
    if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher_hidden must have shape {(*hidden.shape[:-1], teacher_hidden.shape[-1])}, "
            f"got {tuple(teacher_hidden.shape)}"
        )
    if (student.hidden.dtype == torch.float64) != (head.hidden.dtype == torch.float64):
        raise ValueError(
            f"teacher_hidden must be {hidden.dtype} as hidden is, got {teacher_hidden.dtype}"
        )
    return head
