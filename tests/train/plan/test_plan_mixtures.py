"""Mixtures in Hugging Face's layers: their count against measured layers, against what autograd
holds and what torch counts; and the plans that come of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import allocated, flops
from small_families import EXPERTS, family_config
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.constants import GIB
from longctx.cost.machines import MACHINES
from longctx.cost.seconds import priced
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Table, load
from longctx.errors import UserError
from longctx.families.classes import without_storage
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.runtime.costs import StepTable
from longctx.runtime.peer_costs import COUNTED
from longctx.runtime.peers import peer_sizes
from longctx.train.lora.peft_adapters import with_lora
from longctx.train.options.config import ModelArguments
from longctx.train.plan import subject
from longctx.train.plan.predict import plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config

RESULTS = Path(__file__).parents[3] / "profiling" / "results"
COUNTED_FAMILIES = [name for name in EXPERTS if name != "gpt_oss"]
"""gpt-oss's attention in plain torch has matmuls of its own."""


def table_of(sizes: Sizes, tokens: int, layer: int = 0) -> Table:
    return StepTable.of(sizes, Batch(tokens, tokens)).layers[layer]


def arguments(class_type: str = "vanilla", **more: Any) -> ModelArguments:
    return ModelArguments(**dict(class_type=class_type, seq_len=4096) | more)


@pytest.mark.parametrize("tokens", [32768, 131072])
def test_measured_layers(tokens) -> None:
    """Two layers of Qwen3-30B-A3B with checkpointing. The peak is in the lower layer's backward,
    when the upper one has its gradients, and the inputs of both are kept."""
    rows = json.loads((RESULTS / "h100_experts_layer.json").read_text())["rows"]
    (row,) = (r for r in rows if r["tokens"] == tokens and r["class_type"] == "vanilla")
    config = load_config(arguments(preset="qwen3-30b-a3b"), vocab_size=1)
    config.num_hidden_layers = row["layers"]
    model = without_storage(config, torch.bfloat16)
    sizes = peer_sizes(model, "vanilla", 2)
    found = table_of(sizes, tokens)
    rates = MACHINES["h100"].rates(row["backend"], tokens, *sizes.scores)
    forward, backward = (priced(load(x), rates).step for x in (found.forward, found.backward))
    assert forward == pytest.approx(row["fwd_s"], rel=0.03)
    assert forward + backward == pytest.approx(row["layer_s"], rel=0.03)
    weights = sum(p.nbytes for p in model.model.layers[0].parameters())
    needed = sum(found.during("layer backward").values()) + 2 * sizes.unit(tokens) + 3 * weights
    assert needed / GIB == pytest.approx(row["peak_total_gib"], rel=0.01)


@pytest.mark.parametrize("family", COUNTED_FAMILIES)
def test_flops_are_those_that_torch_counts(family) -> None:
    """Of all layers' forward but attention, with the FLOPs of the experts that tokens go to, and of
    the MLPs between them. A shared expert's gate has D more."""
    tokens = 48
    model = AutoModelForCausalLM.from_config(family_config(family)).eval()
    with torch.no_grad():
        _, counted = flops(lambda: model.model(torch.arange(tokens)[None], use_cache=False))
    step = StepTable.of(peer_sizes(model, "vanilla", 4), Batch(tokens, tokens))
    works = [work for layer in step.layers for work in layer.forward if work.rate != "attention"]
    rotary = tokens * model.config.hidden_size * 2 * len(step.layers)  # angles, and gates
    assert 0 <= counted - sum(work.flops for work in works) <= rotary


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_hold_what_is_counted(family, trained) -> None:
    """transformers' grouped matmuls, forward and backward, in bf16. Mixtral's weights of experts
    are in fp32, and so is what they multiply."""
    tokens, wide = 8192, family == "mixtral"
    config = family_config(family, experts_implementation="grouped_mm")
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).requires_grad_(trained)
    experts = model.model.layers[0].mlp.experts
    sizes = peer_sizes(model, "vanilla", 2)
    spec = sizes.kinds[sizes.of_layer[0]].one(ExpertsSpec)
    assert spec.fp32_weights == wide
    x = torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(tokens, spec.chosen, dtype=torch.float32 if wide else torch.bfloat16)
    ids = torch.rand(tokens, spec.experts).argsort(1)[:, : spec.chosen]
    weights.requires_grad_()

    def both() -> None:
        experts(x, ids, weights).backward(torch.ones_like(x))

    _, most = allocated(both)
    count = COUNTED["vanilla"]
    spared = [(not trained) * n for n in count.of_weights]
    slot = count.slots[0] + wide * count.wide[0] - spared[0]
    slot = (slot + 2 / spec.chosen) * config.hidden_size  # dy and dx
    slot += (count.features[0] - spared[1]) * spec.width
    assert most == pytest.approx(2 * tokens * spec.chosen * slot, rel=0.02)


def test_layers_without_experts_are_a_kind_of_their_own() -> None:
    model = AutoModelForCausalLM.from_config(family_config("qwen2_moe"))
    sizes = peer_sizes(model, "vanilla", 4)
    assert sizes.of_layer == (0, 1, 0)
    sparse, dense = sizes.kinds
    spec, mlp = sparse.one(ExpertsSpec), dense.one(MlpSpec)
    assert (spec.experts, spec.chosen, spec.width, spec.shared_width) == (6, 2, 96, 112)
    assert dense.part(ExpertsSpec) is None and (mlp.width, mlp.gated) == (160, True)


@pytest.mark.parametrize("targets", [None, ["q_proj", "o_proj"], ["experts"]])
def test_a_plan_without_peft_counts_pefts_adapters(targets, monkeypatch) -> None:
    pytest.importorskip("peft")
    args = arguments(seq_len=128, lora_r=3, lora_targets=targets)
    run = PlannedRun(model=args)
    config = family_config("qwen3_moe")
    shapes = Subject(config, args).sizes(run)
    monkeypatch.setattr(subject, "with_lora_shapes", with_lora)
    assert shapes == Subject(config, args).sizes(run)
    experts = 7 * 3 * 96 * 128
    assert [kind.folded for kind in shapes.kinds] == [
        experts * (targets != ["q_proj", "o_proj"]),
        0,
    ]
    assert all(kind.rank == 3 for kind in shapes.kinds if kind.adapted.inputs or kind.folded)


def test_adapters_of_experts_are_folded_into_copies() -> None:
    """PEFT's adapters on frozen experts make their gradients whole, as training them does."""
    model = AutoModelForCausalLM.from_config(family_config("mixtral"))
    trained = peer_sizes(model, "vanilla", 2)
    frozen = peer_sizes(model.requires_grad_(False), "vanilla", 2)
    (kind,) = frozen.kinds
    folded = replace(frozen, kinds=(replace(kind, folded=1000, rank=4),))
    names = [{w.name: w.flops for w in table_of(s, 64).backward} for s in (trained, frozen, folded)]
    made = [found["gradients of experts"] for found in names]
    assert made[0] == made[2] == 2 * made[1]
    assert table_of(folded, 64).during("layer backward")["copies of experts"] == 4000


def test_a_plan_of_each_side() -> None:
    """Beside ours on the same row: Hugging Face's layers hold more, and no side but ours streams
    weights. Liger-Kernel has kernels for Qwen3-MoE's experts, which gather as they read."""
    found = {}
    for class_type in ("custom", "liger", "vanilla"):
        args = arguments(class_type, preset="qwen3-30b-a3b", seq_len=32768, lora_r=16)
        args = replace(args, lora_targets=["q_proj", "k_proj", "v_proj", "o_proj"])
        subject = Subject(load_config(args, vocab_size=1), args)
        found[class_type] = plan(subject, PlannedRun(model=args), MACHINES["h200"], 200 * GIB)
    assert all(one.fits for one in found.values())
    steps = [one.seconds.step for one in found.values()]
    assert steps == sorted(steps) and steps[2] > 1.5 * steps[0]
    working = [dict(one.phases)["backward"]["a layer"] for one in [*found.values()][1:]]
    assert working[1] > 1.5 * working[0]


@pytest.mark.parametrize("class_type", ["vanilla", "liger"])
def test_what_is_not_counted_is_refused(class_type) -> None:
    args = arguments(class_type, preset="gpt-oss-20b")
    with pytest.raises(UserError, match="has attention sinks, whose plan in Hugging Face's layers"):
        Subject(load_config(args, vocab_size=1), args)
    other = AutoConfig.for_model("jamba", hidden_size=64, num_hidden_layers=4)
    with pytest.raises(UserError, match="has experts, whose plan in Hugging Face's layers"):
        Subject(other, args)
