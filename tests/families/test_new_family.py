"""A new family touches its table alone. The one here is none of transformers' (fable/): its entry
is all that longctx is told of it."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_layer import PACKED, batch, gradients

import longctx
from longctx.families import families
from longctx.families.family import Family, attention, either, layer_of, mlp
from longctx.runtime.runtime import model_sizes
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")
HOME = "transformers.models.fable.modeling_fable"
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, vocab_size=211)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)


def _factor(config: Any, layer: int) -> float:
    return float(config.residual_factor)


FABLE = Family(
    kind="fable",
    prefix="Fable",
    layer=layer_of(
        attention(factor=_factor),
        either(
            lambda config, i: i % 2 == 0,
            mlp(factor=_factor),
            mlp(factor=_factor, linears={"up": "mlp.up_proj", "down": "mlp.down_proj"}),
        ),
    ),
)


@pytest.fixture
def vanilla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of the new family, whose code has the name that it would have in transformers."""
    spec: Any = importlib.util.spec_from_file_location(
        HOME, Path(__file__).with_name("fable") / "modeling_fable.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, HOME, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(families.FAMILIES, "fable", FABLE)
    families.family_of_class.cache_clear()
    torch.manual_seed(0)
    yield module.FableForCausalLM(module.FableConfig(**SIZES, **HEADS)).train()
    families.family_of_class.cache_clear()


def test_an_entry_is_all_of_a_family(vanilla: Any) -> None:
    ours, inputs = copy.deepcopy(vanilla), batch(PACKED)
    longctx.patch(ours, strict=True)
    (loss, grads), (found, own) = (gradients(model, inputs) for model in (vanilla, ours))
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert grads.keys() == own.keys() and len(grads) == 3 + 3 * 8 + 2
    for name, grad in grads.items():
        assert (own[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_the_plan_counts_its_layers(vanilla: Any) -> None:
    sizes = model_sizes(vanilla, PatchOptions(), torch.bfloat16)
    assert sizes.of_layer == (0, 1, 0)
    assert [kind.parts[1].gated for kind in sizes.kinds] == [True, False]
