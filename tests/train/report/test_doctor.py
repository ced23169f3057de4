"""`longctx doctor`: what is missing by facts, what is printed with and without a GPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from longctx.constants import GIB
from longctx.memory.rates import Link, Measured
from longctx.train.plan.measure import Gpu
from longctx.train.report import doctor
from longctx.train.report.missing import LINK, Facts, Unfit, missing, rates

GPU = Gpu(torch.device("cpu"), "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB)
MEASURED = Measured(
    flops=660e12,
    memory_bytes=2.9e12,
    link=Link(55e9, 54e9, 50e9),
    attention={"fa4": {8192: (400e12, 300e12), 131072: (660e12, 600e12)}},
    locked_bytes=4 * GIB,
    tried_bytes=4 * GIB,
)
WELL = Facts(
    gpu=GPU,
    has_card=True,
    driver="580.65.06",
    driver_cuda=(13, 0),
    torch_cuda="13.0",
    allocator=",expandable_segments:True",
    measured=MEASURED,
    host_bytes=128 * GIB,
    host_free_bytes=120 * GIB,
    allowed_bytes=120 * GIB,
    memlock_bytes=2**23,  # CUDA locks more all the same
    shm_bytes=64 * GIB,
    folders={"output": (Path("runs"), 500 * GIB, True), "cache": (Path("c"), 500 * GIB, True)},
)


def test_a_machine_that_lacks_nothing() -> None:
    assert [*missing(WELL)] == []


@pytest.mark.parametrize(
    ("changes", "what", "found", "do"),
    [
        ({"fa4": "is not installed"}, "flash-attn-4", "is not installed", "install --upgrade "),
        ({"allocator": "max_split_size_mb:1"}, "allocator", "fragments", "=expandable_segments:T"),
        ({"driver_cuda": (12, 4)}, "driver", "580.65.06 for CUDA 12.4, torch", "update the driver"),
        ({"unmeasured": "busy", "measured": None}, "rates", "busy", "longctx doctor --again"),
        ({"shm_bytes": 2**26}, "shared memory", "0.0625 GiB", "--ipc host"),
        ({"allowed_bytes": 32 * GIB}, "host memory", "32 GiB of 120 GiB", "--memory, Slurm --mem"),
        ({"unfit": [Unfit("torch", "2.9.0", "<2.14,>=2.11")]}, "torch", "2.9.0 is", "'torch<2.14"),
        (
            {"measured": replace(MEASURED, locked_bytes=GIB)},
            *("locked memory", "1 GiB of 4 GiB could be locked", "ulimit -l unlimited"),
        ),
        (
            {"measured": replace(MEASURED, link=Link(13e9, 13e9, 12e9))},
            *(LINK, "12 GB/s, 24% of the profile's", "nvidia-smi -q -d PCIE"),
        ),
        (
            {"measured": replace(MEASURED, flops=330e12)},
            *("products", "330 TFLOP/s, 50% of the profile's", "does another process compute"),
        ),
        (
            {"folders": {"output": (Path("runs"), GIB, True)}},
            *("output folder", "runs has 1 GiB free; a checkpoint", "another --output_dir"),
        ),
        (
            {"folders": {"cache": (Path("c"), 500 * GIB, False)}},
            *("cache folder", "c may not be written", "another --cache_dir"),
        ),
    ],
)
def test_what_is_missing(changes, what, found, do) -> None:
    lines = [*missing(replace(WELL, **changes))]
    assert lines[0].what == what and found in lines[0].found and do in lines[0].do
    assert len(lines) == (2 if "unmeasured" in changes else 1)  # nobody tried to lock memory then


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"has_card": False}, "none"),
        ({"torch_cuda": None}, "torch was built without CUDA"),
        ({}, "torch for CUDA 13.0 finds no GPU; driver 580.65.06 for CUDA 13.0"),
    ],
)
def test_without_a_gpu(changes, found) -> None:
    lines = [*missing(replace(WELL, gpu=None, measured=None, allocator="", **changes))]
    assert [line.what for line in lines] == ["GPU"] and found in lines[0].found


def test_rates_beside_the_profile() -> None:
    found = {rate.what: rate for rate in rates(WELL)}
    assert found["products"].share == pytest.approx(660 / 665)
    assert found[LINK].measured == pytest.approx(50) and found[LINK].unit == "GB/s"
    assert found["link, up alone"].profile is None
    assert found["fa4 forward, 8192 tokens"].share is None
    assert found["fa4 backward, 131072 tokens"].share == pytest.approx(600 / 610)
    unknown = replace(WELL, gpu=GPU._replace(name="Some GPU"))
    assert all(rate.share is None for rate in rates(unknown))


def test_versions_that_longctx_does_not_take(monkeypatch) -> None:
    """A new environment has an old setuptools, which only our tests need newer."""
    needed = ["torch<2.14,>=2.11", "nowhere>=9", 'peft>=0.18; extra == "lora"', "torch>=2.11,<2.14"]
    needed += ['gguf>=0.17; extra == "gguf"', 'setuptools>=77; extra == "test"']
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    versions = {"torch": "2.9.0+cu128", "peft": "0.18.1", "gguf": "0.1", "setuptools": "65.5.0"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    torch, gguf = Unfit("torch", "2.9.0+cu128", "<2.14,>=2.11"), Unfit("gguf", "0.1", ">=0.17")
    assert doctor.unfit_packages() == [torch, gguf]


@pytest.mark.parametrize("facts", [WELL, replace(WELL, gpu=None, measured=None)])
def test_what_is_printed(monkeypatch, capsys, facts) -> None:
    monkeypatch.setattr(doctor, "examine", lambda folders, again: facts)
    doctor.main([])
    said = capsys.readouterr().out
    assert ("nothing is missing for speed" in said) == (facts.gpu is not None)
    assert ("known as h100: 79.0 of 80.0 GiB free" in said) == (facts.gpu is not None)
    doctor.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["missing"]) == (0 if facts.gpu else 1)
    assert found["host"]["allowed_gib"] == 120 and found["folders"]["output"]["free_gib"] == 500
    assert bool(found["rates"]) == bool(found["measured"]) == (facts.gpu is not None)


def test_this_very_machine(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "gpu_here", lambda: None)
    doctor.main(["--json", "--output_dir", str(tmp_path / "a" / "b"), "--cache_dir", "~"])
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] is None and found["host"]["cores"] >= 1
    assert found["folders"]["output"] == {
        "path": str(tmp_path / "a" / "b"),
        "free_gib": pytest.approx(found["folders"]["output"]["free_gib"]),
    }
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("a/b/c", True),
        ("", True),
        (os.fsdecode(b"caf\xe9"), True),
        ("two\nlines", True),
        ("x" * 300, False),
        ("x/" * 3000, False),
        ("file", False),
        ("file/below", False),
        ("pipe", False),
        ("loop", False),
        ("loop/below", False),
        ("dangling", False),
        ("dangling/below", False),
    ],
)
def test_odd_folders(name, writes, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.setattr(doctor, "gpu_here", lambda: None)
    facts = doctor.examine({"output": tmp_path / name})
    assert facts.folders["output"][2] == writes
    doctor.show(doctor.as_json(facts))
    assert ("may not be written" in capsys.readouterr().out) == (not writes)


def test_a_working_folder_that_is_gone(tmp_path, monkeypatch, capsys) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(doctor, "gpu_here", lambda: None)
    doctor.main([])
    assert "runs/longctx" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu(capsys) -> None:
    doctor.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"]["name"] and found["rates"] and Path(found["kept_in"]).is_file()
