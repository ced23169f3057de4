"""Pairs of a chosen and a rejected answer, as the losses of DPO's family see them.

With the log-ratios r = log pi(answer) - log pi_ref(answer) of both answers, each summed over the
answer's tokens, a divergence f turns a ratio into a score f'(e^r):

    reverse_kl         r                                   DPO as published
    forward_kl         1 - e^-r
    js_divergence      log 2 + log sigmoid(r)
    alpha_divergence   (e^((a - 1) r) - 1) / (a - 1)       a = f_alpha_divergence_coef

Sources: f-DPO (Wang et al., arXiv 2309.16240); names and values are those of TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longctx.losses.checks import check_between, check_name, check_number, check_positive, widened

MOST_EXPONENT = 80.0
"""Exponents are clamped here, as TRL does for the alpha divergence: e^88.7 overflows fp32. A
clamped ratio gets no gradient."""


def forward_kl(ratios: Tensor, coef: float) -> Tensor:
    return -torch.expm1((-ratios).clamp(max=MOST_EXPONENT))


def js_divergence(ratios: Tensor, coef: float) -> Tensor:
    return math.log(2) + logsigmoid(ratios)


def alpha_divergence(ratios: Tensor, coef: float) -> Tensor:
    if abs(coef - 1) < 1e-6:  # the limit
        return ratios
    return torch.expm1(((coef - 1) * ratios).clamp(max=MOST_EXPONENT)) / (coef - 1)


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratios, coef: ratios,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}


@dataclass(eq=False, kw_only=True)
class PairOptions:
    """The options that losses of pairs read, with TRL's names."""

    beta: float = 0.1
    """Factor of the log-ratios; IPO's tau."""
    label_smoothing: float = 0.0
    """Probability that a pair's two answers are the wrong way round."""
    f_divergence_type: str = "reverse_kl"
    """A name of `DIVERGENCES`."""
    f_alpha_divergence_coef: float = 0.5
    """The alpha of the alpha divergence."""
    discopop_tau: float = 0.05
    """DiscoPOP's temperature."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta, discopop_tau=self.discopop_tau)
        check_between("label_smoothing", self.label_smoothing, "[0, 1]")
        check_name("f_divergence_type", self.f_divergence_type, DIVERGENCES)
        check_number(f_alpha_divergence_coef=self.f_alpha_divergence_coef)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Log-probabilities of a batch of pairs, all tensors (pairs,) in fp32, or fp64."""

    chosen: Tensor
    """log pi of the chosen answers."""
    rejected: Tensor
    ref_chosen: Tensor
    """log pi_ref of the chosen answers."""
    ref_rejected: Tensor
    chosen_tokens: Tensor | None
    """Tokens of the chosen answers."""
    rejected_tokens: Tensor | None
    chosen_scores: Tensor
    """f'(pi / pi_ref) of the chosen answers; with reverse KL the log-ratios."""
    rejected_scores: Tensor

    @property
    def chosen_ratios(self) -> Tensor:
        """log pi - log pi_ref of the chosen answers."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> Tensor:
        """log pi - log pi_ref of the rejected answers."""
        return self.rejected - self.ref_rejected

    @property
    def margins(self) -> Tensor:
        """Scores of the chosen answers less those of the rejected ones."""
        return self.chosen_scores - self.rejected_scores

    @property
    def mean_margins(self) -> Tensor:
        """The margins of scores per token, where an answer without tokens counts as one."""
        assert self.chosen_tokens is not None and self.rejected_tokens is not None
        chosen = self.chosen_scores / self.chosen_tokens.clamp(min=1)
        return chosen - self.rejected_scores / self.rejected_tokens.clamp(min=1)


def make_pairs(
    chosen: Tensor,  # (pairs,)
    rejected: Tensor,  # (pairs,)
    ref_chosen: Tensor,  # (pairs,)
    ref_rejected: Tensor,  # (pairs,)
    chosen_tokens: Tensor | None,  # (pairs,)
    rejected_tokens: Tensor | None,  # (pairs,)
    options: PairOptions,
) -> Pairs:
    """Returns the pairs with their scores. Raises ValueError for shapes or devices that differ."""
    a, b, ref_a, ref_b, count_a, count_b = widened(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    score, coef = DIVERGENCES[options.f_divergence_type], options.f_alpha_divergence_coef
    return Pairs(
        chosen=a,
        rejected=b,
        ref_chosen=ref_a,
        ref_rejected=ref_b,
        chosen_tokens=count_a,
        rejected_tokens=count_b,
        chosen_scores=score(a - ref_a, coef),
        rejected_scores=score(b - ref_b, coef),
    )
