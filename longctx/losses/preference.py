"""Losses of DPO's family over the log-probabilities of whole answers.

    chosen, rejected, ref_chosen, ref_rejected   sum over an answer's tokens of log p(token)
    -> scores of a divergence (pairs.py) -> a loss type or several (loss_types.py), one value a pair

All maths is in fp32, in fp64 for inputs in fp64. The names of options and all values are those of
TRL 1.16's DPOTrainer. Its options of how an answer's log-probability is summed up (`ld_alpha`) or
weighted (`use_weighting`) are none of a function of sums and are left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from longctx.losses.checks import check_between, check_name, check_number
from longctx.losses.loss_types import LOSS_TYPES
from longctx.losses.pairs import PairOptions, Pairs, make_pairs


@dataclass(eq=False, kw_only=True)
class DPOOptions(PairOptions):
    """Loss types, their weights, and what they read; checked when it is made."""

    loss_type: str | Sequence[str] = "sigmoid"
    """A name of `LOSS_TYPES` or several, whose losses are added up."""
    loss_weights: Sequence[float] | None = None
    """A factor for each loss type; None: 1 for each."""
    weighted: tuple[tuple[str, float], ...] = field(init=False, repr=False)
    """Each loss type with its factor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.loss_type
        names = list(given) if isinstance(given, list | tuple) else [given]
        if not names:
            raise ValueError(f"loss_type must name at least one loss, got {self.loss_type!r}")
        for name in names:
            check_name("loss_type", name, LOSS_TYPES)
            kind = LOSS_TYPES[name]
            check_between(f"label_smoothing of {name!r}", self.label_smoothing, kind.smoothing)
            if self.f_divergence_type != "reverse_kl" and not kind.divergences:
                able = ", ".join(n for n, other in LOSS_TYPES.items() if other.divergences)
                raise ValueError(
                    f"f_divergence_type must be 'reverse_kl' for the loss type {name!r}, got "
                    f"{self.f_divergence_type!r}; others are possible for {able}"
                )
        weights = [1.0] * len(names) if self.loss_weights is None else list(self.loss_weights)
        if len(weights) != len(names):
            raise ValueError(
                f"loss_weights must hold one weight for each of {names}, got {self.loss_weights!r}"
            )
        for weight in weights:
            check_number(loss_weights=weight)
        self.weighted = tuple(zip(names, weights, strict=True))


def pair_losses(pairs: Pairs, options: DPOOptions) -> Tensor:  # (pairs,)
    """Returns the weighted sum of the loss types for each pair."""
    total: Tensor | None = None
    for name, weight in options.weighted:
        kind = LOSS_TYPES[name]
        for counts in kind.tokens:
            if getattr(pairs, counts) is None:
                raise ValueError(f"the loss type {name!r} needs {counts}, got None")
        loss = weight * kind.loss(pairs, options)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def dpo_loss(
    chosen: Tensor,  # (pairs,) log-probabilities of the chosen answers, summed over their tokens
    rejected: Tensor,  # (pairs,) the same of the rejected answers
    ref_chosen: Tensor,  # (pairs,) the chosen answers under the reference model
    ref_rejected: Tensor,  # (pairs,) the rejected answers under the reference model
    *,
    chosen_tokens: Tensor | None = None,  # (pairs,) tokens of the chosen answers
    rejected_tokens: Tensor | None = None,  # (pairs,) tokens of the rejected answers
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
) -> Tensor:  # (pairs,) fp32, or fp64
    """The loss of each pair of answers; the mean over the pairs is the loss of TRL's DPOTrainer.

    `loss_type` is one of sigmoid (DPO), hinge, ipo, exo_pair, nca_pair, robust, bco_pair,
    sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft and sigmoid_norm, or several,
    whose losses are added up with `loss_weights`. The formula and paper of each are in
    longctx/losses/loss_types.py. ipo and sigmoid_norm need both counts of tokens, and sft that of
    the chosen answers. aot and aot_unpaired sort the batch, so their values belong to no pair; all
    other values do, but sft's are scaled by the batch's mean length.

    `f_divergence_type` is reverse_kl, forward_kl, js_divergence or alpha_divergence (with
    `f_alpha_divergence_coef`), for sigmoid, hinge, ipo, exo_pair, robust, discopop, sft and
    sigmoid_norm. `label_smoothing` is read by exo_pair, which needs one in (0, 1), by robust, which
    needs one in [0, 0.5), and by aot and aot_unpaired.

    Losses and gradients are finite for log-ratios of any size that fp32 can square, with reverse
    KL. (The scores of forward KL and of the alpha divergence grow up to e^80, and ipo squares
    them.) Raises ValueError for an unknown name, a value outside its range, or a wrong shape.
    """
    options = DPOOptions(
        loss_type=loss_type,
        loss_weights=loss_weights,
        beta=beta,
        label_smoothing=label_smoothing,
        f_divergence_type=f_divergence_type,
        f_alpha_divergence_coef=f_alpha_divergence_coef,
        discopop_tau=discopop_tau,
    )
    answers = (chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens)
    return pair_losses(make_pairs(*answers, options), options)
