"""Preference losses from hidden states, lm_head's weight and labels, in one call and without
logits (answers.py).

    LinearDPOLoss      pairs against a reference, all loss types of `dpo_loss`
    LinearORPOLoss     pairs, with the cross-entropy of the chosen rows
    LinearCPOLoss      pairs, with the cross-entropy of the chosen answers
    LinearSimPOLoss    pairs, by mean log-probabilities
    LinearKTOLoss      single answers against a reference

Pairs are 2 * pairs rows: all chosen ones, then the rejected ones in the same order. Labels are
aligned with hidden states, as in `linear_log_probs`: the label of a position is the next token, and
nothing is shifted here. A label is -100 on prompts and padding, which then cost nothing. Losses are
means over pairs or answers.

FLOPs per answer token, V entries of the vocabulary and D features: 2 V D forward and 6 V D backward
if the head trains, else 4 V D forward; and 2 V E for reference states with E features.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.losses.answers import (
    KTOOutput,
    LinearAnswers,
    PreferenceOutput,
    count_tokens,
    halves,
)
from longctx.losses.kto import KTOOptions, answer_losses
from longctx.losses.pairs import make_pairs
from longctx.losses.preference import DPOOptions, pair_losses
from longctx.losses.without_reference import (
    CPOOptions,
    ORPOOptions,
    orpo_loss,
    per_token,
    reward_losses,
)


@dataclass(eq=False, repr=False, kw_only=True)
class LinearDPOLoss(LinearAnswers, DPOOptions):
    """The mean of `dpo_loss` over pairs of answers, from hidden states. Options are those of
    `dpo_loss`, and `temperature`, `softcap` and `logits_bytes` those of `linear_log_probs`.
    `chosen_rewards` are beta (log pi - log pi_ref)."""

    def forward(
        self,
        hidden: Tensor,  # (2 * pairs, S, D), chosen rows first
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (2 * pairs, S), aligned with hidden
        *,
        bias: Tensor | None = None,  # (V,)
        ref_log_probs: Tensor | None = None,  # (2 * pairs,) summed over the answers' tokens
        ref_hidden: Tensor | None = None,  # (2 * pairs, S, E), the reference's, instead
        ref_weight: Tensor | None = None,  # (V, E)
        ref_bias: Tensor | None = None,  # (V,)
    ) -> PreferenceOutput:
        """The loss, differentiable in hidden, weight and bias. The reference is given as
        `ref_log_probs`, or as `ref_hidden` and `ref_weight`, and gets no gradient."""
        reference = self.reference(labels, ref_log_probs, ref_hidden, ref_weight, ref_bias)
        log_probs = self.token_log_probs(hidden, weight, labels, bias).sum(-1)
        policy, ref, tokens = halves(
            labels=log_probs, reference=reference, tokens=count_tokens(labels)
        )
        pairs = make_pairs(*policy, *ref, *tokens, self)
        return PreferenceOutput(
            pair_losses(pairs, self).mean(),
            self.beta * pairs.chosen_ratios.detach(),
            self.beta * pairs.rejected_ratios.detach(),
            pairs.chosen.detach(),
            pairs.rejected.detach(),
        )


@dataclass(eq=False, repr=False, kw_only=True)
class LinearORPOLoss(LinearAnswers, ORPOOptions):
    """The mean of `orpo_loss` over pairs of answers, from hidden states. `chosen_rewards` are beta
    times the mean log-probabilities of tokens."""

    def forward(
        self,
        hidden: Tensor,  # (2 * pairs, S, D), chosen rows first
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (2 * pairs, S), aligned with hidden
        *,
        bias: Tensor | None = None,  # (V,)
        nll_labels: Tensor | None = None,  # (pairs, S), aligned with hidden's chosen rows
    ) -> PreferenceOutput:
        """The loss, differentiable in hidden, weight and bias.

        The cross-entropy is the mean over the tokens of `nll_labels`; without them, over those of
        the chosen answers. TRL's is over all tokens of the chosen rows: give their next tokens with
        -100 on the padding alone. Where both count, they must be the same as the labels.
        """
        ((mine, other),) = halves(labels=labels)
        wanted = mine if nll_labels is None else nll_labels
        if wanted.shape != mine.shape:
            raise ValueError(
                f"nll_labels must have shape {tuple(mine.shape)}, got {tuple(wanted.shape)}"
            )
        everything = torch.where(mine == IGNORE_INDEX, wanted, mine)
        found = self.token_log_probs(hidden, weight, torch.cat([everything, other]), bias)
        ((at_chosen, at_rejected),) = halves(labels=found)
        counts = wanted != IGNORE_INDEX
        nll = -at_chosen.masked_fill(~counts, 0).sum() / counts.sum().clamp(min=1)
        chosen = at_chosen.masked_fill(mine == IGNORE_INDEX, 0).sum(-1)
        rejected = at_rejected.sum(-1)
        n_chosen, n_rejected = count_tokens(mine), count_tokens(other)
        beta = self.beta
        losses = orpo_loss(
            chosen, rejected, nll, chosen_tokens=n_chosen, rejected_tokens=n_rejected, beta=beta
        )
        return PreferenceOutput(
            losses.mean(),
            beta * per_token(chosen.detach(), n_chosen),
            beta * per_token(rejected.detach(), n_rejected),
            chosen.detach(),
            rejected.detach(),
        )


@dataclass(eq=False, repr=False, kw_only=True)
class LinearCPOLoss(LinearAnswers, CPOOptions):
    """The mean of `cpo_loss` over pairs of answers, from hidden states. Options are those of
    `cpo_loss`. The cross-entropy is the mean over the chosen answers' tokens in the batch, as in
    TRL. `chosen_rewards` are beta times log-probabilities, for ipo and simpo their means over
    tokens, transformed by `alpha`."""

    def forward(
        self,
        hidden: Tensor,  # (2 * pairs, S, D), chosen rows first
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (2 * pairs, S), aligned with hidden
        *,
        bias: Tensor | None = None,  # (V,)
    ) -> PreferenceOutput:
        """The loss, differentiable in hidden, weight and bias."""
        log_probs = self.token_log_probs(hidden, weight, labels, bias).sum(-1)
        (chosen, rejected), (n_chosen, n_rejected) = halves(
            labels=log_probs, tokens=count_tokens(labels)
        )
        nll = -chosen.sum() / n_chosen.sum().clamp(min=1)
        good = self.rewards(chosen, n_chosen)
        bad = self.rewards(rejected, n_rejected)
        return PreferenceOutput(
            reward_losses(good, bad, nll, self).mean(),
            self.beta * good.detach(),
            self.beta * bad.detach(),
            chosen.detach(),
            rejected.detach(),
        )


@dataclass(eq=False, repr=False, kw_only=True)
class LinearSimPOLoss(LinearCPOLoss):
    """The mean of `simpo_loss` over pairs of answers, from hidden states: `LinearCPOLoss` with
    loss_type="simpo" and cpo_alpha=0. The other options are those of `simpo_loss`."""

    loss_type: str = field(init=False, default="simpo")
    cpo_alpha: float = field(init=False, default=0.0)


@dataclass(eq=False, repr=False, kw_only=True)
class LinearKTOLoss(LinearAnswers, KTOOptions):
    """The mean of `kto_loss` over answers, from hidden states. Options are those of `kto_loss`."""

    def forward(
        self,
        hidden: Tensor,  # (answers, S, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (answers, S), aligned with hidden
        desirable: Tensor,  # (answers,) bool
        *,
        kl: Tensor | None = None,  # () as `kto_kl` estimates it; for the loss type kto
        bias: Tensor | None = None,  # (V,)
        ref_log_probs: Tensor | None = None,  # (answers,) summed over the answers' tokens
        ref_hidden: Tensor | None = None,  # (answers, S, E), the reference's, instead
        ref_weight: Tensor | None = None,  # (V, E)
        ref_bias: Tensor | None = None,  # (V,)
    ) -> KTOOutput:
        """The loss, differentiable in hidden, weight and bias. The reference is given as
        `ref_log_probs`, or as `ref_hidden` and `ref_weight`, and gets no gradient."""
        reference = self.reference(labels, ref_log_probs, ref_hidden, ref_weight, ref_bias)
        log_probs = self.token_log_probs(hidden, weight, labels, bias).sum(-1)
        losses = answer_losses(log_probs, reference, desirable, kl, self)
        rewards = self.beta * (log_probs.detach() - reference)
        return KTOOutput(losses.mean(), rewards, log_probs.detach())
