"""No engine on several processes: DDP, on the CPU."""

from __future__ import annotations

from pathlib import Path

from small_job import TORCHRUN, Warm, assert_same_run, batch

TRAIN = ["-m", "longctx", "train"]
"""In place of train.py, which other tests launch."""


def files(folder: str) -> dict[str, int]:
    """When each was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).glob("*.arrow")}


def test_two_processes_without_an_engine(
    job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    """Every process finds the best checkpoint, which is the last one here, and the rows that
    another interpreter has written: names in the cache depend on no PYTHONHASHSEED."""
    cache = job[job.index("--cache_dir") + 1]
    before = files(cache)
    best = "--load_best_model_at_end true --save_steps 5 --eval_strategy steps --eval_steps 5"
    flags = ["--output_dir", f"{tmp_path}/run", *best.split(), *batch(2)]
    launcher = [TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    assert "Could not locate the best model" not in warm.run(1, *launcher, *TRAIN, *job, *flags)
    assert_same_run(tmp_path / "run", vanilla)
    assert files(cache) == before != {}
