"""Trains vanilla, custom and liger from the same weights on the same batches and compares losses.

    python profiling/convergence.py --output profiling/results/h200_convergence.json

bf16 runs that differ only in the order of their sums drift apart. How far *vanilla* runs drift from
each other that use different kernels (sdpa or eager attention, torch.compile) is the noise; another
class type is right if it stays within. Each row holds a run's losses and their root-mean-square
distance from the first vanilla run, in units of that noise. Anything after `--` goes to train.py,
for all runs.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from first_run import run
from results import write_results

JOB = (
    "--preset llama-3.2-1b --seq_len 4096 --dtype bfloat16 --max_steps 50 --learning_rate 1e-4 "
    "--warmup_steps 5"
).split()
RUNS = {
    "vanilla": ["--class_type", "vanilla"],
    "vanilla, torch.compile": ["--class_type", "vanilla", "--torch_compile", "true"],
    "vanilla, eager attention": ["--class_type", "vanilla", "--attn_backend", "eager"],
    "custom": ["--class_type", "custom"],
    "liger": ["--class_type", "liger"],
}


def distance(a: list[float], b: list[float]) -> float:
    """Root mean square of the differences."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args()
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in RUNS.items():
            lines = run(name, [*JOB, *flags, *args.flags], Path(folder) / name.replace(" ", "_"))
            losses[name] = [line["loss"] for line in lines if "loss" in line]
    rows = compare(losses)
    write_results(args.output, rows)


def compare(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a run. The noise is the largest distance of a vanilla run from the first one."""
    vanilla = losses["vanilla"]
    noise = max(distance(run, vanilla) for name, run in losses.items() if "vanilla" in name)
    rows = []
    for name, run_losses in losses.items():
        away = distance(run_losses, vanilla)
        print(f"{name:25} last loss {run_losses[-1]:.4f}  distance {away / noise:.2f} x noise")
        rows.append(
            {
                "run": name,
                "rms_distance": away,
                "distance_over_noise": away / noise,
                "losses": run_losses,
            }
        )
    return rows


if __name__ == "__main__":
    main()
