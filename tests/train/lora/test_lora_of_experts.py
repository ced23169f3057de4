"""`--lora_r` on a mixture: adapters on attention and on experts, none on routers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_families import EXPERTS, family_config
from small_vision import vision_config
from transformers import AutoModelForCausalLM

from longctx.errors import UserError
from longctx.train.lora.peft_adapters import adapter_bytes, add_adapters, check_lora, with_lora
from longctx.train.options.config import ModelArguments
from longctx.train.plan import subject
from longctx.train.plan.subject import PlannedRun, Subject

peft = pytest.importorskip("peft")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def arguments(**more) -> ModelArguments:
    return ModelArguments(class_type="custom", seq_len=128, lora_r=3, **more)


@pytest.mark.parametrize("family", [*EXPERTS, "qwen3_vl_moe"])
@pytest.mark.parametrize(
    "more",
    [{}, {"lora_targets": ATTENTION}, {"lora_targets": ["experts"]}, {"quantize": "nf4"}],
)
def test_a_plan_without_peft_counts_pefts_adapters(family, more, monkeypatch) -> None:
    args = arguments(**more)
    config = (vision_config if family == "qwen3_vl_moe" else family_config)(family)
    shapes = Subject(config, args)
    monkeypatch.setattr(subject, "with_lora_shapes", with_lora)
    real = Subject(config, args)
    run = PlannedRun(model=args)
    assert shapes.sizes(run) == real.sizes(run)
    assert shapes.trained == real.trained
    assert 4 * real.trained == adapter_bytes(args, config)
    has_experts = more.get("lora_targets") != ATTENTION
    assert has_experts == any(
        "experts" in n for n, p in real.model.named_parameters() if "lora" in n
    )
    routers = ("gate.lora", "router.lora")
    assert not any(r in name for name, _ in real.model.named_parameters() for r in routers)


@pytest.mark.parametrize(
    ("more", "said"),
    [({}, "; routers are frozen"), ({"lora_targets": ATTENTION}, "experts and their routers are")],
)
def test_what_is_frozen_is_said(more, said) -> None:
    model = AutoModelForCausalLM.from_config(family_config("qwen3_moe"))
    _, words = add_adapters(model, arguments(**more))
    assert said in words


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"lora_dropout": 0.1}, "--lora_dropout: adapters of experts have none"),
        ({"use_dora": True}, "--use_dora: adapters of experts have none"),
        ({"lora_targets": ["expert"]}, "the model has no such part; did you mean experts"),
        ({"lora_targets": ["gate"]}, "--lora_targets gate: routers and other MLPs than experts"),
    ],
)
def test_options_that_cannot_be(more, problem) -> None:
    with pytest.raises(UserError, match=problem):
        check_lora(arguments(**more), family_config("mixtral"))
    check_lora(arguments(lora_targets=ATTENTION, lora_dropout=0.1), family_config("mixtral"))


def test_a_dense_model_has_none() -> None:
    with pytest.raises(UserError, match="the model has none"):
        check_lora(arguments(lora_targets=["experts"]), family_config("llama"))


@pytest.mark.parametrize("family", EXPERTS)
def test_saved_adapters_are_pefts_and_merge(family, tmp_path: Path) -> None:
    """PEFT reads them, its model gives what the trained one gives, and merged weights do, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).eval()
    model.save_pretrained(tmp_path / "base")
    adapted, _ = add_adapters(model, arguments())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(211, (1, 40))
    with torch.no_grad():
        wanted = adapted.eval()(ids).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(again(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            again.merge_and_unload()(ids).logits, wanted, rtol=1e-3, atol=1e-4
        )
