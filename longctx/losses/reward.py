"""The loss of a reward model over pairs of answers, by Bradley and Terry."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from longctx.losses.checks import check_number, widened


def reward_loss(
    chosen: Tensor,  # (pairs,) rewards of the chosen answers
    rejected: Tensor,  # (pairs,) rewards of the rejected answers
    margin: Tensor | None = None,  # (pairs,) by how much the chosen answer is better
    *,
    center_rewards_coefficient: float | None = None,
) -> Tensor:  # (pairs,) fp32, or fp64
    """-log s(chosen - rejected - margin) + coefficient (chosen + rejected)^2 for each pair.

    The first term is the negative log-likelihood of the preference in the model of Bradley and
    Terry, with Llama 2's margin (arXiv 2307.09288). The second, with
    `center_rewards_coefficient`, keeps rewards around zero (Eisenstein et al., arXiv 2312.09244).
    The mean over the pairs is the loss of TRL's RewardTrainer. Raises ValueError for shapes that
    differ.
    """
    check_number(center_rewards_coefficient=center_rewards_coefficient)
    a, b, gap = widened(chosen=chosen, rejected=rejected, margin=margin)
    loss = -logsigmoid(a - b if gap is None else a - b - gap)
    if center_rewards_coefficient is None:
        return loss
    return loss + center_rewards_coefficient * (a + b) ** 2
