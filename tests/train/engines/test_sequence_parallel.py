"""FSDP2 with rows that processes share (--sequence_parallel_size): the run of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paths import ROOT
from small_job import Warm, assert_same_run, batch, lines_of, on_cpu

from longctx.attention.shards import Shards
from longctx.errors import UserError
from longctx.system import installed
from longctx.train.commands import train
from longctx.train.trainer.trainer import _joined

SCRIPT = "tests/train/engines/fsdp_on_cpu.py"
FSDP2 = "--fsdp true --fsdp_config fsdp_configs/fsdp2.json".split()


def sharing(ranks: int, processes: int) -> list[str]:
    return [*FSDP2, "--sequence_parallel_size", str(ranks), *batch(processes // ranks)]


def test_killed_and_resumed_with_whole_rows(
    job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    """Two groups of two processes share rows until the run is killed."""
    flags = [*job, "--output_dir", f"{tmp_path}/run", "--save_steps", "2"]
    warm.kill_after_saving(tmp_path / "run", 4, SCRIPT, *flags, *sharing(2, 4))
    resumed = [*flags, *sharing(1, 2), "--resume_from_checkpoint", "last"]
    warm.run(2, SCRIPT, *resumed, "--allow_changed", "num_processes", "gradient_accumulation_steps")
    assert_same_run(tmp_path / "run", vanilla)


def test_evaluation_and_rows_that_fill_no_two_shards(
    job: list[str], warm: Warm, tmp_path: Path
) -> None:
    """The last step's evaluation is that of the end."""
    flags = [*job, "--seq_len", "127", "--save_strategy", "no", "--max_steps", "2"]
    flags += ["--eval_strategy", "steps", "--eval_steps", "2"]
    alone = ["--class_type", "vanilla", "--output_dir", f"{tmp_path}/vanilla", *batch(1)]
    train.main([*flags, *alone])
    warm.run(2, SCRIPT, *flags, *sharing(2, 2), "--output_dir", f"{tmp_path}/run")
    assert len([line for line in lines_of(tmp_path / "run") if "eval_loss" in line]) == 1
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


needs_deepspeed = pytest.mark.skipif(
    not installed("deepspeed"), reason="deepspeed is not installed"
)


def zero3(tmp_path: Path) -> list[str]:
    config = on_cpu(ROOT / "ds_configs" / "zero3.json", tmp_path)
    shared = ["--deepspeed", config, "--sequence_parallel_size", "2", "--save_strategy", "no"]
    return [*shared, "--output_dir", f"{tmp_path}/run"]


@needs_deepspeed
def test_zero3(job: list[str], vanilla: Path, warm: Warm, tmp_path: Path) -> None:
    """States are sharded over both processes, which share each row."""
    warm.run(2, "train.py", *job, *zero3(tmp_path), *batch(1))
    assert_same_run(tmp_path / "run", vanilla)


@needs_deepspeed
def test_vanilla_with_ulysses(job: list[str], warm: Warm, tmp_path: Path) -> None:
    """accelerate's own, for comparisons: full rows of one document. It averages rows, not tokens,
    so that one with padding would count too much: of a thousand rows, twelve are seen."""
    (tmp_path / "book.txt").write_text(" ".join(f"{i} bottles" for i in range(20_000)))
    flags = [*job, "--train_file", f"{tmp_path}/book.txt", "--class_type", "vanilla", *batch(1)]
    flags += ["--max_steps", "3"]
    train.main([*flags, "--output_dir", f"{tmp_path}/vanilla", "--save_strategy", "no"])
    warm.run(2, "train.py", *flags, *zero3(tmp_path))
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


def test_documents_that_ulysses_would_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shards, "whole", lambda self, own: own)
    config = SimpleNamespace(_attn_implementation="sdpa")
    model: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
    rows = {"position_ids": torch.tensor([[0, 1, 2, 0]])}
    padded = rows | {"shift_labels": torch.tensor([[5, 6, -100, -100]])}
    assert _joined(padded, model, Shards(None)) is rows["position_ids"]
    packed = rows | {"shift_labels": torch.tensor([[5, 6, -100, 7]])}
    with pytest.raises(UserError, match="with --attn_backend fa2 only"):
        _joined(packed, model, Shards(None))
    model.config._attn_implementation = "flash_attention_2"
    _joined(packed, model, Shards(None))
