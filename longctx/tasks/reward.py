"""A model of rewards, trained on pairs (Bradley-Terry; Ouyang et al. 2022, arXiv 2203.02155)."""

from __future__ import annotations

from typing import Any

from longctx.losses.reward import reward_loss
from longctx.model.scoring import Rewards
from longctx.tasks.answers import scored
from longctx.tasks.pairs import Pairs
from longctx.tasks.protocol import Batch, Measured, Values


class Reward(Pairs):
    """The reward of an answer is one number, made by a head of the hidden state of its last
    token."""

    def values(self, model: Any, batch: Batch) -> Values:
        rewards = scored(model, batch, Rewards(batch["lasts"]))["rewards"]
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
