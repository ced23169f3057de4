"""Trains vanilla, custom and liger from the same weights on the same batches and compares losses.

    python profiling/bench/convergence.py --seeds 0 1 2 \\
        --output profiling/results/h200_convergence.json
    python profiling/bench/convergence.py --gpus 2 \\
        --runs vanilla "vanilla, eager attention" liger custom \\
        --output profiling/results/h200_x2_convergence.json -- --deepspeed zero3_cpu.json \\
        --seq_len 8192 --gradient_accumulation_steps 4

writes the JSON and, beside it, the plot as .png and .html. bf16 runs that differ only in the order
of their sums drift apart. How far *vanilla* runs drift from each other that use different kernels
(sdpa or eager attention, torch.compile) is the noise; another class type is right if it stays
within. Each row holds a run's losses and their root-mean-square distance from the vanilla run of
the same seed (weights and order of the data), in units of the largest such distance of any vanilla
run. The text is Python's standard library; anything after `--` goes to train.py, for all runs.
With `--gpus` a run has as many processes, one a GPU, under an engine that the flags name.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.errors import UserError
from longctx.train.report.page import figure, pyplot, table, write_page
from profiling.bench.runner import on_gpus, train_lines
from profiling.pictures import COLOURS
from profiling.results import how_measured, results_file, write_results

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

Losses = dict[tuple[str, int], list[float]]
"""(run, seed) -> the loss of each step."""


def distance(a: list[float], b: list[float]) -> float:
    """Root mean square of the differences."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def compare(losses: Losses) -> list[dict[str, Any]]:
    """One row a run. The noise is the largest distance of a vanilla run from the plain one."""
    distances = {key: distance(run, losses["vanilla", key[1]]) for key, run in losses.items()}
    noise = max(d for (name, _), d in distances.items() if name.startswith("vanilla"))
    if noise == 0:
        raise UserError("no noise to compare with: name a second vanilla run in --runs")
    rows = []
    for (name, seed), run_losses in losses.items():
        over_noise = distances[name, seed] / noise
        print(
            f"{name:25} seed {seed}  last {run_losses[-1]:.4f}  distance {over_noise:.2f} x noise"
        )
        row = {"run": name, "seed": seed, "rms_distance": distances[name, seed]}
        rows.append({**row, "distance_over_noise": over_noise, "losses": run_losses})
    return rows


def noise_band(losses: Losses) -> list[tuple[float, float]]:
    """For each step, the lowest and highest difference of any vanilla run from the plain one."""
    runs = [
        [x - y for x, y in zip(run, losses["vanilla", seed], strict=True)]
        for (name, seed), run in losses.items()
        if name.startswith("vanilla")
    ]
    return [(min(step), max(step)) for step in zip(*runs, strict=True)]


def draw(losses: Losses) -> Any:
    """Above, the losses of the first seed; below, every seed's difference from its vanilla run."""
    plt = pyplot()
    fig, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    first = next(iter(losses))[1]
    for name in dict.fromkeys(name for name, _ in losses if name in COLOURS):
        run = losses[name, first]
        above.plot(range(1, len(run) + 1), run, color=COLOURS[name], label=name)
    low, high = zip(*noise_band(losses), strict=True)
    steps = range(1, len(low) + 1)
    below.fill_between(steps, low, high, color="#bbbbbb", label="noise: vanilla, other kernels")
    labelled: set[str] = set()
    for (name, seed), run in losses.items():
        if name in COLOURS and name != "vanilla":
            difference = [x - y for x, y in zip(run, losses["vanilla", seed], strict=True)]
            label = None if name in labelled else f"{name} - vanilla"
            labelled.add(name)
            below.plot(steps, difference, color=COLOURS[name], linewidth=1, label=label)
    above.set_ylabel(f"loss (seed {first})")
    below.set_ylabel("difference of the losses (all seeds)")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    fig.tight_layout()
    plt.close(fig)
    return fig


def publish(output: Path, losses: Losses) -> None:
    """The plot and page of the rows in `output`."""
    written = json.loads(output.read_text(encoding="utf-8"))
    fig = draw(losses)
    fig.savefig(output.with_suffix(".png"), dpi=110)
    caption = (
        "Above: training losses. Below: each run's loss less that of vanilla from the same weights "
        "on the same batches. Grey: how far vanilla itself moves when only its kernels change."
    )
    columns = ["run", "seed", "rms_distance", "distance_over_noise"]
    write_page(
        output.with_suffix(".html"),
        "Convergence: vanilla, custom, liger",
        [
            figure(fig, caption),
            table(written["rows"], columns),
            *how_measured(written),
        ],
    )


def flags_of(name: str, seed: int, args: argparse.Namespace) -> list[str]:
    return [*JOB, *RUNS[name], "--seed", str(seed), *args.flags]


def losses_of(name: str, seed: int, args: argparse.Namespace, folder: Path) -> list[float]:
    """The losses of one run of train.py. Raises UserError if it did not finish."""
    print(f"{name}, seed {seed}", flush=True)
    flags, program = flags_of(name, seed, args), (*on_gpus(args.gpus), "train.py")
    try:
        lines = train_lines(flags, folder, program)
    except UserError as error:
        raise UserError(f"the run {name!r} with seed {seed} failed: {error}") from error
    return [line["loss"] for line in lines]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=results_file, required=True, help="JSON file to write")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--gpus", type=int, default=1, help="processes of a run, one a GPU (1)")
    parser.add_argument("--dry_run", action="store_true", help="print the runs and end")
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args(argv)
    pyplot()  # missing? better known now
    if "vanilla" not in args.runs:
        raise UserError("--runs must hold vanilla: the others are compared with it")
    return args


def main() -> None:
    try:
        args = parse()
        runs = [(name, seed) for seed in args.seeds for name in args.runs]
        if args.dry_run:
            for name, seed in runs:
                words = [*on_gpus(args.gpus), "train.py", *flags_of(name, seed, args)]
                print(f"{name}, seed {seed}: python {shlex.join(words)}")
            return
        losses: Losses = {}
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, seed) in enumerate(runs):
                losses[name, seed] = losses_of(name, seed, args, Path(folder) / str(number))
        write_results(args.output, compare(losses))
        publish(args.output, losses)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
