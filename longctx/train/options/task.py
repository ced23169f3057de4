"""The options of what a run trains for, with TRL's names and defaults, so that a config carries
over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longctx.ranges import NOT_NEGATIVE, POSITIVE, Range
from longctx.settings import TaskName
from longctx.train.options.about import NUMBERS, Need, having


def _of(*tasks: str) -> Need:
    return Need(f"--task {' or '.join(tasks)}", lambda m, d, t: t.task in tasks)


def _rare(*tasks: str) -> Callable[..., Any]:
    return having("task", NUMBERS, _of(*tasks), rare=True)


def _reads(t: Any, losses: Sequence[str] | None) -> bool:
    """Whether one of a run's losses is among these; None: whatever its task."""
    return losses is None or any(name in losses for name in t.loss_type or ["sigmoid"])


_SMOOTHED = {"dpo": ("exo_pair", "robust", "aot", "aot_unpaired"), "cpo": ("sigmoid",)}
"""The losses of a task that read --label_smoothing, as in TRL."""
_SMOOTHED_LOSS = Need(
    f"--loss_type {', '.join(_SMOOTHED['dpo'])}, or {_SMOOTHED['cpo'][0]} of cpo",
    lambda m, d, t: _reads(t, _SMOOTHED.get(t.task)),
)
_ALPHA = Need(
    "--f_divergence_type alpha_divergence",
    lambda m, d, t: t.task != "dpo" or t.f_divergence_type == "alpha_divergence",
)
_DISCOPOP = Need(
    "--loss_type discopop", lambda m, d, t: t.task != "dpo" or _reads(t, ("discopop",))
)
_task, _other_model = having("task", NUMBERS), having("task")
_dpo, _kto, _distill = _rare("dpo"), _rare("kto"), _rare("distill")


@dataclass(kw_only=True)
class TaskOptions:
    """Options of the task; each but `task` belongs to the tasks that its help names."""

    task: TaskName = _task(
        "sft",
        "sft, dpo, kto, orpo, cpo, simpo, reward or distill. sft: next tokens; dpo, orpo, cpo, "
        "simpo: pairs of answers to a prompt; kto: rated answers; reward: a model of rewards from "
        "pairs; distill: next tokens as --teacher predicts them.",
    )
    loss_type: list[str] | None = _task(
        None,
        "dpo, cpo, kto: the loss, or for dpo several. dpo: sigmoid (default), hinge, ipo, "
        "exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, "
        "discopop, sigmoid_norm, sft; cpo: sigmoid (default), hinge, ipo; kto: kto (default), "
        "apo_zero_unpaired.",
        _of("dpo", "kto", "cpo"),
    )
    loss_weights: list[float] | None = _dpo(
        None, "dpo: the weight of each --loss_type. Default: 1 each."
    )
    beta: float = _task(
        0.1,
        "How much rewards count (dpo, kto, cpo, simpo). orpo: the weight of the odds ratio.",
        POSITIVE,
        _of("dpo", "kto", "orpo", "cpo", "simpo"),
    )
    label_smoothing: float = _rare("dpo", "cpo")(
        0.0,
        "dpo, cpo: the share of pairs that are thought to be the wrong way round.",
        Range(0, 0.5, open_high=True),  # at a half both answers are as good
        _SMOOTHED_LOSS,
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        _dpo("reverse_kl", "dpo: the divergence from the reference that scores are derived from.")
    )
    f_alpha_divergence_coef: float = _dpo(0.5, "dpo: alpha of alpha_divergence.", _ALPHA)
    discopop_tau: float = _dpo(0.05, "dpo: temperature of the loss discopop.", POSITIVE, _DISCOPOP)
    ld_alpha: float | None = _dpo(
        None,
        "dpo: the weight of an answer's tokens beyond the length of the other one (LD-DPO).",
        Range(0, 1),
    )
    cpo_alpha: float | None = _rare("cpo", "simpo")(
        None,
        "cpo, simpo: the weight of the chosen answer's cross-entropy. Default: 1; simpo 0.",
        NOT_NEGATIVE,
    )
    simpo_gamma: float = _rare("simpo")(0.5, "simpo: the margin that rewards should have.")
    desirable_weight: float = _kto(1.0, "kto: the weight of desirable answers.", NOT_NEGATIVE)
    undesirable_weight: float = _kto(1.0, "kto: the weight of undesirable answers.", NOT_NEGATIVE)
    center_rewards_coefficient: float | None = _rare("reward")(
        None,
        "reward: the weight of the rewards' squared sum, which keeps them around 0.",
        NOT_NEGATIVE,
    )
    reference: str | None = _other_model(
        None,
        "dpo, kto: the reference model, a folder or hub id. Default: the model as it is before "
        "the first step.",
        _of("dpo", "kto"),
    )
    teacher: str | None = _other_model(
        None, "distill: the teacher, a folder or hub id.", _of("distill")
    )
    teacher_quantize: Literal["none", "nf4"] = _distill(
        "none", "distill: read the teacher's weights in 4 bits, by bitsandbytes."
    )
    distill_beta: float = _distill(
        0.5, "distill: 0 is forward KL, 1 reverse KL, in between generalised JSD.", Range(0, 1)
    )
    temperature: float = _distill(1.0, "distill: divides the logits of both models.", POSITIVE)
