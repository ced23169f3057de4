"""Draws GPU memory over a training step, or over all that comes before it, too, coloured by what it
is for; two class types side by side.

    python profiling/memory_timeline.py runs/profile/memory_rank0.json.gz --output step
    python profiling/memory_timeline.py custom.json.gz vanilla.json.gz --output compared

writes step.png and step.html. The files come from profile_step.py (`record` below makes them from
torch's memory snapshot). Memory is allocated by the host, ahead of the GPU's work: the time axis is
the host's, so a picture is sharpest from a run with CUDA_LAUNCH_BLOCKING=1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.constants import GIB
from longctx.errors import UserError
from longctx.train.report.page import (
    code,
    figure,
    heading,
    paragraph,
    pyplot,
    table,
    with_ending,
    write_page,
)
from longctx.train.safety.writing import MARK
from profiling.memory_categories import CATEGORIES, Marks, categorise
from profiling.results import files_named

POINTS = 600
"""Bins of the time axis. Each keeps its moment of most memory, so no peak is lost."""
COLOURS = dict(
    zip(
        CATEGORIES,
        ["#4c72b0", "#8172b3", "#dd8452", "#55a868", "#937860", "#c44e52", "#b0b0b0"],
        strict=True,
    )
)


def record(
    snapshot: dict[str, Any], marks: Marks, description: dict[str, Any], device: int = 0
) -> dict[str, Any]:
    """What the pictures need of a snapshot (`torch.cuda.memory._snapshot()`): GiB by category and
    reserved GiB at up to POINTS moments of the step, and the categories at the peak.

    `description` says what ran (`class_type`, `tokens`, ...) and is kept as it is.
    """
    changes = categorise(snapshot, marks, device)
    first = min([changes[0].time_us, *(time_us for _, time_us in marks.phases)])
    span = max(1, changes[-1].time_us - first)
    live = dict.fromkeys(CATEGORIES, 0)
    reserved = total = 0
    # Bin -> (bytes in all, seconds, reserved bytes, bytes by category) of its largest moment.
    bins: dict[int, tuple[int, float, int, dict[str, int]]] = {}
    for change in changes:
        live[change.category] += change.allocated_bytes
        total += change.allocated_bytes
        reserved += change.reserved_bytes
        number = (change.time_us - first) * (POINTS - 1) // span
        if number not in bins or total > bins[number][0]:
            bins[number] = (total, (change.time_us - first) / 1e6, reserved, dict(live))
    kept = [bins[number] for number in sorted(bins)]
    peak = max(kept, key=lambda point: point[0])
    return {
        **description,
        "time_s": [round(time_s, 6) for _, time_s, _, _ in kept],
        "allocated_gib": {
            name: [round(live[name] / GIB, 4) for _, _, _, live in kept] for name in CATEGORIES
        },
        "reserved_gib": [round(reserved / GIB, 4) for _, _, reserved, _ in kept],
        "marks": [[name, (time_us - first) / 1e6] for name, time_us in marks.phases],
        "peak_gib": peak[0] / GIB,
        "peak_by_category_gib": {name: peak[3][name] / GIB for name in CATEGORIES},
    }


def title(timeline: dict[str, Any]) -> str:
    words = [str(timeline["class_type"]), f"{timeline['tokens']:,} tokens"]
    if timeline.get("layers"):
        words.append(f"{timeline['layers']} layers")
    return ", ".join(words)


def from_beginning(timeline: dict[str, Any]) -> bool:
    """Whether it begins before the model is loaded."""
    return any(name == "loading" for name, _ in timeline["marks"])


def draw(timelines: list[dict[str, Any]]) -> Any:
    """One panel a timeline, on one scale of memory."""
    plt = pyplot()
    size = (6.5 * len(timelines) + 1.5, 4.8)
    fig, panels = plt.subplots(1, len(timelines), figsize=size, sharey=True, squeeze=False)
    near_capacity = any(
        max(t["reserved_gib"]) > 0.6 * t.get("capacity_gib", math.inf) for t in timelines
    )
    for axes, timeline in zip(panels[0], timelines, strict=True):
        _panel(axes, timeline)
        if near_capacity and "capacity_gib" in timeline:
            style = dict(color="#c00", linewidth=1, label="the GPU's memory")
            axes.axhline(timeline["capacity_gib"], **style)
    panels[0][0].set_ylabel("GPU memory (GiB)")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    fig.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )
    fig.tight_layout()
    plt.close(fig)
    return fig


def _panel(axes: Any, timeline: dict[str, Any]) -> None:
    time_s = timeline["time_s"]
    series = [timeline["allocated_gib"][name] for name in CATEGORIES]
    colours = [COLOURS[name] for name in CATEGORIES]
    axes.stackplot(time_s, series, labels=CATEGORIES, colors=colours, step="post", linewidth=0)
    style = dict(color="black", linewidth=1, linestyle=":", drawstyle="steps-post")
    axes.plot(time_s, timeline["reserved_gib"], label="reserved", **style)
    axes.set_title(f"{title(timeline)}: peak {timeline['peak_gib']:.1f} GiB", fontsize=11)
    axes.set_xlabel(f"s since {'loading' if from_beginning(timeline) else 'the step'} began")
    for name, at_s in timeline["marks"]:
        axes.axvline(at_s, color="black", linewidth=0.6, alpha=0.5)
        axes.annotate(
            name, (at_s, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip


def peak_rows(timelines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the memory is for at each timeline's peak, in GiB."""
    rows = [
        {"at the peak": name}
        | {title(t): round(t["peak_by_category_gib"][name], 3) for t in timelines}
        for name in CATEGORIES
    ]
    return [*rows, {"at the peak": "all"} | {title(t): round(t["peak_gib"], 3) for t in timelines}]


def memory_section(timelines: list[dict[str, Any]]) -> list[str]:
    """The HTML of the picture and its table, for a page of its own or a larger one."""
    over = "over one training step"
    if any(map(from_beginning, timelines)):
        over = "from before the model is loaded to the end of the first step"
    caption = (
        f"Memory that tensors hold {over}, by what it is for. Dotted: what the allocator has "
        "reserved of the GPU. Lines mark where a phase begins."
    )
    return [figure(draw(timelines), caption), table(peak_rows(timelines))]


def write(timelines: list[dict[str, Any]], output: Path) -> list[Path]:
    """Writes OUTPUT.png and OUTPUT.html."""
    png, html = with_ending(output, ".png"), with_ending(output, ".html")
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(timelines).savefig(png, dpi=110, bbox_inches="tight", metadata={"Software": MARK.decode()})
    recorded = []
    for timeline in timelines:
        recorded.append(heading(f"How {title(timeline)} was recorded"))
        if timeline.get("hardware"):
            recorded.append(paragraph(f"{timeline['hardware']}, commit {timeline.get('commit')}"))
        recorded.append(code(str(timeline.get("command", ""))))
    write_page(html, "GPU memory over a training step", [*memory_section(timelines), *recorded])
    return [png, html]


def save(timeline: dict[str, Any], path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(timeline, file)


def read(path: Path) -> dict[str, Any]:
    """A timeline that `record` made. Raises UserError if it is none."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            timeline = json.load(file)
        timeline["allocated_gib"], timeline["marks"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no memory timeline of profile_step.py") from error
    return timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("timelines", nargs="+", type=Path, help="memory_rank0.json.gz, one or two")
    parser.add_argument(
        "--output",
        type=files_named(".png", ".html"),
        required=True,
        help="PATH of PATH.png and PATH.html",
    )
    args = parser.parse_args()
    try:
        for path in write([read(path) for path in args.timelines], args.output):
            print(f"wrote {path}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
