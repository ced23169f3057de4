"""A configuration and the model that transformers makes of it are in one family, of all types."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_families import SIZES
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import longctx
from longctx.families.families import FAMILIES, family_of, is_a
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

BORROWED = ["internlm3", "iquestcoder"]
"""Types whose models are of another type's class, Llama's."""


def small(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **SIZES | dict(hidden_size=32, head_dim=8) | changes)


def test_all_of_transformers_types() -> None:
    borrowed = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind)
        except Exception:  # some have no defaults of which a model can be made
            assert kind not in FAMILIES
            continue
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = model_class.__new__(model_class)
        family = family_of(config)
        assert family is family_of(model), kind
        assert kind not in FAMILIES or FAMILIES[kind] is family
        if family is not None and is_a(model, "ForCausalLM") and kind not in FAMILIES:
            borrowed.append(kind)
    assert borrowed == [*BORROWED, "qwen3_5", "qwen3_5_moe"]  # made as text models


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_found_by_its_configuration(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    assert family_of(config) is FAMILIES[kind]


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("biases", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("kind", BORROWED)
def test_a_borrowed_class_trains_as_before(kind: str, biases, scheduled, tmp_path) -> None:
    torch.manual_seed(0)
    vanilla = AutoModelForCausalLM.from_config(small(kind, **biases)).train()
    ours = longctx.patch(copy.deepcopy(vanilla), strict=True)
    ids = torch.randint(211, (2, 24))
    losses = [model(input_ids=ids, labels=ids).loss for model in (vanilla, ours)]
    for loss in losses:
        loss.backward()
    assert scheduled
    torch.testing.assert_close(*losses)
    for theirs, own in zip(vanilla.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    vanilla.save_pretrained(tmp_path)  # and a run takes it
    load_config(ModelArguments(model_name_or_path=str(tmp_path), seq_len=8), vocab_size=211)
    rewards = AutoModelForSequenceClassification.from_config(small("llama", num_labels=1))
    assert family_of(rewards.config) is family_of(rewards) is family_of(vanilla)
