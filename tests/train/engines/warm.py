"""Runs of train.py in one process or several, each forked from this one: it has imported everything
and computed nothing, which saves a launcher and two interpreters 15 s of work a run. What launchers
do is tested by test_ddp.py (torchrun) and by published YAML (accelerate): there a launcher is
forked, and starts interpreters of its own.

    stdin    {"processes": 2, "words": ["train.py", ...], "log": FILE, "until": FOLDER} a line,
             and `end`
    stdout   the processes' exit statuses, a line a run

All processes write into `log`. When `until` is there, they are killed at once.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from small_run import add_callback, fork_ranks, import_late
from transformers import TrainerCallback

from longctx.head import logits


class WaitForDeath(TrainerCallback):
    """A run that is to be killed stops before its fourth step, however late the killer is."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        while state.global_step == 3:
            signal.pause()


def run_and_exit(words: list[str], log: str, dies: bool) -> NoReturn:
    """As the interpreter would run the script, in a process that a launcher has just started."""
    status: Any = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        torch.set_num_threads(1)  # remakes torch's pool; several threads at once would race for it
        if dies:
            add_callback(WaitForDeath())
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
        os._exit(status or 0)


def run(job: dict[str, Any]) -> list[int]:
    how = job["words"], job["log"], bool(job["until"])
    children = fork_ranks(job["processes"], lambda rank: run_and_exit(*how))
    ranks = [psutil.Process(pid) for pid in children]
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        for rank in ranks:
            if rank.pid not in statuses and (ended := os.waitpid(rank.pid, os.WNOHANG))[0]:
                statuses[rank.pid] = os.waitstatus_to_exitcode(ended[1])
        broken = any(statuses.values())  # the others would wait for it
        if broken or job["until"] and Path(job["until"]).exists():
            left = [rank for rank in ranks if rank.pid not in statuses]
            for victim in [*(c for r in left for c in r.children(recursive=True)), *left]:
                with suppress(psutil.NoSuchProcess):  # it may end by itself
                    victim.kill()
        time.sleep(0.02)
    return [statuses[pid] for pid in children]


def remember_the_cpu() -> None:
    """DeepSpeed's AdamW asks for it in each process: an interpreter, and a second of measuring."""
    with suppress(ImportError):
        import cpuinfo

        known = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: dict(known)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where libraries print
    import_late()
    remember_the_cpu()
    torch.set_num_threads(1)
    logits.LIMIT_BYTES = 0  # no engine may read them in training or evaluation
    gc.freeze()  # or every child's first collection copies the memory of all that was imported
    for line in iter(sys.stdin.readline, "end\n"):
        if not line:  # whoever started this process is gone
            break
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
