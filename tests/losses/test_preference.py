"""DPO's loss types: TRL's values and gradients, exact derivatives, and nothing infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
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

from longctx.losses import LinearDPOLoss, dpo_loss
from longctx.losses.loss_types import LOSS_TYPES

pytestmark = pytest.mark.usefixtures("plain_kernels")
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
SMOOTHING = {"exo_pair": 0.01, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.1}


def answers(pairs: int = 5, dtype: torch.dtype = torch.float64, scale: float = 20.0):
    """Log-probabilities of chosen, rejected and both under the reference, and counts of tokens."""
    torch.manual_seed(pairs)
    values = [(-scale * torch.rand(pairs, dtype=torch.float64)).to(dtype) for _ in range(4)]
    counts = {name: torch.randint(1, 9, (pairs,)) for name in ("chosen_tokens", "rejected_tokens")}
    return [x.requires_grad_() for x in values], counts


def options_of(name: str) -> dict[str, Any]:
    return {"loss_type": name, "label_smoothing": SMOOTHING.get(name, 0.0)}


# --- TRL -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trl = pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("dpo")
    dataset = rows(prompt=0, chosen=3, rejected=5)
    return make_trainer(trl.DPOTrainer, trl.DPOConfig, folder, dataset, ref_model=make_model(1))


CASES = [
    *({"loss_type": name} for name in LOSS_TYPES if name not in ("exo_pair",)),
    *(options_of(name) for name in SMOOTHING),
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},  # MPO
    {"loss_type": ["ipo", "sft"], "beta": 0.3},
    {"loss_type": "discopop", "discopop_tau": 0.5},
    *({"f_divergence_type": name, "beta": 0.02} for name in DIVERGENCES),
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.1, "beta": 0.02},
    {"f_divergence_type": "js_divergence", "loss_type": ["ipo", "sigmoid_norm"]},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trl_agrees(trainer, case) -> None:
    ours = LinearDPOLoss(**case)
    names = case.get("loss_type", "sigmoid")
    trainer.loss_types = [names] if isinstance(names, str) else names
    trainer.loss_weights = case.get("loss_weights") or [1.0] * len(trainer.loss_types)
    for name in ("beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef"):
        setattr(trainer, name, getattr(ours, name))
    trainer.args.discopop_tau = ours.discopop_tau

    batch, model, reference = batch_of(trainer), trainer.model, trainer.ref_model
    theirs = trainer._compute_loss(model, dict(batch), False)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = next_tokens(ids, batch["completion_mask"])
    found = ours(
        hidden_states(model, ids, mask),
        model.lm_head.weight,
        labels,
        ref_hidden=hidden_states(reference, ids, mask),
        ref_weight=reference.lm_head.weight,
    )
    assert_same(found.loss, theirs, model)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for name in ("chosen", "rejected"):
        rewards, log_probs = getattr(found, f"{name}_rewards"), getattr(found, f"{name}_log_probs")
        assert rewards.mean().item() == pytest.approx(logged[f"rewards/{name}"], rel=1e-4, abs=1e-5)
        assert log_probs.mean().item() == pytest.approx(logged[f"logps/{name}"], rel=1e-5)


# --- the functions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "divergence"),
    [*((name, "reverse_kl") for name in LOSS_TYPES), *(("ipo", name) for name in DIVERGENCES)],
)
def test_gradients(name, divergence) -> None:
    """In all four log-probabilities, against differences in fp64."""
    values, counts = answers(pairs=3, scale=6.0)
    options = {**options_of(name), "f_divergence_type": divergence, **counts}
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, **options), values)
    assert dpo_loss(*values, **options).dtype == torch.float64


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_16_bit_answers_are_computed_in_fp32(name) -> None:
    values, counts = answers(dtype=torch.bfloat16)
    found = dpo_loss(*values, **options_of(name), **counts)
    wide = dpo_loss(*(x.float() for x in values), **options_of(name), **counts)
    assert found.dtype == torch.float32 and torch.equal(found, wide)
    mixed = dpo_loss(values[0], *(x.float() for x in values[1:]), **options_of(name), **counts)
    assert torch.equal(mixed, wide)


@pytest.mark.parametrize(
    ("name", "divergence"),
    [*((name, "reverse_kl") for name in LOSS_TYPES), *(("sigmoid", name) for name in DIVERGENCES)],
)
def test_large_ratios_stay_finite(name, divergence) -> None:
    """Ratios of 1e4 nats in any direction, as of answers of 1e5 tokens."""
    policy = torch.tensor([[-1e4, 0.0], [0.0, -1e4], [-1e4, -1e4], [0.0, 0.0]])
    values = [*policy.t(), *policy.flip(0).t()]
    values = [x.clone().requires_grad_() for x in values]
    counts = {name: torch.full((4,), 7) for name in ("chosen_tokens", "rejected_tokens")}
    loss = dpo_loss(*values, **options_of(name), f_divergence_type=divergence, **counts)
    assert loss.isfinite().all()
    loss.sum().backward()
    assert all(x.grad.isfinite().all() for x in values if x.grad is not None)


def test_discopop_is_its_formula_where_trls_is_nan() -> None:
    """e^-x s(x / tau) at x = -100, which is below the smallest number: the logistic loss is left;
    and for tau = 1 it is e^-x / (1 + e^-x) = 1."""
    zeros = torch.zeros(1)
    x = torch.full((1,), -1000.0)
    assert_close(dpo_loss(x, zeros, zeros, zeros, loss_type="discopop"), torch.full((1,), 100.0))
    one = dpo_loss(x, zeros, zeros, zeros, loss_type="discopop", discopop_tau=1.0)
    assert_close(one, torch.full((1,), 101.0))


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_equal_answers(name) -> None:
    """A pair without a preference: the gradients of its two answers cancel where the loss reads
    their difference alone."""
    same, reference = torch.full((1,), -9.0, requires_grad=True), torch.full((1,), -7.0)
    counts = {"chosen_tokens": torch.tensor([4]), "rejected_tokens": torch.tensor([4])}
    loss = dpo_loss(same, same, reference, reference, **options_of(name), **counts)
    assert loss.isfinite().all()
    if name in ("sigmoid", "sigmoid_norm", "aot", "aot_unpaired"):
        assert_close(loss.exp(), torch.full((1,), 2.0))
    if name in ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "aot", "discopop"):
        loss.sum().backward()
        assert_close(same.grad, torch.zeros(1))


def test_values_belong_to_their_pairs() -> None:
    values, counts = answers()
    for name in LOSS_TYPES.keys() - {"aot", "aot_unpaired", "sft"}:
        whole = dpo_loss(*values, **options_of(name), **counts)
        alone = [
            dpo_loss(
                *(x[n : n + 1] for x in values),
                **options_of(name),
                **{k: v[n : n + 1] for k, v in counts.items()},
            )
            for n in range(5)
        ]
        assert_close(torch.cat(alone), whole)


def test_several_losses_are_added_up() -> None:
    values, counts = answers()
    both = dpo_loss(*values, **counts, loss_type=("hinge", "sft"), loss_weights=(0.5, 2))
    parts = [dpo_loss(*values, **counts, loss_type=name) for name in ("hinge", "sft")]
    assert_close(both, 0.5 * parts[0] + 2 * parts[1])
    summed = dpo_loss(*values, **counts, loss_type=["hinge", "sft"])
    assert_close(summed, parts[0] + parts[1])


def test_sft_is_the_mean_over_the_batchs_tokens() -> None:
    """And an answer without tokens adds none."""
    chosen, zeros = torch.tensor([-6.0, 0.0, -2.0]), torch.zeros(3)
    counts = torch.tensor([3, 0, 1])
    loss = dpo_loss(chosen, zeros, zeros, zeros, chosen_tokens=counts, loss_type="sft")
    assert_close(loss.mean(), torch.tensor(2.0))
    empty = dpo_loss(zeros, zeros, zeros, zeros, chosen_tokens=zeros, loss_type="sft")
    assert torch.equal(empty, zeros)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss_type": "sigmod"},
            "loss_type must be one of sigmoid, .*'sigmod' .did you mean 'sig",
        ),
        ({"loss_type": "xyz"}, "got 'xyz'$"),
        ({"loss_type": 3}, "got 3$"),
        ({"loss_type": []}, "loss_type must name at least one loss"),
        ({"loss_type": ["hinge", "ip"]}, "got 'ip' .did you mean 'ipo'"),
        ({"loss_weights": [1, 2]}, r"one weight for each of \['sigmoid'\], got \[1, 2\]"),
        ({"loss_weights": ["a"]}, "loss_weights must be a number, got str"),
        ({"loss_type": "exo_pair"}, r"label_smoothing of 'exo_pair' must be in \(0, 1\), got 0.0"),
        (
            {"loss_type": "robust", "label_smoothing": 0.5},
            r"label_smoothing of 'robust' must be in \[0, 0.5\), got 0.5",
        ),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\], got -0.1"),
        ({"label_smoothing": float("nan")}, "label_smoothing must be in .*, got nan"),
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
        ({"beta": torch.ones(())}, "beta must be a number, got Tensor"),
        ({"discopop_tau": -1}, "discopop_tau must be positive, got -1"),
        ({"f_divergence_type": "forward"}, "f_divergence_type must be .*mean 'forward_kl'"),
        (
            {"f_divergence_type": "forward_kl", "loss_type": "apo_zero"},
            "must be 'reverse_kl' for the loss type 'apo_zero', got 'forward_kl'; .*sigmoid_norm",
        ),
        ({"loss_type": "ipo"}, "'ipo' needs chosen_tokens, got None"),
        (
            {"loss_type": "sigmoid_norm", "chosen_tokens": torch.ones(3)},
            "needs rejected_tokens, got None",
        ),
        ({"chosen_tokens": torch.ones(2)}, r"chosen_tokens must have shape \(3,\) as chosen, got"),
        ({"chosen": torch.zeros(3, 1)}, r"chosen must have shape \(n,\), got \(3, 1\)"),
        ({"rejected": torch.zeros(1)}, r"rejected must have shape \(3,\) as chosen, got \(1,\)"),
        ({"ref_chosen": torch.zeros(3, device="meta")}, "ref_chosen must be on cpu as chosen"),
        ({"ref_chosen": [0.0] * 3}, "ref_chosen must be a tensor, got list"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message) -> None:
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    arguments = dict(zip(names, tensors(*[(3,)] * 4), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        dpo_loss(**arguments)
