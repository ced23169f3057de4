"""The options of what a run trains for, with TRL's names and defaults, so that a config carries
over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

TaskName = Literal["sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "distill"]


LABELLED = ("sft", "distill")
"""Tasks whose loss is of all tokens of a row; others' is of answers' log-probabilities."""


def scored_tokens(task: TaskName, tokens: int) -> int | None:
    """Returns how many of a batch's tokens a task scores at most, as a step's memory and time are
    counted; None where its loss is of all of them."""
    return None if task in LABELLED else tokens


def option(default: Any, help: str) -> Any:
    """A field of a dataclass behind the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class TaskOptions:
    """What is trained for; each option but `task` belongs to the tasks that its help names."""

    task: TaskName = option(
        "sft",
        "sft, dpo, kto, orpo, cpo, simpo, reward or distill. sft: next tokens; dpo, orpo, cpo, "
        "simpo: pairs of answers to a prompt; kto: rated answers; reward: a model of rewards from "
        "pairs; distill: next tokens as --teacher predicts them.",
    )
    loss_type: list[str] | None = option(
        None,
        "dpo, cpo, kto: the loss, or for dpo several. dpo: sigmoid (default), hinge, ipo, "
        "exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, "
        "discopop, sigmoid_norm, sft; cpo: sigmoid (default), hinge, ipo; kto: kto (default), "
        "apo_zero_unpaired.",
    )
    loss_weights: list[float] | None = option(
        None, "dpo: the weight of each --loss_type. Default: 1 each."
    )
    beta: float = option(
        0.1,
        "How much rewards count (dpo, kto, cpo, simpo). orpo: the weight of the odds ratio.",
    )
    label_smoothing: float = option(
        0.0, "dpo, cpo: the share of pairs that are thought to be the wrong way round."
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        option("reverse_kl", "dpo: the divergence from the reference that scores are derived from.")
    )
    f_alpha_divergence_coef: float = option(0.5, "dpo: alpha of alpha_divergence.")
    discopop_tau: float = option(0.05, "dpo: temperature of the loss discopop.")
    ld_alpha: float | None = option(
        None, "dpo: the weight of an answer's tokens beyond the length of the other one (LD-DPO)."
    )
    cpo_alpha: float | None = option(
        None, "cpo, simpo: the weight of the chosen answer's cross-entropy. Default: 1; simpo 0."
    )
    simpo_gamma: float = option(0.5, "simpo: the margin that rewards should have.")
    desirable_weight: float = option(1.0, "kto: the weight of desirable answers.")
    undesirable_weight: float = option(1.0, "kto: the weight of undesirable answers.")
    center_rewards_coefficient: float | None = option(
        None, "reward: the weight of the rewards' squared sum, which keeps them around 0."
    )
    reference: str | None = option(
        None,
        "dpo, kto: the reference model, a folder or hub id. Default: the model as it is before "
        "the first step.",
    )
    teacher: str | None = option(None, "distill: the teacher, a folder or hub id.")
    teacher_quantize: Literal["none", "nf4"] = option(
        "none", "distill: read the teacher's weights in 4 bits, by bitsandbytes."
    )
    distill_beta: float = option(
        0.5, "distill: 0 is forward KL, 1 reverse KL, in between generalised JSD."
    )
    temperature: float = option(1.0, "distill: divides the logits of both models.")
