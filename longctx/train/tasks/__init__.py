"""What a run trains for, by the name that `--task` takes.

A task is a class in a file of its own (protocol.py says what it is asked) and a line in TASKS.
"""

from __future__ import annotations

import importlib

from longctx.train.options.task import TaskOptions
from longctx.train.tasks.protocol import Task

TASKS = {
    "sft": "longctx.train.tasks.protocol:Task",
    "dpo": "longctx.train.tasks.pairs:DPO",
    "orpo": "longctx.train.tasks.pairs:ORPO",
    "cpo": "longctx.train.tasks.pairs:CPO",
    "simpo": "longctx.train.tasks.pairs:SimPO",
    "kto": "longctx.train.tasks.rated:KTO",
    "reward": "longctx.train.tasks.reward:Reward",
    "distill": "longctx.train.tasks.distill:Distill",
}


def make_task(options: TaskOptions) -> Task:
    """Makes the task that the options ask for. Raises UserError for options that contradict it."""
    home, _, name = TASKS[options.task].partition(":")
    task: Task = getattr(importlib.import_module(home), name)(options)
    return task
