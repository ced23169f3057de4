"""A model whose weights are mostly stacks of experts is not taken for its linear maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from longctx.cost.sizes import Batch
from longctx.errors import UserError
from longctx.families.adapters import Applied
from longctx.families.matrices import active_shares, linears, stacks
from longctx.layer.adapters.lora import adapters_cost
from longctx.loop.metrics import parameters_in_matmuls
from longctx.runtime import runtime
from longctx.runtime.runtime import model_sizes
from longctx.settings import PatchOptions
from longctx.train.lora.quantise import check_experts
from longctx.train.options.config import ModelArguments

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0]),
    ),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=4, num_experts_per_tok=1, head_dim=16)),
}


def mixture(name: str) -> tuple[PretrainedConfig, Any]:
    kind, more = MIXTURES[name]
    config = tiny_config(kind, **more)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MIXTURES)
def test_mfu_counts_the_experts_that_a_token_meets(name) -> None:
    config, model = mixture(name)
    layers = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    experts = sum(p.numel() for module in layers for p in module.parameters())
    rest = sum(p.numel() for p in model.parameters()) - experts - model.lm_head.weight.numel()
    share = config.num_experts_per_tok / len(layers[0].down_proj)
    assert set(active_shares(model, config).values()) == {share}
    assert len(stacks(model)) == len(layers) and not set(stacks(model)) & set(linears(model))
    assert parameters_in_matmuls(model) == rest + experts * share


def test_a_stack_of_convolutions_is_none() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(8, 8, 4, groups=8), "linear": nn.Linear(8, 8)})
    assert not stacks(model) and [*linears(model)] == ["linear"]


@pytest.mark.parametrize("name", MIXTURES)
def test_4_bits_that_would_leave_the_experts_in_16_are_refused(name) -> None:
    args = ModelArguments(lora_r=2, class_type="vanilla", lora_targets=["q_proj"])
    config = mixture(name)[0]
    check_experts(args, config)
    with pytest.raises(UserError, match=r"layers\.[01]\.mlp\.experts holds the weights of several"):
        check_experts(replace(args, quantize="nf4"), config)


def test_adapters_cost_what_the_tokens_cost_that_they_are_applied_to(monkeypatch) -> None:
    """On half of them a half."""
    model = AutoModelForCausalLM.from_config(tiny_config())

    def flops(share: float) -> list[float]:
        one = Applied(torch.zeros(4, 64), torch.zeros(96, 4), 1.0, 0.0, share=share)
        monkeypatch.setattr(runtime, "layer_adapters", lambda *layer: {"up": one})
        sizes = model_sizes(model, PatchOptions(), torch.bfloat16)
        table = adapters_cost(sizes, sizes.kinds[0], Batch(100, 100))
        works = (*table.forward, *table.backward)
        return [work.flops for work in works] + [work.nbytes for work in works]

    assert flops(1.0)[0] == 2 * 100 * 4 * (64 + 96)
    assert [2 * half for half in flops(0.5)] == flops(1.0)
