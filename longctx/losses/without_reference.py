"""Preference losses that need no reference model: ORPO, CPO and SimPO.

With c and r the log-probabilities of the chosen and the rejected answer, summed over their tokens,
m(c) and m(r) their means over the tokens, the logistic function s and nll a cross-entropy of the
chosen answers:

    orpo    nll - beta log s(log odds(m(c)) - log odds(m(r))),   log odds(x) = x - log(1 - e^x)
    cpo     loss(c - r) + cpo_alpha nll
    simpo   -log s(beta (m(c) - m(r)) - simpo_gamma)

Values and names of options are those of TRL 1.16 (trl.experimental.orpo, trl.experimental.cpo).
The cross-entropy is the caller's, because TRL takes it over other tokens in each of them: ORPO's is
the mean over all tokens of the chosen rows, prompts included, and CPO's over their answers alone.

Sources: ORPO (Hong et al., arXiv 2403.07691), CPO (Xu et al., arXiv 2401.08417), SimPO (Meng et
al., arXiv 2405.14734), AlphaPO (Gupta et al., arXiv 2501.03884).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longctx.losses.checks import check_between, check_name, check_number, check_positive, widened
from longctx.losses.loss_types import smoothed
from longctx.losses.pairs import MOST_EXPONENT

# --- ORPO ------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class ORPOOptions:
    """The option of ORPO's loss, with TRL's name. Raises ValueError for a value that cannot be."""

    beta: float = 0.1
    """Factor of the odds ratio's loss; the paper's lambda."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)


def orpo_loss(
    chosen: Tensor,  # (pairs,) log-probabilities of the chosen answers, summed over their tokens
    rejected: Tensor,  # (pairs,) the same of the rejected answers
    chosen_nll: Tensor,  # () or (pairs,) cross-entropy of the chosen answers
    *,
    chosen_tokens: Tensor,  # (pairs,) tokens of the chosen answers
    rejected_tokens: Tensor,  # (pairs,) tokens of the rejected answers
    beta: float = 0.1,
) -> Tensor:  # (pairs,) fp32, or fp64
    """ORPO's loss of each pair, nll - beta log s(log odds(m(c)) - log odds(m(r))).

    With TRL's `chosen_nll`, the mean over all tokens of the chosen rows, prompts included, the mean
    over the pairs is the loss of TRL's ORPOTrainer. A mean log-probability of 0 counts as one
    rounding below 0, where TRL's gradient is NaN. Raises ValueError for a wrong shape or value.
    """
    beta = ORPOOptions(beta=beta).beta
    c, r, c_tokens, r_tokens = widened(
        chosen=chosen,
        rejected=rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    c, r = per_token(c, c_tokens), per_token(r, r_tokens)
    return nll_of_each(chosen_nll, c) - beta * logsigmoid(log_odds(c) - log_odds(r))


def log_odds(x: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) for log-probabilities x = log p, (n,)."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.693  # log 2: each form of log(1 - p) is exact on its side
    # The inner `where` gives the unused form a value at which its gradient is finite.
    from_small = (-torch.expm1(torch.where(near, x, -1.0))).log()
    from_large = torch.log1p(-torch.where(near, -1.0, x).exp())
    return x - torch.where(near, from_small, from_large)


# --- CPO and SimPO ---------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class CPOOptions:
    """The options of CPO's and SimPO's losses, with TRL's names. Raises ValueError for a value that
    cannot be."""

    loss_type: str = "sigmoid"
    """A name of `CPO_TYPES`; or alphapo, which is simpo with a cpo_alpha of 0."""
    beta: float = 0.1
    """Factor of the log-probabilities; IPO's tau."""
    label_smoothing: float = 0.0
    """Probability that a pair's two answers are the wrong way round; for sigmoid and simpo."""
    cpo_alpha: float = 1.0
    """Factor of the cross-entropy of the chosen answers."""
    simpo_gamma: float = 0.5
    """Margin by which SimPO wants the chosen answers to be better."""
    alpha: float = 0.0
    """AlphaPO's exponent: rewards are (1 - p^-alpha) / alpha, and log p for 0."""

    def __post_init__(self) -> None:
        if self.loss_type == "alphapo":
            self.loss_type = "simpo"
            self.cpo_alpha = 0.0
        check_name("loss_type", self.loss_type, [*CPO_TYPES, "alphapo"])
        check_positive(beta=self.beta)
        check_between("label_smoothing", self.label_smoothing, "[0, 1]")
        check_number(cpo_alpha=self.cpo_alpha, simpo_gamma=self.simpo_gamma, alpha=self.alpha)

    def rewards(self, log_probs: Tensor, tokens: Tensor | None) -> Tensor:
        """Returns the reward of each answer, yet without beta: its log-probability, for ipo and
        simpo the mean over its tokens, transformed by `alpha`. All are (n,)."""
        if self.loss_type in PER_TOKEN:
            if tokens is None:
                raise ValueError(
                    f"the loss type {self.loss_type!r} needs chosen_tokens and rejected_tokens, "
                    "got None"
                )
            log_probs = per_token(log_probs, tokens)
        if self.alpha == 0:
            return log_probs
        return -torch.expm1((-self.alpha * log_probs).clamp(max=MOST_EXPONENT)) / self.alpha


def _sigmoid(margins: Tensor, how: CPOOptions) -> Tensor:
    """-(1 - e) log s(beta d) - e log s(-beta d)"""
    return smoothed(how.beta * margins, how.label_smoothing)


def _hinge(margins: Tensor, how: CPOOptions) -> Tensor:
    """max(0, 1 - beta d)"""
    return torch.relu(1 - how.beta * margins)


def _ipo(margins: Tensor, how: CPOOptions) -> Tensor:
    """(d - 1 / (2 beta))^2"""
    return (margins - 1 / (2 * how.beta)) ** 2


def _simpo(margins: Tensor, how: CPOOptions) -> Tensor:
    """-(1 - e) log s(x) - e log s(-x), with x = beta d - simpo_gamma"""
    return smoothed(how.beta * margins - how.simpo_gamma, how.label_smoothing)


CPO_TYPES: dict[str, Callable[[Tensor, CPOOptions], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
}
"""Each type's function turns differences of rewards (pairs,) into losses (pairs,)."""
PER_TOKEN = ("ipo", "simpo")
"""The types whose rewards are means over an answer's tokens."""


def cpo_loss(
    chosen: Tensor,  # (pairs,) log-probabilities of the chosen answers, summed over their tokens
    rejected: Tensor,  # (pairs,) the same of the rejected answers
    chosen_nll: Tensor | None = None,  # () or (pairs,) cross-entropy of the chosen answers
    *,
    chosen_tokens: Tensor | None = None,  # (pairs,) tokens of the chosen answers
    rejected_tokens: Tensor | None = None,  # (pairs,) tokens of the rejected answers
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
) -> Tensor:  # (pairs,) fp32, or fp64
    """CPO's loss of each pair: that of its difference of rewards, and cpo_alpha chosen_nll.

    `loss_type` is sigmoid, hinge, ipo, simpo or alphapo (simpo with a cpo_alpha of 0). The rewards
    are log-probabilities, for ipo and simpo their means over tokens, so these types need both
    counts; with `alpha` they are AlphaPO's (1 - p^-alpha) / alpha. `chosen_nll` is needed unless
    `cpo_alpha` is 0. With TRL's, the mean over the chosen answers' tokens in the batch, the mean
    over the pairs is the loss of TRL's CPOTrainer. Raises ValueError for an unknown name, a wrong
    shape or value.
    """
    options = CPOOptions(
        loss_type=loss_type,
        beta=beta,
        label_smoothing=label_smoothing,
        cpo_alpha=cpo_alpha,
        simpo_gamma=simpo_gamma,
        alpha=alpha,
    )
    c, r, c_tokens, r_tokens = widened(
        chosen=chosen,
        rejected=rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    c, r = options.rewards(c, c_tokens), options.rewards(r, r_tokens)
    return reward_losses(c, r, chosen_nll, options)


def reward_losses(
    chosen: Tensor,  # (pairs,) rewards of `CPOOptions.rewards`
    rejected: Tensor,  # (pairs,)
    chosen_nll: Tensor | None,  # () or (pairs,)
    options: CPOOptions,
) -> Tensor:  # (pairs,)
    """Returns the loss of each pair of rewards. Raises ValueError as `cpo_loss` does."""
    losses = CPO_TYPES[options.loss_type](chosen - rejected, options)
    if options.cpo_alpha == 0:
        return losses
    if chosen_nll is None:
        raise ValueError(f"cpo_alpha={options.cpo_alpha} needs chosen_nll, got None")
    return losses + options.cpo_alpha * nll_of_each(chosen_nll, losses)


def simpo_loss(
    chosen: Tensor,  # (pairs,) log-probabilities of the chosen answers, summed over their tokens
    rejected: Tensor,  # (pairs,) the same of the rejected answers
    *,
    chosen_tokens: Tensor,  # (pairs,) tokens of the chosen answers
    rejected_tokens: Tensor,  # (pairs,) tokens of the rejected answers
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
) -> Tensor:  # (pairs,) fp32, or fp64
    """SimPO's loss of each pair, -log s(beta (m(c) - m(r)) - simpo_gamma): `cpo_loss` with
    loss_type="simpo" and cpo_alpha=0. With `alpha` it is AlphaPO's.

    The defaults are TRL's; the paper's beta is 2 to 10, its gamma 0.3 to 1.6. Raises ValueError for
    a wrong shape or value.
    """
    return cpo_loss(
        chosen,
        rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        loss_type="simpo",
        beta=beta,
        label_smoothing=label_smoothing,
        cpo_alpha=0.0,
        simpo_gamma=simpo_gamma,
        alpha=alpha,
    )


# --- both ------------------------------------------------------------------------------------


def per_token(log_probs: Tensor, tokens: Tensor) -> Tensor:  # each (n,)
    """Returns the mean log-probability of each answer's tokens; an answer without tokens has 0."""
    return log_probs / tokens.clamp(min=1)


def nll_of_each(chosen_nll: Tensor, like: Tensor) -> Tensor:
    """Returns a cross-entropy, () or (pairs,), in the dtype of `like` (pairs,)."""
    if chosen_nll.dim() and chosen_nll.shape != like.shape:
        raise ValueError(
            f"chosen_nll must have shape () or {tuple(like.shape)}, got {tuple(chosen_nll.shape)}"
        )
    return chosen_nll.to(like.dtype)
