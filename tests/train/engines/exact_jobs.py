"""Runs of train.py with exact states in one process or several, each forked from this one, which
has imported everything, so that a run costs its own time only.

    run({"processes": 2, "flags": [...], "breaks": [rank, step]})

`breaks` says whose gradient is infinite, and when. Every process leaves what a callback sees of the
weights after each step in OUTPUT-RANK.safetensors, and what it says in OUTPUT-RANK.log. Returned
are the processes' exit statuses.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from small_run import add_callback, fork_ranks
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from longctx.memory.optimizer import ExactAdamW
from longctx.train.commands import train
from longctx.train.trainer.trainer import LongTrainer


class Watch(TrainerCallback):
    """Nothing wraps the model. Keeps the weights after each step."""

    def __init__(self, path: Path, breaks: bool, step: int) -> None:
        self.path, self.breaks, self.step, self.now = path, breaks, step, False
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        assert not isinstance(model, DistributedDataParallel)
        assert isinstance(optimizer.optimizer, ExactAdamW)
        if self.breaks:
            weight = model.model.layers[1].mlp.up_proj.weight
            weight.register_hook(lambda grad: grad * (torch.inf if self.now else 1))

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.now = state.global_step + 1 == self.step

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        for name, weight in model.named_parameters():
            self.weights[f"{state.global_step} {name}"] = weight.detach().clone()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        save_file(self.weights, self.path)


def unwrapped(step: Any) -> Any:
    """The model that a trainer calls is its own."""

    def training_step(self: LongTrainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        assert model is self.model and not isinstance(model, DistributedDataParallel)
        return step(self, model, *args, **kwargs)

    return training_step


def run_and_exit(job: dict[str, Any], rank: int) -> NoReturn:
    flags = job["flags"]
    output = Path(flags[flags.index("--output_dir") + 1])
    path = output.with_name(f"{output.name}-{rank}.safetensors")
    status = 1
    try:
        log = path.with_suffix(".log").open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(1, 2)
        sys.stdout = sys.stderr = log  # pytest's own write elsewhere
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        torch.set_num_threads(1)  # remakes torch's pool; several threads at once would race for it
        broken_rank, step = job.get("breaks") or (None, 0)
        add_callback(Watch(path, rank == broken_rank, step))
        LongTrainer.training_step = unwrapped(LongTrainer.training_step)
        train.main(flags)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run(job: dict[str, Any]) -> list[int]:
    children = fork_ranks(job["processes"], lambda rank: run_and_exit(job, rank))
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
