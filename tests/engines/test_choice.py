"""Which engine a run gets, what it refuses, and the files that ask for one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from paths import ROOT

from longctx.config import TrainArguments, installed, read_settings
from longctx.engines import check_resume, choose_engine
from longctx.engines.deepspeed import DeepSpeed
from longctx.engines.fsdp import FSDP2
from longctx.engines.plain import Plain
from longctx.errors import UserError

DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def test_sharded_checkpoints_without_an_optimizer_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TrainArguments, "device", torch.device("cuda"))
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, save_only_model=True)
    with pytest.raises(UserError, match="--save_only_model is impossible with FSDP"):
        FSDP2().start(args)


def test_other_parallelism_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(UserError, match="parallelism_config is not supported"):
        choose_engine(args).start(args)


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
