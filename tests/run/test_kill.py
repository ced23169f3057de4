"""SIGKILL at twenty random moments of one run, saves included, changes none of its numbers.

A moment is a place in the order of what a run does, never a time, so that a slow or busy machine
changes nothing. Before every step, and before Python creates, renames or deletes anything in the
output folder, the run announces it and waits for the answer: go on, or SIGKILL. While C++ and Rust
write a file nobody can ask them; there the kernel ends the run at a byte of the file (RLIMIT_FSIZE,
whose signal lets a process do as little as SIGKILL does).

A process that has imported everything and computed nothing forks one child a run, so that a run
costs its own time only. That process is this file, run as a program.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import PYTHONPATH
from small_run import add_callback, logged, prepare
from transformers import TrainerCallback

import train

KILLS = 20
SAVE_STEPS = 2
AHEAD = 3
"""Whole steps of a run before it is killed at the latest: one checkpoint, no second one."""
STEPS = SAVE_STEPS * (KILLS + 1)
"""So many that no run that is to be killed reaches the end."""
SILENT_S = 300
"""A run that announces nothing for so long hangs. Events are milliseconds apart."""

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Python's audit events that come before a change of a folder."""
STAGING = ".incomplete-"


# --- the run ---------------------------------------------------------------------------------


class Announce(TrainerCallback):
    """Announces each event and waits for the answer: None, or the size that no file may exceed."""

    def __init__(self, output: Path, parent: Connection) -> None:
        self.output, self.parent, self.pid = output, parent, os.getpid()
        sys.addaudithook(self.audit)

    def announce(self, event: str) -> None:
        self.parent.send(event)
        size_bytes = self.parent.recv()
        if size_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.announce("step")

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or isinstance(args[0], int) or os.getpid() != self.pid:
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = Path(os.fspath(args[0]))
        if event in ("os.remove", "os.rmdir") and args[1] >= 0:  # within an open folder
            path = Path(os.readlink(f"/proc/self/fd/{args[1]}")) / path
        if path.is_relative_to(self.output) and path != self.output:
            self.announce(f"{event} {path.relative_to(self.output)}")


def run_and_exit(flags: list[str], output: Path, parent: Connection) -> None:
    """Prints into OUTPUT.log, and never returns to the code of the process it was forked from."""
    status = 1
    try:
        os.dup2(os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        add_callback(Announce(output, parent))
        train.main(flags)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


# --- its parent ------------------------------------------------------------------------------


def begins_save(event: str) -> bool:
    """Of a run that has just deleted what an earlier one left half done."""
    return event.startswith(f"os.mkdir {STAGING}")


class Moment:
    """When to kill a run: at an event, told by how many of its kind came before."""

    def __init__(
        self,
        steps: int = AHEAD,
        changes: int | None = None,
        saving: int | None = None,
        file_bytes: int | None = None,
        waiting: bool = True,
    ) -> None:
        """Before step `steps` of this run (from 0), before change `changes` of its folder, before
        change `saving` of those from the first save on, or when a file of that save has
        `file_bytes`; while it waits, or else when it has just been told to go on."""
        self.left = {"step": steps, "change": changes, "saving": saving}
        self.file_bytes, self.waiting = file_bytes, waiting
        self.saves = False

    def has_come(self, event: str) -> bool:
        self.saves |= begins_save(event)
        kinds = ["step"] if event == "step" else ["change", *(["saving"] if self.saves else [])]
        for kind in kinds:
            left = self.left[kind]
            if left == 0:
                return True
            self.left[kind] = None if left is None else left - 1
        return False


def fork_run(flags: list[str], moment: Moment | None) -> dict[str, Any]:
    """Runs train.py in a child. How it ended: `status` (None: killed), whether `saving` something,
    after which `events`."""
    output = Path(flags[flags.index("--output_dir") + 1])
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        run_and_exit(flags, output, theirs)
    theirs.close()
    events: list[str] = []
    hangs = kill = False
    try:
        while not kill and not hangs:
            if hangs := not ours.poll(SILENT_S):
                continue
            events.append(ours.recv())
            kill = moment is not None and moment.has_come(events[-1])
            if not (kill and moment.waiting):
                ours.send(moment.file_bytes if moment and moment.saves else None)
        os.kill(pid, signal.SIGKILL)
    except (EOFError, ConnectionError):
        pass  # it has ended
    _, status = os.waitpid(pid, 0)
    exited = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return {
        "status": f"hangs after {SILENT_S} s" if hangs else exited,
        "saving": any(output.glob(STAGING + "*")),
        "events": events,
    }


def serve() -> None:
    """Answers lines `[flags, moment or null]` with what became of the run."""
    torch.set_num_threads(1)
    gc.freeze()  # a run's own gc.collect() is twice as long as all else that it does before step 1
    for line in sys.stdin:
        flags, moment = json.loads(line)
        print(json.dumps(fork_run(flags, moment and Moment(**moment))), flush=True)


# --- the test --------------------------------------------------------------------------------

Start = Callable[..., dict[str, Any]]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(flags, **moment) -> what became of the run; without a moment it runs to its end."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "TOKENIZERS_PARALLELISM": "false"}
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**env, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin and server.stdout

    def start(flags: list[str], **moment: Any) -> dict[str, Any]:
        print(json.dumps([flags, moment or None]), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    yield start
    server.stdin.close()
    server.wait()


def split_at_steps(events: list[str]) -> list[list[str]]:
    """The changes before step 1, after step 1 began, after step 2 began, ..."""
    changes: list[list[str]] = [[]]
    for event in events:
        changes.append([]) if event == "step" else changes[-1].append(event)
    return changes


def draw(seed: int, whole: list[str], largest_bytes: int) -> list[dict[str, Any]]:
    """Five moments of each kind, in random order. `whole` are the events of a run without one."""
    drawn = random.Random(seed)
    last_step = STEPS - SAVE_STEPS  # of a save with the deletion of an older checkpoint after it
    of_a_save = split_at_steps(whole)[last_step]
    changes = len(of_a_save) - next(i for i, e in enumerate(of_a_save) if begins_save(e))
    moments: list[dict[str, Any]] = [
        *({"steps": steps} for steps in (0, 1, 2, AHEAD, AHEAD)),
        *({"changes": drawn.randrange(2 * changes)} for _ in range(5)),
        *({"saving": drawn.randrange(changes)} for _ in range(5)),
        *({"file_bytes": drawn.randrange(largest_bytes)} for _ in range(5)),
    ]
    drawn.shuffle(moments)
    return [{**moment, "waiting": drawn.random() < 0.5} for moment in moments]


def test_twenty_kills_change_nothing(start: Start, tmp_path: Path) -> None:
    flags = [*prepare(tmp_path), "--max_steps", str(STEPS), "--save_steps", str(SAVE_STEPS)]
    flags += ["--lr_scheduler_type", "cosine", "--gradient_accumulation_steps", "2"]

    def at(name: str) -> list[str]:
        return [*flags, "--output_dir", str(tmp_path / name)]

    def log() -> str:
        return (tmp_path / "run.log").read_text()[-3000:]

    whole = start(at("whole"))
    assert whole["status"] == 0, (tmp_path / "whole.log").read_text()
    assert whole["events"].count("step") == STEPS
    last = tmp_path / "whole" / f"checkpoint-{STEPS}"
    largest_bytes = max(path.stat().st_size for path in last.iterdir())

    seed = random.randrange(2**32)
    kills = []
    has_begun = False
    for moment in draw(seed, whole["events"], largest_bytes):
        # Once there is a checkpoint, there is one after every kill.
        has_begun |= any((tmp_path / "run").glob("checkpoint-*"))
        how = "--resume_from_checkpoint last" if has_begun else "--overwrite_output_dir true"
        outcome = start([*at("run"), *how.split()], **moment)
        kills.append((moment, outcome["saving"], outcome["events"][-1:]))
        assert outcome["status"] is None, (seed, kills, log())
    assert len(kills) == KILLS
    cut = [saving for moment, saving, _ in kills if "file_bytes" in moment]
    assert cut == [True] * 5, (seed, kills)  # and others by chance
    steps = [line["step"] for line in logged(tmp_path / "run")]
    assert SAVE_STEPS <= max(steps) < STEPS, (seed, steps)

    outcome = start([*at("run"), "--resume_from_checkpoint", "last"])
    assert outcome["status"] == 0, (seed, kills, log())
    for key in ("step", "loss", "grad_norm", "learning_rate"):
        expected, found = ([line[key] for line in logged(tmp_path / n)] for n in ("whole", "run"))
        assert found == expected, (seed, kills, key)
    for name in ("final", last.name):
        weights = [
            (tmp_path / n / name / "model.safetensors").read_bytes() for n in ("whole", "run")
        ]
        assert weights[0] == weights[1], (seed, kills, name)
    assert not list((tmp_path / "run").glob(STAGING + "*")), (seed, kills)


if __name__ == "__main__":
    serve()
