"""Tasks over pairs of answers to a prompt: DPO and its relatives, ORPO, CPO, SimPO.

All of them compare the log-probabilities of a chosen and a rejected answer, summed over each
answer's tokens; longctx/losses has the losses themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from longctx.errors import UserError
from longctx.losses.loss_types import LOSS_TYPES
from longctx.losses.preference import DPOOptions, dpo_loss
from longctx.losses.without_reference import CPOOptions, cpo_loss, orpo_loss
from longctx.train.tasks.answer_values import Tokens, answer_log_probs, summed_log_probs
from longctx.train.tasks.answers_task import AnswersTask
from longctx.train.tasks.protocol import Batch, Metric, Values


class PairTask(AnswersTask):
    """The base class of tasks that train on pairs."""

    rows = "pairs"

    def items(self, batch: Batch) -> Tensor:
        return batch["tokens"].new_tensor(len(batch["tokens"]) // 2)

    def measured(
        self, batch: Batch, losses: Tensor, log_probs: Tensor, rewards: Tensor
    ) -> Values:  # (pairs,), (A,), (A,)
        """Returns the values of each pair that are logged, by TRL's names."""
        rows = batch["rows"][0::2]
        chosen, rejected = rewards.detach()[0::2], rewards.detach()[1::2]
        found = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).double(),
            "logps/chosen": log_probs.detach()[0::2],
            "logps/rejected": log_probs.detach()[1::2],
        }
        metrics = {name: Metric(values, rows) for name, values in found.items()}
        return Values(losses=losses, rows=rows, metrics=metrics)


class DPO(PairTask):
    """Direct preference optimisation (arXiv 2305.18290) with all of TRL's losses."""

    has_reference = True
    loss_types = tuple(LOSS_TYPES)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.loss: dict[str, Any] = dict(
            loss_type=options.loss_type or ["sigmoid"],
            loss_weights=options.loss_weights,
            beta=options.beta,
            label_smoothing=options.label_smoothing,
            f_divergence_type=options.f_divergence_type,
            f_alpha_divergence_coef=options.f_alpha_divergence_coef,
            discopop_tau=options.discopop_tau,
        )
        checked(DPOOptions, self.loss)

    def log_probs(self, model: Any, batch: Batch) -> Tensor:
        return answer_log_probs(model, batch, self.options.ld_alpha, self.shards)

    def values(self, model: Any, batch: Batch) -> Values:
        log_probs, reference = self.log_probs(model, batch), batch["reference"].double()
        losses = dpo_loss(
            *(log_probs[0::2], log_probs[1::2], reference[0::2], reference[1::2]),
            chosen_tokens=batch["tokens"][0::2],
            rejected_tokens=batch["tokens"][1::2],
            **self.loss,
        )
        rewards = self.options.beta * (log_probs - reference)
        return self.measured(batch, losses, log_probs, rewards)


class ORPO(PairTask):
    """Odds ratio preference optimisation (arXiv 2403.07691). As in TRL its cross-entropy is of all
    tokens of a prompt with its chosen answer."""

    lists_prompts = True

    def values(self, model: Any, batch: Batch) -> Values:
        tokens, prompts = batch["tokens"], len(batch["prompt_targets"])
        every = Tokens(  # the prompts' are one part more
            torch.cat([batch["predictors"], batch["prompt_predictors"]]),
            torch.cat([batch["targets"], batch["prompt_targets"]]),
            torch.cat([batch["answers"], batch["answers"].new_full((prompts,), len(tokens))]),
            torch.cat([tokens, tokens.new_tensor([prompts])]),
        )
        sums = summed_log_probs(model, batch, every, self.shards)
        log_probs, of_prompts = sums[:-1], sums[-1]
        nll = -(log_probs[0::2].sum() + of_prompts) / (tokens[0::2].sum() + prompts)
        losses = orpo_loss(
            *(log_probs[0::2], log_probs[1::2], nll),
            chosen_tokens=tokens[0::2],
            rejected_tokens=tokens[1::2],
            beta=self.options.beta,
        )
        means = log_probs / tokens
        values = self.measured(batch, losses, means, self.options.beta * means)
        return with_nll(values, nll)


class CPO(PairTask):
    """Contrastive preference optimisation (arXiv 2401.08417), with the cross-entropy of the chosen
    answers."""

    loss_types: ClassVar[Sequence[str]] = ("sigmoid", "hinge", "ipo")
    default_alpha = 1.0

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if len(options.loss_type or ()) > 1:
            raise UserError(f"--loss_type: --task {options.task} takes one of them")
        alpha = options.cpo_alpha
        self.loss: dict[str, Any] = dict(
            loss_type=(options.loss_type or [self.loss_types[0]])[0],
            beta=options.beta,
            label_smoothing=options.label_smoothing,
            cpo_alpha=self.default_alpha if alpha is None else alpha,
            simpo_gamma=options.simpo_gamma,
        )
        self.checked_loss = checked(CPOOptions, self.loss)

    def values(self, model: Any, batch: Batch) -> Values:
        tokens = batch["tokens"]
        log_probs = answer_log_probs(model, batch, shards=self.shards)
        nll = -log_probs[0::2].sum() / tokens[0::2].sum()
        losses = cpo_loss(
            *(log_probs[0::2], log_probs[1::2], nll),
            chosen_tokens=tokens[0::2],
            rejected_tokens=tokens[1::2],
            **self.loss,
        )
        compared = self.checked_loss.rewards(log_probs, tokens)
        values = self.measured(batch, losses, compared, self.options.beta * compared)
        return with_nll(values, nll)


class SimPO(CPO):
    """Simple preference optimisation (arXiv 2405.14734): CPO's loss `simpo`, whose cross-entropy
    counts only with --cpo_alpha."""

    loss_types = ("simpo",)
    default_alpha = 0.0


def with_nll(values: Values, nll: Tensor) -> Values:
    """Adds the batch's cross-entropy to what is logged."""
    rows = values.rows
    return replace(
        values,
        metrics={**values.metrics, "nll_loss": Metric(nll.detach().expand(len(rows)), rows)},
    )


def checked(kind: Any, options: dict[str, Any]) -> Any:
    """Makes a loss's options. Raises UserError for what they refuse, by the names of the flags."""
    try:
        return kind(**options)
    except ValueError as error:
        raise UserError(f"--{error}") from error
