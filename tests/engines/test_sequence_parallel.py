"""FSDP2 with rows that processes share (--sequence_parallel_size): the run of one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paths import ROOT
from small_job import STEPS, Warm, assert_same_run, batch, on_cpu
from transformers import LlamaConfig, LlamaForCausalLM

import train
from longctx.attention.shards import Shards
from longctx.config import installed
from longctx.errors import UserError
from longctx.output import METRICS
from longctx.presets import PRESETS
from longctx.run.trainer import LongTrainer

SCRIPT = "tests/engines/fsdp_on_cpu.py"
FSDP2 = "--fsdp true --fsdp_config fsdp_configs/fsdp2.json".split()


def sharing(ranks: int, processes: int) -> list[str]:
    return [*FSDP2, "--sequence_parallel_size", str(ranks), *batch(processes // ranks)]


@pytest.mark.parametrize(("processes", "ranks"), [(2, 2), (4, 2)])
def test_killed_and_resumed_with_whole_rows(
    processes: int, ranks: int, job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    """Rows are shared until the run is killed."""
    flags = [*job, "--output_dir", f"{tmp_path}/run", "--save_steps", "2"]
    shared = [*flags, *sharing(ranks, processes)]
    warm.kill_after_saving(tmp_path / "run", processes, SCRIPT, *shared)
    resumed = [*flags, *sharing(1, 2), "--resume_from_checkpoint", "last"]
    warm.run(2, SCRIPT, *resumed, "--allow_changed", "num_processes", "gradient_accumulation_steps")
    assert_same_run(tmp_path / "run", vanilla)


def test_evaluation(job: list[str], warm: Warm, tmp_path: Path) -> None:
    """At the end of a run and of the same without sharing; of rows that fill no two shards."""
    flags = [
        *job,
        "--seq_len",
        "127",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "5",
        "--save_strategy",
        "no",
    ]
    losses, trained = [], []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        warm.run(2, SCRIPT, *flags, *sharing(ranks, 2), "--output_dir", str(folder))
        lines = [*map(json.loads, (folder / METRICS).read_text().splitlines())]
        losses.append([line["eval_loss"] for line in lines if "eval_loss" in line])
        trained.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 2  # after the last step, and when training is over
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert len(trained[0]) == STEPS
    assert trained[0] == pytest.approx(trained[1], rel=2e-5)


needs_deepspeed = pytest.mark.skipif(
    not installed("deepspeed"), reason="deepspeed is not installed"
)


def zero3(tmp_path: Path) -> list[str]:
    config = on_cpu(ROOT / "ds_configs" / "zero3.json", tmp_path)
    shared = ["--deepspeed", config, "--sequence_parallel_size", "2", "--save_strategy", "no"]
    return [*shared, "--output_dir", f"{tmp_path}/run"]


@needs_deepspeed
def test_zero3(job: list[str], vanilla: Path, warm: Warm, tmp_path: Path) -> None:
    """States are sharded over all four processes, two of which share each row."""
    warm.run(4, "train.py", *job, *zero3(tmp_path), *batch(2))
    assert_same_run(tmp_path / "run", vanilla)


@needs_deepspeed
def test_vanilla_with_ulysses(job: list[str], warm: Warm, tmp_path: Path) -> None:
    """accelerate's own, for comparisons: full rows of one document. It averages rows, not tokens,
    so that one with padding would count too much."""
    (tmp_path / "book.txt").write_text(" ".join(f"{i} bottles" for i in range(2000)))
    flags = [*job, "--train_file", f"{tmp_path}/book.txt", "--class_type", "vanilla", *batch(1)]
    flags += ["--max_steps", "3"]
    train.main([*flags, "--output_dir", f"{tmp_path}/vanilla", "--save_strategy", "no"])
    warm.run(2, "train.py", *flags, *zero3(tmp_path))
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


def test_documents_that_ulysses_would_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "whole", lambda self, own: own)
    model = LlamaForCausalLM(LlamaConfig(**PRESETS["tiny"], vocab_size=8))
    model.config._attn_implementation = "sdpa"
    trainer: Any = SimpleNamespace(model=model, args=SimpleNamespace(device=torch.device("cpu")))
    rows = {"position_ids": torch.tensor([[0, 1, 2, 0]])}
    padded = rows | {"shift_labels": torch.tensor([[5, 6, -100, -100]])}
    assert LongTrainer._joined(trainer, padded, None) is rows["position_ids"]
    packed = rows | {"shift_labels": torch.tensor([[5, 6, -100, 7]])}
    with pytest.raises(UserError, match="with --attn_backend fa2 only"):
        LongTrainer._joined(trainer, packed, None)
    model.config._attn_implementation = "flash_attention_2"
    LongTrainer._joined(trainer, packed, None)
