"""Plans of --class_type any: by measured layers, by count, and without what nobody knows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_any import config_of, make
from small_plan import card
from transformers import AutoModelForCausalLM

import longctx
from longctx.any_model import measured
from longctx.constants import GIB
from longctx.cost.dims import UNKNOWN
from longctx.errors import UserError
from longctx.runtime.peers import peer_sizes
from longctx.train.options.config import ModelArguments
from longctx.train.plan.measure import gpu_here
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.subject import DTYPE, PlannedRun, Subject
from longctx.train.report import plan as command
from longctx.train.report.plan_numbers import Answer, as_json
from longctx.train.report.plan_text import figures
from longctx.train.report.predicted import as_planned, compare, lines

CPU = torch.device("cpu")
ROW = 64
NO_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts"))


def of(family: str) -> dict[str, Any]:
    return NO_EXPERTS if family == "llama" else {}


def planned(family: str, device: torch.device | None, **options: Any) -> tuple[Subject, Plan]:
    args = ModelArguments(model_name_or_path="x", class_type="any", seq_len=ROW, **options)
    config = config_of(family, **of(family))
    subject = Subject(config, args, device)
    return subject, plan(subject, PlannedRun(model=args), card(24), 64 * GIB)


def said(found: Plan) -> dict[str, str]:
    return dict(figures(as_json(Answer(plan=found, host_bytes=64 * GIB))))


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gemma4_text"])
def test_what_can_be_counted_is_what_a_run_holds(family) -> None:
    """In bfloat16, with all on the GPU: weights, gradients, exact states, inputs of layers."""
    subject, found = planned(family, CPU, offload_activations="none")
    model = make(family, **of(family)).to(torch.bfloat16)
    longctx.patch(model, any_model=True, offload_activations="none")
    weights, update = [*model.parameters()], found.phases[-1].buffers
    numbers, least = sum(p.numel() for p in weights), 512  # bytes that torch's allocator gives
    for name, nbytes, tensors in (
        ("weights", 2, 1),
        ("gradients", 2, 1),
        ("AdamW's states", 10, 3),
    ):
        assert 0 <= update[name] - nbytes * numbers <= tensors * least * len(weights)
    (kept,) = (phase.buffers["kept activations"] for phase in found.phases if phase.name == "loss")
    ids = torch.randint(10, 100, (1, ROW))
    loss = model(input_ids=ids, labels=ids).loss
    store = model.longctx_any.store
    held = sum(x.nbytes for x in store.tensors_on_gpu())
    layers = model.config.num_hidden_layers
    assert held == layers * 2 * ROW * model.config.hidden_size
    assert held <= kept <= held + 1024 * layers  # whole pieces of the allocator's
    loss.backward()
    runtime = model.longctx_any
    sizes = peer_sizes(model, "any", 2, chunks_loss=runtime.loss is not None)
    assert runtime._measured(sizes, DTYPE).kinds == found.sizes.kinds  # by which a run decides
    assert found.sizes.chunks_loss == (runtime.loss is not None)


def test_layers_are_those_that_were_measured(monkeypatch) -> None:
    """Bytes grow with the row, seconds with its square; a run promises memory."""
    subject, found = planned("deepseek_v3", CPU)
    kinds = found.sizes.kinds
    assert len(kinds) == 2 and found.sizes.of_layer == (0, 1, 1) and found.unknown is None
    seconds = [
        spent.seconds_of(ROW, ROW)
        for i in found.sizes.of_layer
        for spent in (kinds[i].measured.forward, kinds[i].measured.backward)
    ]
    assert found.seconds.layers == pytest.approx(sum(seconds))
    assert found.seconds.step > found.seconds.layers > 0
    shown = said(found)
    assert shown["fits"] == "yes" and shown["promised"].startswith("memory, not speed; a layer of")
    assert found.backend == "ours"


def test_elsewhere_a_known_family_is_counted_and_another_is_not() -> None:
    _, found = planned("llama", None)
    assert found.unknown is None and found.seconds.layers == 0 and found.seconds.products > 0
    assert "the seconds are those of Llama" in said(found)["promised"]
    subject, found = planned("gpt2", None)
    assert {kind.measured for kind in found.sizes.kinds} == {UNKNOWN}
    shown = said(found)
    assert shown["fits"] == "yes, but for a layer's own memory"
    assert "only the GPU that trains can measure them" in shown["promised"]
    assert not {"a step", "tokens/s", "days"} & shown.keys()
    result = as_json(Answer(plan=found, host_bytes=64 * GIB, data_tokens=10**9))
    assert result["layers"] == "unknown" and "\n" not in result["unknown"]
    assert not {"step_s", "tokens_per_s", "parts_s", "days"} & result.keys()
    measured_too = {"gpu_gib": 1.0, "host_gib": found.rank_host_bytes / GIB, "step_s": 1.0}
    (line,) = lines(compare(found, measured_too, True))
    assert line.startswith("predicted and measured: host")


def test_a_layer_that_cannot_be_measured_is_unknown(monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measured, "of_specimen", full)
    args = ModelArguments(model_name_or_path="x", class_type="any", seq_len=ROW)
    subject = Subject(config_of("llama", vocab_size=72), args, CPU)
    found = plan(subject, PlannedRun(model=args), card(24), 64 * GIB)
    assert found.unknown == "a layer does not fit beside what is on the GPU"


def test_predicted_stands_beside_measured() -> None:
    _, found = planned("gpt2", CPU)
    same = {"gpu_gib": found.gpu_bytes / GIB, "host_gib": 1.0, "step_s": 2 * found.seconds.step}
    assert as_planned(found, found.decision.kept.ladder, None)
    assert not as_planned(found, (), None)
    parts = {part.key: part for part in compare(found, same, True)}
    assert parts["gpu_gib"].error == 0 and parts["step_s"].error == -0.5
    assert "memory is what is promised" in parts["step_s"].why


def test_the_command_has_one_line_for_what_it_does_not_know(tmp_path, capsys, monkeypatch) -> None:
    config_of("gpt2").save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--class_type", "any", "--seq_len", str(ROW)]
    elsewhere = [*words, "--gpu", "rtx-4090", "--host_memory_gib", "16", "--sweep"]
    command.main([*elsewhere, "--html", str(tmp_path / "plan.html")])
    shown = capsys.readouterr().out
    assert "Lengths that fit" not in shown and "seconds" not in shown.split("promised")[0]
    assert " ".join(shown.split()).count("no memory and seconds of a layer itself are planned") == 1
    assert "own memory" in (tmp_path / "plan.html").read_text()
    command.main([*elsewhere, "--json"])
    assert json.loads(capsys.readouterr().out)["layers"] == "unknown"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU: name the one to plan for"):
        command.main(words)


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_the_predicted_one() -> None:
    """Of layers as wide as those of a model of 1B, over a row longer than those measured."""
    rows = 16384
    wide = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
    config = config_of(
        "olmo", **wide, num_key_value_heads=16, head_dim=128, max_position_embeddings=rows
    )
    here = gpu_here()
    assert here is not None
    args = ModelArguments(
        model_name_or_path="x", class_type="any", seq_len=rows, offload_activations="none"
    )
    found = plan(Subject(config, args, here.device), PlannedRun(model=args), card(70), 64 * GIB)
    assert found.unknown is None and found.sizes.kinds[0].measured
    with torch.device(here.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    longctx.patch(model, any_model=True, offload_activations="none")
    ids = torch.randint(10, 100, (1, rows), device=here.device)
    model(input_ids=ids[:, :512], labels=ids[:, :512]).loss.backward()  # compiles
    model.zero_grad()
    before = torch.cuda.memory_allocated() - 2 * sum(p.numel() for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, labels=ids).loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    states = found.phases[0].buffers["AdamW's states"]  # which no optimizer has made
    assert found.gpu_bytes - states == pytest.approx(peak, rel=0.1)
