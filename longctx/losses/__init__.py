"""Preference losses: functions of the log-probabilities of whole answers, and modules that take
hidden states and lm_head's weight and make no logits.

    dpo_loss              pairs against a reference, TRL's 15 loss types
    orpo_loss             pairs: odds ratio, and a cross-entropy of the chosen answers
    cpo_loss              pairs: sigmoid, hinge, ipo or simpo, and a cross-entropy
    simpo_loss            pairs by mean log-probabilities
    kto_loss, kto_kl      single answers against a reference, and KTO's reference point
    reward_loss           pairs of rewards, by Bradley and Terry
    LinearDPOLoss, LinearORPOLoss, LinearCPOLoss, LinearSimPOLoss, LinearKTOLoss     the modules
    PreferenceOutput, KTOOutput     what they return
    LinearJSDLoss         divergence from a teacher (longctx.patching.nn)

Example:
    >>> import torch
    >>> from longctx import losses
    >>> chosen, rejected = torch.tensor([-10.0, -12.0]), torch.tensor([-11.0, -11.0])
    >>> reference = torch.tensor([-10.5, -11.5])
    >>> losses.dpo_loss(chosen, rejected, reference, reference, beta=0.1)
    tensor([0.6444, 0.7444])

Functions return one value a pair or answer, in fp32 maths whatever the dtype of their arguments;
the mean of the values is TRL 1.16's loss.
"""

from longctx.losses.answers import KTOOutput, PreferenceOutput
from longctx.losses.kto import kto_kl, kto_loss
from longctx.losses.modules import (
    LinearCPOLoss,
    LinearDPOLoss,
    LinearKTOLoss,
    LinearORPOLoss,
    LinearSimPOLoss,
)
from longctx.losses.preference import dpo_loss
from longctx.losses.reward import reward_loss
from longctx.losses.without_reference import cpo_loss, orpo_loss, simpo_loss
from longctx.patching.nn import LinearJSDLoss

__all__ = [
    "KTOOutput",
    "LinearCPOLoss",
    "LinearDPOLoss",
    "LinearJSDLoss",
    "LinearKTOLoss",
    "LinearORPOLoss",
    "LinearSimPOLoss",
    "PreferenceOutput",
    "cpo_loss",
    "dpo_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "reward_loss",
    "simpo_loss",
]
