"""FSDP2 with rows that processes share (--sequence_parallel_size): the run of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paths import ROOT
from small_job import STEPS, Warm, assert_same_run, batch, on_cpu

from longctx.config import installed
from longctx.output import METRICS

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


@pytest.mark.skipif(not installed("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize(("stage", "processes"), [("zero3", 2), ("zero2", 4)])
def test_deepspeed(
    stage: str, processes: int, job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    """States are sharded over all processes, of which two share each row."""
    config = on_cpu(ROOT / "ds_configs" / f"{stage}.json", tmp_path)
    flags = [*job, "--deepspeed", config, "--save_strategy", "no", *batch(processes // 2)]
    flags += ["--sequence_parallel_size", "2", "--output_dir", f"{tmp_path}/run"]
    warm.run(processes, "train.py", *flags)
    assert_same_run(tmp_path / "run", vanilla)
