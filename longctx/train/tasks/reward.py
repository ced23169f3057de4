"""A model of rewards, trained on pairs (Bradley-Terry; Ouyang et al. 2022, arXiv 2203.02155)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longctx.losses.reward import reward_loss
from longctx.train.tasks.answers import own_predictors, scored, sum_of_ranks
from longctx.train.tasks.pairs import Pairs
from longctx.train.tasks.protocol import Batch, Measured, Values
from longctx.train.tasks.scoring import Rewards


class Reward(Pairs):
    """The reward of an answer is one number, made by a head of the hidden state of its last
    token."""

    with_images = False

    def values(self, model: Any, batch: Batch) -> Values:
        rewards = self._rewards(model, batch)
        chosen, rejected, rows = rewards[0::2], rewards[1::2], batch["rows"][0::2]
        margins = batch["margins"].nan_to_num(0.0)
        losses = reward_loss(
            *(chosen, rejected, margins),
            center_rewards_coefficient=self.options.center_rewards_coefficient,
        )
        found = {
            "accuracy": (chosen > rejected).double(),
            "margin": (chosen - rejected).double(),
            "mean_reward": (chosen + rejected).double() / 2,
        }
        metrics = {name: Measured(x.detach(), rows) for name, x in found.items()}
        return Values(losses=losses, rows=rows, metrics=metrics)

    def _rewards(self, model: Any, batch: Batch) -> Tensor:  # (A,)
        lasts = batch["lasts"]
        if self.shards is None:
            return scored(model, batch, Rewards(lasts))["rewards"]
        here, predictors = own_predictors(lasts, batch, self.shards)
        own = scored(model, batch, Rewards(predictors), self.shards)["rewards"]
        return sum_of_ranks(own.new_zeros(len(lasts)).index_copy(0, here, own), self.shards)
