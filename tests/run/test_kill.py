"""SIGKILL at random moments of one run, saves, resumes and tokenising included, changes none of its
numbers. kills.py is the program; docs/robustness.md has the counts of its long runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH

PROGRAM = Path(__file__).with_name("kills.py")


@pytest.mark.parametrize(("engine", "kills"), [("plain", 6), ("exact", 7), ("ddp", 6), ("dpo", 7)])
def test_kills_change_nothing(engine: str, kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--engine", engine, "--kills", str(kills)],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        env={
            **os.environ,
            **{"PYTHONPATH": PYTHONPATH, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        },
    )
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, outcome["problems"]) == (0, []), outcome["seed"]
    assert outcome["kills"] == kills and len(set(outcome["by_kind"].values())) == 1
