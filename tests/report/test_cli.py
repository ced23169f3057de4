"""`longctx`, `python -m longctx` and `python -m longctx.cli` are the same command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT


def longctx(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("module", ["longctx", "longctx.cli"])
def test_the_module_is_the_command(module: str) -> None:
    usage = longctx(module)
    assert (usage.returncode, usage.stderr) == (0, "")
    lines = usage.stdout.splitlines()
    assert lines[0] == "usage: longctx COMMAND ..."
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        "cache",
        "doctor",
        "eval",
        "merge",
        "plan",
        "report",
        "verify",
    ]
    wrong = longctx(module, "repot", "x")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "error: unknown command 'repot'; did you mean longctx report?\n"
    missing = longctx(module, "report", "no/such/run")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "error: no such folder or file: no/such/run\n"
