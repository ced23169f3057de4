"""A plan as an HTML page: its text, bars of memory and time, every buffer of every phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx.train.report.page import figure, heading, paragraph, pyplot, table, write_page
from longctx.train.report.plan_text import chosen, figures, parts_s, title_of

COLUMNS = {
    "flags": "flags",
    "seq_len": "tokens",
    "step_s_low": "a step, s, from",
    "step_s_high": "to",
    "tokens_per_s": "tokens/s",
    "gpu_gib": "GPU, GiB",
    "host_gib": "host, GiB",
}


def _rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[key] for key, name in COLUMNS.items() if key in row} for row in rows]


def write_html(path: Path, result: dict[str, Any]) -> None:
    said = [*figures(result), *chosen(result)]
    parts = [table([{"what": name, "value": text} for name, text in said], ["what", "value"])]
    parts += [heading("A step's GPU memory by phase"), figure(_phases(result), "GiB by phase")]
    if "parts_s" in result:
        parts += [heading("A step's time"), figure(_seconds(result), "Seconds of a step by part")]
    if "changes" in result:
        parts += [heading("It fits with"), table(_rows(result["changes"]))]
    if "sweep" in result:
        parts += [heading("Lengths that fit"), table(_rows(result["sweep"]))]
    parts.append(heading("Every large buffer"))
    parts.append(
        table(
            {"phase": phase["phase"], "buffer": name, "GiB": gib}
            for phase in result["phases"]
            for name, gib in phase["buffers"].items()
        )
    )
    run = "one layer of each kind was" if result["layers"] == "measured" else "nothing was"
    parts.append(paragraph(f"Predicted by `longctx plan`, by arithmetic; {run} run."))
    write_page(path, title_of(result), parts)


def _phases(result: dict[str, Any]) -> Any:
    """Returns a stacked bar a phase, and the limit."""
    plt = pyplot()
    phases = result["phases"]
    drawn, axes = plt.subplots(figsize=(9, 4))
    names = list(dict.fromkeys(name for phase in phases for name in phase["buffers"]))
    left = [0.0] * len(phases)
    maps = ("tab20", "tab20b", "tab20c")  # 20 buffers and more: no colour twice
    colours = [colour for name in maps for colour in plt.colormaps[name].colors]
    for i, name in enumerate(names):
        widths = [phase["buffers"].get(name, 0.0) for phase in phases]
        labels = [phase["phase"] for phase in phases]
        axes.barh(labels, widths, left=left, label=name, color=colours[i % len(colours)])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(result["gpu_limit_gib"], color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel("GiB; dashed: what may be used")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    plt.close(drawn)
    return drawn


def _seconds(result: dict[str, Any]) -> Any:
    plt = pyplot()
    drawn, axes = plt.subplots(figsize=(9, 2.2))
    parts = parts_s(result)
    parts["link, beside"] = result["link_s"]
    axes.barh(list(parts), list(parts.values()), color="tab:blue")
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds; a step takes {result['step_s']:.3g}")
    plt.close(drawn)
    return drawn
