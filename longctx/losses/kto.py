"""KTO: a loss of single answers that are known to be desirable or not, without pairs.

With r = log pi(answer) - log pi_ref(answer), the logistic function s and a reference point z, an
estimate of KL(pi | pi_ref) from answers that belong to other prompts:

    kto                  1 - s(beta (r - z))  if desirable, else  1 - s(beta (z - r))
    apo_zero_unpaired    1 - s(beta r)        if desirable, else  s(beta r)

each times `desirable_weight` or `undesirable_weight`. Values are those of TRL 1.16's KTOTrainer.

Sources: KTO (Ethayarajh et al., arXiv 2402.01306, equation 7); APO (D'Oosterlinck et al., arXiv
2408.06266).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.losses.checks import check_name, check_number, check_positive, widened

KTO_TYPES = ("kto", "apo_zero_unpaired")


@dataclass(eq=False, kw_only=True)
class KTOOptions:
    """The options of KTO's loss, with TRL's names. Raises ValueError for a value that cannot be."""

    loss_type: str = "kto"
    """A name of `KTO_TYPES`."""
    beta: float = 0.1
    """Factor of the log-ratios."""
    desirable_weight: float = 1.0
    """Factor of the losses of desirable answers."""
    undesirable_weight: float = 1.0
    """Factor of the losses of the other answers."""

    def __post_init__(self) -> None:
        check_name("loss_type", self.loss_type, KTO_TYPES)
        check_positive(beta=self.beta)
        check_number(
            desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight
        )


def kto_loss(
    policy: Tensor,  # (answers,) log-probabilities of the answers, summed over their tokens
    reference: Tensor,  # (answers,) the same under the reference model
    desirable: Tensor,  # (answers,) bool
    kl: Tensor | None = None,  # () as `kto_kl` estimates it
    *,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:  # (answers,) fp32, or fp64
    """The loss of each answer; the mean over the answers is the loss of TRL's KTOTrainer.

    `loss_type` is kto, which needs `kl`, or apo_zero_unpaired, which does not read it. Raises
    ValueError for an unknown name, a missing `kl`, a wrong shape or dtype.
    """
    options = KTOOptions(
        loss_type=loss_type,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    return answer_losses(policy, reference, desirable, kl, options)


def answer_losses(
    policy: Tensor,  # (answers,)
    reference: Tensor,  # (answers,)
    desirable: Tensor,  # (answers,) bool
    kl: Tensor | None,  # ()
    options: KTOOptions,
) -> Tensor:  # (answers,)
    """Returns the loss of each answer. Raises ValueError as `kto_loss` does."""
    ours, theirs = widened(policy=policy, reference=reference)
    if desirable.dtype != torch.bool or desirable.shape != ours.shape:
        raise ValueError(
            f"desirable must be bool of shape {tuple(ours.shape)}, got {desirable.dtype} of shape "
            f"{tuple(desirable.shape)}"
        )
    ratios = ours - theirs
    if options.loss_type == "kto":
        if kl is None:
            raise ValueError("the loss type 'kto' needs kl, got None; kto_kl estimates it")
        if kl.numel() != 1:
            raise ValueError(f"kl must be one number, got shape {tuple(kl.shape)}")
        ratios = ratios - kl.to(ratios).reshape(())
    good, bad = (options.beta * -ratios).sigmoid(), (options.beta * ratios).sigmoid()
    good, bad = options.desirable_weight * good, options.undesirable_weight * bad
    return torch.where(desirable, good, bad)


def kto_kl(
    policy_kl: Tensor,  # (answers,) log-probabilities of answers that belong to other prompts
    ref_kl: Tensor,  # (answers,) the same under the reference model
) -> Tensor:  # () fp32, or fp64, without gradient
    """The reference point of KTO: the mean of log pi - log pi_ref over answers that do not belong
    to their prompts, and 0 where the mean is negative.

    TRL pairs each prompt with the answer of the batch's previous row. With several processes it
    takes the mean over all of them, so gather the log-probabilities first.
    """
    ours, theirs = widened(policy_kl=policy_kl, ref_kl=ref_kl)
    return (ours - theirs).detach().mean().clamp(min=0)
