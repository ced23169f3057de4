"""Time against memory: what custom and its peers make of any amount of GPU memory.

    python profiling/front.py --output profiling/results/h200_front

measures forward and backward of whole models, loss and gradients of all weights included, on four
kinds of rows. A peer (Hugging Face's layers with Liger-Kernel, flash-attn-4 by documents; peers.py)
is a point: what its settings need, and how long they take. custom is a line: it is given each
budget of `--budgets`, enforced in torch's allocator, and keeps what is fastest in it. Of a budget
weights and gradients are part, an optimizer is not.

writes OUTPUT.json, a row a measurement, and OUTPUT.png. In a row `budget_gib` is what custom might
use, `peak_gib` what was in use at most, `s` the median of `--repeats` (of fewer where they take
more than ENOUGH_S) after one more. `behind` in the file lists custom's rows beside a peer that is
faster in no more memory than custom's budget.

custom and its peers have processes of their own for each model (Liger-Kernel patches transformers
for a whole process); on a machine of several GPUs that many run side by side, one a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.constants import GIB
from longctx.memory.pending import Pending
from longctx.train.report.page import pyplot, with_ending
from profiling.bench.peers import CHECKPOINTING
from profiling.bench.trl_bench import PackedRows
from profiling.build import VOCABULARY, build_model
from profiling.ladders import ladder_columns
from profiling.pictures import CUSTOM, legend_below
from profiling.results import files_named, write_results

ENOUGH_S = 5.0
SIDES = ("peers", "custom")
Row = dict[str, Any]
Batch = dict[str, Tensor]
MODELS: dict[str, tuple[str, int | None]] = {
    "Llama-3.2-1B": ("llama-3.2-1b", None),
    "4 layers of Llama-3.1-8B": ("llama-3.1-8b", 4),
}
"""Preset, and how many of its layers."""
CUSTOM_CASE = dict(class_type="custom", backend="fa4")
PEERS = [
    dict(class_type="liger", checkpointing=checkpointing, offload=offload, backend="fa4")
    for checkpointing in CHECKPOINTING
    for offload in ("none", "all")
    if (checkpointing, offload) != ("none", "all")  # several times the bytes of any other
]
COLOURS = {"none": "#c44e52", "layers": "#dd8452", "selective": "#937860"}
"""Of peers, by their checkpointing."""


PACKED = "32768 tokens, packed documents"
KINDS = {"8192 tokens": 8192, PACKED: 32768, "32768 tokens": 32768, "131072 tokens": 131072}
"""Tokens of a row of each kind."""


def batches() -> dict[str, Batch]:
    """Of each kind a row, on the CPU."""

    def one(tokens: int) -> Batch:
        ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
        return dict(input_ids=ids, labels=ids, position_ids=torch.arange(tokens)[None])

    packed = PackedRows(1, KINDS[PACKED], VOCABULARY)[0]
    whole = {kind: one(tokens) for kind, tokens in KINDS.items()}
    return whole | {PACKED: {name: x[None] for name, x in packed.items()}}


# --- measuring -------------------------------------------------------------------------------


def build(preset: str, layers: int | None, peer: Row | None, tokens: int) -> Any:
    case = {"preset": preset, "layers": layers, "tokens": tokens, **(peer or CUSTOM_CASE)}
    torch.manual_seed(0)
    model = build_model(case, device=torch.device("cuda"))
    if peer is None:
        model.longctx.surround(strict=True)
    return model


def measure(model: Any, batch: Batch, repeats: int) -> Row:
    """Seconds and GiB of forward and backward; gradients are made anew each time."""
    seconds = []
    try:
        for repeat in range(repeats + 1):
            model.zero_grad(set_to_none=True)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            model(**batch, use_cache=False).loss.backward()
            stop.record()
            stop.synchronize()
            if repeat:
                seconds.append(start.elapsed_time(stop) / 1e3)
            else:
                torch.cuda.reset_peak_memory_stats()
            if sum(seconds) > ENOUGH_S:
                break
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    finally:
        model.zero_grad(set_to_none=True)
    s = statistics.median(seconds)
    return {
        "s": round(s, 4),
        "tokens_per_s": round(batch["input_ids"].numel() / s, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "status": "ok",
    }


def spend(model: Any, tokens: int, budget_bytes: int) -> Row:
    """Gives custom so much of the GPU, in all; returns what it makes of it (ladders.py)."""
    device, runtime = model.device, model.longctx
    capacity = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / capacity), device)
    runtime.surround(pending_bytes=_gradients)
    runtime.forget()
    runtime.reserve(model, tokens)
    return ladder_columns(runtime.store.ladder, runtime.adopted.cut)


def _gradients(model: Any) -> Pending:
    return Pending(gradients=sum(p.nbytes for p in model.parameters()))


def peer_row(peer: Row, source: tuple[str, int | None], batch: Batch, repeats: int) -> Row:
    try:
        model = build(*source, peer, batch["input_ids"].numel())
    except torch.OutOfMemoryError:
        return {**peer, "status": "oom"}
    return {**peer, **measure(model, batch, repeats)}


def custom_rows(
    budgets: Sequence[float], source: tuple[str, int | None], batch: Batch, repeats: int
) -> Iterator[Row]:
    tokens = batch["input_ids"].numel()
    model = build(*source, None, tokens)
    for budget in budgets:
        row = {**CUSTOM_CASE, "budget_gib": budget}
        ladder = spend(model, tokens, int(budget * GIB))
        yield {**row, **ladder, **measure(model, batch, repeats)}
        torch.cuda.empty_cache()


@contextmanager
def alone() -> Iterator[None]:
    """With all of the GPU, and nothing of it left behind."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure_side(name: str, side: str, args: argparse.Namespace) -> Iterator[Row]:
    """What one process measures."""
    for kind, batch in batches().items():
        if kind not in args.rows:
            continue
        batch = {name: x.cuda() for name, x in batch.items()}
        rows = {"model": name, "rows": kind}
        with alone():
            if side == "custom":
                for row in custom_rows(args.budgets, MODELS[name], batch, args.repeats):
                    yield {**rows, **row}
                continue
        for peer in PEERS:
            with alone():
                yield {**rows, **peer_row(peer, MODELS[name], batch, args.repeats)}


def run(args: argparse.Namespace) -> list[Row]:
    """All rows, written as they come; each child prints its own as lines of JSON."""
    rows: list[Row] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in names:
        free.put(gpu)
    one_at_a_time = Lock()

    def child(name: str, side: str) -> int:
        gpu = free.get()
        command = [sys.executable, *sys.argv, "--child", name, side]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                if not line.startswith("{"):
                    continue
                with one_at_a_time:
                    rows.append(json.loads(line))
                    found = {"behind": behind(rows)}
                    write_results(with_ending(args.output, ".json"), rows, extra=found)
        free.put(gpu)
        return process.returncode

    with ThreadPoolExecutor(free.qsize()) as pool:
        jobs = [pool.submit(child, name, side) for name in args.models for side in SIDES]
    if any(job.result() for job in jobs):
        sys.exit("error: a part of the front failed (above); what is there is written")
    return rows


# --- reading ---------------------------------------------------------------------------------


def behind(rows: Sequence[Row]) -> list[str]:
    """Where a peer is faster in no more memory than custom's budget."""
    found = []
    for ours in rows:
        if ours["class_type"] != "custom":
            continue
        for peer in rows:
            same = all(peer[key] == ours[key] for key in ("model", "rows"))
            if not same or peer["class_type"] == "custom" or peer["status"] != "ok":
                continue
            if peer["peak_gib"] <= ours["budget_gib"] and peer["s"] < ours.get("s", math.inf):
                found.append(
                    f"{ours['model']}, {ours['rows']}, {ours['budget_gib']} GiB: "
                    f"{label(peer)} {peer['s']} s in {peer['peak_gib']} GiB, "
                    f"custom {ours.get('s', 'out of memory')}"
                )
    return found


def label(row: Row) -> str:
    if row["class_type"] == "custom":
        return "custom"
    checkpointing = {"none": "no checkpointing", "layers": "checkpointing"}
    words = ["Liger, flash-attn-4", checkpointing.get(row["checkpointing"], "selective")]
    return ", ".join([*words, *(["offloaded"] if row["offload"] != "none" else [])])


ALONE = "custom, in less than any of the others needs"


def alone_in(ours: Row, rows: Sequence[Row]) -> bool:
    """Whether no peer, of which `rows` are those that ran, fits into custom's budget."""
    return all(row["peak_gib"] > ours["budget_gib"] for row in rows if "budget_gib" not in row)


def draw(rows: Sequence[Row]) -> Any:
    """A panel for each model and kind of row: tokens/s against the GPU memory that is in use."""
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    kinds = list(dict.fromkeys(row["rows"] for row in rows))
    size = (4 * len(kinds), 3.4 * len(models))
    fig, panels = plt.subplots(len(models), len(kinds), figsize=size, squeeze=False)
    for i, model in enumerate(models):
        for j, kind in enumerate(kinds):
            axes = panels[i][j]
            shown = [
                row
                for row in rows
                if (row["model"], row["rows"], row["status"]) == (model, kind, "ok")
            ]
            for row in shown:
                if row["class_type"] != "custom":
                    colour = COLOURS[row["checkpointing"]]
                    face = colour if row["offload"] == "none" else "white"
                    at = (row["peak_gib"], row["tokens_per_s"])
                    axes.plot(*at, "s", color=colour, markerfacecolor=face, label=label(row))
            ours = sorted(
                (row for row in shown if "budget_gib" in row), key=lambda row: row["budget_gib"]
            )
            if ours:
                line = [(row["peak_gib"], row["tokens_per_s"]) for row in ours]
                axes.plot(*zip(*line, strict=True), "o-", color=CUSTOM, label="custom")
            for row in ours:
                if alone_in(row, shown):
                    at = (row["peak_gib"], row["tokens_per_s"])
                    style = dict(color=CUSTOM, markersize=13, label=ALONE)
                    axes.plot(*at, "*", **style)
            axes.set_xscale("log", base=2)
            axes.set_xlim(4, 160)
            axes.set_xticks([4, 8, 16, 32, 64, 128])
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_ylim(0, 1.12 * max((row["tokens_per_s"] for row in shown), default=1.0))
            axes.set_title(f"{model}\n{kind}", fontsize=9)
            axes.set_xlabel("peak GPU memory (GiB)")
            axes.set_ylabel("tokens/s" if j == 0 else "")
    legend_below(fig, columns=3)
    plt.close(fig)
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--output",
        type=files_named(".json", ".png"),
        required=True,
        help="files are OUTPUT.json, .png",
    )
    parser.add_argument("--budgets", type=float, nargs="+", default=[8, 12, 24, 40, 80, 138])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: the front is of GPU memory: this machine has no GPU")
    if args.child:
        for row in measure_side(*args.child, args):
            print(json.dumps(row), flush=True)
        return
    rows = run(args)
    draw(rows).savefig(with_ending(args.output, ".png"), dpi=110, bbox_inches="tight")
    for text in behind(rows) or ["nowhere is a peer faster in the same memory"]:
        print(text)


if __name__ == "__main__":
    main()
