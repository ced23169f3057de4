"""lm_head and the log-probabilities of labels as one operation, by the streaming head (stream.py):
what preference and policy-gradient losses (DPO, KTO, ORPO, GRPO, ...) need.

    z = (hidden @ weight.T + bias) / temperature   (T, V), never held whole
    log_probs_i = z_i,y - logsumexp(z_i)           entropy_i = -sum_j p_ij log p_ij

The gradient of each row is known in backward only, so logits are computed twice where the head
trains. FLOPs per token that counts, and saved for backward:

    without gradients                                             2 V D   nothing
    weight or bias trains                                         8 V D   hidden (T, D)
    frozen head (LoRA), log_probs and entropy                     6 V D   hidden (T, D)
    frozen head, one of them                                      4 V D   d_hidden (T, D), 16-bit

With a frozen head and one gradient a row, forward computes d_hidden for a gradient of one, and
backward multiplies its rows by theirs. A second gradient, the entropy's, would be a second product
in forward. Backward may run as often as the graph is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Table, Work
from longctx.head.pieces import LogitsPiece, RowCount, Rows
from longctx.head.stream import (
    KeptObjective,
    check_labels,
    check_positive,
    checked_head,
    logits_budget,
    per_row,
)
from longctx.kernels import log_softmax as kernel

OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
WITH_GRADIENT = ("log_probs", "entropy")


class TokenLogProbs(NamedTuple):
    """The outputs of `linear_log_probs` for each token, in the labels' shape; None for those that
    were not asked for. Tokens whose label is ignored have 0, or False."""

    log_probs: Tensor | None = None
    """Log-probability of the label, fp32; differentiable."""
    entropy: Tensor | None = None
    """Entropy of the distribution over the vocabulary in nats, fp32; differentiable."""
    mean_logits: Tensor | None = None
    """Mean over the vocabulary of the logits, capped and divided by the temperature; fp32."""
    is_top1: Tensor | None = None
    """Whether the label has the largest logit, the first of them if several are equal; bool."""


def linear_log_probs_reference(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S)
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = OUTPUTS,
) -> TokenLogProbs:
    """Computes the values by ordinary autograd, with all logits held, for tests and readers."""
    logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2)  # (T, V)
    y = labels.flatten()
    found = kernel.log_softmax_reference(logits, y, temperature=temperature, softcap=softcap)
    ignored = y == IGNORE_INDEX
    values = {name: getattr(found, name).masked_fill(ignored, 0) for name in outputs}
    return TokenLogProbs(**{name: x.view(labels.shape) for name, x in values.items()})


class _LogProbs(KeptObjective):
    kind = kernel.LogProbs

    def __init__(self, outputs: Sequence[str], temperature: float, softcap: float | None) -> None:
        self.outputs = [name for name in OUTPUTS if name in outputs]  # those with gradients first
        self.gradients = sum(name in WITH_GRADIENT for name in self.outputs)
        self.divisor = temperature
        self._options: dict[str, Any] = {"temperature": temperature, "softcap": softcap}

    def find(self, piece: LogitsPiece, labels: Tensor) -> kernel.LogProbs:
        return kernel.log_softmax(piece.logits[0], labels, **self._options)

    def write_gradient(
        self, piece: LogitsPiece, labels: Tensor, found: Any, d_values: Sequence[Tensor | None]
    ) -> None:
        assert piece.d_logits is not None
        named = dict(zip(self.outputs, d_values, strict=False))
        weights = [named.get(name) for name in WITH_GRADIENT]
        given = piece.logits[0], labels, found, piece.d_logits, *weights
        kernel.log_softmax_gradient(*given, **self._options)


def linear_log_probs(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S), already aligned with hidden: nothing is shifted here
    *,
    bias: Tensor | None = None,  # (V,)
    temperature: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = OUTPUTS,
    logits_bytes: int | None = None,
    counted: RowCount | None = None,
) -> TokenLogProbs:  # each (T,) or (B, S)
    """Log-probabilities of labels under softmax((hidden @ weight.T + bias) / temperature), with the
    distribution's entropy, the mean logit and whether the label is the most likely token.

    Shapes: hidden is (T, D) with labels (T,), or (B, S, D) with labels (B, S); weight is (V, D) and
    bias (V,). hidden and weight have one dtype; labels are int64, in [0, V) or -100. Each output
    has the labels' shape.

    `outputs` says which of `log_probs`, `entropy`, `mean_logits` and `is_top1` are computed; the
    others are None. All but `is_top1`, which is bool, are fp32 (fp64 for operands in fp64);
    `log_probs` and `entropy` are differentiable in hidden, weight and bias, `mean_logits` and
    `is_top1` are not. Labels of -100 are ignored: they cost nothing, and their values are 0 and
    False. `softcap` bounds the logits by softcap * tanh(logits / softcap) before the temperature
    divides them; a model's own divisor of logits (Granite's `logits_scaling`) is a factor of the
    temperature. `logits_bytes` bounds the logits held at a time (default: `default_logits_bytes`).
    `counted` is the count of these labels, if the caller has made it.

    A frozen head costs a third less without `entropy` among the outputs. Without gradients nothing
    is saved. Raises ValueError for a wrong shape, dtype or value.

    Example:
        >>> import longctx, torch
        >>> hidden, weight = torch.zeros(3, 8), torch.zeros(16, 8)
        >>> labels = torch.tensor([5, 9, -100])
        >>> found = longctx.linear_log_probs(hidden, weight, labels, outputs=("log_probs",))
        >>> found.log_probs  # -log(16), and 0 where the label is ignored
        tensor([-2.7726, -2.7726,  0.0000])

    The values are those of TRL's `add_fused_lm_head`.
    """
    head = checked_head(hidden, weight, bias, float64=True)
    check_labels(labels, hidden)
    check_positive(temperature=temperature, softcap=softcap)
    check_outputs(outputs)
    logits_bytes = logits_budget(logits_bytes, weight)
    rows = Rows(labels.flatten(), len(weight), counted)
    objective = _LogProbs(outputs, temperature, softcap)
    values = per_row(objective, head, rows, logits_bytes)
    named = zip(objective.outputs, values, strict=True)
    return TokenLogProbs(**{name: x.view(labels.shape) for name, x in named})


def check_outputs(outputs: Sequence[str]) -> None:
    """Raises ValueError unless these are names of OUTPUTS, each once."""
    names = [outputs] if isinstance(outputs, str) else list(outputs)
    if isinstance(outputs, str) or not names or not set(names) <= set(OUTPUTS):
        raise ValueError(f"outputs must be a tuple of {', '.join(OUTPUTS)}, got {outputs!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"outputs must be named once each, got {outputs!r}")


# --- what it costs ---------------------------------------------------------------------------


def scoring_cost(s: Sizes, batch: Batch) -> Table:
    """Returns the cost of a loss of `batch.scored` tokens' log-probabilities, whose hidden states
    are taken out of the batch. If the head trains, backward computes logits again."""
    scored, unit = batch.scored or 0, s.unit(batch.tokens)
    head = s.hidden * s.vocab * s.trains_head
    buffers = {
        "last layer's output": unit,
        "its gradient": unit,
        "the same, normed": unit,
        "logits": min(s.cut(batch.tokens).logits_bytes, 4 * scored * s.vocab),
        "rows of the loss": 3 * scored * s.hidden * s.itemsize,  # kept, in fp32 pieces, gradient
        "lm_head's gradient, fp32": 4 * head,
    }
    work = Work(
        name="loss",
        flops=(8 if s.trains_head else 4) * scored * s.vocab * s.hidden,
        nbytes=18.0 * scored * s.vocab + 8 * head,
    )
    return Table(
        forward=(work,),
        buffers=tuple(Buffer(name=k, nbytes=n, during="loss") for k, n in buffers.items()),
    )
