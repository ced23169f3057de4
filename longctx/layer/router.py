"""A router: which k of E experts each token goes to, and with which weights.

    logits = n2 W'                       (t, E), by the caller, with the router's bias if it has one
    s = softmax(logits) or sigmoid(logits)                                                    (t, E)
    ids = the k largest of s + bias, or of logits + bias                                      (t, k)
    w = c s[ids] / max(sum s[ids], floor)    or, not normalised,    w = c s[ids]              (t, k)

The bias decides the choice and never the weights. Backward, with u = s[ids] / sum and the gradient
dw of the weights, where the sum is above the floor:

    ds[ids] = c (dw - <dw, u>) / sum          dlogits = s (ds - <ds, s>)      or      s (1 - s) ds

A normalised softmax is the softmax of the k chosen logits alone, and is computed so, forward and
backward: no expert but the chosen ones has a gradient, and chosen probabilities that fp32 rounds to
zero still have weights.

The auxiliary loss needs no logits of earlier layers. Each layer leaves two sums over its tokens for
each expert, of probabilities and of choices, which is 8 E bytes where the logits are 4 t E. The
gradient of the first sum is one number for each expert, and comes back into `logits_grad`.

Everything is in the logits' dtype, which is fp32 (fp64 in tests). Nothing waits for the GPU: all
shapes are known before the choice. Nothing is saved here. A caller keeps the ids, 2 bytes a choice,
and computes the logits and the weights again in backward, so that backward has forward's choice
even if its logits differ in a bit.

Letters: t tokens of a tile, E experts, k experts of a token, G groups of experts, L layers, c the
scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

IDS = torch.int16
"""The dtype of experts' ids. 8 bits are too few for the 512 experts of Qwen3-Next, and torch's own
64 would be 384 MiB of ids in 48 layers of 131072 tokens with k = 8, where these are 96."""
MOST_EXPERTS = 2**15


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a family's router decides. The defaults are Mixtral's. Raises ValueError if no router can
    have these numbers."""

    experts: int
    """E"""
    chosen: int
    """k"""
    score: Literal["softmax", "sigmoid"] = "softmax"
    over: Literal["scores", "logits"] = "scores"
    """The values whose k largest are the chosen experts. Both orders are the same until a bias is
    added or scores of different logits round to one number. GPT-OSS and Granite take logits."""
    normalised: bool = True
    """The k weights are divided by their sum."""
    floor: float = 0.0
    """The least that weights are divided by: `moe_norm_min` of ERNIE 4.5. GLM-4 and DeepSeek-V3 add
    1e-20 to the sum instead; a floor of 1e-20 gives the same bits in fp32 for sums above 4e-13."""
    scaling: float = 1.0
    """Multiplies the weights: `routed_scaling_factor` of GLM-4 and DeepSeek-V3."""
    groups: int = 1
    """G. The experts are G groups of neighbours, and a token goes to some groups only. A group's
    rank is the sum of its two largest values, as in transformers' DeepSeek-V3 and GLM-4."""
    chosen_groups: int = 1
    """Groups that a token may go to."""
    in_fp32: bool = False
    """Its logits are a product of fp32 operands, as ERNIE 4.5 keeps its router's weight."""

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts <= MOST_EXPERTS:
            raise ValueError(
                f"a token goes to 1 to E of at most {MOST_EXPERTS} experts, "
                f"not to {self.chosen} of {self.experts}"
            )
        if self.groups == 1:
            return
        size, rest = divmod(self.experts, self.groups)
        if rest or size < 2:
            raise ValueError(
                f"groups have the same size, at least 2: not {self.groups} of {self.experts}"
            )
        if not self.chosen <= self.chosen_groups * size <= self.experts:
            raise ValueError(
                f"{self.chosen_groups} of {self.groups} groups of {size} experts "
                f"do not hold the {self.chosen} of a token"
            )

    @property
    def of_chosen_alone(self) -> bool:
        """True if the weights are a softmax of the k chosen logits."""
        return self.score == "softmax" and self.normalised and not self.floor


class Routing(NamedTuple):
    """The experts of each token of a tile, and their weights."""

    ids: Tensor
    """(t, k) int16, the experts of each token, the best first unless they were given."""
    weights: Tensor
    """(t, k), the logits' dtype."""


# --- forward ---------------------------------------------------------------------------------


def route(
    logits: Tensor,  # (t, E)
    router: Router,
    bias: Tensor | None = None,  # (E,) fp32
    ids: Tensor | None = None,  # (t, k) of any integer dtype
) -> Routing:
    """Chooses experts, and weighs them. Given `ids` replace the choice, as in replaying another
    program's routing. Ties are broken as torch.topk breaks them."""
    if ids is None:
        ids = choice(logits, router, bias)
    return Routing(ids.to(IDS), weights_of(logits, router, ids))


def choice(
    logits: Tensor,  # (t, E)
    router: Router,
    bias: Tensor | None = None,  # (E,) fp32
) -> Tensor:  # (t, k) int64
    """Returns the experts of each token, the best first."""
    values = logits if router.over == "logits" else _scores(logits, router)
    if bias is not None:
        values = values + bias
    if router.groups > 1:
        values = _of_best_groups(values, router)
    return values.topk(router.chosen).indices


def weights_of(
    logits: Tensor,  # (t, E)
    router: Router,
    ids: Tensor,  # (t, k) of any integer dtype
) -> Tensor:  # (t, k)
    """Returns the weights of these experts."""
    at = ids.long()
    if router.of_chosen_alone:
        return router.scaling * logits.gather(-1, at).softmax(-1)
    s = _scores(logits, router).gather(-1, at)
    if router.normalised:
        s = s / s.sum(-1, keepdim=True).clamp(min=router.floor)
    return router.scaling * s


def _scores(logits: Tensor, router: Router) -> Tensor:
    return logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()


def _of_best_groups(values: Tensor, router: Router) -> Tensor:
    """Returns `values` (t, E) with -inf in all groups that a token may not go to."""
    grouped = values.unflatten(-1, (router.groups, -1))
    ranks = grouped.topk(2).values.sum(-1)
    best = ranks.topk(router.chosen_groups).indices
    out = torch.ones_like(ranks, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)


# --- backward --------------------------------------------------------------------------------


def logits_grad(
    logits: Tensor,  # (t, E)
    router: Router,
    ids: Tensor,  # (t, k) of any integer dtype
    d_weights: Tensor,  # (t, k)
    d_probabilities: Tensor | None = None,  # (E,), of the first of `balance_sums`
    times: Tensor | None = None,  # (t,), as `balance_sums` had them
) -> Tensor:  # (t, E)
    """Returns the gradient of the logits from that of the weights and, with an auxiliary loss, from
    that of the probabilities' sums over tokens."""
    dlogits = _weights_grad(logits, router, ids.long(), d_weights)
    if d_probabilities is None:
        return dlogits
    of_balance = _softmax_grad(logits.softmax(-1), d_probabilities)
    return dlogits.add_(_counted(of_balance, times))


def _weights_grad(logits: Tensor, router: Router, at: Tensor, d_weights: Tensor) -> Tensor:
    ds = router.scaling * d_weights
    if router.of_chosen_alone:
        u = logits.gather(-1, at).softmax(-1)
        return torch.zeros_like(logits).scatter_(-1, at, _softmax_grad(u, ds))
    scores = _scores(logits, router)
    s = scores.gather(-1, at)
    if router.normalised:
        ds = _quotient_grad(s, ds, router.floor)
    if router.score == "sigmoid":
        return torch.zeros_like(logits).scatter_(-1, at, s * (1 - s) * ds)
    return _softmax_grad(scores, torch.zeros_like(logits).scatter_(-1, at, ds))


def _quotient_grad(s: Tensor, du: Tensor, floor: float) -> Tensor:
    """Returns the gradient of s (t, k) from that of u = s / max(sum s, floor). At the floor, the
    divisor is a constant."""
    total = s.sum(-1, keepdim=True)
    divisor = total.clamp(min=floor)
    along = (du * s).sum(-1, keepdim=True) / divisor
    return (du - along * (total >= floor)) / divisor


def _softmax_grad(p: Tensor, dp: Tensor) -> Tensor:
    return p * (dp - (p * dp).sum(-1, keepdim=True))


# --- the auxiliary loss ----------------------------------------------------------------------


def balance_sums(
    logits: Tensor,  # (t, E)
    router: Router,
    times: Tensor | None = None,  # (t,)
) -> Tensor:  # (2, E), the logits' dtype
    """Returns, for each expert, the sum over tokens of its probability and of the times that it is
    chosen, as `load_balancing_loss_func` of transformers defines them. Whatever the router does,
    that is a softmax of the logits, and the k largest of it. `times` says how often each token
    counts: 0 for padding, n for a token of a prompt that n answers share. Sums of tiles add up."""
    p = logits.softmax(-1)
    picked = torch.zeros_like(p).scatter_(-1, p.topk(router.chosen).indices, 1.0)
    return torch.stack([_counted(x, times).sum(0) for x in (p, picked)])


def balance_loss(
    sums: Tensor,  # (L, 2, E), `balance_sums` of all sparse layers
    tokens: Tensor | float,  # (), those of one layer: the sum of `times`, if there are any
    router: Router,
) -> Tensor:  # ()
    """Returns E <mean choices, mean probabilities>, with means over the tokens of all layers, as
    `load_balancing_loss_func` of transformers (Switch Transformer, arXiv 2101.03961, equations 4
    to 6). Autograd gives the probabilities' sums a gradient, sums.grad[:, 0], and the choices' sums
    none."""
    probabilities, choices = (sums.sum(0) / (len(sums) * tokens)).unbind()
    return router.experts * (choices.detach() * probabilities).sum()


def _counted(x: Tensor, times: Tensor | None) -> Tensor:
    """Returns x (t, E), each row as often as it counts."""
    return x if times is None else x * times.unsqueeze(-1).to(x.dtype)
