"""`longctx`, `python -m longctx` and `python -m longctx.train.cli` are the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

from longctx import __version__
from longctx.errors import UserError
from longctx.train import cli


def longctx(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.ci
def test_the_module_is_the_command() -> None:
    usage = longctx("longctx")
    assert (usage.returncode, usage.stderr) == (0, "")
    assert longctx("longctx.train.cli").stdout == usage.stdout
    lines = usage.stdout.splitlines()
    assert lines[0] == "usage: longctx COMMAND ..."
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        "cache",
        "doctor",
        "eval",
        "help",
        "merge",
        "plan",
        "recipes",
        "report",
        "train",
        "verify",
    ]
    wrong = longctx("longctx", "repot", "x")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "error: unknown command 'repot'; did you mean longctx report?\n"
    far = longctx("longctx.train.cli", "xyzzy")
    assert far.stderr == "error: unknown command 'xyzzy'; `longctx --help` lists all\n"
    missing = longctx("longctx", "report", "no/such/run")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "error: no such folder or file: no/such/run\n"


def test_what_people_try_first(capsys) -> None:
    for word in ("--version", "-V", "version"):
        cli.run([word])
        assert capsys.readouterr().out == f"longctx {__version__}\n"
    for words in (["-h"], ["--help"], []):
        cli.run(words)
        assert capsys.readouterr().out == f"{cli.usage()}\n"
    with pytest.raises(UserError, match="unknown command 'TRAIM'; did you mean longctx train"):
        cli.run(["TRAIM"])


@pytest.mark.ci
def test_python_without_docstrings_is_one_line() -> None:
    """transformers makes its docstrings from others, and raises a ValueError without them."""
    command = [sys.executable, "-OO", "-m", "longctx", "train", "--preset", "tiny"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: transformers needs its docstrings, which PYTHONOPTIMIZE")


@pytest.mark.parametrize(
    "said",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.255.255.1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "first", "WORLD_SIZE": "", "LOCAL_RANK": "-", "LOCAL_WORLD_SIZE": "0"},
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/nowhere"},
        {"ACCELERATE_USE_FSDP": "perhaps", "FSDP_VERSION": "1"},
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "many"},
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "2",
            "PMI_RANK": "1",
            "PMI_SIZE": "4",
        },
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "MV2_COMM_WORLD_RANK": "1"},
    ],
    ids=lambda said: next(iter(said.values())) + "-" + next(iter(said)),
)
def test_commands_start_alone_whatever_launched_them(said, monkeypatch, capsys) -> None:
    for name, value in ({"MASTER_PORT": "29999"} | said).items():
        monkeypatch.setenv(name, value)
    plan = "plan --preset tiny --seq_len 512 --gpu h100 --host_memory_gib 8 --json"
    cli.run(plan.split())
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["engine"] is None and found["gpus"] == 1
    assert all(os.environ[name] == value for name, value in said.items())


PLANNED = """
import gc, sys
from longctx.train import cli
cli.main("plan --preset tiny --seq_len 512 --gpu h100 --host_memory_gib 8".split())
print(*sys.modules)
print("collects", gc.isenabled())
"""


@pytest.mark.ci
def test_a_plan_imports_no_engine_no_trainer_no_text_and_no_figure() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PLANNED], env=env, capture_output=True, text=True, check=True
    )
    *_, modules, collects = done.stdout.splitlines()
    unused = {
        "deepspeed",
        "matplotlib",
        "liger_kernel",
        "trl",
        "longctx.train.data",
        "longctx.train.output",
    }
    unused |= {"transformers.trainer", "datasets", "pandas"}
    assert not unused & {*modules.split()}
    assert collects == "collects True"
