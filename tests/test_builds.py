"""Locks that killed builds of C++ extensions leave behind (longctx/builds.py)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from longctx import builds
from longctx.errors import UserError


@pytest.fixture(params=["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
def lock(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock that nobody holds, in either layout, as old as the test wants it."""
    for name in ("TORCH_EXTENSIONS_DIR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    inner = "" if request.param == "TORCH_EXTENSIONS_DIR" else "torch_extensions/py311_cpu"
    folder = tmp_path / inner / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    return folder / "lock"


def age(lock: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in (lock, lock.parent):
        os.utime(path, (then, then))


def test_a_killed_build_left_its_lock(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    age(lock, 1000)
    builds.wait_for_builds()
    assert not lock.exists() and lock.parent.exists()
    assert f"removed {lock}" in capsys.readouterr().out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_build_on_this_machine_is_waited_for_and_may_be_killed(
    lock: Path, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builds, "GRACE_S", 1)
    monkeypatch.setenv("LOCAL_RANK", rank)
    age(lock, 1000)
    run = threading.Thread(target=builds.wait_for_builds)
    with lock.open():
        run.start()
        run.join(timeout=0.7)
        assert run.is_alive() and lock.exists()
    run.join(timeout=10)
    assert not run.is_alive() and not lock.exists()
    assert ("another run's build" in capsys.readouterr().out) == (rank == "0")


def test_other_programs_locks_stay(lock: Path) -> None:
    (lock.parent / "data.db").touch()
    nested = lock.parent / "deeper" / "lock"
    nested.parent.mkdir()
    nested.touch()
    age(lock, 1000)
    age(nested, 1000)
    builds.wait_for_builds()
    assert lock.exists() and nested.exists()


def test_a_folder_that_still_changes_is_waited_for(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builds, "QUIET_S", 2)
    (lock.parent / "build.ninja").touch()
    age(lock, 1000)
    (lock.parent / "cpu_adam.o").touch()
    builds.wait_for_builds()
    out = capsys.readouterr().out
    assert not lock.exists() and out.count("waiting up to 2 s") == out.count("removed") == 1


def test_a_machine_s_first_process_removes_before_the_others(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    age(lock, builds.QUIET_S + 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = threading.Thread(target=builds.wait_for_builds)
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive() and lock.exists()
    lock.unlink()
    second.join(timeout=10)
    assert not second.is_alive() and not capsys.readouterr().out


def test_a_lock_that_may_not_be_removed_is_named(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool) -> None:
        raise PermissionError(13, "Permission denied")

    age(lock, 1000)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match="delete it .Permission denied"):
        builds.wait_for_builds()
