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
from longctx.cost import fitted
from longctx.cost.sizes import Batch
from longctx.families import families
from longctx.families.family import Family, attention, either, layer_of, mixer, mlp
from longctx.layer import segments
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.runtime.costs import StepTable
from longctx.runtime.runtime import model_sizes
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")
HOME = "transformers.models.fable.modeling_fable"
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, vocab_size=211)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)


def _factor(config: Any, layer: int) -> float:
    return float(config.residual_factor)


def _state(config: Any, layer: int) -> tuple[int, int]:
    return 0, config.hidden_size


FABLE = Family(
    kind="fable",
    prefix="Fable",
    layer=layer_of(
        either(
            lambda config, i: config.mixes and i == config.num_hidden_layers - 1,
            mixer(path="mix", module="Mixer", kind="fable", state=_state, factor=_factor),
            attention(factor=_factor),
        ),
        either(
            lambda config, i: i % 2 == 0,
            mlp(factor=_factor),
            mlp(factor=_factor, linears={"up": "mlp.up_proj", "down": "mlp.down_proj"}),
        ),
    ),
)


@pytest.fixture
def fable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes models of the new family, whose code has the name that it would have in transformers,
    and which is in longctx's table; the seconds of its mixer are in theirs."""
    spec: Any = importlib.util.spec_from_file_location(
        HOME, Path(__file__).with_name("fable") / "modeling_fable.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, HOME, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(families.FAMILIES, "fable", FABLE)
    families.family_of_class.cache_clear()
    monkeypatch.setitem(fitted.MIXERS, "fable", (1000, 2000))

    def made(**changes: Any) -> Any:
        torch.manual_seed(0)
        return module.FableForCausalLM(module.FableConfig(**SIZES, **HEADS, **changes)).train()

    yield made
    families.family_of_class.cache_clear()


def compare(vanilla: Any, documents: list[list[int]]) -> int:
    """Compares a patched model with Hugging Face's, and returns how many gradients there are."""
    ours, inputs = copy.deepcopy(vanilla), batch(documents)
    longctx.patch(ours, strict=True)
    (loss, grads), (found, own) = (gradients(model, inputs) for model in (vanilla, ours))
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert grads.keys() == own.keys()
    for name, grad in grads.items():
        assert (own[name] - grad).norm() <= 1e-5 * grad.norm(), name
    return len(grads)


def test_an_entry_is_all_of_a_family(fable: Any) -> None:
    assert compare(fable(), PACKED) == 3 + 3 * 8 + 2


def test_a_mixer_is_a_spec_and_its_seconds(fable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose state goes from segment to segment."""
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", 16)
    assert compare(fable(mixes=True), [[40], [40]]) == 3 + 3 * 8 + 2 - 3


def test_the_plan_counts_its_layers(fable: Any) -> None:
    sizes = model_sizes(fable(mixes=True), PatchOptions(), torch.bfloat16)
    assert sizes.of_layer == (0, 1, 2)
    assert [kind.one(MlpSpec).gated for kind in sizes.kinds] == [True, False, True]
    mixed = StepTable.of(sizes, Batch(64, 64)).kinds[2]
    besides = [work.flops for work in mixed.forward if work.rate == "mixer"]
    assert besides == [64 * 32 * 1000]
