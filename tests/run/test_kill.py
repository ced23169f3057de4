"""SIGKILL at twenty random moments of one run, saves included, changes none of its numbers.

A process that has imported everything and computed nothing forks one child a run, so that a run
costs its own time only. Half of the kills wait for a save to begin.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH
from small_run import logged, prepare

KILLS = 20

# Reads lines "seconds|flags": forks a run, kills it after so many seconds (from the start of its
# next save if they are negative), and answers what became of it: "killed", "killed while saving",
# or its exit status.
FORKS = """
import os, signal, sys, time
from pathlib import Path
import torch, train
from paths import PYTHONPATH
torch.set_num_threads(1)
for line in sys.stdin:
    seconds, *flags = line.rstrip("\\n").split("|")
    seconds, output = float(seconds), Path(flags[flags.index("--output_dir") + 1])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            train.main(flags)
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    begun = time.monotonic()
    if seconds < 0:
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if list(output.glob(".incomplete-checkpoint-*/*/*")):
                break
            time.sleep(0.0005)
        time.sleep(-seconds)
    else:
        while time.monotonic() - begun < seconds:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    saving = any(output.glob(".incomplete-*"))
    killed = "killed while saving" if saving else "killed"
    print(killed if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), time.monotonic() - begun,
          sep="|", flush=True)
"""


@pytest.fixture
def start():
    """start(seconds, flags) -> (what became of the run, seconds it took)."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "TOKENIZERS_PARALLELISM": "false"}
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**env, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin and server.stdout

    def start(seconds: float, flags: list[str]) -> tuple[str, float]:
        print(seconds, *flags, sep="|", file=server.stdin, flush=True)
        outcome, took_s = server.stdout.readline().split("|")
        return outcome, float(took_s)

    yield start
    server.stdin.close()
    server.wait()


def test_twenty_kills_change_nothing(start, tmp_path: Path) -> None:
    flags = [*prepare(tmp_path), "--max_steps", "300", "--save_steps", "4"]
    flags += ["--lr_scheduler_type", "cosine", "--gradient_accumulation_steps", "2"]

    def at(name: str) -> list[str]:
        return [*flags, "--output_dir", str(tmp_path / name)]

    outcome, whole_s = start(1e9, at("whole"))
    assert outcome == "0", (tmp_path / "whole.log").read_text()
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    outcomes = []
    for kill in range(KILLS):
        has_begun = bool(list((tmp_path / "run").glob("checkpoint-*")))
        how = "--resume_from_checkpoint|last" if has_begun else "--overwrite_output_dir|true"
        seconds = moments.uniform(0, 0.15 * whole_s)
        if kill % 2:  # in a save, which takes some milliseconds, or soon after
            seconds = -moments.uniform(1e-4, moments.choice([0.004, 0.05]))
        outcome, _ = start(seconds, [*at("run"), *how.split("|")])
        assert "killed" in outcome, (seed, outcomes, (tmp_path / "run.log").read_text()[-3000:])
        outcomes.append(outcome)
    assert outcomes.count("killed while saving") >= 3, (seed, outcomes)
    steps = [line["step"] for line in logged(tmp_path / "run")]
    assert 4 <= max(steps) < 300, (seed, steps)

    outcome, _ = start(1e9, [*at("run"), "--resume_from_checkpoint", "last"])
    assert outcome == "0", (seed, (tmp_path / "run.log").read_text()[-3000:])
    for key in ("step", "loss", "grad_norm", "learning_rate"):
        whole, killed = ([line[key] for line in logged(tmp_path / n)] for n in ("whole", "run"))
        assert killed == whole, (seed, key)
    for name in ("final", "checkpoint-300"):
        weights = [
            (tmp_path / n / name / "model.safetensors").read_bytes() for n in ("whole", "run")
        ]
        assert weights[0] == weights[1], (seed, name)
    assert not list((tmp_path / "run").glob(".incomplete-*"))
