"""ORPO, CPO and SimPO: TRL's values and gradients, exact derivatives, and nothing infinite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from trl_side import assert_same, batch_of, hidden_states, make_trainer, next_tokens, rows

from longctx.losses import LinearCPOLoss, LinearORPOLoss, cpo_loss, orpo_loss, simpo_loss
from longctx.losses.without_reference import log_odds

pytestmark = pytest.mark.usefixtures("plain_kernels")
EPSILON = torch.finfo(torch.float32).eps


def answers(dtype: torch.dtype = torch.float64, scale: float = 20.0):
    torch.manual_seed(3)
    values = [(-scale * torch.rand(3, dtype=torch.float64) - 0.1).to(dtype) for _ in range(2)]
    counts = {name: torch.randint(1, 9, (3,)) for name in ("chosen_tokens", "rejected_tokens")}
    return [x.requires_grad_() for x in values], counts


def both_halves(trainer: Any) -> tuple[Any, Any, Any]:
    """ids, attention mask and labels of TRL's batch, chosen rows first."""
    both = trainer.concatenated_inputs(batch_of(trainer), padding_value=0)
    return tuple(both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))


# --- TRL -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orpo(tmp_path_factory):
    trl = pytest.importorskip("trl.experimental.orpo", reason="needs trl")
    dataset = rows(prompt=0, chosen=3, rejected=5)
    folder = tmp_path_factory.mktemp("orpo")
    return make_trainer(trl.ORPOTrainer, trl.ORPOConfig, folder, dataset)


@pytest.fixture(scope="module")
def cpo(tmp_path_factory):
    trl = pytest.importorskip("trl.experimental.cpo", reason="needs trl")
    dataset = rows(prompt=0, chosen=3, rejected=5)
    return make_trainer(trl.CPOTrainer, trl.CPOConfig, tmp_path_factory.mktemp("cpo"), dataset)


def assert_logged(found: Any, metrics: dict[str, float]) -> None:
    for name in ("chosen", "rejected"):
        rewards = getattr(found, f"{name}_rewards").mean().item()
        assert rewards == pytest.approx(metrics[f"rewards/{name}"], rel=1e-5)


@pytest.mark.parametrize("beta", [0.1, 1.5])
def test_trl_agrees_on_orpo(orpo, beta) -> None:
    """Its cross-entropy counts the prompts of the chosen rows."""
    orpo.beta = beta
    theirs, metrics = orpo.get_batch_loss_metrics(orpo.model, batch_of(orpo))
    ids, mask, labels = both_halves(orpo)
    found = LinearORPOLoss(beta=beta)(
        hidden_states(orpo.model, ids, mask),
        orpo.model.lm_head.weight,
        next_tokens(ids, labels != -100),
        nll_labels=next_tokens(ids, mask)[: len(ids) // 2],
    )
    assert_same(found.loss, theirs, orpo.model)
    assert_logged(found, metrics)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"label_smoothing": 0.2, "cpo_alpha": 0.0},
        {"loss_type": "hinge", "cpo_alpha": 0.5},
        {"loss_type": "ipo", "beta": 0.3},
        {"loss_type": "simpo", "simpo_gamma": 1.2, "beta": 2.0},  # CPO-SimPO
        {"loss_type": "alphapo", "alpha": 0.25},
        {"loss_type": "simpo", "alpha": -0.5, "label_smoothing": 0.1},
    ],
    ids=str,
)
def test_trl_agrees_on_cpo(cpo, case) -> None:
    """Its cross-entropy counts the answers alone."""
    ours = LinearCPOLoss(**case)
    for name in ("loss_type", "beta", "label_smoothing", "cpo_alpha", "simpo_gamma", "alpha"):
        setattr(cpo, name, getattr(ours, name))
    theirs, metrics = cpo.get_batch_loss_metrics(cpo.model, batch_of(cpo))
    ids, mask, labels = both_halves(cpo)
    hidden, weight = hidden_states(cpo.model, ids, mask), cpo.model.lm_head.weight
    found = ours(hidden, weight, next_tokens(ids, labels != -100))
    assert_same(found.loss, theirs, cpo.model)
    assert_logged(found, metrics)


# --- the functions ---------------------------------------------------------------------------

CPO_CASES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "label_smoothing": 0.1},
    {"loss_type": "hinge"},
    {"loss_type": "ipo"},
    {"loss_type": "simpo"},
    {"loss_type": "sigmoid", "alpha": 0.1},
]


@pytest.mark.parametrize("case", CPO_CASES, ids=str)
def test_gradients_of_cpo(case) -> None:
    (chosen, rejected), counts = answers()
    nll = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: cpo_loss(*x, **case, **counts), [chosen, rejected, nll]
    )


def test_gradients_of_orpo() -> None:
    (chosen, rejected), counts = answers()
    for nll in (torch.rand(3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)):
        values = [chosen, rejected, nll.requires_grad_()]
        assert torch.autograd.gradcheck(lambda *x: orpo_loss(*x, **counts), values)


def test_16_bit_answers_are_computed_in_fp32() -> None:
    (chosen, rejected), counts = answers(torch.bfloat16)
    nll = torch.ones((), dtype=torch.bfloat16)
    for loss in (orpo_loss, cpo_loss):
        found = loss(chosen, rejected, nll, **counts)
        wide = loss(chosen.float(), rejected.float(), nll.float(), **counts)
        assert found.dtype == torch.float32 and torch.equal(found, wide)


def test_log_odds_are_exact_on_both_sides() -> None:
    x = -torch.logspace(-6, 4, 200)
    p = x.double().exp()
    truth = x.double() - torch.where(x < -1, torch.log1p(-p), (-torch.expm1(x.double())).log())
    assert_close(log_odds(x).double(), truth, rtol=1e-6, atol=1e-6)


def test_a_certain_answer_has_finite_gradients() -> None:
    """Probability 1 of every token, or within a rounding of it; both answers, or one."""
    for x in (0.0, -1e-9, -EPSILON / 2, -1e4):
        chosen = torch.tensor([x, x, -3.0], requires_grad=True)
        rejected = torch.tensor([x, -3.0, x], requires_grad=True)
        ones = torch.ones(3)
        nll = -chosen.mean()
        loss = orpo_loss(chosen, rejected, nll, chosen_tokens=ones, rejected_tokens=ones)
        assert loss.isfinite().all()
        loss.sum().backward()
        assert chosen.grad.isfinite().all() and rejected.grad.isfinite().all()


@pytest.mark.parametrize(
    "case", [*CPO_CASES, {"loss_type": "simpo", "alpha": 0.25}, {"alpha": -0.25}], ids=str
)
def test_large_log_probabilities_stay_finite(case) -> None:
    """With AlphaPO's alpha, too, where p^-alpha leaves fp32 (and TRL's p has become 0)."""
    chosen = torch.tensor([-1e4, 0.0, -1e4, 0.0], requires_grad=True)
    rejected = torch.tensor([0.0, -1e4, -1e4, 0.0], requires_grad=True)
    ones = torch.ones(4)
    loss = cpo_loss(
        chosen, rejected, torch.ones(()), chosen_tokens=ones, rejected_tokens=ones, **case
    )
    assert loss.isfinite().all()
    loss.sum().backward()
    assert chosen.grad.isfinite().all() and rejected.grad.isfinite().all()


def test_simpo_is_its_formula() -> None:
    (chosen, rejected), counts = answers()
    margin = chosen / counts["chosen_tokens"] - rejected / counts["rejected_tokens"]
    found = simpo_loss(chosen, rejected, beta=2.5, simpo_gamma=1.4, **counts)
    assert_close(found, -torch.nn.functional.logsigmoid(2.5 * margin - 1.4))
    more = cpo_loss(
        chosen, rejected, torch.ones(()), loss_type="simpo", beta=2.5, simpo_gamma=1.4, **counts
    )
    assert_close(more, found + 1)


def test_equal_answers() -> None:
    """log odds of 1 to 1, and the margin alone."""
    same, count = torch.full((2,), -6.0), torch.full((2,), 3)
    counts = {"chosen_tokens": count, "rejected_tokens": count}
    found = orpo_loss(same, same, torch.zeros(()), beta=2.0, **counts)
    assert_close(found, torch.full((2,), 2 * math.log(2)))
    assert_close(
        simpo_loss(same, same, simpo_gamma=1.0, **counts),
        torch.full((2,), math.log1p(math.e)),
    )


def test_the_cross_entropy_is_the_callers() -> None:
    """One number for the batch, or one a pair."""
    (chosen, rejected), counts = answers()
    logits, y = torch.randn(3, 7, dtype=torch.float64), torch.tensor([1, 5, 0])
    each, mean = cross_entropy(logits, y, reduction="none"), cross_entropy(logits, y)
    for loss in (cpo_loss, orpo_loss):
        assert_close(
            loss(chosen, rejected, each, **counts).mean(),
            loss(chosen, rejected, mean, **counts).mean(),
        )


@pytest.mark.parametrize(
    ("loss", "change", "message"),
    [
        (cpo_loss, {"loss_type": "simp"}, "loss_type must be .*alphapo, got 'simp' .*'simpo'"),
        (cpo_loss, {"loss_type": "ipo"}, "'ipo' needs chosen_tokens and rejected_tokens, got None"),
        (cpo_loss, {}, r"cpo_alpha=1.0 needs chosen_nll, got None"),
        (
            cpo_loss,
            {"chosen_nll": torch.ones(2)},
            r"chosen_nll must have shape \(\) or \(3,\), got",
        ),
        (cpo_loss, {"beta": -1.0}, "beta must be positive, got -1.0"),
        (cpo_loss, {"label_smoothing": 2}, r"label_smoothing must be in \[0, 1\], got 2"),
        (cpo_loss, {"alpha": "a"}, "alpha must be a number, got str"),
        (orpo_loss, {"beta": 0}, "beta must be positive, got 0"),
        (orpo_loss, {"rejected": torch.ones(2)}, r"rejected must have shape \(3,\) as chosen"),
    ],
)
def test_wrong_arguments(loss, change, message) -> None:
    arguments = {"chosen": -torch.ones(3), "rejected": -torch.ones(3)}
    if loss is orpo_loss:
        arguments |= {"chosen_nll": torch.ones(())}
        arguments |= {name: torch.ones(3) for name in ("chosen_tokens", "rejected_tokens")}
    with pytest.raises(ValueError, match=message):
        loss(**arguments | change)
