"""profiling/bench/convergence.py: distances in units of vanilla's own noise, and their picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import open_page

from longctx.errors import UserError
from longctx.train.options.config import parse_flags

STEPS = 20


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch):
    from profiling.bench import convergence

    return convergence


def losses(offset: float, seed: int) -> list[float]:
    """Falls, and differs from the plain run by `offset`, up and down in turn."""
    return [9 - step / 10 + seed + offset * (-1) ** step for step in range(STEPS)]


def example_runs() -> dict[tuple[str, int], list[float]]:
    offsets = {"vanilla": 0, "vanilla, torch.compile": 0.01, "custom": 0.015, "liger": 0.08}
    runs = {
        (name, seed): losses(offset, seed) for seed in (0, 1) for name, offset in offsets.items()
    }
    return runs | {("vanilla, eager attention", 1): losses(-0.02, 1)}


def test_distances_are_in_units_of_the_largest_vanilla_drift(convergence) -> None:
    rows = {(row["run"], row["seed"]): row for row in convergence.compare(example_runs())}
    assert rows["vanilla", 0]["rms_distance"] == 0
    assert rows["vanilla, eager attention", 1]["distance_over_noise"] == pytest.approx(1)
    assert rows["custom", 0]["distance_over_noise"] == pytest.approx(0.75)
    assert rows["liger", 1]["distance_over_noise"] == pytest.approx(4)
    for step, (low, high) in enumerate(convergence.noise_band(example_runs())):
        even = step % 2 == 0  # plain 0, compile +-0.01 in both seeds, eager -+0.02 in one
        expected = (-0.02, 0.01) if even else (-0.01, 0.02)
        assert (low, high) == pytest.approx(expected)


def test_all_is_written_and_the_page_opens(convergence, tmp_path: Path, monkeypatch) -> None:
    asked = []
    plain = convergence.RUNS["vanilla"]

    def run(flags: list[str], folder: Path, program: Any) -> list[dict[str, float]]:
        assert program == ("train.py",)
        parse_flags([*flags[:-1], "--output_dir", str(folder)])
        settings, seed = flags[len(convergence.JOB) : -3], flags[-2]
        asked.append((settings, seed, flags[-1]))
        offset = 0 if settings == plain else 0.01 if "custom" in settings else 0.02
        return [{"loss": loss} for loss in losses(offset, int(seed))]

    monkeypatch.setattr(convergence, "train_lines", run)
    output = tmp_path / "c.json"
    words = ["convergence.py", "--seeds", "3", "4", "--output", str(output), "--", "--use_cpu"]
    monkeypatch.setattr(sys, "argv", words)
    convergence.main()
    assert len(asked) == 2 * 5 and {a[2] for a in asked} == {"--use_cpu"}
    rows = json.loads(output.read_text())["rows"]
    assert [row["seed"] for row in rows] == [3] * 5 + [4] * 5
    assert output.with_suffix(".png").stat().st_size > 10000
    opened = open_page(output.with_suffix(".html"), tmp_path, height=1500)
    assert opened.console == [] and opened.svgs == 1 and opened.colours >= 2


def test_a_failed_run_and_impossible_requests(convergence, tmp_path: Path, monkeypatch) -> None:
    def main(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["c.py", "--output", str(tmp_path / "c.json"), *words])
        convergence.main()

    def failed(*args: Any) -> list[dict[str, float]]:
        raise UserError("exit code 1")

    monkeypatch.setattr(convergence, "train_lines", failed)
    with pytest.raises(SystemExit, match="'vanilla' with seed 0 failed"):
        main()
    with pytest.raises(SystemExit, match="must hold vanilla"):
        main("--runs", "custom")
    monkeypatch.setattr(convergence, "train_lines", lambda *args: [{"loss": 1.0}])
    with pytest.raises(SystemExit, match="a second vanilla run"):
        main("--runs", "vanilla", "custom")
    assert not list(tmp_path.iterdir())


def test_runs_of_two_processes(convergence, tmp_path: Path, monkeypatch, capsys) -> None:
    """The published command, whose flags a run takes."""
    words = ["c.py", "--gpus", "2", "--output", str(tmp_path / "c.json"), "--dry_run", "--runs"]
    words += ["vanilla", "vanilla, eager attention", "liger", "custom", "--"]
    flags = "--deepspeed zero3_cpu.json --seq_len 8192 --gradient_accumulation_steps 4"
    monkeypatch.setattr(sys, "argv", [*words, *flags.split()])
    convergence.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1].startswith("custom, seed 0: python -m torch.distributed")
    for line in lines:
        command = line.partition(": python ")[2].split()
        assert command[3:6] == ["--nproc_per_node", "2", "train.py"]
        found = parse_flags(command[6:])
        assert (found.seq_len, found.gradient_accumulation_steps) == (8192, 4)
        assert found.deepspeed.endswith("zero3_cpu.json")
    assert not list(tmp_path.iterdir())
