"""Tasks on two processes, with every engine: the numbers and weights of one process without any."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from small_job import Warm, assert_same_run, lines_of, on_cpu
from small_task import flags, pairs, write_jsonl

from longctx.system import installed
from longctx.train.commands import train

METRICS = ("rewards/margins", "logps/chosen", "eval_rewards/margins")
ROWS_A_STEP = 4
needs_deepspeed = pytest.mark.skipif(
    not installed("deepspeed"), reason="deepspeed is not installed"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two steps of four rows, each of one pair or two, with an evaluation of three pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    records = pairs(12)
    held_out = write_jsonl(folder / "held_out.jsonl", records[:3])
    found = flags(folder, records, "--task", "dpo", "--eval_file", str(held_out))
    return [*found, "--seq_len", "256", "--max_steps", "2"]


@pytest.fixture(scope="module")
def alone(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face's model in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train.main([*words, *rows(1), "--class_type", "vanilla", "--output_dir", str(folder)])
    return folder


def rows(processes: int) -> list[str]:
    return ["--gradient_accumulation_steps", str(ROWS_A_STEP // processes)]


def assert_same(
    folder: Path, alone: Path, warm: Warm, script: str, words: list[str], *more: str
) -> None:
    """Two processes, whose reference is computed anew."""
    words = [*words, *more, "--cache_dir", f"{folder}/cache"]
    warm.run(2, script, *words, "--output_dir", f"{folder}/run")
    assert_same_run(folder / "run", alone)
    ours, theirs = lines_of(folder / "run"), lines_of(alone)
    for name in METRICS:
        a, b = ([line[name] for line in lines if name in line] for lines in (ours, theirs))
        assert len(a) == len(b) >= 1 and a == pytest.approx(b, rel=2e-4, abs=1e-5), name


def test_ddp_with_exact_states(words, alone: Path, warm: Warm, tmp_path: Path) -> None:
    assert_same(tmp_path, alone, warm, "train.py", words, *rows(2), "--place", "host")


@needs_deepspeed
def test_zero3(words, alone: Path, warm: Warm, tmp_path: Path) -> None:
    config = on_cpu(ROOT / "ds_configs" / "zero3.json", tmp_path)
    assert_same(tmp_path, alone, warm, "train.py", words, *rows(2), "--deepspeed", config)


FSDP2 = ["--fsdp", "true", "--fsdp_config", str(ROOT / "fsdp_configs" / "fsdp2.json")]
SCRIPT = "tests/train/engines/fsdp_on_cpu.py"


def test_fsdp2(words, alone: Path, warm: Warm, tmp_path: Path) -> None:
    assert_same(tmp_path, alone, warm, SCRIPT, words, *rows(2), *FSDP2)


def test_two_processes_share_rows(words, alone: Path, warm: Warm, tmp_path: Path) -> None:
    shared = [*FSDP2, "--sequence_parallel_size", "2", *rows(1)]
    assert_same(tmp_path, alone, warm, SCRIPT, words, *shared)


@pytest.mark.parametrize("task", ["orpo", "reward"])
def test_other_tasks_on_rows_that_are_shared(words, warm: Warm, tmp_path: Path, task: str) -> None:
    """ORPO also reads prompts, and a reward is one token of its answer."""
    words = [*words, *rows(1), "--task", task, "--max_steps", "1"]
    train.main([*words, "--class_type", "vanilla", "--output_dir", f"{tmp_path}/alone"])
    shared = [*FSDP2, "--sequence_parallel_size", "2", "--output_dir", f"{tmp_path}/run"]
    warm.run(2, SCRIPT, *words, *shared)
    ours, theirs = (lines_of(tmp_path / name)[0] for name in ("run", "alone"))
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=5e-4), name
