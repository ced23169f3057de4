"""KTO: rated answers, each on its own (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.errors import UserError
from longctx.losses.kto import kto_loss
from longctx.train.data.reading.groups import MISMATCHED, SIDE_NAMES
from longctx.train.tasks.answer_values import answer_log_probs
from longctx.train.tasks.answers_task import AnswersTask
from longctx.train.tasks.protocol import Batch, Metric, Values

DESIRABLE = SIDE_NAMES["rated"].index("desirable")


class KTO(AnswersTask):
    """Each prompt also gets the answer to another prompt, whose log-ratio estimates the KL from the
    reference. The estimate is the mean over a batch of all processes, at least 0, and gets no
    gradient."""

    rows = "rated"
    has_reference = True
    loss_types = ("kto", "apo_zero_unpaired")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if len(options.loss_type or ()) > 1:
            raise UserError("--loss_type: --task kto takes one, kto or apo_zero_unpaired")
        (self.loss_type,) = options.loss_type or ["kto"]

    @property
    def mismatched(self) -> bool:  # type: ignore[override]
        return self.loss_type == "kto"

    def items(self, batch: Batch) -> Tensor:
        return (batch["sides"] != MISMATCHED).sum()

    def log_probs(self, model: Any, batch: Batch) -> Tensor:
        return answer_log_probs(model, batch, shards=self.shards)

    def values(self, model: Any, batch: Batch) -> Values:
        o, sides = self.options, batch["sides"]
        log_probs, reference = self.log_probs(model, batch), batch["reference"].double()
        rated = sides != MISMATCHED
        kl = _mean_of_all((log_probs - reference).detach()[~rated]).clamp(min=0)
        desirable, rows = sides[rated] == DESIRABLE, batch["rows"][rated]
        policy = log_probs[rated]
        losses = kto_loss(
            *(policy, reference[rated], desirable, kl),
            loss_type=self.loss_type,
            beta=o.beta,
            desirable_weight=o.desirable_weight,
            undesirable_weight=o.undesirable_weight,
        )
        rewards = o.beta * (policy - reference[rated]).detach()
        metrics = {"kl": Metric(kl.view(1), rows[:1])} if self.mismatched else {}
        for name, of in (("chosen", desirable), ("rejected", ~desirable)):
            metrics[f"rewards/{name}"] = Metric(rewards[of], rows[of])
            metrics[f"logps/{name}"] = Metric(policy.detach()[of], rows[of])
        return Values(losses=losses, rows=rows, metrics=metrics)


def _mean_of_all(values: Tensor) -> Tensor:  # (n,) -> ()
    """Returns the mean over all processes; 0 of nothing."""
    both = torch.stack([values.sum(), values.new_tensor(len(values))])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(both)
    return both[0] / both[1].clamp(min=1)
