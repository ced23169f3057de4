"""Answers to prompts: what a model makes of each, from one forward pass.

A batch (train/data/pack/batches.py) lists the tokens of all answers one after the other:
`predictors` (N,) and `targets` (N,), `answers` (N,) the number of the answer that each belongs to,
`tokens` (A,) how many each answer has. Sums over an answer's tokens are in fp64, where the order of
additions does not show.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.shards import Shards
from longctx.families.vision import image_inputs
from longctx.train.tasks.scoring import LogProbs, Scoring

MODEL_INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "parents")
"""Names of a batch's tensors that a model's forward gets; those of images come with them."""


def scored(
    model: Any, batch: dict[str, Tensor], scoring: Scoring, shards: Shards | None = None
) -> dict[str, Tensor]:
    """Runs a model (in whatever wrapper) on a batch, and returns what `scoring` computes. Ranks
    that share rows each run their own tokens; `scoring` has the predictors among them."""
    inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch} | image_inputs(batch)
    if shards is not None:  # bounds and parents stay those of whole rows
        inputs |= {name: shards.own(inputs[name], -1) for name in ("input_ids", "position_ids")}
    found: dict[str, Tensor] = model(**inputs, scoring=scoring)
    return found


def answer_log_probs(
    model: Any,
    batch: dict[str, Tensor],
    ld_alpha: float | None = None,
    shards: Shards | None = None,
) -> Tensor:  # (A,) fp64
    """Returns the log-probability of each answer, summed over its tokens. With `ld_alpha` the
    tokens of a pair's answer beyond the length of the other one count that much (LD-DPO, arXiv
    2409.06411)."""
    tokens = Tokens(batch["predictors"], batch["targets"], batch["answers"], batch["tokens"])
    weights = None if ld_alpha is None else _length_weights(batch, ld_alpha)
    return summed_log_probs(model, batch, tokens, shards, weights)


class Tokens(NamedTuple):
    """Tokens that are scored, and the parts into which their values are added up."""

    predictors: Tensor  # (N,) into the flattened batch
    targets: Tensor  # (N,)
    parts: Tensor  # (N,) ascending
    counts: Tensor  # (P,) tokens of each part


def summed_log_probs(
    model: Any,
    batch: dict[str, Tensor],
    tokens: Tokens,
    shards: Shards | None = None,
    weights: Tensor | None = None,  # (N,)
) -> Tensor:  # (P,) fp64
    """Returns the sum of each part's log-probabilities, over all ranks that share the rows."""
    if shards is None:
        scoring = LogProbs(tokens.predictors, tokens.targets)
        log_probs = scored(model, batch, scoring)["log_probs"]
        return part_sums(log_probs if weights is None else log_probs * weights, tokens.counts)
    here, predictors = own_predictors(tokens.predictors, batch, shards)
    scoring = LogProbs(predictors, tokens.targets[here])
    log_probs = scored(model, batch, scoring, shards)["log_probs"]
    counts = torch.bincount(tokens.parts[here], minlength=len(tokens.counts))
    own = part_sums(log_probs if weights is None else log_probs * weights[here], counts)
    return sum_of_ranks(own, shards)


def part_sums(values: Tensor, counts: Tensor) -> Tensor:  # (N,), (P,) -> (P,) fp64
    """Returns the sums of consecutive values, `counts` of them each."""
    found: Tensor = torch.segment_reduce(values.double(), "sum", lengths=counts, unsafe=True)
    return found


# --- ranks that share rows -------------------------------------------------------------------


def own_predictors(
    predictors: Tensor,  # (N,) into the flattened batch
    batch: dict[str, Tensor],
    shards: Shards,
) -> tuple[Tensor, Tensor]:
    """Returns which of the predictors lie in this rank's part of the rows, (n,), and where in the
    flattened part, (n,)."""
    row_tokens = batch["input_ids"].shape[1]
    own = row_tokens // shards.ranks
    place = predictors % row_tokens
    here = (place // own == shards.rank).nonzero().squeeze(1)
    found = predictors[here] // row_tokens * own + place[here] % own
    return here, found


def sum_of_ranks(own: Tensor, shards: Shards) -> Tensor:
    """Returns the sum over the ranks of a row. Each computes the same loss of it. Engines take the
    mean of the ranks' gradients, each of which holds its own tokens' part, so that backward
    multiplies by their number."""
    found: Tensor = _SumOfRanks.apply(own, shards)
    return found


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shards: Shards) -> Tensor:
        ctx.ranks = shards.ranks
        return shards.total(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def _length_weights(batch: dict[str, Tensor], ld_alpha: float) -> Tensor:  # (N,)
    answers, tokens = batch["answers"], batch["tokens"]
    starts = tokens.cumsum(0) - tokens
    place = torch.arange(len(answers), device=answers.device) - starts[answers]
    shared = tokens.view(-1, 2).min(1).values.repeat_interleave(2)
    return torch.where(place < shared[answers], 1.0, ld_alpha)
