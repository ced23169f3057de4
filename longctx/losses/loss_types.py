"""DPO's loss types: one function each, in one table, `LOSS_TYPES`.

In the formulas s is the logistic function, a and b are the log-ratios log pi - log pi_ref of the
chosen and the rejected answer, D is the difference of their scores (a - b with reverse KL, see
pairs.py), n_a and n_b are the answers' tokens and e is `label_smoothing`. A new loss type is a
function of `Pairs` and `PairOptions` with `@_loss_type(...)` above it; its name is the option.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longctx.losses.pairs import MOST_EXPONENT, PairOptions, Pairs

Loss = Callable[[Pairs, PairOptions], Tensor]


class LossType(NamedTuple):
    loss: Loss
    """Computes the loss of each pair of a batch, (pairs,)."""
    tokens: tuple[str, ...]
    """Which counts of tokens the loss needs: `chosen_tokens`, `rejected_tokens`."""
    divergences: bool
    """Whether divergences other than reverse KL are allowed. Their scores are known up to a term of
    the prompt, which cancels in the difference of two scores and nowhere else."""
    smoothing: str
    """The interval of `label_smoothing` in which the loss exists."""


LOSS_TYPES: dict[str, LossType] = {}
BOTH = ("chosen_tokens", "rejected_tokens")


def _loss_type(
    *, tokens: tuple[str, ...] = (), divergences: bool = False, smoothing: str = "[0, 1]"
) -> Callable[[Loss], Loss]:
    def enter(loss: Loss) -> Loss:
        LOSS_TYPES[loss.__name__] = LossType(loss, tokens, divergences, smoothing)
        return loss

    return enter


def smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """Returns -(1 - e) log s(x) - e log s(-x)."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


@_loss_type(divergences=True)
def sigmoid(pairs: Pairs, how: PairOptions) -> Tensor:
    """-log s(beta D). DPO (Rafailov et al., arXiv 2305.18290, equation 7)."""
    return -logsigmoid(how.beta * pairs.margins)


@_loss_type(divergences=True)
def hinge(pairs: Pairs, how: PairOptions) -> Tensor:
    """max(0, 1 - beta D). RSO (Liu et al., arXiv 2309.06657), after SLiC (arXiv 2305.10425)."""
    return torch.relu(1 - how.beta * pairs.margins)


@_loss_type(divergences=True, tokens=BOTH)
def ipo(pairs: Pairs, how: PairOptions) -> Tensor:
    """(score_a / n_a - score_b / n_b - 1 / (2 beta))^2. IPO (Azar et al., arXiv 2310.12036,
    equation 17), with scores per token as in its authors' experiments."""
    return (pairs.mean_margins - 1 / (2 * how.beta)) ** 2


@_loss_type(divergences=True, smoothing="(0, 1)")
def exo_pair(pairs: Pairs, how: PairOptions) -> Tensor:
    """KL((s(beta D), s(-beta D)) | (1 - e, e)). EXO (Ji et al., arXiv 2402.00856, equation 16),
    which recommends e = 0.001."""
    x = how.beta * pairs.margins
    log_kept, log_swapped = math.log1p(-how.label_smoothing), math.log(how.label_smoothing)
    kept = x.sigmoid() * (logsigmoid(x) - log_kept)
    return kept + (-x).sigmoid() * (logsigmoid(-x) - log_swapped)


@_loss_type()
def nca_pair(pairs: Pairs, how: PairOptions) -> Tensor:
    """-log s(beta a) - 1/2 log s(-beta a) - 1/2 log s(-beta b). NCA (Chen et al., arXiv
    2402.05369)."""
    a, b = how.beta * pairs.chosen_ratios, how.beta * pairs.rejected_ratios
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


@_loss_type(divergences=True, smoothing="[0, 0.5)")
def robust(pairs: Pairs, how: PairOptions) -> Tensor:
    """(-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e): sigmoid's loss in expectation, if
    answers are swapped with probability e. Robust DPO (Chowdhury et al., arXiv 2403.00409)."""
    e, x = how.label_smoothing, how.beta * pairs.margins
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


@_loss_type()
def bco_pair(pairs: Pairs, how: PairOptions) -> Tensor:
    """-log s(beta a) - log s(-beta b). BCO (Jung et al., arXiv 2404.04656), without the shift by
    the mean reward."""
    a, b = how.beta * pairs.chosen_ratios, how.beta * pairs.rejected_ratios
    return -logsigmoid(a) - logsigmoid(-b)


@_loss_type()
def sppo_hard(pairs: Pairs, how: PairOptions) -> Tensor:
    """(a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2. SPPO (Wu et al., arXiv 2405.00675, equation 4.7)
    with the probabilities 1 and 0 that the answers win."""
    half = 0.5 / how.beta
    return (pairs.chosen_ratios - half) ** 2 + (pairs.rejected_ratios + half) ** 2


@_loss_type()
def aot(pairs: Pairs, how: PairOptions) -> Tensor:
    """-(1 - e) log s(beta d) - e log s(-beta d), where d_i is the i-th smallest difference
    log pi(chosen) - log pi(rejected) of the batch less the i-th smallest of the reference.

    Values are in the order of the sorted differences, not of the pairs. AOT (Melnyk et al., arXiv
    2406.05882), paired.
    """
    ours = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.ref_chosen - pairs.ref_rejected).sort().values
    return smoothed(how.beta * (ours - reference), how.label_smoothing)


@_loss_type()
def aot_unpaired(pairs: Pairs, how: PairOptions) -> Tensor:
    """-(1 - e) log s(beta d) - e log s(-beta d), where d_i is the i-th smallest a of the batch less
    the i-th smallest b.

    Values are in the order of the sorted ratios, not of the pairs. AOT (Melnyk et al., arXiv
    2406.05882), unpaired.
    """
    d = pairs.chosen_ratios.sort().values - pairs.rejected_ratios.sort().values
    return smoothed(how.beta * d, how.label_smoothing)


@_loss_type()
def apo_zero(pairs: Pairs, how: PairOptions) -> Tensor:
    """1 - s(beta a) + s(beta b), for chosen answers that are better than the model's own. APO
    (D'Oosterlinck et al., arXiv 2408.06266, equation 7)."""
    a, b = how.beta * pairs.chosen_ratios, how.beta * pairs.rejected_ratios
    return (-a).sigmoid() + b.sigmoid()


@_loss_type()
def apo_down(pairs: Pairs, how: PairOptions) -> Tensor:
    """s(beta a) + 1 - s(beta (a - b)), for chosen answers that are worse than the model's own. APO
    (D'Oosterlinck et al., arXiv 2408.06266, equation 8)."""
    a, b = how.beta * pairs.chosen_ratios, how.beta * pairs.rejected_ratios
    return a.sigmoid() + (b - a).sigmoid()


@_loss_type(divergences=True)
def discopop(pairs: Pairs, how: PairOptions) -> Tensor:
    """-log s(x) (1 - m) + e^-x m, with x = beta D and m = s(x / tau). DiscoPOP (Lu et al., arXiv
    2406.08414, equation 5).

    The second term is computed as e^(log m - x): for tau < 1 its exponent is never large, where TRL
    multiplies infinity by zero for x < -88.
    """
    x = how.beta * pairs.margins
    gate = x / how.discopop_tau
    exponent = (logsigmoid(gate) - x).clamp(max=MOST_EXPONENT)
    return -logsigmoid(x) * (-gate).sigmoid() + exponent.exp()


@_loss_type(divergences=True, tokens=("chosen_tokens",))
def sft(pairs: Pairs, how: PairOptions) -> Tensor:
    """-log pi(chosen) pairs / sum n_a, whose mean over the pairs is the cross-entropy over all
    chosen tokens of the batch. The reference is not used."""
    assert pairs.chosen_tokens is not None
    return -pairs.chosen * (len(pairs.chosen) / pairs.chosen_tokens.sum().clamp(min=1))


@_loss_type(divergences=True, tokens=BOTH)
def sigmoid_norm(pairs: Pairs, how: PairOptions) -> Tensor:
    """-log s(beta (score_a / n_a - score_b / n_b)). Length-normalised DPO of Tulu 3 (Lambert et
    al., arXiv 2411.15124)."""
    return -logsigmoid(how.beta * pairs.mean_margins)
