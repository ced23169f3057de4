"""One small run of four steps that a module's tests share, and copies of it to damage.

It takes the plain torch references, as runs on the CPU do for users.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_run import prepare, run


@pytest.fixture(scope="module", autouse=True)
def runs_are_plain(plain_kernels) -> None:
    pass


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "4"]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(flags, folder)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
