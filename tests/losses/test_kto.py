"""KTO's losses and reference point: TRL's values and gradients, exact derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from trl_side import (
    assert_same,
    batch_of,
    hidden_states,
    make_model,
    make_trainer,
    next_tokens,
    rows,
)

import longctx
from longctx.losses import LinearKTOLoss, kto_kl, kto_loss
from longctx.losses.kto import KTO_TYPES

pytestmark = pytest.mark.usefixtures("plain_kernels")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trl = pytest.importorskip("trl")
    dataset = rows(prompt=0, completion=3).add_column("label", [True, False, True, True, False])
    folder = tmp_path_factory.mktemp("kto")
    return make_trainer(trl.KTOTrainer, trl.KTOConfig, folder, dataset, ref_model=make_model(1))


def exchange(one: Any, other: Any) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        a.data, b.data = b.data, a.data


@pytest.fixture(params=[False, True], ids=["kl", "kl of 0"])
def models(trainer, request):
    """A model and its reference with a reference point above 0, and with one that is clamped."""
    if request.param:
        exchange(trainer.model, trainer.ref_model)
    yield trainer.model, trainer.ref_model
    if request.param:
        exchange(trainer.model, trainer.ref_model)


@pytest.mark.parametrize("name", KTO_TYPES)
def test_trl_agrees(trainer, models, name) -> None:
    trainer.loss_type, trainer.calculate_KL = name, name == "kto"
    trainer.beta, trainer.desirable_weight, trainer.undesirable_weight = 0.2, 1.3, 0.7
    ours = LinearKTOLoss(loss_type=name, beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)
    model, reference = models
    batch = batch_of(trainer)
    theirs = trainer._compute_loss(model, dict(batch), False)

    ids, mask = batch["input_ids"], batch["attention_mask"]
    other, other_mask = batch["KL_input_ids"], batch["KL_attention_mask"]
    other_labels = next_tokens(other, batch["KL_completion_mask"])
    with torch.no_grad():
        policy_kl, ref_kl = (
            longctx.linear_log_probs(
                hidden_states(which, other, other_mask), which.lm_head.weight, other_labels
            ).log_probs.sum(-1)
            for which in (model, reference)
        )
    kl = kto_kl(policy_kl, ref_kl)
    assert (kl > 0) == ((policy_kl - ref_kl).mean() > 0)
    found = ours(
        hidden_states(model, ids, mask),
        model.lm_head.weight,
        next_tokens(ids, batch["completion_mask"]),
        torch.as_tensor(batch["label"]),
        kl=kl,
        ref_hidden=hidden_states(reference, ids, mask),
        ref_weight=reference.lm_head.weight,
    )
    assert_same(found.loss, theirs, model)
    if name == "kto":  # a difference of sums near -200, whose rounding is 2e-5
        assert kl.item() == pytest.approx(trainer._metrics["train"]["kl"][-1], abs=1e-4)


@pytest.mark.parametrize("name", KTO_TYPES)
def test_gradients(name) -> None:
    torch.manual_seed(0)
    values = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    desirable, kl = torch.tensor([True, False, False, True]), torch.tensor(0.4).double()
    how = dict(loss_type=name, undesirable_weight=0.3)
    assert torch.autograd.gradcheck(lambda a, b: kto_loss(a, b, desirable, kl, **how), values)


def test_the_formula() -> None:
    r, kl = torch.tensor([1.0, 1.0, -2.0]), torch.tensor(0.5)
    desirable = torch.tensor([True, False, False])
    found = kto_loss(r, torch.zeros(3), desirable, kl, beta=2.0, undesirable_weight=3.0)
    assert_close(found, torch.tensor([-1.0, 1.0, -5.0]).sigmoid() * torch.tensor([1.0, 3.0, 3.0]))
    plain = kto_loss(r, torch.zeros(3), desirable, loss_type="apo_zero_unpaired", beta=2.0)
    assert_close(plain, torch.tensor([-2.0, 2.0, -4.0]).sigmoid())


def test_16_bit_answers_and_large_ratios() -> None:
    r = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=torch.bfloat16, requires_grad=True)
    desirable = torch.tensor([True, True, False, False])
    loss = kto_loss(r, torch.zeros(4, dtype=torch.bfloat16), desirable, torch.zeros(()))
    assert loss.dtype == torch.float32
    assert_close(loss, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    loss.sum().backward()
    assert r.grad.isfinite().all()


def test_the_reference_point() -> None:
    """A mean that is never negative, and has no gradient; where one is 0, all of one kind."""
    policy = torch.tensor([-3.0, -1.0], requires_grad=True)
    kl = kto_kl(policy, torch.tensor([-5.0, -2.0]))
    assert_close(kl, torch.tensor(1.5))
    assert not kl.requires_grad
    assert kto_kl(torch.tensor([-5.0]), torch.tensor([-2.0])) == 0
    desirable = torch.ones(2, dtype=torch.bool)
    for given in (kl, kl[None]):  # () or (1,), as TRL has it
        assert kto_loss(policy, policy.detach(), desirable, given).shape == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_type": "kto_pair"}, "loss_type must be one of kto, apo_zero_unpaired, got 'kto_pa"),
        ({"kl": None}, "'kto' needs kl, got None; kto_kl estimates it"),
        ({"kl": torch.zeros(2)}, r"kl must be one number, got shape \(2,\)"),
        (
            {"desirable": torch.ones(3)},
            r"desirable must be bool of shape \(3,\), got torch.float32",
        ),
        ({"desirable": torch.ones(2).bool()}, r"got torch.bool of shape \(2,\)"),
        ({"reference": torch.zeros(2)}, r"reference must have shape \(3,\) as policy, got"),
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
        ({"desirable_weight": "1"}, "desirable_weight must be a number, got str"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message) -> None:
    arguments = {
        "policy": torch.zeros(3),
        "reference": torch.zeros(3),
        "desirable": torch.ones(3).bool(),
        "kl": torch.zeros(()),
    }
    with pytest.raises(ValueError, match=message):
        kto_loss(**arguments | change)
