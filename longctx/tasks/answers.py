"""Answers to prompts: what a model makes of each, from one forward pass.

A batch (data/batches.py) lists the tokens of all answers one after the other: `predictors` (N,) and
`targets` (N,), `answers` (N,) the number of the answer that each belongs to, `tokens` (A,) how many
each answer has. Sums over an answer's tokens are in fp64, where the order of additions does not
show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.model.scoring import LogProbs, Scoring

MODEL_INPUTS = ("input_ids", "position_ids", "cu_seq_lens_q", "parents")
CHOSEN, REJECTED = 0, 1
"""The sides of a pair's answers."""
DESIRABLE, UNDESIRABLE, MISMATCHED = 0, 1, 2
"""The sides of rated answers."""


def scored(model: Any, batch: dict[str, Tensor], scoring: Scoring) -> dict[str, Tensor]:
    """Runs a model (in whatever wrapper) on a batch, and returns what `scoring` computes."""
    inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
    found: dict[str, Tensor] = model(**inputs, scoring=scoring)
    return found


def answer_log_probs(
    model: Any, batch: dict[str, Tensor], ld_alpha: float | None = None
) -> Tensor:  # (A,) fp64
    """Returns the log-probability of each answer, summed over its tokens. With `ld_alpha` the
    tokens of a pair's answer beyond the length of the other one count that much (LD-DPO, arXiv
    2409.06411)."""
    scoring = LogProbs(batch["predictors"], batch["targets"])
    log_probs = scored(model, batch, scoring)["log_probs"]
    if ld_alpha is not None:
        log_probs = log_probs * _length_weights(batch, ld_alpha)
    return answer_sums(log_probs, batch["tokens"])


def answer_sums(values: Tensor, tokens: Tensor) -> Tensor:  # (N,), (A,) -> (A,) fp64
    """Returns the sum over each answer's tokens."""
    found: Tensor = torch.segment_reduce(values.double(), "sum", lengths=tokens, unsafe=True)
    return found


def _length_weights(batch: dict[str, Tensor], ld_alpha: float) -> Tensor:  # (N,)
    answers, tokens = batch["answers"], batch["tokens"]
    starts = tokens.cumsum(0) - tokens
    place = torch.arange(len(answers), device=answers.device) - starts[answers]
    shared = tokens.view(-1, 2).min(1).values.repeat_interleave(2)
    return torch.where(place < shared[answers], 1.0, ld_alpha)
