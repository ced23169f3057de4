"""Where weights wait that are quantised: each is packed on the GPU, and a GPU that cannot hold all
of them hands them to the host one by one. The meta device stands in for one of the two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_families import family_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.constants import GIB
from longctx.cost.machines import MACHINES
from longctx.train.lora import quantise, quantised_reading
from longctx.train.lora.nf4 import in_nf4, move_
from longctx.train.lora.quantise import leave_waiting_, quantise_, quantised_loading
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config

CPU, META = torch.device("cpu"), torch.device("meta")


def arguments(**more: Any) -> ModelArguments:
    return ModelArguments(**{"seq_len": 8192, "lora_r": 16, "quantize": "nf4", **more})


@pytest.fixture
def packs() -> None:
    pytest.importorskip("bitsandbytes")


def test_weights_leave_the_gpu_one_by_one(packs, monkeypatch) -> None:
    """What is packed goes to the host before the next is packed, maps and experts alike."""
    model = AutoModelForCausalLM.from_config(family_config("mixtral", num_hidden_layers=2))
    order: list[Any] = []
    pack = quantise.in_nf4
    monkeypatch.setattr(quantise, "in_nf4", lambda *a: order.append("pack") or pack(*a))
    monkeypatch.setattr(quantise, "move_", lambda packed, to: order.append(to) or packed)
    quantise_(model, CPU, META)
    assert order == ["pack", META] * 2 * (4 + 2)


def test_a_weight_leaves_with_its_scales_and_without_its_codes(packs) -> None:
    """Kernels read the codes wherever the weight waits."""
    state = in_nf4(torch.randn(64, 64), CPU).quant_state
    weight = SimpleNamespace(data=torch.ones(8, dtype=torch.uint8), quant_state=state)
    assert move_(weight, META) is weight
    assert weight.data.is_meta and state.absmax.is_meta and state.state2.absmax.is_meta
    assert not (state.code.is_meta or state.state2.code.is_meta or state.offset.is_meta)


def test_codes_of_a_checkpoint_in_4_bits_go_where_kernels_run(packs) -> None:
    """transformers reads these to the host with the weight: here from the CPU to meta."""
    weight = in_nf4(torch.randn(64, 64), CPU)
    model: Any = nn.Module()
    model.weight = weight
    model.register_buffer("frequencies", torch.ones(4))
    vars(model)["hf_device_map"] = {"": "cpu"}
    leave_waiting_(model, META)
    state = weight.quant_state
    assert state.code.is_meta and state.state2.code.is_meta and state.offset.is_meta
    assert not (weight.is_meta or state.absmax.is_meta) and model.frequencies.is_meta
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("kind", ["read", "in 4 bits already"])
def test_what_is_read_to_the_host_is_packed_where_it_is_asked(
    kind, packs, tmp_path, monkeypatch
) -> None:
    """Of every weight, dense ones and experts, the dense one is brought and the packed one leaves
    again. A checkpoint in 4 bits has nothing to pack."""
    family = "mixtral" if kind == "read" else "llama"
    AutoModelForCausalLM.from_config(family_config(family)).save_pretrained(tmp_path / "model")
    args, name = arguments(model_name_or_path=str(tmp_path / "model")), str(tmp_path / "model")
    if kind != "read":
        loading = quantised_loading(args, torch.bfloat16, CPU)
        name = str(tmp_path / "packed")
        packed = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **loading)
        packed.save_pretrained(name)
    moved: list[torch.device] = []
    monkeypatch.setattr(quantised_reading, "move_", lambda packed, to: moved.append(to) or packed)
    config = AutoConfig.from_pretrained(name)
    loading = quantised_loading(args, torch.bfloat16, CPU, config, rests=CPU)
    model = AutoModelForCausalLM.from_pretrained(name, config=config, **loading)
    packed = [p for p in model.parameters() if hasattr(p, "quant_state")]
    assert moved == ([CPU] * len(packed) if kind == "read" else []) and packed
    assert "longctx" not in str(model.config.to_dict())


def test_where_weights_wait_is_decided_by_what_the_gpu_holds(monkeypatch, capsys) -> None:
    """The same function for a run and its plan: 35 GiB of 70B are read to the host beside a card of
    24 GiB, which is planned, and needs that much host memory."""
    args = arguments(preset="llama-3.3-70b")
    config = load_config(args, vocab_size=1)
    subject, gpu = Subject(config, args), torch.device("cuda")
    for gib, waits in ((24, True), (48, False)):
        monkeypatch.setattr(quantise, "free_gpu_bytes", lambda device, gib=gib: gib * GIB)
        place = quantise.resting_place(args, config, torch.bfloat16, gpu)
        assert place == (CPU if waits else gpu)
        reads = subject.reading_bytes(gib * GIB)
        assert reads == (pytest.approx(37.4 * GIB, rel=0.02) if waits else 0)
    assert "GiB of weights in 4 bits are packed on the GPU one by one" in capsys.readouterr().out
    run, card = PlannedRun(model=args), MACHINES["rtx-4090"]
    enough, lacks = (plan(subject, run, card, gib * GIB) for gib in (96, 36))
    assert enough.fits and enough.reading_bytes > 37 * GIB
    assert "to read the weights in 4 bits, which the GPU does not hold" in str(lacks.problem)
