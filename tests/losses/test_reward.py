"""The loss of reward models against TRL's, which computes it from a classifier's logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification
from trl_side import assert_same, batch_of, make_model, make_trainer, rows

from longctx.losses import reward_loss


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trl = pytest.importorskip("trl")
    config = make_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config)
    dataset = rows(prompt=0, chosen=3, rejected=5).add_column("margin", [0.0, 1.0, 0.5, 2.0, 3.0])
    folder = tmp_path_factory.mktemp("reward")
    return make_trainer(trl.RewardTrainer, trl.RewardConfig, folder, dataset, model=classifier)


@pytest.mark.parametrize("coefficient", [None, 0.02])
@pytest.mark.parametrize("with_margin", [False, True])
def test_trl_agrees(trainer, with_margin, coefficient) -> None:
    trainer.args.center_rewards_coefficient = coefficient
    batch = batch_of(trainer)
    margin = batch["margin"] if with_margin else None
    if not with_margin:
        del batch["margin"]
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    chosen, rejected = trainer.model(**inputs).logits.squeeze(-1).chunk(2)
    ours = reward_loss(chosen, rejected, margin, center_rewards_coefficient=coefficient)
    assert_same(ours.mean(), theirs, trainer.model)


def test_gradients_and_dtypes() -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *x: reward_loss(*x, center_rewards_coefficient=0.1), values
    )
    low = [x.detach().bfloat16() for x in values]
    assert torch.equal(reward_loss(*low), reward_loss(*(x.float() for x in low)))


def test_large_and_equal_rewards() -> None:
    a = torch.tensor([1e4, -1e4, 3.0], requires_grad=True)
    loss = reward_loss(a, torch.tensor([-1e4, 1e4, 3.0]))
    assert_close(loss, torch.tensor([0.0, 2e4, math.log(2)]))
    loss.sum().backward()
    assert_close(a.grad, torch.tensor([0.0, -1.0, -0.5]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": torch.zeros(2)}, r"margin must have shape \(3,\) as chosen, got \(2,\)"),
        ({"chosen": torch.zeros(3, 1)}, r"chosen must have shape \(n,\), got \(3, 1\)"),
        ({"center_rewards_coefficient": "x"}, "center_rewards_coefficient must be a number"),
    ],
)
def test_wrong_arguments(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        reward_loss(**{"chosen": torch.zeros(3), "rejected": torch.zeros(3)} | change)
