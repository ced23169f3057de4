"""Compares class types over sequence lengths: memory, time and tokens/s of whole training steps.

    python profiling/bench/compare.py --quick --output /tmp/quick     under a minute, no GPU needed
    python profiling/bench/compare.py --preset llama-3.1-8b --layers 4 \\
        --tokens 8192 16384 32768 65536 131072 --output profiling/results/h200_compare

    python profiling/bench/compare.py --gpus 2 --engines zero3_cpu fsdp2_offload \\
        --class_types vanilla liger:selective custom --tokens 8192 32768 \\
        --output profiling/results/h200_x2_offload

A peer is NAME, NAME:CHECKPOINTING or NAME:CHECKPOINTING:offload (peers.py), as in
`--class_types liger:none liger:selective:offload custom`; NAME alone checkpoints its layers. Peers
have flash-attn-4 where it is installed.

writes OUTPUT.json and OUTPUT.csv (a row a case), OUTPUT_memory.png, OUTPUT_time.png,
OUTPUT_speed.png and OUTPUT.html, which holds all of it with hardware, versions and command.

Every case (class type x length x engine) is a process of its own (step_bench.py measures it), so
running out of memory is a row. The files are renewed after every case; the same command, run again,
goes on where it was interrupted. What comes after `--` goes to train.py in all cases.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.errors import UserError
from longctx.system import installed
from longctx.train.options.config import ModelArguments
from longctx.train.report.page import (
    figure,
    heading,
    paragraph,
    pyplot,
    table,
    with_ending,
    write_page,
)
from profiling.bench import step_bench
from profiling.bench.peers import CHECKPOINTING
from profiling.bench.runner import ROOT, Case, Row, run_child
from profiling.pictures import COLOURS
from profiling.results import describe_run, files_named, how_measured, write_results

CLASS_TYPES = ("vanilla", "liger", "custom")
LINES = {None: "-", "layers": "-", "selective": "--", "none": ":"}
KEY = (
    *("class_type", "checkpointing", "offload", "backend", "engine", "gpus", "tokens", "layers"),
    *("preset", "steps", "flags"),
)
COLUMNS = (
    *KEY,
    *"fwd_s bwd_s opt_s step_s tokens_per_s mfu peak_gib reserved_gib".split(),
    *"peak_host_gib host_gib status".split(),
)
FULL = dict(
    preset="llama-3.1-8b",
    tokens=[8192, 32768, 131072],
    class_types=("vanilla", "liger", "liger:selective", "custom"),
    steps=3,
)
QUICK = dict(preset="tiny", tokens=[256, 512], class_types=("vanilla", "custom"), steps=1)


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells cases apart. `gpus` is 0 without a GPU; `layers` None keeps the preset's."""
    return tuple(row.get(name) for name in KEY)


def command(case: Case) -> list[str]:
    """The child's."""
    settings = {name: value for name, value in case.items() if name not in ("steps", "flags")}
    return step_bench.BENCH.command(settings, case["steps"], shlex.split(case["flags"]))


def settings(name: str, on_gpu: bool) -> dict[str, Any]:
    """What `--class_types` says of a case: custom runs as train.py runs it by default, a peer with
    its best attention and the checkpointing in its name. Raises UserError."""
    class_type, *words = name.split(":")
    _known("class type", class_type, CLASS_TYPES)
    if class_type == "custom":
        if words:
            raise UserError(f"{name}: checkpointing is for peers; custom has its schedule")
        return dict(class_type="custom", checkpointing=None, offload="auto", backend="auto")
    checkpointing, *rest = words or ["layers"]
    _known("checkpointing", checkpointing, CHECKPOINTING)
    if rest not in ([], ["offload"]):
        raise UserError(f"{name}: NAME, NAME:CHECKPOINTING or NAME:CHECKPOINTING:offload")
    return dict(
        class_type=class_type,
        checkpointing=checkpointing,
        offload="all" if rest else "none",
        backend="fa4" if on_gpu and installed("flash_attn.cute") else "auto",
    )


def _known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        close = get_close_matches(value, known, n=1, cutoff=0.0)[0]
        raise UserError(f"unknown {what} {value!r}; did you mean {close}?")


def engines() -> list[str]:
    folders = ("ds_configs", "fsdp_configs")
    return ["plain", *sorted(file.stem for d in folders for file in (ROOT / d).glob("*.json"))]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, checked before anything runs. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--class_types", nargs="+", help="default: vanilla liger liger:selective custom"
    )
    parser.add_argument("--tokens", nargs="+", type=int, help="default: 8192 32768 131072")
    parser.add_argument("--engines", nargs="+", default=["plain"], help="plain, zero3, fsdp2, ...")
    parser.add_argument("--gpus", type=int, help="processes, one a GPU; default: 1")
    parser.add_argument("--preset", help="default: llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="instead of the preset's, to fit a machine")
    parser.add_argument("--steps", type=int, help="measured a case, after one more; default: 3")
    parser.add_argument("--timeout_s", type=float, default=1200, help="for a case")
    parser.add_argument(
        "--quick", action="store_true", help="other defaults: tiny, two short lengths"
    )
    parser.add_argument(
        "--output",
        type=files_named(".json", ".csv", ".html"),
        required=True,
        help="files are called OUTPUT.json..",
    )
    parser.add_argument("--dry_run", action="store_true", help="print the cases and run nothing")
    parser.add_argument("flags", nargs="*", help="after --: more flags of train.py")
    args = parser.parse_args(argv)
    pyplot()  # missing? better known now
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for value in args.class_types:
        settings(value, on_gpu=False)
    for value in args.engines:
        _known("engine", value, engines())
    for name in ("tokens", "layers", "steps", "gpus"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise UserError(f"--{name} must be at least 1, got {value}")
    return args


def plan(args: argparse.Namespace) -> list[Case]:
    """The cases in the order of the lengths. Raises UserError for what this machine cannot run."""
    import torch

    from longctx.train.start.loading import PRESETS, check_request

    _known("preset", args.preset, list(PRESETS))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = [settings(name, device.type == "cuda") for name in args.class_types]
    for kind in kinds:
        check_request(ModelArguments(preset=args.preset, class_type=kind["class_type"]), device)
    gpus = (args.gpus or 1) if device.type == "cuda" else 0
    if gpus > torch.cuda.device_count():
        raise UserError(f"--gpus {gpus}: this machine has {torch.cuda.device_count()}")
    shared = dict(gpus=gpus, layers=args.layers, preset=args.preset, steps=args.steps)
    shared["flags"] = shlex.join(args.flags)
    return [
        {**kind, **shared, "engine": engine, "tokens": tokens}
        for tokens in sorted(set(args.tokens))
        for engine in args.engines
        for kind in kinds
    ]


# --- running ---------------------------------------------------------------------------------


def finished(path: Path, wanted: set[tuple[Any, ...]]) -> list[Row]:
    """The rows of an interrupted sweep. Raises UserError if they are another sweep's, machine's or
    code's: a results file has one command, hardware, set of versions and commit."""
    if not path.exists():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    rows = held["rows"]
    for row in rows:
        if key_of(row) not in wanted:
            raise UserError(
                f"{path} holds cases that are not of this sweep: name them too, so that the "
                "recorded command makes all rows, or choose another --output"
            )
    now = describe_run(path)
    for name in ("hardware", "versions", "commit"):
        if held.get(name) != now[name]:
            raise UserError(
                f"{path} was measured with another {name}: delete it, or choose another --output"
            )
    return rows


def sweep(args: argparse.Namespace, cases: list[Case]) -> Iterator[list[Row]]:
    """Runs what is not finished yet; yields all rows of the plan so far after every case."""
    path = with_ending(args.output, ".json")
    rows = finished(path, set(map(key_of, cases)))
    done = set(map(key_of, rows))
    if done:
        print(f"{len(done)} of {len(cases)} cases are in {path} already", flush=True)
    yield rows
    for number, case in enumerate(cases, 1):
        if key_of(case) in done:
            continue
        print(f"[{number}/{len(cases)}] {named(case)}")
        measured = run_child(command(case), args.timeout_s)
        if measured:
            rows = [*rows, {**measured[0], **case}]
            write_results(path, rows)
            yield rows


# --- what is written -------------------------------------------------------------------------


def publish(output: Path, rows: list[Row]) -> None:
    """CSV, plots and page of the rows in OUTPUT.json."""
    description = json.loads(with_ending(output, ".json").read_text(encoding="utf-8"))
    rows = sorted(rows, key=lambda r: (r["engine"], label(r), r["tokens"]))
    columns = [name for name in COLUMNS if any(row.get(name) not in (None, "") for row in rows)]
    temporary = with_ending(output, ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, with_ending(output, ".csv"))
    plots = draw(rows)
    for name, (fig, _) in plots.items():
        fig.savefig(with_ending(output, f"_{name}.png"), dpi=110, bbox_inches="tight")
    versions = [{"package": k, "version": v} for k, v in description["versions"].items() if v]
    write_page(
        with_ending(output, ".html"),
        "Class types over sequence lengths",
        [
            paragraph(describe_cases(rows)),
            *(figure(fig, f"{of} against tokens in a row.") for fig, of in plots.values()),
            heading("All cases"),
            table(rows, columns),
            *how_measured(description),
            table(versions, ["package", "version"]),
        ],
    )


def describe_cases(rows: list[Row]) -> str:
    """What ran, in a sentence or two for the page."""
    row = rows[0]
    layers = f"{row['layers']} of its layers" if row["layers"] else "all of its layers"
    own_data = "--train_file" in row["flags"] or "--dataset_name" in row["flags"]
    text = (
        f"Whole training steps (forward, backward, optimizer) of {row['preset']}, {layers}, random "
        f"weights; {'rows of given data' if own_data else 'a row is a document of random tokens'}. "
        "Attention is flash-attn-4 where it is installed. "
    )
    if not on_gpu(rows):
        text += "Measured on a CPU, without a GPU: times are the CPU's, memory is the host's. "
    return text + (f"Flags of train.py: {row['flags']}." if row["flags"] else "")


def label(row: Row) -> str:
    """A row's class type, with what its peer keeps: `liger, selective, offloaded`."""
    words = [row["class_type"]]
    if row.get("checkpointing") is not None:
        words.append(row["checkpointing"])
        words += ["offloaded"] if row["offload"] != "none" else []
    return ", ".join(words)


def named(case: Case) -> str:
    return f"{label(case)}, {case['engine']}, {case['tokens']:,} tokens"


def on_gpu(rows: list[Row]) -> bool:
    return any(row["gpus"] for row in rows)


def draw(rows: list[Row]) -> dict[str, tuple[Any, str]]:
    """Name -> (figure, what it shows). Cases that ran out of memory are crosses above it."""
    memory = (
        ("peak_gib", "Peak GPU memory") if on_gpu(rows) else ("peak_host_gib", "Peak host memory")
    )
    machine = "" if on_gpu(rows) else " (CPU)"
    capacity = max((row.get("capacity_gib") or 0 for row in rows), default=0)
    return {
        "memory": (_plot(rows, memory[0], f"{memory[1]} (GiB)", capacity_gib=capacity), memory[1]),
        "time": (_plot(rows, "step_s", f"s a step{machine}", log=True), "Time of a training step"),
        "speed": (_plot(rows, "tokens_per_s", f"tokens/s{machine}"), "Tokens per second"),
    }


def _plot(rows: list[Row], key: str, unit: str, log: bool = False, capacity_gib: float = 0) -> Any:
    plt = pyplot()
    from matplotlib.ticker import LogLocator

    fig, axes = plt.subplots(figsize=(8, 4.5))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    lines = list(dict.fromkeys((label(row), row["engine"]) for row in rows))
    for number, (name, engine) in enumerate(lines):
        of_line = [r for r in rows if (label(r), r["engine"]) == (name, engine)]
        first = of_line[0]
        title = f"{name}, {engine}" if len(engines) > 1 else name
        colour = COLOURS[first["class_type"]]
        fits = [r for r in of_line if r["status"] == "ok"]
        if fits:
            axes.plot(
                [r["tokens"] for r in fits],
                [r[key] for r in fits],
                marker="osD^v"[engines.index(engine) % 5],
                linestyle=LINES[first.get("checkpointing")],
                color=colour,
                label=title,
            )
        failed = [r["tokens"] for r in of_line if r["status"] == "oom"]
        if failed:
            axes.plot(
                failed,
                [1.02 + 0.02 * number] * len(failed),  # above the axes: no value
                "x",
                color=colour,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
                label=f"{title}: out of memory",
            )
    axes.set_xscale("log", base=2)
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in ticks])
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    if capacity_gib:
        axes.axhline(capacity_gib, color="#c00", linewidth=1, ls="--", label="the GPU's memory")
        axes.set_ylim(top=1.15 * capacity_gib)
    axes.minorticks_off()
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel(unit)
    axes.legend()
    plt.close(fig)
    return fig


def main() -> None:
    try:
        args = parse()
        cases = plan(args)
        if args.dry_run:
            for case in cases:
                print(f"{named(case)}: {shlex.join(command(case))}")
            return
        rows: list[Row] = []
        for rows in sweep(args, cases):
            if rows:
                publish(args.output, rows)
    except UserError as error:
        sys.exit(f"error: {error}")
    missing = len(cases) - len(rows)
    print(f"wrote {args.output}.html, .json, .csv and _memory, _time, _speed .png")
    if missing > 0:
        sys.exit(f"error: {missing} of {len(cases)} cases failed; run the command again for them")


if __name__ == "__main__":
    main()
