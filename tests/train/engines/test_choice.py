"""Which engine a run gets, what it refuses, and the files that ask for one."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from accelerate import ParallelismConfig
from paths import ROOT

from longctx.errors import UserError
from longctx.system import installed
from longctx.train.engines import check_resume, choose_engine
from longctx.train.engines.deepspeed import DeepSpeed
from longctx.train.engines.fsdp import FSDP2
from longctx.train.engines.plain import Plain
from longctx.train.engines.protocol import Engine
from longctx.train.options.config import TrainArguments, read_settings

DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def test_sharded_checkpoints_without_an_optimizer_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TrainArguments, "device", torch.device("cuda"))
    monkeypatch.setattr(TrainArguments, "world_size", 1)
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, save_only_model=True)
    with pytest.raises(UserError, match="--save_only_model is impossible with FSDP"):
        FSDP2().start(args)


@pytest.mark.parametrize("kind", [Plain, DeepSpeed])
def test_processes_without_a_gpu_are_told_of_use_cpu(kind, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for processes in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        kind().check_device(use_cpu=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    kind().check_device(use_cpu=True)
    with pytest.raises(UserError, match="2 processes were started .* no GPU: add --use_cpu"):
        kind().check_device(use_cpu=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kind().check_device(use_cpu=False)


def test_deepspeed_builds_alone_before_transformers_opens_its_group(monkeypatch) -> None:
    """DeepSpeed compiles an operator for serving when its group opens, which asking for a run's
    device does."""
    calls: list[str] = []
    for name in ("become_one_process", "build_one_at_a_time", "show_greeting"):
        monkeypatch.setattr(f"longctx.train.engines.deepspeed.{name}", partial(calls.append, name))
    monkeypatch.setattr("longctx.train.engines.deepspeed.installed", lambda name: True)
    DeepSpeed().prepare(Namespace(deepspeed=str(DS_CONFIGS[0]), bf16=False))
    assert calls[-1] == "build_one_at_a_time"


def launched_with(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """What `accelerate launch` sets for its YAML's parallelism_config."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", str(size))


def sharing(
    tmp_path: Path, processes: int, engine: Engine | None = None, **options: Any
) -> tuple[int, Any]:
    """What a run of so many processes is told about shared rows, and accelerate."""
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    world_size = property(lambda self: processes)
    with mock.patch.object(TrainArguments, "world_size", world_size):
        (engine or FSDP2()).share_rows(args)
    return args.sequence_parallel_size, args.parallelism_config


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
@pytest.mark.parametrize("launched", [True, False])
def test_accelerates_words_for_shared_rows(name, launched, tmp_path, monkeypatch) -> None:
    """TrainingArguments and launcher, with and without the flag: one mesh."""
    given: dict[str, Any] = {}
    if launched:
        launched_with(monkeypatch, dp_shard_size=2, **{name: 2})
    else:
        given["parallelism_config"] = ParallelismConfig(**{name: 2})
    for options in (given, given | {"sequence_parallel_size": 2}):
        size, config = sharing(tmp_path, 4, **options)
        assert size == 2
        assert (config.dp_shard_size, config.cp_size, config.sp_size) == (2, 2, 1)
    assert sharing(tmp_path, 4, sequence_parallel_size=2)[1] == config  # the launcher's is dropped


def test_a_launcher_that_asks_for_nothing(tmp_path: Path, monkeypatch) -> None:
    launched_with(monkeypatch, dp_shard_size=4)
    assert sharing(tmp_path, 4) == (1, None)
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in os.environ
    launched_with(monkeypatch, dp_shard_size=1)
    assert sharing(tmp_path, 1, Plain()) == (1, None)


@pytest.mark.parametrize(
    ("sizes", "asked", "processes", "says"),
    [
        (dict(cp_size=2), 4, 4, "_size 4, but the parallelism_config has cp_size 2: leave one"),
        (dict(sp_size=4), 2, 4, "_size 2, but the parallelism_config has sp_size 4: leave one"),
        (dict(cp_size=2, sp_size=2), 1, 4, "the launcher's parallelism_config: .* exclusive"),
        (dict(cp_size=2, dp_shard_size=4), 1, 4, "dp_shard_size 4 .* are 2 groups"),
        (dict(cp_size=2, tp_size=2), 1, 4, "tp_size is not supported"),
        (dict(dp_replicate_size=2, dp_shard_size=2), 1, 4, "dp_replicate_size is not supported"),
        (dict(cp_size=3), 1, 4, "_size 3 does not divide the 4 processes"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else None,
)
def test_contradictions_of_shared_rows(
    sizes, asked, processes, says, tmp_path, monkeypatch
) -> None:
    launched_with(monkeypatch, **sizes)
    with pytest.raises(UserError, match=says):
        sharing(tmp_path, processes, sequence_parallel_size=asked)


def test_attention_that_accelerates_exchange_does_not_take(tmp_path: Path, monkeypatch) -> None:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, sequence_parallel_size=2)
    monkeypatch.setattr(TrainArguments, "world_size", 2)
    with pytest.raises(UserError, match="ring attention takes each row for one document"):
        FSDP2().share_rows(args, "sdpa")
    with pytest.raises(UserError, match="does not take flash_attention_4: choose another"):
        DeepSpeed().share_rows(args, "flash_attention_4")
    DeepSpeed().share_rows(args, "sdpa")
    assert (args.parallelism_config.cp_size, args.parallelism_config.sp_size) == (1, 2)


def test_rows_are_not_shared_without_an_engine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="need an engine that shards"):
        sharing(tmp_path, 2, Plain(), parallelism_config=ParallelismConfig(cp_size=2))


@pytest.mark.parametrize(
    ("quantised", "whole", "fp16", "says"),
    [
        (True, False, False, "--quantize nf4 is for runs without an engine"),
        (False, True, False, "--lora_modules_to_save and --task reward train whole modules"),
        (False, False, True, "--fp16 with --lora_r under an engine"),
    ],
)
def test_adapters_that_no_engine_trains(quantised, whole, fp16, says) -> None:
    args: Any = SimpleNamespace(fp16=fp16)
    for engine in (FSDP2(), DeepSpeed()):
        engine.settings = {}
        with pytest.raises(UserError, match=says):
            engine.check_adapters(args, quantised=quantised, whole=whole)
        engine.check_adapters(SimpleNamespace(fp16=False), quantised=False, whole=False)
    Plain().check_adapters(args, quantised=quantised, whole=whole)


def test_adapters_are_not_swapped_to_disks() -> None:
    engine = DeepSpeed()
    engine.settings = json.loads((ROOT / "ds_configs" / "zero3_nvme.json").read_text())
    with pytest.raises(UserError, match="--lora_r with offload to NVMe: .*zero3_cpu"):
        engine.check_adapters(SimpleNamespace(fp16=False), quantised=False, whole=False)


def test_an_optimizer_of_a_file_has_one_rate_for_adapters() -> None:
    engine = DeepSpeed()
    engine.settings = {"optimizer": {"type": "AdamW"}}
    args: Any = SimpleNamespace(fp16=False, loraplus_lr_ratio=None)
    engine.check_adapters(args, quantised=False, whole=False)
    args.loraplus_lr_ratio = 8.0
    with pytest.raises(UserError, match="leave `optimizer` out of the file"):
        engine.check_adapters(args, quantised=False, whole=False)


def test_each_yaml_says_what_its_json_says() -> None:
    for path in DS_CONFIGS:
        settings = yaml.safe_load(path.with_suffix(".yaml").read_text())
        assert settings["deepspeed_config"]["deepspeed_config_file"] == f"ds_configs/{path.name}"
        stage = json.loads(path.read_text())["zero_optimization"]["stage"]
        assert settings["deepspeed_config"]["zero3_init_flag"] == (stage == 3)
    for path in (ROOT / "fsdp_configs").glob("*.json"):
        theirs = yaml.safe_load(path.with_suffix(".yaml").read_text())["fsdp_config"]
        ours = json.loads(path.read_text())
        ours["offload_params"] = ours.pop("cpu_offload")
        assert "transformer_layer_cls_to_wrap" not in ours  # the model knows the name of its layer
        assert theirs == {f"fsdp_{key}": value for key, value in ours.items()}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_yaml_of_shared_rows_is_fsdp2s(gpus: int) -> None:
    """But for who shares them."""
    settings = yaml.safe_load((ROOT / "fsdp_configs" / f"shared_{gpus}gpu.yaml").read_text())
    sizes = settings.pop("parallelism_config")
    prefix = "parallelism_config_"
    assert sizes.pop(f"{prefix}cp_size") == settings.pop("num_processes") == gpus
    assert sizes.pop(f"{prefix}cp_comm_strategy") == "alltoall"  # or accelerate has no default
    assert {*sizes.values()} == {1}
    plain = yaml.safe_load((ROOT / "fsdp_configs" / "fsdp2.yaml").read_text())
    assert settings == {key: plain[key] for key in plain if key != "num_processes"}


@pytest.mark.parametrize(
    ("options", "environment", "engine"),
    [
        ({}, {}, "plain"),
        ({"deepspeed": "ds.json"}, {}, "deepspeed"),
        ({"deepspeed": {"zero_optimization": {}}}, {}, "deepspeed"),
        ({"deepspeed": "false"}, {}, "plain"),
        ({"fsdp": "true"}, {}, "fsdp"),
        ({"fsdp": True}, {}, "fsdp"),
        ({"fsdp": "no"}, {}, "plain"),
        ({"fsdp": []}, {}, "plain"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "on"}, "deepspeed"),
        ({}, {"ACCELERATE_USE_FSDP": "y"}, "fsdp"),
        ({}, {"ACCELERATE_USE_FSDP": "false"}, "plain"),
    ],
)
def test_options_and_environment_choose_the_engine(
    options, environment, engine, monkeypatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chosen = choose_engine(SimpleNamespace(**{"deepspeed": None, "fsdp": None} | options))
    assert chosen.name == engine


def test_host_offload_is_seen_in_a_file_text_or_dict(tmp_path: Path) -> None:
    def offloads(settings: object) -> bool:
        return bool(read_settings("fsdp_config", settings).get("cpu_offload"))

    assert offloads(str(ROOT / "fsdp_configs/fsdp2_offload.json"))
    assert not offloads(str(ROOT / "fsdp_configs/fsdp2.json"))
    assert offloads('{"cpu_offload": true}') and offloads({"cpu_offload": True})
    assert not offloads(None) and not offloads("false")
    for text in ("{", "[1]"):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(UserError, match="broken.json: not JSON"):
            offloads(str(tmp_path / "broken.json"))


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True)
    (tmp_path / "checkpoint-1" / "global_step1").mkdir(parents=True)
    with pytest.raises(UserError, match="saved with engine deepspeed .* --model_name_or_path"):
        check_resume(Plain(), args, tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-2").mkdir()
    for name in ("optimizer", "scheduler"):
        with pytest.raises(UserError, match=f"holds no {name}"):
            check_resume(Plain(), args, tmp_path / "checkpoint-2")
        (tmp_path / "checkpoint-2" / f"{name}.pt").touch()
    check_resume(Plain(), args, tmp_path / "checkpoint-2")


def test_a_sharded_checkpoint_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    for name in ("optimizer_0", "scheduler.pt"):
        with pytest.raises(UserError, match="holds no (optimizer|scheduler)"):
            check_resume(FSDP2(), args, tmp_path)
        (tmp_path / name).touch()
    check_resume(FSDP2(), args, tmp_path)


@pytest.mark.skipif(not installed("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": {"type": "Adamax2", "params": {}}}, "the optimizer Adamax2 is unknown"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload to NVMe needs libaio",
        ),
    ],
    ids=["optimizer", "nvme"],
)
def test_deepspeed_settings_that_cannot_run(settings, says, monkeypatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from transformers.integrations import HfDeepSpeedConfig

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **settings})
    config.mismatches = []
    with pytest.raises(UserError, match=says):
        DeepSpeed()._check_settings(SimpleNamespace(hf_deepspeed_config=config))
