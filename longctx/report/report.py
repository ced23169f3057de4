"""A run's loss, throughput and memory as one HTML page.

    longctx report runs/books                 writes runs/books/report.html
    longctx report metrics.jsonl --output page.html

The page shows what `metrics.jsonl` holds and nothing else: a run without a GPU has no GPU memory,
no MFU and says so.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longctx.errors import UserError, printable
from longctx.output import METRICS
from longctx.program import Parser
from longctx.report.page import figure, heading, paragraph, pyplot, table, write_page
from longctx.writing import check_writable

Line = dict[str, Any]
LARGEST_BYTES = 1 << 28
"""Of metrics: a million logged lines."""

PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "Loss": ("loss", {"loss": "training", "eval_loss": "evaluation"}),
    "Rewards": (
        "reward",
        {
            "rewards/chosen": "chosen or desirable answers",
            "rewards/rejected": "rejected or undesirable answers",
            "mean_reward": "all answers",
        },
    ),
    "Reward margins": (
        "margin",
        {
            "rewards/margins": "training",
            "eval_rewards/margins": "evaluation",
            "margin": "training",
            "eval_margin": "evaluation",
        },
    ),
    "Accuracy": (
        "share of pairs whose chosen answer has the larger reward",
        {
            "rewards/accuracies": "training",
            "eval_rewards/accuracies": "evaluation",
            "accuracy": "training",
            "eval_accuracy": "evaluation",
        },
    ),
    "Log-probabilities of answers": (
        "log-probability",
        {
            "logps/chosen": "chosen or desirable",
            "logps/rejected": "rejected or undesirable",
        },
    ),
    "KL from the reference": ("KL", {"kl": "estimate"}),
    "Throughput": ("tokens/s", {"tokens_per_s": "tokens/s"}),
    "Time of a step": ("s", {"step_s": "step"}),
    "MFU": ("share of the dense bf16 peak", {"mfu": "MFU"}),
    "Peak memory since the start": (
        "GiB",
        {
            "peak_gpu_gib": "GPU, allocated",
            "peak_reserved_gib": "GPU, reserved by the allocator",
            "peak_host_gib": "host (resident)",
        },
    ),
    "Gradient norm": ("norm before clipping", {"grad_norm": "gradient norm"}),
    "Learning rate": ("learning rate", {"learning_rate": "learning rate"}),
}
"""Title -> (unit, {key of metrics.jsonl: what it is}), in the order of the page."""
SIGNED = ("loss", "learning rate", "reward", "margin", "log-probability")
"""Units whose axis does not begin at 0."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="longctx report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help=f"a run's folder, or its {METRICS}")
    parser.add_argument("--output", type=Path, help="HTML file; default: report.html beside it")
    args = parser.parse_args(argv)
    path = metrics_path(args.run)
    lines = read_metrics(path)
    output = args.output or path.parent / "report.html"
    check_writable(output, path)
    write_report(lines, output, title=f"Run {path.parent.resolve().name}")
    print(printable(f"wrote {output}"))


def metrics_path(run: Path) -> Path:
    """The metrics file of a folder or file. Raises UserError that says what is missing."""
    if os.path.isdir(run):  # False for a name too long, where Path.is_dir raises
        if not os.path.isfile(run / METRICS):
            raise UserError(
                f"{run} holds no {METRICS}: give the --output_dir of a run that logged a step"
            )
        return run / METRICS
    if not os.path.isfile(run):
        raise UserError(f"no such folder or file: {run}")
    return run


def read_metrics(path: Path) -> list[Line]:
    """The logged lines in order. Half a line, as a kill or a full disk leaves, is left out and
    said. Raises UserError for a file without any logged step."""
    try:
        if (size_bytes := path.stat().st_size) > LARGEST_BYTES:
            raise UserError(f"{path} has {size_bytes >> 20} MiB, which no run logs")
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    lines: list[Line] = []
    broken: list[int] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text, parse_int=_number)
            step = line["step"]
            if not isinstance(step, int):
                raise TypeError(step)
        except (ValueError, LookupError, TypeError, RecursionError):
            broken.append(number)
            continue
        lines.append(line)
    if broken and not lines:
        raise UserError(f"{path}:{broken[0]} is no line of metrics (a JSON object with a step)")
    if broken:
        said = f"{path}: left out {len(broken)} damaged line(s), the first is {broken[0]}"
        print(printable(said))
    if not any(key in line for line in lines for key in ("loss", "eval_loss")):
        raise UserError(f"{path} holds no logged step yet")
    return lines


def _number(digits: str) -> int | float:
    """An integer; beyond 64 bits a float, infinite if need be, as no figure can show more."""
    return int(digits) if len(digits) < 20 else float(digits)


def write_report(lines: list[Line], output: Path, *, title: str) -> None:
    parts = [table(summary(lines), ["what", "value"])]
    if series(lines, "peak_host_gib") and not series(lines, "peak_gpu_gib"):
        parts.append(
            paragraph("This run had no GPU: throughput and memory are the CPU's and the host's.")
        )
    for name, (unit, keys) in PANELS.items():
        drawn = draw(lines, unit, keys)
        if drawn is not None:
            parts += [heading(name), figure(drawn, f"{name} ({unit}) by step")]
    logged = [line for line in lines if "loss" in line]
    if logged:
        parts += [heading("Logged lines"), table(logged)]
    write_page(output, title, parts)


def series(lines: list[Line], key: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has `key` as a number."""
    return [
        (line["step"], float(line[key]))
        for line in lines
        if isinstance(line.get(key), (int, float)) and not isinstance(line[key], bool)
    ]


def summary(lines: list[Line]) -> list[dict[str, Any]]:
    """What a person asks first: how the loss moved, how fast, how much memory."""
    rows: list[dict[str, Any]] = [{"what": "last step", "value": lines[-1]["step"]}]
    for key, name in (
        ("loss", "loss"),
        ("eval_loss", "evaluation loss"),
        ("eval_rewards/accuracies", "evaluation accuracy"),
        ("eval_accuracy", "evaluation accuracy"),
    ):
        values = [value for _, value in series(lines, key)]
        if values:
            rows.append({"what": name, "value": f"{values[0]:.4f} -> {values[-1]:.4f}"})
            bad = sum(not math.isfinite(value) for value in values)
            if bad:
                rows.append({"what": f"{name}: steps not finite", "value": bad})
    for key, name in (("tokens_per_s", "tokens/s"), ("step_s", "s a step"), ("mfu", "MFU")):
        values = [value for _, value in series(lines, key)]
        if values:
            rows.append({"what": f"{name} (median)", "value": statistics.median(values)})
    for key, name in PANELS["Peak memory since the start"][1].items():
        values = [value for _, value in series(lines, key)]
        if values:
            rows.append({"what": f"peak GiB, {name}", "value": max(values)})
    return rows


def draw(lines: list[Line], unit: str, keys: dict[str, str]) -> Any | None:
    """One panel, or None where the run logged none of its keys."""
    curves = {name: points for key, name in keys.items() if (points := series(lines, key))}
    if not curves:
        return None
    plt = pyplot()
    drawn, axes = plt.subplots(figsize=(9, 3))
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker="." if len(points) < 60 else None, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if unit not in SIGNED:
        axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend()
    plt.close(drawn)
    return drawn
