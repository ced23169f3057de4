"""Where a step's time goes, from a profiler's trace: seconds and share of each phase.

    python profiling/phases.py runs/profile/trace_rank0.json.gz

Every moment of the profiled steps is given to one line of the table:

    attention, projections, mlp, norm, ...   a kernel of that phase computes
    communication not hidden                 only NCCL kernels run
    copies not hidden                        only copies between host and GPU run
    idle                                     nothing runs on the GPU

A kernel belongs to the innermost named range (`kernels/annotate.py`) that was open on the thread
that launched it. A kernel of autograd's own backward has none: there the range of the forward
operator counts, to which the profiler links it. Failing both, the operator's name decides.

In a trace without a GPU the innermost CPU operators stand for the kernels, and idle is the time
between them (Python and dispatch).
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PHASES = "attention projections mixer mlp norm rope loss embedding optimizer".split()
OTHER = "other"
COMMUNICATION = "communication not hidden"
COPIES = "copies not hidden"
IDLE = "idle"
LINES = [*PHASES, OTHER, COMMUNICATION, COPIES, IDLE]

_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}

# Operators outside every range, most telling first. The rest is "other".
_OPERATORS = [
    (re.compile(r"CrossEntropy|nll_loss|log_softmax"), "loss"),
    (re.compile(r"scaled_dot_product|flash_attn|FlashAttn"), "attention"),
    (re.compile(r"RMSNorm|rms_norm"), "norm"),
    (re.compile(r"Rope|rotary"), "rope"),
    (re.compile(r"SiLUMul|SwiGLU"), "mlp"),
    (re.compile(r"aten::embedding|EmbeddingBackward"), "embedding"),
    (re.compile(r"Optimizer\.|aten::_foreach_|aten::_fused_adam"), "optimizer"),
]


class Item(NamedTuple):
    """Something that ran on the device, in microseconds of the trace's clock."""

    start: float
    end: float
    phase: str


class Range(NamedTuple):
    """A named stretch of one thread."""

    start: float
    end: float
    phase: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Seconds a step by line; the shares of all lines add up to 1."""

    steps: int
    step_s: float
    seconds: dict[str, float]
    copies_s: float
    """Of a step, copies between host and GPU in all, hidden ones included."""
    on_gpu: bool

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"phase": line, "s_per_step": self.seconds[line], "share": share}
            for line in LINES
            if (share := self.seconds.get(line, 0.0) / self.step_s) > 0
        ]


def read_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace, gzipped or not. Exits with one line if it is none."""
    try:
        open_ = gzip.open if path.suffix == ".gz" else open
        with open_(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        trace["traceEvents"]
    except OSError as error:
        sys.exit(f"error: cannot read {path}: {error.strerror or error}")
    except (ValueError, KeyError, TypeError):
        sys.exit(f"error: {path} is no trace of torch.profiler")
    return trace


def phase_table(trace: dict[str, Any]) -> Table:
    """The table of a trace's profiled steps. Raises ValueError if it has no `ProfilerStep`."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    steps = [e for e in events if _cat(e) == "user_annotation"]
    steps = [e for e in steps if e["name"].startswith("ProfilerStep#")]
    if not steps:
        raise ValueError("the trace has no ProfilerStep: it was not recorded over steps")
    window = (min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps))
    ranges = _named_ranges(events, trace["traceEvents"])
    on_gpu = any(_cat(e) in _GPU for e in events)
    kinds = _gpu_items(events, ranges) if on_gpu else {"compute": _cpu_items(events, ranges)}

    free = [window]
    seconds: Counter[str] = Counter()
    for kind in ("compute", "communication", "copy"):
        assigned, free = assign_time(kinds.get(kind, []), free)
        seconds.update(assigned)
    seconds[IDLE] = sum(stop - start for start, stop in free)
    copies, _ = assign_time(kinds.get("copy", []), [window])
    scale = 1e-6 / len(steps)
    return Table(
        steps=len(steps),
        step_s=(window[1] - window[0]) * scale,
        seconds={name: value * scale for name, value in seconds.items()},
        copies_s=sum(copies.values()) * scale,
        on_gpu=on_gpu,
    )


def assign_time(
    items: Iterable[Item], free: list[tuple[float, float]]
) -> tuple[Counter[str], list[tuple[float, float]]]:
    """Gives each moment of `free` (sorted, disjoint) to the item that runs then, the earliest one
    where several do; returns the sums by phase and what is still free."""
    assigned: Counter[str] = Counter()
    left: list[tuple[float, float]] = []
    gaps = iter(free)
    start, stop = next(gaps, (0.0, 0.0))
    for item in sorted(items):
        while start < stop and item.end > start:
            if item.start >= stop:
                left.append((start, stop))
                start, stop = next(gaps, (0.0, 0.0))
                continue
            if item.start > start:
                left.append((start, item.start))
                start = item.start
            until = min(item.end, stop)
            assigned[item.phase] += until - start
            start = until
            if start >= stop:
                start, stop = next(gaps, (0.0, 0.0))
    if start < stop:
        left.append((start, stop))
    return assigned, [*left, *gaps]


# --- which phase -----------------------------------------------------------------------------


def _cat(event: dict[str, Any]) -> str:
    return str(event.get("cat", ""))


def _named_ranges(
    events: list[dict[str, Any]], all_events: list[dict[str, Any]]
) -> dict[Any, list[Range]]:
    """Ranges with a phase by thread: annotations, operators with a telling name, and the backward
    operators whose forward operator ran inside such a range."""
    ranges: dict[Any, list[Range]] = defaultdict(list)
    backward: dict[tuple[Any, float], dict[str, Any]] = {}
    for event in events:
        if _cat(event) == "user_annotation":
            phase = event["name"] if event["name"] in PHASES else _by_name(event["name"])
        elif _cat(event) == "cpu_op":
            phase = _by_name(event["name"])
            backward[event["tid"], event["ts"]] = event
        else:
            continue
        if phase:
            ranges[event["tid"]].append(_range(event, phase))
    forward = {e["id"]: e for e in all_events if e.get("cat") == "fwdbwd" and e.get("ph") == "s"}
    links = [e for e in all_events if e.get("cat") == "fwdbwd" and e.get("ph") == "f"]
    origins = [forward[e["id"]] for e in links if e["id"] in forward]
    phases = _innermost([(e["tid"], e["ts"]) for e in origins], ranges)
    by_id = {e["id"]: phase for e, phase in zip(origins, phases, strict=True)}
    for link in links:
        phase, event = by_id.get(link["id"]), backward.get((link["tid"], link["ts"]))
        if phase and event:
            ranges[link["tid"]].append(_range(event, phase))
    return ranges


def _range(event: dict[str, Any], phase: str) -> Range:
    return Range(event["ts"], event["ts"] + event["dur"], phase)


def _by_name(name: str) -> str | None:
    return next((phase for pattern, phase in _OPERATORS if pattern.search(name)), None)


def _innermost(points: list[tuple[Any, float]], ranges: dict[Any, list[Range]]) -> list[str | None]:
    """For each (thread, time), the phase of the innermost range around it."""
    found: list[str | None] = [None] * len(points)
    by_thread: dict[Any, list[int]] = defaultdict(list)
    for i, (thread, _) in enumerate(points):
        by_thread[thread].append(i)
    for thread, indices in by_thread.items():
        opened = sorted(ranges.get(thread, []), key=lambda r: (r.start, -r.end))
        stack: list[Range] = []
        at = 0
        for i in sorted(indices, key=lambda i: points[i][1]):
            time = points[i][1]
            while at < len(opened) and opened[at].start <= time:
                while stack and stack[-1].end <= opened[at].start:
                    stack.pop()
                stack.append(opened[at])
                at += 1
            while stack and stack[-1].end < time:
                stack.pop()
            found[i] = stack[-1].phase if stack else None
    return found


# --- what ran --------------------------------------------------------------------------------


def _gpu_items(
    events: list[dict[str, Any]], ranges: dict[Any, list[Range]]
) -> dict[str, list[Item]]:
    """Kernels, copies and communication of the GPU, with the phase of their launch."""
    launches = {
        e["args"]["correlation"]: (e["tid"], e["ts"])
        for e in events
        if _cat(e) in _LAUNCHES and "correlation" in e.get("args", {})
    }
    ran = [e for e in events if _cat(e) in _GPU]
    points = [launches.get(e.get("args", {}).get("correlation"), (None, 0.0)) for e in ran]
    kinds: dict[str, list[Item]] = defaultdict(list)
    for event, phase in zip(ran, _innermost(points, ranges), strict=True):
        kind, phase = _kind(event, phase or _by_name(event["name"]) or OTHER)
        kinds[kind].append(Item(event["ts"], event["ts"] + event["dur"], phase))
    return kinds


def _kind(event: dict[str, Any], phase: str) -> tuple[str, str]:
    if event["name"].startswith("nccl"):
        return "communication", COMMUNICATION
    if _cat(event) == "gpu_memcpy" and ("HtoD" in event["name"] or "DtoH" in event["name"]):
        return "copy", COPIES
    return "compute", phase


def _cpu_items(events: list[dict[str, Any]], ranges: dict[Any, list[Range]]) -> list[Item]:
    """Operators that call no other operator."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if _cat(event) == "cpu_op":
            threads[event["tid"]].append(event)
    leaves = []
    for operators in threads.values():
        operators.sort(key=lambda e: (e["ts"], -e["dur"]))
        starts = [e["ts"] for e in operators]
        for i, event in enumerate(operators):
            last = bisect_right(starts, event["ts"] + event["dur"]) - 1
            if last <= i:
                leaves.append(event)
    phases = _innermost([(e["tid"], e["ts"]) for e in leaves], ranges)
    return [
        Item(e["ts"], e["ts"] + e["dur"], phase or _by_name(e["name"]) or OTHER)
        for e, phase in zip(leaves, phases, strict=True)
    ]


# --- printed ---------------------------------------------------------------------------------


def show(table: Table) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table as RichTable

    where = "GPU" if table.on_gpu else "CPU operators: no GPU in this trace"
    title = f"{table.step_s:.3f} s a step, mean of {table.steps} ({where})"
    printed = RichTable("phase", title=title)
    printed.add_column("s a step", justify="right")
    printed.add_column("share", justify="right")
    for row in table.rows():
        printed.add_row(row["phase"], f"{row['s_per_step']:.4f}", f"{row['share']:.1%}")
    Console().print(printed)
    if table.copies_s:
        print(f"copies between host and GPU: {table.copies_s:.3f} s a step in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("trace", type=Path, help="trace_rank0.json.gz of profile_step.py")
    args = parser.parse_args()
    try:
        show(phase_table(read_trace(args.trace)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
