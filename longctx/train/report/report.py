"""One run or several as one HTML page: what ran, its loss, throughput and memory.

    longctx report runs/books                        writes runs/books/report.html
    longctx report runs/books runs/plays             writes report.html: both on one page
    longctx report metrics.jsonl --output page.html

The page shows what `metrics.jsonl` and `run.json` hold and nothing else: a run without a GPU has no
GPU memory, no MFU and says so.
"""

from __future__ import annotations

import math
import shlex
import statistics
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longctx.errors import many, printable, shortened
from longctx.train.output import METRICS
from longctx.train.output.record import LOSSES, counts_of, hardware
from longctx.train.program import Parser
from longctx.train.report.page import (
    code,
    details,
    facts,
    figure,
    figures,
    heading,
    paragraph,
    table,
    write_page,
)
from longctx.train.report.panels import PANELS, draw_all
from longctx.train.report.runs import LoggedRun, loss_change, metrics_path, read_runs
from longctx.train.safety.writing import check_writable

MOST_LINES = 2000
"""Most lines of a run on the page: a browser is slow with more."""
NOT_COMPARED = (
    "output_dir cache_dir run_name report_to resume_from_checkpoint overwrite_output_dir"
).split()
NO_GPU = (
    "No GPU: throughput and memory are the CPU's and the host's. They say nothing of a GPU, where "
    "other parts of a step are the slow ones. There is no MFU, for a CPU's peak is not known."
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="longctx report",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help=f"folders of runs, or the {METRICS} in them"
    )
    parser.add_argument(
        "--output", type=Path, help="HTML file; default: report.html, of one run in its folder"
    )
    args = parser.parse_args(argv)
    files = [metrics_path(path) for path in args.run]
    output = args.output or (files[0].parent if len(files) == 1 else Path()) / "report.html"
    runs = read_runs(args.run)
    check_writable(output, *files)
    write_report(runs, output)
    print(printable(f"wrote {output}"))


def write_report(runs: Sequence[LoggedRun], output: Path) -> None:
    """Raises UserError."""
    alone = len(runs) == 1
    title = f"Run {runs[0].name}" if alone else many(len(runs), "run")
    parts: list[str] = []
    if alone:
        parts += [facts(described(runs[0])), *started(runs[0]), facts(summary(runs[0]))]
    else:
        parts += [table(compared(runs)), *_different(runs)]
    without = [
        run for run in runs if run.series("peak_host_gib") and not run.series("peak_gpu_gib")
    ]
    if without:
        which = "" if alone else f"{', '.join(run.name for run in without)}: "
        parts.append(paragraph(which + NO_GPU))
    parts.append(figures(figure(drawn, caption) for drawn, caption in draw_all(runs)))
    if not alone:
        for run in runs:
            parts += [heading(f"Run {run.name}"), facts(described(run)), *started(run)]
    for run in runs:
        parts += _lines(run, "Logged lines" if alone else f"Logged lines of {run.name}")
    write_page(output, title, parts)


def described(run: LoggedRun) -> list[tuple[str, Any]]:
    """Says what ran, where and when, as far as the run's files tell."""
    found: list[tuple[str, Any]] = [("model", _model(run)), ("task", run.get("task"))]
    found += [("data", _data(run, "train")), ("evaluation data", _data(run, "eval"))]
    length = run.options.get("seq_len")
    found.append(("row length", f"{length:,} tokens" if isinstance(length, int) else length))
    found.append(("tokens", None if run.tokens is None else f"{run.tokens:,}, padding included"))
    machine, libraries = run.get("starts", -1, "machine"), run.get("starts", -1, "versions")
    if isinstance(machine, dict):
        found.append(("machine", hardware(machine)))
    if isinstance(libraries, dict):
        found.append(("versions", ", ".join(f"{name} {x}" for name, x in libraries.items())))
    return [(name, shortened(str(value))) for name, value in found if value]


def _model(run: LoggedRun) -> str | None:
    name = run.get("model", "name") or run.get("model", "preset")
    if not name:
        return None
    said = [f"{name} ({run.get('model', 'class')})"]
    whole, trained = (run.get("model", key) for key in ("parameters", "trained_parameters"))
    if isinstance(whole, int) and isinstance(trained, int):
        said.append(f"{whole:,} parameters" + f", {trained:,} trained" * (trained != whole))
    said += [str(x) for x in (run.get("model", "dtype"), run.options.get("class_type")) if x]
    rank, packed = run.options.get("lora_r"), run.get("model", "packed")
    if packed is None and run.options.get("quantize", "none") != "none":
        packed = run.options["quantize"]  # of version 0.1
    kind = "DoRA" if run.options.get("use_dora") else "LoRA"
    said += [f"{kind} of rank {rank}"] if rank else []
    said += [f"over {packed}"] if packed else []
    return ", ".join(said)


def _data(run: LoggedRun, part: str) -> str | None:
    files, dataset = run.get("data", part, "files"), run.get("data", part, "dataset")
    counts = run.get("data", part, "counts")
    said = [dataset] if dataset else files if isinstance(files, list) else []
    if isinstance(counts, dict) and all(type(count) is int for count in counts.values()):
        said = [*said, *counts_of(counts)]
    return ", ".join(map(str, said)) or None


def started(run: LoggedRun) -> list[str]:
    """Returns the commands that started and resumed the run, each with its date."""
    starts = run.get("starts")
    parts: list[str] = []
    for start in starts if isinstance(starts, list) else []:
        if isinstance(start, dict) and start.get("command"):
            step = f", after step {start['step']}" if start.get("step") else ""
            date = str(start.get("date"))[:16].replace("T", " ")
            parts += [paragraph(f"Started {date} UTC{step}:"), code(_command(start["command"]))]
    return parts


def _command(text: Any) -> str:
    """Returns a command with an option a line, as a shell takes it."""
    try:
        words = shlex.split(str(text))
    except ValueError:
        return str(text)
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(group) for group in groups)


def summary(run: LoggedRun) -> list[tuple[str, Any]]:
    """Answers what a person asks first: how the loss moved, how fast, how much memory."""
    rows: list[tuple[str, Any]] = [("last step", run.lines[-1]["step"])]
    for key, name in LOSSES.items():
        if values := run.values(key):
            rows.append((name, loss_change(values)))
            if bad := sum(not math.isfinite(value) for value in values):
                rows.append((f"{name}: steps not finite", bad))
    for key, name in (("tokens_per_s", "tokens/s"), ("step_s", "s a step"), ("mfu", "MFU")):
        if values := run.values(key):
            rows.append((f"{name} (median)", statistics.median(values)))
    for key, name in PANELS["Peak memory since the start"][1].items():
        if values := run.values(key):
            rows.append((f"peak GiB, {name}", max(values)))
    return rows


def compared(runs: Sequence[LoggedRun]) -> list[dict[str, Any]]:
    """Returns a line a run: where its loss ended, how fast it was, what it took."""
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run": run.name, "steps": run.lines[-1]["step"]}
        row["tokens"] = run.tokens
        for end, key, at in (("first", "loss", 0), ("last", "loss", -1), ("eval", "eval_loss", -1)):
            if values := run.values(key):
                row[f"{end} loss"] = f"{values[at]:.4f}"
        for key, name in (("tokens_per_s", "tokens/s"), ("step_s", "s a step"), ("mfu", "MFU")):
            if values := run.values(key):
                row[name] = statistics.median(values)
        for key, name in (("peak_gpu_gib", "GPU GiB"), ("peak_host_gib", "host GiB")):
            if values := run.values(key):
                row[name] = max(values)
        rows.append(row)
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _different(runs: Sequence[LoggedRun]) -> list[str]:
    """Returns the options in which the runs differ. An option that a run does not name has its
    default; of an earlier version's run it is not known."""
    names = dict.fromkeys(name for run in runs for name in run.options if name not in NOT_COMPARED)
    rows = []
    for name in names:
        known = [run.options.get(name) for run in runs if run.record or name in run.options]
        if any(value != known[0] for value in known):
            row = {run.name: _shown(run, name) for run in runs}
            rows.append({"option": name, **row})
    if not rows:
        return [paragraph("No recorded option differs.")]
    empty = paragraph("An empty cell: the default, or not recorded.")
    columns = ["option", *(run.name for run in runs)]
    return [heading("Options that differ"), table(rows, columns), empty]


def _shown(run: LoggedRun, name: str) -> str | None:
    value = run.options.get(name)
    words = map(str, value) if isinstance(value, list) else [str(value)]
    return None if value is None else shortened(", ".join(words), 120)


def _lines(run: LoggedRun, title: str) -> list[str]:
    logged = [line for line in run.lines if "loss" in line]
    if not logged:
        return []
    left_out = len(logged) - MOST_LINES
    said = [paragraph(f"The first {left_out:,} are in {METRICS} only.")] if left_out > 0 else []
    return [details(title, [*said, table(logged[-MOST_LINES:])])]
