"""Runs of eight layers of Llama-3.1-8B, whose states are 39 GiB, on cards of any memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from longctx.cost.machines import MACHINES, Machine
from longctx.train.options.config import ModelArguments
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config


@cache
def eight_layers() -> Subject:
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=8192), vocab_size=1)
    config.num_hidden_layers = 8
    return Subject(config)


@cache
def whole_model() -> Subject:
    return Subject(load_config(ModelArguments(preset="llama-3.1-8b", seq_len=8192), vocab_size=1))


def run(tokens: int = 8192, *, class_type: str = "custom", **options) -> PlannedRun:
    model = ModelArguments(preset="llama-3.1-8b", class_type=class_type, seq_len=tokens)
    return PlannedRun(model=model).having(**options)


def card(gpu_gib: float, name: str = "rtx-4090") -> Machine:
    return replace(MACHINES[name], gpu_gib=gpu_gib)
