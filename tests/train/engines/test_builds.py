"""Builds of DeepSpeed's operators: a killed one stops nobody (longctx/train/engines/builds.py)."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longctx.errors import UserError
from longctx.train.engines import builds
from longctx.train.engines.builds import extensions_folder


def load(folder: Path, parent: Connection) -> None:
    """Loads an operator whose build waits for a word: it marks its folder as torch does, and waits
    where torch waits. DeepSpeed itself is two names. Runs in a process of its own."""

    class OpBuilder:
        name = "op"

        def load(self, verbose: bool = False) -> None:
            marker = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / self.name / "lock"
            marker.parent.mkdir(exist_ok=True)
            while marker.exists():
                time.sleep(0.05)
            marker.touch()
            parent.send("building")
            parent.recv()
            marker.unlink()
            parent.send("built")

    builder = "deepspeed.ops.op_builder.builder"
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder", builder):
        sys.modules[name] = ModuleType(name)
    deepspeed: Any = sys.modules["deepspeed"]
    deepspeed.__version__ = "0"
    sys.modules[builder].OpBuilder = OpBuilder  # type: ignore[attr-defined]
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    builds.build_one_at_a_time()
    parent.send("loading")
    OpBuilder().load()


Start = Callable[[], tuple[Any, Connection]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Forks a process that builds, with a pipe to it; ends all that are left."""
    fork = multiprocessing.get_context("fork")
    processes: list[Any] = []

    def start() -> tuple[Any, Connection]:
        ours, theirs = fork.Pipe()
        processes.append(fork.Process(target=load, args=(tmp_path, theirs)))
        processes[-1].start()
        assert ours.recv() == "loading"
        return processes[-1], ours

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_a_killed_build_stops_nobody_and_two_do_not_meet(start: Start, tmp_path: Path) -> None:
    killed, said = start()
    assert said.recv() == "building"
    killed.kill()
    killed.join()
    assert list(tmp_path.glob("*/op/lock"))  # for which torch would wait for ever
    first, of_first = start()
    assert of_first.recv() == "building"
    second, of_second = start()
    assert not of_second.poll(0.5)  # it waits, and takes no live build for a killed one
    assert list(tmp_path.glob("*/op/lock"))
    of_first.send("end")
    assert of_first.recv() == "built"
    assert of_second.recv() == "building"
    of_second.send("end")
    assert of_second.recv() == "built"
    for process in (first, second):
        process.join()
        assert process.exitcode == 0
    assert not list(tmp_path.glob("*/op/lock"))


def test_deepspeed_loads_its_operators_where_we_stand_in_its_way() -> None:
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder")
    cpu_adam = pytest.importorskip("deepspeed.ops.op_builder").CPUAdamBuilder
    assert cpu_adam.load is builder.OpBuilder.load  # no class on the way has one of its own
    assert cpu_adam().name == "cpu_adam"


def test_what_serves_models_is_not_built(tmp_path: Path, monkeypatch) -> None:
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder").OpBuilder
    unused = pytest.importorskip("deepspeed.ops.op_builder.cpu.comm").ShareMemCommBuilder()
    assert unused.name == builds.SERVES
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "load", builder.load)  # put back afterwards
    builds.build_one_at_a_time()
    assert unused.load() is None


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
