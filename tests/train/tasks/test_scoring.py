"""Scoring inside a model's forward, against log-softmax of all logits."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from small_families import FIRST_OF_EACH, delta_rule_in_fp64, family_config
from small_model import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import longctx
from longctx.errors import UserError
from longctx.train.tasks.scoring import LogProbs, attach_scoring

pytestmark = pytest.mark.usefixtures("reference_kernels")


def inputs(rows: int = 2) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A batch, predictors (one of them twice, one the last of its row) and targets."""
    torch.manual_seed(1)
    ids = torch.randint(211, (rows, 24))
    positions = torch.arange(24).expand(rows, -1)
    predictors = torch.tensor([3, 3, 4, 23, 30, 47])
    return {"input_ids": ids, "position_ids": positions}, predictors, torch.randint(211, (6,))


def expected(model: Any, batch: dict[str, Tensor], predictors: Tensor, targets: Tensor) -> Tensor:
    logits = model(**batch, use_cache=False).logits.flatten(0, 1)[predictors]
    return logits.float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def assert_scores(plain: Any, ours: Any) -> None:
    batch, predictors, targets = inputs()
    weights = torch.linspace(-1, 1, len(targets))
    truth = expected(plain, batch, predictors, targets)
    (truth * weights).sum().backward()
    found = ours(**batch, scoring=LogProbs(predictors, targets))["log_probs"]
    (found * weights).sum().backward()
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    grads = {name: p.grad for name, p in ours.named_parameters()}
    for name, p in plain.named_parameters():
        if p.grad is not None:
            most = 1e-4 if name.endswith("A_log") else 2e-5  # a few numbers, of terms that cancel
            assert (grads[name] - p.grad).norm() <= most * p.grad.norm(), name


@pytest.mark.parametrize(
    ("name", "patched"),
    [*((name, True) for name in FIRST_OF_EACH), *((name, False) for name in FIRST_OF_EACH[::2])],
)
def test_every_family(name: str, patched: bool) -> None:
    """Without a patch scoring calls Hugging Face's layers, whatever the family."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(family_config(name)).train()
    ours = copy.deepcopy(plain)
    if patched:
        longctx.patch(ours, strict=True)
    attach_scoring(ours)
    with delta_rule_in_fp64():
        assert_scores(plain, ours)


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "saved"])
def test_adapters(options: dict[str, Any]) -> None:
    plain, ours = adapted(**options), adapted(**options)
    longctx.patch(ours, strict=True)
    attach_scoring(ours)
    assert_scores(plain, ours)


def test_calls_without_scoring_are_as_before() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    batch, *_ = inputs()
    before = model(**batch, labels=batch["input_ids"])
    attach_scoring(model)
    after = model(**batch, labels=batch["input_ids"])
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)


def test_a_head_that_is_not_computed_is_refused() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    model = peft.get_peft_model(LlamaForCausalLM(tiny_config()), config)
    with pytest.raises(UserError, match="lm_head"):
        attach_scoring(model)
    with pytest.raises(UserError, match="GPT2"):
        attach_scoring(AutoModelForCausalLM.from_config(tiny_config("gpt2", n_layer=1)))
