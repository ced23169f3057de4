"""Draws docs/front.png: whole steps of Llama-3.1-8B beside the trainers that people use.

    PYTHONPATH=. python docs/draw_front.py

Left, QLoRA of one row, by its length, from the rows of one machine in
profiling/results/h100_everyday.json: a bar is the fastest of a side's settings that fit, with its
peak memory. Right, steps of 131072 tokens on H200s, from h200_claims.json and h200_dpo_pair.json:
a peer has a bar for its fastest settings and one for those that take the least memory. Bars of a
group are of one machine but for those with a star. Adapters of PEFT are in bf16 but for TRL's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longctx.train.report.page import pyplot
from profiling.pictures import CUSTOM, RED

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (1024, 2048, 4096, 8192, 32768)
ONE_MACHINE = "b835ebb"
"""The commit whose rows of h100_everyday.json have both sides on one machine."""
Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    found: list[Row] = json.loads((ROOT / f"profiling/results/{name}.json").read_text())["rows"]
    return found


def fastest(side: str) -> list[Row]:
    """Returns the row of a side's fastest settings, for each of LENGTHS."""
    rows = [row for row in rows_of("h100_everyday") if row["of_commit"] == ONE_MACHINE]
    return [
        min(
            (
                row
                for row in rows
                if row["case"] == f"qlora:{length}"
                and row["side"] == side
                and row["status"] == "ok"
            ),
            key=lambda row: row["step_s"],
        )
        for length in LENGTHS
    ]


NAMES = {
    ("liger", "selective", True): "PEFT + Liger: selective, to the host",
    ("liger", "selective", False): "PEFT + Liger: selective, on the GPU",
    ("liger", "layers", True): "PEFT + Liger: layers, to the host",
    ("unsloth", "unsloth", False): "Unsloth",
    ("unsloth", "unsloth", True): "Unsloth: tiled MLP",
}
"""A peer, what its layers keep, and whether it is offloaded or in tiles -> its name."""


def name_of(row: Row, commit: str | None) -> str:
    """Returns the label of a row's bar. A star marks a row of another commit than `commit`,
    which was measured on another machine."""
    star = " *" if row.get("of_commit") != commit else ""
    peer = (row["side"], row["checkpointing"], row["offload"] or row["tiled_mlp"])
    return NAMES[peer] + star


def beside(case: str, ours: str) -> list[tuple[str, Row]]:
    """Returns our row of 131072 tokens within a budget, and of each peer on `case` its fastest and
    the one that takes the least memory."""
    ran = [row for row in rows_of("h200_claims") if row["status"] == "ok"]
    (own,) = (row for row in ran if (row["case"], row["side"]) == (ours, "custom"))
    found = [("longctx", own)]
    for side in ("liger", "unsloth"):
        rows = [row for row in ran if (row["case"], row["side"]) == (case, side)]
        best = [min(rows, key=lambda row: row[key]) for key in ("step_s", "peak_gib") if rows]
        found += [(name_of(row, own.get("of_commit")), row) for row in best]
    return found


def at_length() -> list[tuple[str, list[tuple[str, Row]]]]:
    """Returns rows, ours first and then those of peers, by what is trained."""
    ran = [row for row in rows_of("h200_dpo_pair") if row["status"] == "ok"]
    words = {"custom": "longctx", "trl": "TRL: layers, to the host, fp32"}
    dpo = [(words[row["class_type"]], row) for row in ran]
    return [
        ("QLoRA", beside("qlora:131072", "qlora:131072@12")),
        ("LoRA", beside("lora:131072", "lora:131072@24")),
        ("DPO pair,\nLoRA", dpo),
    ]


def draw_short(axes: Any) -> None:
    """Draws tokens per second by the length of a row, a pair of bars each, with peak memory."""
    for i, side in enumerate((("custom", "longctx", CUSTOM), ("unsloth", "Unsloth", RED))):
        kind, name, colour = side
        at, rows = [x + 0.4 * (i - 0.5) for x in range(len(LENGTHS))], fastest(kind)
        rates = [length / row["step_s"] for length, row in zip(LENGTHS, rows, strict=True)]
        bars = axes.bar(at, rates, 0.38, color=colour, label=name)
        said = [
            f"{r / 1000:.1f}\n{row['peak_gib']:.0f} G" for r, row in zip(rates, rows, strict=True)
        ]
        axes.bar_label(bars, said, padding=2, fontsize=7)
    axes.set_xticks(range(len(LENGTHS)), [str(n) for n in LENGTHS])
    axes.set_yticks([0, 5000, 10000, 15000], ["0", "5", "10", "15"])
    axes.set(xlabel="tokens of a row", ylabel="tokens per second, thousands", ylim=(0, 19500))
    axes.set_title("QLoRA of Llama-3.1-8B, one H100 (G: peak GiB)", fontsize=10)
    axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=9)


def draw_long(axes: Any) -> None:
    """Draws seconds of a step, with its memory in words, bars for each kind of run."""
    ticks, y = [], 0.0
    for what, bars in reversed(at_length()):
        first = y
        for name, row in reversed(bars):
            axes.barh(y, row["step_s"], 0.9, color=CUSTOM if name == "longctx" else RED)
            said = f"{row['step_s']:.1f} s, {row['peak_gib']:.0f} GiB of the GPU"
            if row.get("host_gib"):
                said += f", {row['host_gib']:.0f} of the host"
            axes.text(row["step_s"] + 1, y, said, va="center", fontsize=7.5)
            ticks.append((y, name))
            y += 1
        axes.text(-92, (first + y - 1) / 2, what, va="center", ha="right", fontsize=9)
        y += 0.5
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set(xlabel="seconds of a step", xlim=(0, 178))
    axes.set_title("131072 tokens, Llama-3.1-8B, H200 (*: not longctx's machine)", fontsize=10)


def main() -> None:
    figure, panels = pyplot().subplots(1, 2, figsize=(12, 4.0), width_ratios=(1, 1.15))
    for axes, draw in zip(panels, (draw_short, draw_long), strict=True):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/front.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
