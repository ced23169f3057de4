"""One run at a time in a folder, and a lock that dies with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.config import UserError
from longctx.lock import lock_folder

HOLD = (
    "import sys, time, os, pathlib; from longctx.lock import lock_folder;"
    "lock = lock_folder(pathlib.Path(sys.argv[1])); child = os.fork();"
    "child and print('held', flush=True); time.sleep(60)"
)


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on .*--output_dir"):
            lock_folder(tmp_path)
        holder.kill()  # its forked child, like a data loader's worker, lives on
        holder.wait()
        lock_folder(tmp_path).close()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write to"):
        lock_folder(tmp_path / "missing")
