"""What a run lacks, and the ways out: flags, adapters, shorter rows, more GPUs, a larger host."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from small_plan import card, eight_layers, run

from longctx.constants import GIB
from longctx.cost.machines import Machine
from longctx.errors import UserError
from longctx.train.engines.layout import FullyShard
from longctx.train.lora.peft_adapters import with_lora
from longctx.train.lora.shapes import with_lora_shapes
from longctx.train.options.config import ModelArguments
from longctx.train.plan import predict
from longctx.train.plan.changes import changes
from longctx.train.plan.predict import plan
from longctx.train.plan.shortage import shortage
from longctx.train.plan.subject import PlannedRun, Subject


def found_changes(request: PlannedRun, machine: Machine, host_gib: int, grows: bool = True) -> dict:
    found = changes(eight_layers(), request, machine, host_gib * GIB, host_grows=grows)
    assert all(change.plan.fits for change in found)
    return {change.flags: change.plan for change in found}


def test_flags_alone_come_first_and_the_fastest_of_them() -> None:
    request = run(131072, place="gpu")
    assert not plan(eight_layers(), request, card(24), 256 * GIB).fits
    found = found_changes(request, card(24), 256)
    assert next(iter(found)) == "--place auto"
    speeds = [each.tokens_per_s for flags, each in found.items() if "--seq_len" not in flags]
    assert speeds == sorted(speeds, reverse=True)
    assert not any("--lora_r" in flags or "--gpus" in flags for flags in found)


def test_two_changes_where_one_is_not_enough() -> None:
    request = run(262144, place="gpu", offload_activations="none")
    found = found_changes(request, card(20), 256)
    assert next(iter(found)) == "--place auto --offload_activations auto"


def test_another_class_fewer_rows() -> None:
    found = found_changes(run(65536, class_type="vanilla"), card(24), 256)
    assert [*found] == ["--class_type custom", "--seq_len 11264"]
    request = run(131072, per_device_train_batch_size=8)
    found = found_changes(request, card(16), 96)
    assert "--per_device_train_batch_size 1 --gradient_accumulation_steps 8" in found


def test_the_order_of_ways_out_where_no_flag_is_enough() -> None:
    request, machine = run(131072), card(40, "h100")
    found = found_changes(request, machine, 6)
    assert [*found] == [
        "--lora_r 16",
        "--lora_r 16 --quantize nf4",
        "--seq_len 76288",
        "--gpus 2 --fsdp true --fsdp_config fsdp2 --sequence_parallel_size 2",
        "--host_memory_gib 8",
    ]
    assert found["--lora_r 16"].host_bytes < 6 * GIB
    adapted = eight_layers().adapted(ModelArguments(lora_r=16))
    alone = plan(adapted, request.having(lora_r=16), machine, 6 * GIB)
    assert found["--lora_r 16"].seconds == alone.seconds
    assert not plan(eight_layers(), request, machine, 6 * GIB).fits


def test_the_longest_rows_of_adapters_where_nothing_else_fits() -> None:
    found = found_changes(run(65536), card(8), 3, grows=False)
    assert [flags.split(" --seq_len ")[0] for flags in found] == [
        *("--lora_r 16", "--lora_r 16 --quantize nf4"),
    ]
    lengths = [each.run.model.seq_len for each in found.values()]
    assert lengths == sorted(lengths) and lengths[-1] < 65536


def test_adapters_are_of_our_layers_without_an_engine() -> None:
    """As the command knows them."""
    asked = dict(class_type="liger", engine=FullyShard(offloads=True))
    found = found_changes(run(65536, **asked), card(12), 8, grows=False)
    assert [flags.split(" --lora_r")[0] for flags in found] == 2 * [
        "without --deepspeed and --fsdp --class_type custom"
    ]


def test_no_way_out_is_counted_twice(monkeypatch) -> None:
    """A model of 512 layers takes 1 s to make and half a second to plan."""
    planned, made = [], []

    def count(subject, *asked):
        planned.append((subject, asked[:3]))
        return predict_once(subject, *asked)

    predict_once = predict._planned
    monkeypatch.setattr(predict, "_planned", count)
    adapted = Subject.adapted
    monkeypatch.setattr(
        Subject, "adapted", lambda self, args, **kw: made.append(args) or adapted(self, args, **kw)
    )
    request = run(65536, place="gpu", keep="all")
    lacking = plan(model := eight_layers(), request, card(8), 4 * GIB)
    shortage(model, lacking, 4 * GIB)
    changes(model, request, card(8), 4 * GIB, host_grows=True)
    assert len(made) == 2 and len(planned) > 10
    assert all(one not in planned[:i] for i, one in enumerate(planned))


def test_what_a_way_out_needs_of_flags_is_part_of_it() -> None:
    found = found_changes(run(131072, place="gpu", keep="all"), card(24), 20)
    assert [*found][-1].startswith("--place auto --keep auto --host_memory_gib ")


def test_the_memory_that_is_short() -> None:
    """The host, by what it must have free; the GPU where no host would be enough."""
    request = run(131072)
    lacks = shortage(eight_layers(), plan(eight_layers(), request, card(24), 24 * GIB), 24 * GIB)
    assert lacks is not None and lacks.memory == "host" and lacks.available == 24 * GIB
    assert plan(eight_layers(), request, card(24), lacks.needed).fits
    assert not plan(eight_layers(), request, card(24), lacks.needed - GIB).fits
    assert sum(lacks.holds.values()) == lacks.needed
    request = run(1 << 20)
    for host_gib in (8, 512):
        found = plan(eight_layers(), request, card(12), host_gib * GIB)
        lacks = shortage(eight_layers(), found, host_gib * GIB)
        assert lacks is not None and lacks.memory == "GPU"
        assert lacks.available == found.gpu_limit < lacks.needed < 64 * GIB
    assert re.match(r"GPU memory is short by [\d.]+ GiB: [\d.]+ are needed \(a layer's", lacks.line)


def test_less_of_this_host_was_allowed_than_there_is() -> None:
    request = run(131072, host_memory_gib=8.0)
    found = found_changes(request, card(20), 256, grows=False)
    assert "without --host_memory_gib" in found
    lacks = shortage(eight_layers(), plan(eight_layers(), request, card(20), 256 * GIB), 256 * GIB)
    assert lacks is not None and lacks.available == 8 * GIB


def test_nothing_helps_a_model_that_is_too_large() -> None:
    assert found_changes(run(8192), card(2), 2, grows=False) == {}


@pytest.mark.parametrize(("quantize", "dora"), [("none", False), ("nf4", False), ("none", True)])
def test_adapters_are_planned_without_peft(monkeypatch, quantize, dora) -> None:
    """As with its own layers, to the byte."""
    pytest.importorskip("peft")
    asked = ModelArguments(lora_r=16, quantize=quantize, lora_targets=["q_proj", "down_proj"])
    asked = replace(asked, lora_dropout=0.1, use_dora=dora)
    request = run(32768, lora_r=16, quantize=quantize)
    found = []
    for adapt in (with_lora_shapes, with_lora):
        monkeypatch.setattr("longctx.train.plan.subject.with_lora_shapes", adapt)
        subject = eight_layers().adapted(asked)
        found.append(plan(subject, request, card(24), 64 * GIB))
    assert found[0].phases == found[1].phases and found[0].seconds == found[1].seconds
    assert found[0].sizes == found[1].sizes and found[0].host_bytes == found[1].host_bytes
    assert found[0].sizes.kinds[0].adapted.parameters > 0
    monkeypatch.undo()
    monkeypatch.setattr("longctx.train.plan.subject.installed", lambda name: False)
    with pytest.raises(UserError, match="--lora_modules_to_save needs PEFT"):
        eight_layers().adapted(replace(asked, lora_modules_to_save=["lm_head"]))


GPUS = {
    "one alone": (dict(gpus=2), card(12), 128, ["--gpus 1", "--lora_r 16"]),
    "offloaded": (
        dict(gpus=4, engine=FullyShard(processes=4)),
        card(8, "a100-40gb"),
        200,
        ["--deepspeed zero3_cpu", "without --deepspeed and --fsdp --lora_r 16"],
    ),
}


@pytest.mark.parametrize("name", GPUS)
def test_several_gpus_are_searched_both_ways(name) -> None:
    asked, machine, host_gib, ways = GPUS[name]
    request = run(32768, **asked)
    planned = plan(eight_layers(), request, machine, host_gib * GIB)
    assert not planned.fits
    found = found_changes(request, machine, host_gib)
    assert all(any(flags.startswith(way) for flags in found) for way in ways), [*found]
    lacks = shortage(eight_layers(), planned, host_gib * GIB)
    assert lacks is not None and sum(lacks.holds.values()) == lacks.needed
