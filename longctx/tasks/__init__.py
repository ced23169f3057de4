"""What a run trains for, by the name that `--task` takes.

A task is a class in a file of its own (protocol.py says what it is asked) and a line in TASKS.
"""

from __future__ import annotations

import importlib

from longctx.options.task import TaskOptions
from longctx.tasks.protocol import Task

TASKS = {
    "sft": "longctx.tasks.protocol:Task",
    "dpo": "longctx.tasks.pairs:DPO",
    "orpo": "longctx.tasks.pairs:ORPO",
    "cpo": "longctx.tasks.pairs:CPO",
    "simpo": "longctx.tasks.pairs:SimPO",
    "kto": "longctx.tasks.kto:KTO",
    "reward": "longctx.tasks.reward:Reward",
    "distill": "longctx.tasks.distill:Distill",
}


def make_task(options: TaskOptions) -> Task:
    """Makes the task that the options ask for. Raises UserError for options that contradict it."""
    home, _, name = TASKS[options.task].partition(":")
    task: Task = getattr(importlib.import_module(home), name)(options)
    return task
