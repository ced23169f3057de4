"""SIGKILL at random moments of one run, saves, resumes and tokenising included, changes none of its
numbers. kills.py is the program; docs/results.md has the counts of its long runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH

WARM = """
import gc, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # where libraries print
import kills, torch
kills.ENGINES["plain"].main()
kills.import_late()
torch.set_num_threads(1)
gc.freeze()
for line in iter(sys.stdin.readline, "end\\n"):
    words = json.loads(line)
    if not (child := os.fork()):
        os.dup2(os.open(words.pop(), os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["kills.py", *words]
        sys.exit(kills.main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""
"""Imports what all runs need, once, and forks a process for each line of words."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)])
    with (
        (tmp_path_factory.mktemp("kills") / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", WARM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={
                **os.environ,
                **{"PYTHONPATH": path, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
                **{"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            },
        ) as process,
    ):
        yield process
        print("end", file=process.stdin, flush=True)


@pytest.mark.parametrize(("engine", "kills"), [("exact", 7), ("ddp", 6), ("dpo", 7)])
def test_kills_change_nothing(warm: Any, engine: str, kills: int, tmp_path: Path) -> None:
    """`plain` has nothing that they have not: ddp is its task and its optimizer on two processes,
    dpo its optimizer on one."""
    words = ["--engine", engine, "--kills", str(kills), str(tmp_path / "stdout")]
    print(json.dumps(words), file=warm.stdin, flush=True)
    status = int(warm.stdout.readline())
    outcome = json.loads((tmp_path / "stdout").read_text().splitlines()[-1])
    assert (status, outcome["problems"]) == (0, []), outcome["seed"]
    assert outcome["kills"] == kills and len(set(outcome["by_kind"].values())) == 1
