"""The modules against their functions over all logits, and what they cost."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from counted import allocated, flops
from paths import ROOT
from small_model import tiny_config
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaForCausalLM

import longctx
from longctx.losses import (
    KTOOutput,
    LinearCPOLoss,
    LinearDPOLoss,
    LinearKTOLoss,
    LinearORPOLoss,
    LinearSimPOLoss,
    PreferenceOutput,
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)

pytestmark = pytest.mark.usefixtures("reference_kernels")
ROWS, S, D, V = 6, 11, 8, 37
TOKENS = torch.tensor([7, 1, 11, 3, 5, 0])  # of each answer; the last has none
DESIRABLE = torch.tensor([True, False, True, True, False, False])


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Answers that end at ragged places, with a prompt of at least one ignored label."""
    torch.manual_seed(0)
    labels = torch.randint(V, (ROWS, S))
    start = torch.tensor([2, 4, 0, 8, 1, 5])[:, None]
    at = torch.arange(S)
    labels[(at < start) | (at >= start + TOKENS[:, None])] = -100
    wide = {"dtype": torch.float64}
    return {
        "hidden": torch.randn(ROWS, S, D, **wide).to(dtype).requires_grad_(),
        "weight": torch.randn(V, D, **wide).to(dtype).requires_grad_(),
        "labels": labels,
    }


def over_all_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens (rows, S) and answers (rows,), and counts of tokens (rows,)."""
    log_p = (hidden.double() @ weight.double().t() / temperature).log_softmax(-1)
    counts = labels != -100
    each = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * counts
    return each, each.sum(-1), counts.sum(-1)


def check(found: PreferenceOutput, losses: Tensor, given: dict[str, Tensor]) -> None:
    """The loss, its gradients and the sums are those over all logits."""
    assert_close(found.loss, losses.mean())
    leaves = [given["hidden"], given["weight"]]
    ours = torch.autograd.grad(found.loss, leaves, retain_graph=True)
    for a, b in zip(ours, torch.autograd.grad(losses.mean(), leaves), strict=True):
        assert_close(a, b)
    _, sums, _ = over_all_logits(**given)
    assert_close(torch.cat([found.chosen_log_probs, found.rejected_log_probs]), sums.detach())
    assert not any(x.requires_grad for x in found[1:])


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "sft", "aot", "sigmoid_norm"])
def test_dpo(name) -> None:
    given, reference = inputs(), torch.randn(ROWS, dtype=torch.float64) - 20
    _, sums, tokens = over_all_logits(**given)
    found = LinearDPOLoss(loss_type=name, beta=0.3)(**given, ref_log_probs=reference)
    n, m = tokens.chunk(2)
    how = dict(loss_type=name, beta=0.3, chosen_tokens=n, rejected_tokens=m)
    check(found, dpo_loss(*sums.chunk(2), *reference.chunk(2), **how), given)
    assert_close(found.chosen_rewards, 0.3 * (sums - reference)[:3].detach())
    assert_close(found.rejected_rewards, 0.3 * (sums - reference)[3:].detach())


def test_the_reference_may_have_another_width_and_gets_no_gradient() -> None:
    given = inputs()
    other = torch.randn(ROWS, S, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, 5, dtype=torch.float64, requires_grad=True)
    _, sums, _ = over_all_logits(other, weight, given["labels"])
    loss = LinearDPOLoss()
    found = loss(**given, ref_hidden=other, ref_weight=weight)
    same = loss(**given, ref_log_probs=sums)
    assert_close(found, same)
    for output in (found, same):
        output.loss.backward()
    assert other.grad is None and weight.grad is None


@pytest.mark.parametrize("prompts", [False, True], ids=["answers", "whole rows"])
def test_orpo(prompts) -> None:
    """The cross-entropy of the answers, or of whole rows but for padding at their end."""
    given, everything = inputs(), None
    each, sums, tokens = over_all_logits(**given)
    n, m = tokens.chunk(2)
    nll = -each[:3].sum() / n.sum()
    if prompts:
        everything = torch.randint(V, (3, S)).where(
            given["labels"][:3] == -100, given["labels"][:3]
        )
        everything[:, 9:] = given["labels"][:3, 9:]
        chosen = {"hidden": given["hidden"][:3], "weight": given["weight"], "labels": everything}
        each, _, counts = over_all_logits(**chosen)
        nll = -each.sum() / counts.sum()
        assert (counts > n).any()
    found = LinearORPOLoss(beta=0.7)(**given, nll_labels=everything)
    losses = orpo_loss(*sums.chunk(2), nll, chosen_tokens=n, rejected_tokens=m, beta=0.7)
    check(found, losses, given)
    assert_close(found.chosen_rewards, 0.7 * (sums[:3] / n).detach())


@pytest.mark.parametrize(
    "case", [{}, {"loss_type": "simpo", "cpo_alpha": 0.0, "alpha": 0.2}, {"loss_type": "ipo"}]
)
def test_cpo(case) -> None:
    given = inputs()
    each, sums, tokens = over_all_logits(**given)
    n, m = tokens.chunk(2)
    nll = -each[:3].sum() / n.sum()
    losses = cpo_loss(*sums.chunk(2), nll, chosen_tokens=n, rejected_tokens=m, **case)
    check(LinearCPOLoss(**case)(**given), losses, given)


def test_simpo() -> None:
    given = inputs()
    _, sums, tokens = over_all_logits(**given)
    n, m = tokens.chunk(2)
    losses = simpo_loss(
        *sums.chunk(2), chosen_tokens=n, rejected_tokens=m, beta=2.0, simpo_gamma=1.0
    )
    found = LinearSimPOLoss(beta=2.0, simpo_gamma=1.0)(**given)
    check(found, losses, given)
    assert_close(found.chosen_rewards, 2 * (sums[:3] / n).detach())


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_kto(name) -> None:
    given, reference = inputs(), torch.randn(ROWS, dtype=torch.float64) - 20
    _, sums, _ = over_all_logits(**given)
    kl = torch.tensor(0.6)
    loss = LinearKTOLoss(loss_type=name, undesirable_weight=0.4)
    found = loss(**given, desirable=DESIRABLE, kl=kl, ref_log_probs=reference)
    assert isinstance(found, KTOOutput)
    how = dict(loss_type=name, undesirable_weight=0.4)
    losses = kto_loss(sums, reference, DESIRABLE, kl, **how)
    assert_close(found.loss, losses.mean())
    leaves = [given["hidden"], given["weight"]]
    for a, b in zip(
        torch.autograd.grad(found.loss, leaves),
        torch.autograd.grad(losses.mean(), leaves),
        strict=True,
    ):
        assert_close(a, b)
    assert_close(found.log_probs, sums.detach())
    assert_close(found.rewards, 0.1 * (sums - reference).detach())
    assert not found.rewards.requires_grad and not found.log_probs.requires_grad


def test_temperature_and_bias() -> None:
    """Options of the head; the reference takes the same temperature."""
    given = inputs()
    _, sums, _ = over_all_logits(**given, temperature=0.5)
    found = LinearDPOLoss(temperature=0.5)(
        **given, ref_hidden=given["hidden"], ref_weight=given["weight"]
    )
    assert_close(found.chosen_log_probs, sums[:3].detach())
    assert_close(found.chosen_rewards, torch.zeros(3, dtype=torch.float64))
    bias = torch.randn(V, dtype=torch.float64)
    with_bias = LinearSimPOLoss(softcap=4.0)(**given, bias=bias)
    log_p = (4 * ((given["hidden"] @ given["weight"].t() + bias) / 4).tanh()).log_softmax(-1)
    at = log_p.gather(-1, given["labels"].clamp(min=0)[..., None]).squeeze(-1)
    sums = (at * (given["labels"] != -100)).sum(-1)
    assert_close(with_bias.chosen_log_probs, sums[:3].detach())


def test_bf16() -> None:
    """The loss and metrics are fp32 and within the rounding of operands; gradients are bf16."""
    given = inputs(torch.bfloat16)
    _, sums, _ = over_all_logits(**given)
    reference = torch.full((ROWS,), -20.0, dtype=torch.bfloat16)
    found = LinearDPOLoss()(**given, ref_log_probs=reference)
    truth = dpo_loss(*sums.chunk(2), *reference.chunk(2)).mean()
    assert all(x.dtype == torch.float32 for x in found)
    assert_close(found.loss.double(), truth, rtol=1e-5, atol=1e-5)
    found.loss.backward()
    assert given["hidden"].grad.dtype == given["weight"].grad.dtype == torch.bfloat16


def test_rows_without_any_answer() -> None:
    given = inputs()
    given["labels"].fill_(-100)
    for loss in (
        LinearORPOLoss(),
        LinearCPOLoss(),
        LinearSimPOLoss(),
        LinearDPOLoss(loss_type="ipo"),
    ):
        how = {"ref_log_probs": torch.zeros(ROWS)} if isinstance(loss, LinearDPOLoss) else {}
        found = loss(**given, **how)
        found.loss.backward()
        assert found.loss.isfinite() and not given["hidden"].grad.any()


def test_the_example_of_the_docs() -> None:
    """docs/in_your_code.md over patched models gives what plain logits give."""
    page = (ROOT / "docs/in_your_code.md").read_text()
    example = page[page.index("## Preference losses") :].split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    models = [LlamaForCausalLM(tiny_config()) for _ in range(2)]
    ids, mask = torch.randint(331, (4, 30)), torch.ones(4, 30, dtype=torch.int64)
    answer_mask = (torch.arange(30) >= torch.tensor([9, 20, 9, 20])[:, None]).long()
    each = [
        model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        for model in models
    ]
    sums, reference = ((x * answer_mask[:, 1:]).sum(-1) for x in each)
    margins = (sums - reference)[:2] - (sums - reference)[2:]
    truth = (-(0.1 * margins).sigmoid().log()).mean() - 0.2 * sums[:2].sum() / answer_mask[:2].sum()
    expected = torch.autograd.grad(truth, models[0].parameters())

    names = {"ids": ids, "mask": mask, "answer_mask": answer_mask, "longctx": longctx}
    names["model"], names["reference"] = (longctx.patch(copy.deepcopy(model)) for model in models)
    exec(example, names)
    assert_close(names["found"].loss, truth, rtol=1e-5, atol=1e-5)
    for (name, ours), grad in zip(names["model"].named_parameters(), expected, strict=True):
        assert_close(ours.grad, grad, rtol=1e-3, atol=1e-5, msg=name)


# --- what it costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_flops(frozen) -> None:
    """As the docstring counts them; labels of prompts cost nothing."""
    given = inputs(torch.bfloat16)
    given["weight"].requires_grad_(not frozen)
    unit = 2 * V * D * int(TOKENS.sum())
    loss = LinearDPOLoss()
    how = {"ref_hidden": given["hidden"], "ref_weight": given["weight"]}
    found, counted = flops(lambda: loss(**given, **how))
    assert counted == (1 + (2 if frozen else 1)) * unit
    assert flops(found.loss.backward)[1] == (0 if frozen else 3) * unit


BUDGET = 2**16


@pytest.mark.parametrize("kind", [LinearDPOLoss, LinearORPOLoss])
def test_memory_does_not_grow_with_a_pairs_tokens_times_vocabulary(kind) -> None:
    """The largest tensor is a piece of logits, where all logits of the one pair would take 32 times
    as much; twice the tokens need no more than twice what is as long as they are."""
    features, vocab, peaks = 16, 2048, []
    loss = kind(logits_bytes=BUDGET)
    for length in (256, 512):
        hidden = torch.randn(2, length, features, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab, features, dtype=torch.bfloat16, requires_grad=True)
        given = {"hidden": hidden, "weight": weight, "labels": torch.randint(vocab, (2, length))}
        if kind is LinearDPOLoss:
            given |= {"ref_hidden": hidden.detach(), "ref_weight": weight.detach()}
        largest, peak = allocated(lambda given=given: loss(**given).loss.backward())
        # on the CPU gradients are copied to fp32, in pieces of twice the budget
        assert largest <= 2 * BUDGET <= 2 * length * vocab * 4 / 32
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= 2 * 256 * (3 * 4 * features + 200)


# --- what is given ---------------------------------------------------------------------------


def test_they_show_their_options() -> None:
    assert repr(LinearDPOLoss()) == "LinearDPOLoss()"
    shown = repr(LinearDPOLoss(loss_type=["ipo", "sft"], beta=0.3, softcap=30.0))
    assert shown == "LinearDPOLoss(beta=0.3, loss_type=['ipo', 'sft'], softcap=30.0)"
    assert repr(LinearORPOLoss(beta=1.0)) == "LinearORPOLoss(beta=1.0)"
    assert not list(LinearKTOLoss().parameters())


def test_signatures_show_every_option_with_its_default() -> None:
    found = inspect.signature(LinearDPOLoss).parameters
    assert {"beta", "loss_weights", "f_divergence_type", "temperature", "softcap"} < {*found}
    assert len(found) == 10 and found["loss_type"].default == "sigmoid"
    assert all(p.kind is p.KEYWORD_ONLY for p in found.values())
    fixed = {"loss_type", "cpo_alpha"}
    both = (inspect.signature(kind).parameters for kind in (LinearCPOLoss, LinearSimPOLoss))
    assert fixed == set.difference(*map(set, both))
    for name in (*fixed, "bta"):
        with pytest.raises(TypeError, match=f"LinearSimPOLoss.* unexpected .*{name!r}"):
            LinearSimPOLoss(**{name: "sigmoid"})


@pytest.mark.parametrize(
    ("loss", "change", "message"),
    [
        (LinearDPOLoss, {}, "as ref_log_probs, or as ref_hidden and ref_weight, got none of them"),
        (LinearDPOLoss, {"ref_hidden": torch.ones(2)}, "ref_weight, got ref_hidden"),
        (
            LinearDPOLoss,
            {"ref_hidden": torch.ones(2), "ref_log_probs": torch.ones(6)},
            "got ref_log_probs and ref_hidden",
        ),
        (
            LinearDPOLoss,
            {"ref_log_probs": torch.ones(3)},
            r"ref_log_probs must have shape \(6,\), got \(3,\)",
        ),
        (LinearORPOLoss, {"nll_labels": torch.ones(6, S)}, r"nll_labels must have shape \(3, 11\)"),
        (
            LinearSimPOLoss,
            {"hidden": torch.ones(ROWS, D)},
            r"hidden must have shape \(rows, S, D\)",
        ),
        (
            LinearSimPOLoss,
            {"labels": torch.ones(ROWS, 2).long()},
            r"labels must have shape \(6, 11",
        ),
        (
            LinearCPOLoss,
            {"hidden": torch.ones(3, S, D).double(), "labels": torch.ones(3, S).long()},
            "chosen rows first and then as many rejected ones, got 3 rows",
        ),
    ],
)
def test_wrong_arguments(loss, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        loss()(**inputs() | change)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (LinearDPOLoss, {"loss_type": "dpo"}, "loss_type must be one of sigmoid"),
        (LinearDPOLoss, {"loss_type": "exo_pair"}, "label_smoothing of 'exo_pair'"),
        (LinearCPOLoss, {"loss_type": "hing"}, "did you mean 'hinge'"),
        (LinearORPOLoss, {"beta": -1.0}, "beta must be positive, got -1.0"),
        (LinearKTOLoss, {"loss_type": "bco"}, "loss_type must be one of kto, apo_zero_unpaired"),
        (LinearSimPOLoss, {"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ],
)
def test_options_are_checked_when_a_module_is_made(loss, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        loss(**options)
