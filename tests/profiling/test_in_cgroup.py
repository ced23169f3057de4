"""profiling/in_cgroup.py: held to a size by the kernel, or refused and not run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT

from profiling.in_cgroup import make_group

COMMAND = [sys.executable, str(ROOT / "profiling/in_cgroup.py"), "--gib", "0.25", "--"]
TAKES = "import sys; x = b'x' * (int(sys.argv[1]) << 20); print(len(x))"


def run(mib: int) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, sys.executable, "-c", TAKES, str(mib)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_command_is_held_to_its_size_or_not_run() -> None:
    small, large = run(50), run(2000)
    if small.returncode:  # no root, or no cgroup v2 to write
        assert small.stderr.startswith("error: no control group of 0.25 GiB can be made")
        assert small.stdout == large.stdout == "" and large.returncode
        return
    assert small.stdout.startswith(f"{50 << 20}\nheld 0.")
    assert large.returncode == 137 and "the kernel killed it for more" in large.stdout


def test_where_none_can_be_made_nothing_is_left(tmp_path) -> None:
    with pytest.raises(SystemExit, match="no control group of 3 GiB can be made"):
        make_group(3, tmp_path / "nowhere")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    group = make_group(3, tmp_path)
    assert (group / "memory.max").read_text() == str(3 << 30)
