"""From hidden states and lm_head's weight to the log-probability of each answer, and what the
modules of this room have in common.

A row is a prompt and an answer, and its labels are -100 everywhere but on the answer's tokens:

    hidden (rows, S, D), weight (V, D), labels (rows, S)
    -> linear_log_probs (rows, S), in pieces of logits
    -> log_probs (rows,), tokens (rows,): sums over each row

Memory: pieces of logits of at most `logits_bytes` at any length, what `linear_log_probs` saves for
backward, and 4 bytes a token for the log-probabilities. Losses that chunk over the batch, as
Liger-Kernel's do, hold all logits of a pair at once: two rows of 131072 tokens with a vocabulary of
151936 are 80 GB in bf16 and 159 GB in fp32, before their gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.constants import IGNORE_INDEX
from longctx.errors import many
from longctx.head.log_probs import linear_log_probs
from longctx.head.stream import check_positive


class PreferenceOutput(NamedTuple):
    """The loss of a batch of pairs, with the rewards and log-probabilities behind it. Only the loss
    has a gradient."""

    loss: Tensor  # ()
    """Mean loss of the pairs, fp32; differentiable."""
    chosen_rewards: Tensor  # (pairs,)
    """Rewards of the chosen answers, as TRL logs them."""
    rejected_rewards: Tensor  # (pairs,)
    """Rewards of the rejected answers."""
    chosen_log_probs: Tensor  # (pairs,)
    """Log-probabilities of the chosen answers, summed over their tokens."""
    rejected_log_probs: Tensor  # (pairs,)
    """Log-probabilities of the rejected answers, summed over their tokens."""


class KTOOutput(NamedTuple):
    """The loss of a batch of rated answers, with the rewards and log-probabilities behind it. Only
    the loss has a gradient."""

    loss: Tensor  # ()
    """Mean loss of the answers, fp32; differentiable."""
    rewards: Tensor  # (answers,)
    """beta (log pi - log pi_ref) of each answer."""
    log_probs: Tensor  # (answers,)
    """Log-probabilities of the answers, summed over their tokens."""


@dataclass(eq=False, repr=False, kw_only=True)
class LinearAnswers(nn.Module):
    """The base class of the loss modules: it holds the options of the head and sums
    log-probabilities over each answer.

    A module is a dataclass: its fields are the options of the head and those of its loss, whose
    class it names as its second base. It has no parameters: lm_head's weight is an argument of
    forward.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logits_bytes: int | None = None

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        super().__post_init__()  # type: ignore[misc]  # checks the options of the loss
        check_positive(**self._head_options)

    @property
    def _head_options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(LinearAnswers)}

    def token_log_probs(
        self,
        hidden: Tensor,  # (rows, S, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (rows, S)
        bias: Tensor | None,  # (V,)
    ) -> Tensor:  # (rows, S)
        """Returns the labels' log-probabilities, 0 where a label is ignored."""
        if hidden.dim() != 3:
            raise ValueError(f"hidden must have shape (rows, S, D), got {tuple(hidden.shape)}")
        found = linear_log_probs(
            hidden, weight, labels, bias=bias, outputs=("log_probs",), **self._head_options
        ).log_probs
        assert found is not None
        return found

    def reference(
        self,
        labels: Tensor,  # (rows, S)
        log_probs: Tensor | None,  # (rows,)
        hidden: Tensor | None,  # (rows, S, E)
        weight: Tensor | None,  # (V, E)
        bias: Tensor | None,  # (V,)
    ) -> Tensor:  # (rows,)
        """Returns the answers' log-probabilities under the reference, without gradients: those
        given, or those of the hidden states. Raises ValueError unless there is one of them."""
        if (log_probs is None) == (hidden is None) or (hidden is None) != (weight is None):
            given = {"ref_log_probs": log_probs, "ref_hidden": hidden, "ref_weight": weight}
            names = [name for name, x in given.items() if x is not None]
            raise ValueError(
                "the reference must be given as ref_log_probs, or as ref_hidden and ref_weight, "
                f"got {' and '.join(names) or 'none of them'}"
            )
        if log_probs is not None:
            if log_probs.shape != labels.shape[:1]:
                raise ValueError(
                    f"ref_log_probs must have shape {tuple(labels.shape[:1])}, got "
                    f"{tuple(log_probs.shape)}"
                )
            return log_probs.detach()
        assert hidden is not None and weight is not None
        with torch.no_grad():
            return self.token_log_probs(hidden, weight, labels, bias).sum(-1)

    def extra_repr(self) -> str:
        options = {f.name: f.default for f in dataclasses.fields(self) if f.repr}
        changed = {k: getattr(self, k) for k, usual in options.items() if getattr(self, k) != usual}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())


def count_tokens(labels: Tensor) -> Tensor:  # (rows, S) -> (rows,)
    """Returns how many tokens of each row are not ignored."""
    return (labels != IGNORE_INDEX).sum(-1)


def halves(**tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the chosen rows of each tensor (2 * pairs, ...), which come first, and the rejected
    ones. Raises ValueError for an odd number of rows."""
    for name, x in tensors.items():
        if len(x) % 2:
            raise ValueError(
                f"{name} must have the chosen rows first and then as many rejected ones, got "
                f"{many(len(x), 'row')}"
            )
    return [(x[: len(x) // 2], x[len(x) // 2 :]) for x in tensors.values()]
