"""A run and its plan ask one count, whoever's layers run; and what a configuration alone says of
whose layers those are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from small_model import tiny_config
from small_plan import card, run

from longctx.any_model.declined import is_dropout, set_dropout_, why_declined
from longctx.constants import GIB
from longctx.cost.machines import MACHINES
from longctx.errors import UserError
from longctx.families.blocks import state_blocks
from longctx.loop import states
from longctx.loop.exact_adamw import _Placing
from longctx.memory.ladder import DROPS
from longctx.patching.patch import patch_custom
from longctx.runtime.peers import peer_kind
from longctx.settings import FUSED, PARTS, TaskName
from longctx.train.lora.peft_adapters import with_lora
from longctx.train.options.config import ModelArguments
from longctx.train.plan.changes import changes
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.step import step_of
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.report.plan_numbers import Answer, as_json
from longctx.train.report.plan_text import figures, title_of
from longctx.train.start.loading import load_config

MACHINE = card(24)


def eight_layers(**changes) -> Subject:
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=8192), vocab_size=1)
    config.num_hidden_layers = 8
    config.update(changes)
    return Subject(config, changes.pop("args", None))


CASES = [(kind, n, "sft") for kind in ("vanilla", "liger", "dropout") for n in (8192, 32768)]
CASES += [("gelu_new", 32768, "sft"), ("vanilla", 32768, "dpo"), ("dropout", 8192, "dpo")]
CASES += [("rms_norm", 8192, "sft"), (FUSED, 32768, "sft")]


@pytest.mark.parametrize(("kind", "tokens", "task"), CASES)
def test_a_run_puts_states_where_its_plan_does(monkeypatch, kind, tokens, task) -> None:
    odd = dict(dropout={"attention_dropout": 0.1}, gelu_new={"hidden_act": "gelu_new"})
    subject = eight_layers(**odd.get(kind, {}))
    class_type = kind if kind in ("vanilla", "liger") else "custom"
    asked = run(tokens, class_type=class_type, task=task, parts=[kind] if kind in PARTS else None)
    planned = plan(subject, asked, MACHINE, 256 * GIB)
    model = subject.model
    if class_type == "custom":
        patch_custom(model, asked.model.patch_options, torch.device("meta"))
        assert states._scheduled(model) is None
        assert planned.sizes.chunks_loss == (kind != "rms_norm")
    monkeypatch.setattr(states, "peer_kind_of", lambda model: (class_type, False))
    rates = MACHINE.rates(planned.backend, tokens, *planned.sizes.scores)
    monkeypatch.setattr(states, "NO_RATES", rates)
    request = partial(_Placing, place="auto", gpu_memory_gib=None, gradient_accumulation_steps=1)
    args = request(device=torch.device("cpu"), world_size=1)
    specs = state_blocks(model, movable=False)
    budget = planned.decision.budget
    decided = states._decided(model, None, specs, budget, args, tokens, None, task)
    assert decided.sizes == planned.decision.sizes
    assert decided.places == planned.decision.places
    assert decided.needed_bytes == planned.decision.needed_bytes
    assert decided.host.nbytes == planned.decision.host.nbytes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("task", get_args(TaskName))
def test_a_run_counts_the_loss_of_its_task_as_its_plan_does(task, ranks) -> None:
    """Of answers' log-probabilities, or of a row's labels; two ranks of a row have half of each."""
    subject, request = eight_layers(), run(32768, task=task, sequence_parallel_size=ranks)
    planned = step_of(subject, request, MACHINE, "cudnn").batch
    assert (planned.scored is None) == (task in ("sft", "distill"))
    options = ModelArguments(seq_len=32768).patch_options
    patch_custom(model := subject.model, options, torch.device("meta"))
    model.longctx.surround(task=task)
    assert model.longctx.step(subject.sizes(request), request.tokens).batch == planned


def peer(class_type: str, **options) -> Plan:
    subject = eight_layers().adapted(ModelArguments(**options)) if options else eight_layers()
    return plan(subject, run(16384, class_type=class_type, **options), card(140), 256 * GIB)


@pytest.mark.parametrize("class_type", ["vanilla", "liger"])
def test_adapters_of_others_layers_are_planned(class_type) -> None:
    whole, lora = peer(class_type), peer(class_type, lora_r=16)
    packed = peer(class_type, lora_r=16, quantize="nf4")
    (kind,) = lora.sizes.kinds
    assert lora.sizes.layers * kind.adapted.parameters == lora.sizes.trained > 0
    assert not kind.trains_weights and not lora.sizes.trains_head
    assert packed.gpu_bytes < lora.gpu_bytes < whole.gpu_bytes
    assert lora.seconds.products < whole.seconds.products
    assert packed.seconds.memory > lora.seconds.memory
    backward = next(phase for phase in lora.phases if phase.name == "backward").buffers
    assert backward["inputs of adapters, fp32"] == 4 * 16384 * kind.adapted.inputs


REASONS = {
    "attention_dropout": ("llama", {"attention_dropout": 0.1}, "attention dropout in", True),
    "seed_oss": ("seed_oss", {"residual_dropout": 0.1}, "residual dropout in", True),
    "gelu_new": ("llama", {"hidden_act": "gelu_new"}, "NewGELUActivation", False),
    "relu": ("qwen2", {"hidden_act": "relu"}, "mlp.act_fn", False),
    "both": ("llama", {"hidden_act": "relu", "attention_dropout": 0.1}, "mlp.act_fn", False),
    "bias": ("llama", {"output_attentions": True}, "output_attentions", False),
    "granite": ("granite", {"attention_dropout": 0.2}, "attention dropout in", True),
    "none": ("llama", {}, None, False),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_configuration_says_whose_layers_run(name) -> None:
    family, changed, says, drops = REASONS[name]
    config = tiny_config(family)
    config.update(changed)
    reason = why_declined(config)
    assert reason is None if says is None else says in str(reason)
    assert is_dropout(config, str(reason)) == drops
    set_dropout_(config, 0.0)
    assert (why_declined(config) is None) == (drops or says is None)


def test_the_way_out_of_dropout_is_offered_where_it_is_dropout() -> None:
    request = run(131072)
    for changed, offered in (({"attention_dropout": 0.1}, True), ({"hidden_act": "relu"}, False)):
        subject = eight_layers(**changed)
        assert subject.declined(request) and ("--dropout 0" in subject.declined(request)) == offered
        assert not plan(subject, request, card(16), 96 * GIB).fits
        found = changes(subject, request, card(16), 96 * GIB, host_grows=False)
        assert any(flags == "--dropout 0" for flags, _ in found) == offered
    with pytest.raises(UserError, match="--dropout must be at most 0"):
        ModelArguments(dropout=0.1)


def test_modules_without_a_language_model_are_counted() -> None:
    args = _Placing(
        place="auto",
        gpu_memory_gib=None,
        gradient_accumulation_steps=1,
        device=torch.device("cpu"),
        world_size=1,
    )
    module = torch.nn.Linear(4, 2)
    specs = state_blocks(module, movable=False)
    found = states._decided(module, None, specs, states.Budget(2**40, 2**40), args, 8, None, "sft")
    assert all(place.all_on_gpu for place in found.places)


def test_adapters_of_any_family_are_found() -> None:
    pytest.importorskip("peft")
    subject = eight_layers()
    model = with_lora(subject.model, ModelArguments(lora_r=8, lora_targets=["q_proj"]))
    found = states.peer_sizes(model, "vanilla", 2)
    (kind,) = found.kinds
    assert kind.rank == 8 and kind.adapted.inputs == 4096


SPARED = "GiB, so that nothing waits for single launches"
LAUNCHED = {  # preset, tokens, options; what the plan says of CUDA graphs
    "QLoRA, 2048": ("llama-3.1-8b", 2048, {"lora_r": 16, "quantize": "nf4"}, SPARED),
    "QLoRA, 8192": ("llama-3.1-8b", 8192, {"lora_r": 16, "quantize": "nf4"}, SPARED),
    "1B, 8192": ("llama-3.2-1b", 8192, {}, SPARED),
    "with dropout": ("llama-3.1-8b", 2048, {"lora_r": 16, "lora_dropout": 0.1}, DROPS),
    "off": ("llama-3.2-1b", 8192, {"cuda_graphs": "off"}, None),
    "on the host": ("llama-3.2-1b", 8192, {"offload_activations": "all"}, "waits on the host"),
    "1B, 131072": ("llama-3.2-1b", 131072, {}, None),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_plan_has_graphs_where_they_pay(name) -> None:
    preset, tokens, options, says = LAUNCHED[name]
    asked = ModelArguments(preset=preset, seq_len=tokens, **options)
    subject = Subject(load_config(asked, vocab_size=1), asked)
    found = plan(subject, PlannedRun(model=asked), MACHINES["h100"], 256 * GIB)
    assert (found.decision.chosen.graph_bytes > 0) == (says == SPARED)
    lines = dict(figures(as_json(Answer(plan=found, host_bytes=256 * GIB))))
    assert lines.get("CUDA graphs", "").endswith(says) if says else "CUDA graphs" not in lines
    if says == SPARED:
        eager = replace(asked, cuda_graphs="off")
        assert (
            found.step_s
            < plan(subject, PlannedRun(model=eager), MACHINES["h100"], 256 * GIB).step_s
        )


def test_a_budget_has_room_for_graphs() -> None:
    """They take less than what eager layers would keep for the sake of a fraction of their time."""
    asked = ModelArguments(preset="llama-3.1-8b", seq_len=2048, lora_r=16, quantize="nf4")
    subject = Subject(load_config(asked, vocab_size=1), asked)
    run = PlannedRun(model=asked, gpu_memory_gib=8)
    found = plan(subject, run, MACHINES["h100"], 256 * GIB)
    assert found.fits and found.decision.chosen.graph_bytes
    assert found.gpu_bytes <= 8 * GIB
    short = plan(subject, run.having(gpu_memory_gib=6.5), MACHINES["h100"], 256 * GIB)
    assert short.decision.chosen.no_graphs == "a step with them does not fit into the GPU's memory"


@pytest.mark.parametrize(
    ("class_type", "parts", "counted"),
    [
        ("custom", None, ("vanilla", True)),  # where the schedule declines
        ("custom", ["rope", "cross_entropy"], ("vanilla", False)),
        ("custom", [FUSED], ("vanilla", True)),
        ("liger", None, ("liger", False)),
        ("liger", ["rope", "rms_norm", "swiglu", FUSED], ("liger", False)),
        ("liger", ["rope", "rms_norm", "swiglu"], ("vanilla", False)),
        ("liger", ["rope", FUSED], ("vanilla", True)),
        ("vanilla", None, ("vanilla", False)),
    ],
)
def test_whose_layers_and_loss_are_counted(class_type, parts, counted) -> None:
    options = ModelArguments(class_type=class_type, parts=parts).patch_options
    assert peer_kind(options) == counted


def test_a_run_with_parts_is_offered_the_schedule() -> None:
    subject = eight_layers()
    request = run(65536, parts=["rms_norm"])
    found = changes(subject, request, card(16), 256 * GIB, host_grows=False)
    assert found[0].flags == "without --parts"
    answer = Answer(plan=plan(subject, request, MACHINE, 256 * GIB), host_bytes=256 * GIB)
    assert title_of(as_json(answer)).startswith("llama-3.1-8b, custom with rms_norm alone, a row")
