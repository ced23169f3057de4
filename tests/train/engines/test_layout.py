"""An engine's file says in one line what no engine could mean."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from longctx.errors import UserError
from longctx.train.engines.fsdp import FSDP2
from longctx.train.engines.zero_settings import zero_layout

ODD = ["many", -1, 10**400, float("nan"), float("inf"), True, None, [1], {"a": 1}]
COUNTS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "allgather_bucket_size",
    "stage3_max_live_parameters",
    "sub_group_size",
)


def zero(**settings: object) -> dict:
    return {"zero_optimization": {"stage": 3, **settings}}


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("key", COUNTS)
def test_buckets_are_numbers(key, value) -> None:
    with pytest.raises(UserError, match=f"--deepspeed: {key} must be a number from 0"):
        zero_layout(zero(**{key: value}), 2, 1)


@pytest.mark.parametrize("value", ["auto", 0, 5e8, 1e14])
@pytest.mark.parametrize("key", COUNTS)
def test_numbers_that_deepspeed_takes(key, value) -> None:
    assert zero_layout(zero(**{key: value}), 2, 1).stage == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *(({"zero_optimization": value}, "must be an object") for value in ("3", 3, [3], True)),
        *((zero(stage=value), "ZeRO stage .* is not known") for value in (0, "3", True, 3.0, None)),
        *(
            (zero(offload_param=value), "offload_param must be an object")
            for value in ("cpu", True)
        ),
        (zero(offload_optimizer={"device": ["cpu"]}), "offload to .'cpu'. is not known"),
        (zero(offload_optimizer={"device": "cpu", "pin_memory": "false"}), "must be true or false"),
    ],
    ids=str,
)
def test_what_is_no_zero(settings, says) -> None:
    with pytest.raises(UserError, match=says):
        zero_layout(settings, 2, 1)


def read(tmp_path: Path, **settings: object) -> FSDP2:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(settings))
    engine = FSDP2()
    engine.read(Namespace(fsdp="true", fsdp_config=str(path)))
    return engine


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_fully_shard_is_read_as_transformers_does(prefix, tmp_path) -> None:
    for offloads in (True, False):
        settings = {f"{prefix}cpu_offload": offloads, f"{prefix}version": 2}
        layout = read(tmp_path, **settings).layout(2, 1)
        assert layout.name == ("FSDP2 with CPU offload" if offloads else "FSDP2")


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("value", ["false", 1, [True], float("nan")], ids=str)
def test_offload_is_true_or_false(prefix, value, tmp_path) -> None:
    with pytest.raises(UserError, match="--fsdp_config: cpu_offload must be true or false"):
        read(tmp_path, **{f"{prefix}cpu_offload": value})


@pytest.mark.parametrize("value", [1, 0, -2, "two", 2.5, None, [2], True], ids=str)
def test_versions_of_fsdp(value, tmp_path) -> None:
    with pytest.raises(UserError, match="is not supported: set fsdp_version to 2"):
        read(tmp_path, version=value)
