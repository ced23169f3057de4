"""Draws docs/front.png: whole steps of QLoRA of Llama-3.1-8B beside the trainers that people use.

    PYTHONPATH=. python docs/draw_front.py

Left, one row by its length, from the rows of one machine in profiling/results/h100_everyday.json:
longctx, and Unsloth at its fastest, which keeps everything, and in the least memory. Right, steps
of 131072 tokens on H200s, from h200_claims.json: each setting of a peer that was run. A star marks
the bars of another machine than longctx's. Adapters of PEFT are in bf16, others in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longctx.train.report.page import pyplot
from profiling.pictures import CUSTOM, RED

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (1024, 2048, 4096, 8192)
"""Unsloth's tiled MLP, which spares memory in longer rows, was run at 131072 tokens alone."""
ONE_MACHINE = "b835ebb"
"""The commit whose rows of h100_everyday.json have both sides on one machine."""
PALE = "#e2a3a3"
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    found: list[Row] = json.loads((ROOT / f"profiling/results/{name}.json").read_text())["rows"]
    return found


SHORT = {
    ("custom", None): ("longctx", CUSTOM),
    ("unsloth", "none"): ("Unsloth, all kept", RED),
    ("unsloth", "unsloth"): ("Unsloth, its checkpoints", PALE),
}
"""A side of the short rows, and what its layers keep -> the name and the colour of its bars."""


def by_length(side: str, kept: str | None) -> list[Row]:
    """Returns a side's row of each of LENGTHS."""
    found = {
        row["tokens"]: row
        for row in rows_of("h100_everyday")
        if row["of_commit"] == ONE_MACHINE
        and (row["name"], row["side"], row["checkpointing"]) == ("qlora", side, kept)
    }
    return [found[length] for length in LENGTHS]


LONG = {
    ("custom", None, None): "longctx",
    ("liger", "selective", False): "PEFT + Liger: selective, on the GPU",
    ("liger", "selective", True): "PEFT + Liger: selective, to the host",
    ("liger", "layers", True): "PEFT + Liger: layers, to the host",
    ("unsloth", "unsloth", False): "Unsloth: its checkpoints",
    ("unsloth", "unsloth", True): "Unsloth: the same, tiled MLP",
}
"""A side of the long row, what its layers keep, and whether that is offloaded or its MLP runs in
tiles -> its name."""


def at_length() -> list[tuple[str, Row]]:
    """Returns our row of 131072 tokens within a budget and those of peers, with their names. A
    star marks a row of another commit than ours, which was measured on another machine."""
    cases = {"custom": "qlora:131072@12", "liger": "qlora:131072", "unsloth": "qlora:131072"}
    found = {
        (row["side"], row["checkpointing"], row.get("offload") or row.get("tiled_mlp")): row
        for row in rows_of("h200_claims")
        if row["case"] == cases[row["side"]] and row["status"] == "ok"
    }
    ours = found["custom", None, None].get("of_commit")
    return [
        (name + (" *" if found[key].get("of_commit") != ours else ""), found[key])
        for key, name in LONG.items()
    ]


def draw_short(axes: Any) -> None:
    """Draws tokens per second by the length of a row, a bar for each side, with peak memory."""
    for i, ((side, kept), (name, colour)) in enumerate(SHORT.items()):
        at = [x + 0.29 * (i - 1) for x in range(len(LENGTHS))]
        rows = by_length(side, kept)
        rates = [n / row["step_s"] for n, row in zip(LENGTHS, rows, strict=True)]
        bars = axes.bar(at, rates, 0.28, color=colour, label=name)
        said = [
            f"{rate / 1000:.1f}\n{row['peak_gib']:.0f} G"
            for rate, row in zip(rates, rows, strict=True)
        ]
        axes.bar_label(bars, said, padding=2, fontsize=7)
    axes.set_xticks(range(len(LENGTHS)), [str(n) for n in LENGTHS])
    axes.set_yticks([0, 5000, 10000, 15000], ["0", "5", "10", "15"])
    axes.set(xlabel="tokens of a row", ylabel="tokens per second, thousands", ylim=(0, 18500))
    axes.set_title("QLoRA of Llama-3.1-8B, short rows, one H100 (G: peak GiB)", fontsize=10)
    axes.legend(frameon=False, loc="upper left", ncols=3, fontsize=8.5, columnspacing=1)


def draw_long(axes: Any) -> None:
    """Draws the seconds of a step, with its memory in words."""
    bars = at_length()[::-1]
    for y, (name, row) in enumerate(bars):
        axes.barh(y, row["step_s"], 0.8, color=CUSTOM if name == "longctx" else RED)
        said = (
            f"{row['step_s']:.1f} s, {row['peak_gib']:.1f} GiB of the GPU, "
            f"{row['host_gib']:.0f} of the host"
        )
        axes.text(row["step_s"] + 1, y, said, va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8.5)
    axes.set(xlabel="seconds of a step", xlim=(0, 105))
    axes.set_title("QLoRA of Llama-3.1-8B, 131072 tokens, H200s (*: a second one)", fontsize=10)


def main() -> None:
    figure, panels = pyplot().subplots(1, 2, figsize=(12.5, 3.6), width_ratios=(1, 1.1))
    for axes, draw in zip(panels, (draw_short, draw_long), strict=True):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/front.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
