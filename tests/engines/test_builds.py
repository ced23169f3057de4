"""Builds of DeepSpeed's operators: a killed one stops nobody (longctx/engines/builds.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH

from longctx.engines import builds
from longctx.engines.builds import extensions_folder
from longctx.errors import UserError

# Loads an operator whose build is a line of Python: it marks its folder as torch does, and waits
# where torch waits. DeepSpeed itself, which takes seconds to import, is two names.
LOAD = """
import importlib.util, os, sys, time
from pathlib import Path
from types import ModuleType

class OpBuilder:
    name = "op"

    def load(self, verbose=False):
        marker = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / self.name / "lock"
        marker.parent.mkdir(exist_ok=True)
        while marker.exists():
            time.sleep(0.05)
        marker.touch()
        print("building", flush=True)
        sys.stdin.readline()
        marker.unlink()
        print("built", flush=True)

builder = "deepspeed.ops.op_builder.builder"
for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder", builder):
    sys.modules[name] = ModuleType(name)
sys.modules["deepspeed"].__version__ = "0"
sys.modules[builder].OpBuilder = OpBuilder
spec = importlib.util.spec_from_file_location("builds", sys.argv[1])
builds = importlib.util.module_from_spec(spec)  # the file alone, without all engines
spec.loader.exec_module(builds)
builds.build_one_at_a_time()
print("loading", flush=True)
OpBuilder().load()
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts a process that builds; ends all that are left."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    processes: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOAD, str(builds.__file__)]
        processes.append(subprocess.Popen(command, text=True, env=env, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    """Until the process prints the word; libraries may print as well."""
    assert process.stdout
    assert any(line == f"{word}\n" for line in process.stdout)


def test_a_killed_build_stops_nobody_and_two_do_not_meet(start, tmp_path: Path) -> None:
    killed = start()
    wait_for(killed, "building")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list(tmp_path.glob("*/op/lock"))  # for which torch would wait for ever
    first = start()
    wait_for(first, "building")
    second = start()
    wait_for(second, "loading")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=0.5)  # it waits, and takes no live build for a killed one
    assert list(tmp_path.glob("*/op/lock"))
    assert first.communicate("\n")[0].endswith("built\n")
    assert second.communicate("\n")[0].endswith("building\nbuilt\n")
    assert not list(tmp_path.glob("*/op/lock"))


def test_deepspeed_loads_its_operators_where_we_stand_in_its_way() -> None:
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder")
    cpu_adam = pytest.importorskip("deepspeed.ops.op_builder").CPUAdamBuilder
    assert cpu_adam.load is builder.OpBuilder.load  # no class on the way has one of its own
    assert cpu_adam().name == "cpu_adam"


def test_builds_have_a_folder_of_their_own_for_each_version(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = extensions_folder("1.2")
    assert folder.parent == tmp_path and "deepspeed1.2" in folder.name
    assert extensions_folder("1.3") != folder
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))  # as a child process finds it
    assert extensions_folder("1.2") == folder


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written .*: set TORCH_EXTENSIONS_DIR"):
        extensions_folder("1.2")
