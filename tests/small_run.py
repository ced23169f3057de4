"""A run of train.py that takes a fraction of a second: a Llama of 30,000 parameters, and data."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from small_tokenizer import small_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from longctx.train.commands import train
from longctx.train.output import METRICS
from longctx.train.trainer.trainer import LongTrainer

LATE = (
    "accelerate.commands.launch",
    "deepspeed",  # which accelerate imports where it is installed
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # decorated by torch.compile: 1.5 s
    "longctx.losses.modules",
    "longctx.train.start.optimization",
    "longctx.train.tasks.collate",
    "longctx.train.tasks.pairs",
    "torch.distributed.run",
)
"""Modules that a run imports only when it needs them."""


def import_late() -> None:
    """For a process from which runs are forked: or each of them imports it again."""
    for name in LATE:
        with suppress(ImportError):  # not installed, or another version, which has other parts
            importlib.import_module(name)
    compile_patterns()


def compile_patterns() -> None:
    """Those of names of weights, 1000 of them, which transformers compiles when a process first
    loads a model: 0.5 s."""
    with suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def become_rank(rank: int, processes: int, port: int) -> None:
    """What a launcher tells its processes, for one that was forked."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    told |= {"LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()}


def fork_ranks(processes: int, end: Callable[[int], NoReturn]) -> list[int]:
    """Forks the processes of one run, each of which ends in `end(rank)`; their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(processes):
        if not (pid := os.fork()):
            if processes > 1:
                become_rank(rank, processes, port)
            end(rank)
        children.append(pid)
    return children


def on_ranks(processes: int, check: Callable[[int, int], None], folder: Path) -> None:
    """Calls check(rank, processes) in processes that gloo connects. What it raises is shown."""
    log = folder / "ranks.log"
    log.touch()

    def run_and_end(rank: int) -> NoReturn:
        status = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            check(rank, processes)
            dist.barrier()
            status = 0
        except BaseException:
            with log.open("a") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(status)

    statuses = [os.waitpid(child, 0)[1] for child in fork_ranks(processes, run_and_end)]
    assert not any(statuses), log.read_text()


def prepare(folder: Path) -> list[str]:
    """Writes model and data into `folder`; returns the flags that train on them."""
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for i in range(12):
        text = f"Chapter {i}. The quick brown fox number {i} jumps over the lazy dog. " * 12
        (folder / "data" / f"{i}.txt").write_text(text)
    flags = ["--model_name_or_path", str(folder / "model"), "--seq_len", "64", "--use_cpu"]
    flags += ["--train_file", str(folder / "data"), "--cache_dir", str(folder / "cache")]
    return [*flags, "--learning_rate", "0.003", "--disable_tqdm", "true", "--save_steps", "2"]


def run(flags: list[str], output: Path, *more: str) -> list[dict[str, float]]:
    """Trains, and returns the logged lines that have a loss."""
    train.main([*flags, "--output_dir", str(output), *more])
    return logged(output)


def logged(output: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (output / METRICS).read_text().splitlines())
    return [line for line in lines if "loss" in line]


def add_callback(callback: TrainerCallback, patch: Any = None) -> None:
    """Trainers made from now on have the callback too; `patch` (monkeypatch) undoes it."""
    make = LongTrainer.__init__

    def init(self, **kwargs) -> None:
        make(self, **kwargs)
        self.add_callback(callback)

    (patch.setattr if patch else setattr)(LongTrainer, "__init__", init)


class SendAt(TrainerCallback):
    """Sends this process a signal while step `step` runs."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self.number, self.step = number, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)
