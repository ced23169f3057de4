"""Trains a tiny model to name matplotlib's icons, with longctx's layers and with Hugging Face's.

    python profiling/icons_run.py --output profiling/results/icons.json

writes the losses, and their curves beside them as .png. The pictures are real and small: the eleven
icons of matplotlib's toolbar, of 24 x 24 pixels, and the ten of them that it also has in 48 x 48,
which are held out. Each is asked about once a step (`Which icon is this?`, `home`). The model is a
Qwen3-VL with random weights, whose tower trains. `custom` packs all conversations into one row;
`vanilla` has one a row, padded, so that both have the same loss but for rounding.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.errors import UserError
from longctx.train.report.page import pyplot
from profiling.bench.runner import train_lines
from profiling.pictures import COLOURS
from profiling.pictures_to_read import make_model, write_answers
from profiling.results import results_file, write_results

ICONS = (
    *("home", "back", "forward", "move", "zoom_to_rect", "filesave", "subplots", "hand", "help"),
    *("qt4_editor_options", "matplotlib"),
)
QUESTION = "Which icon is this?"
TRAINED, HELD_OUT = "icons.jsonl", "icons_large.jsonl"
JOB = (
    "--seq_len 512 --dtype float32 --train_vision --learning_rate 3e-3 --warmup_steps 5 "
    "--logging_steps 1 --eval_strategy steps --eval_steps 5 --dataloader_num_workers 0"
).split()
ROWS = {"custom": 1, "vanilla": len(ICONS)}
"""Class type -> the rows that hold all conversations."""


def write_icons(folder: Path) -> None:
    """Copies the icons into the folder, and writes the conversations about them."""
    import matplotlib

    source = Path(matplotlib.get_data_path()) / "images"
    for file, size in ((TRAINED, ""), (HELD_OUT, "_large")):
        found = [(name, f"{name}{size}.png") for name in ICONS]
        shown = [(picture, name) for name, picture in found if (source / picture).exists()]
        for picture, _ in shown:
            shutil.copy(source / picture, folder)
        write_answers(folder / file, QUESTION, shown)


def flags_of(folder: Path, class_type: str, steps: int) -> list[str]:
    rows = str(ROWS[class_type])
    return [
        *("--model_name_or_path", str(folder / "model"), "--cache_dir", str(folder / "cache")),
        *("--train_file", str(folder / TRAINED), "--eval_file", str(folder / HELD_OUT)),
        *("--per_device_train_batch_size", rows, "--per_device_eval_batch_size", rows),
        *("--class_type", class_type, "--max_steps", str(steps), *JOB),
    ]


def rows_of(folder: Path, class_type: str, steps: int) -> list[dict[str, Any]]:
    """Trains, and returns a row a step: its loss, and that of held-out icons after some."""
    out = folder / class_type
    lines = train_lines(flags_of(folder, class_type, steps), out)
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["eval_loss"] for line in log if "eval_loss" in line}
    rows = []
    for line in lines:
        row = {"class_type": class_type, "step": line["step"], "loss": line["loss"]}
        rows.append(row | {"eval_loss": held_out.get(line["step"])})
    return rows


def draw(rows: list[dict[str, Any]]) -> Any:
    """Losses by step: lines of trained icons, dots of held-out ones."""
    plt = pyplot()
    fig, axes = plt.subplots(figsize=(8, 4))
    widths = {"vanilla": 4, "custom": 1.5}  # one lies on the other
    for name, width in widths.items():
        mine = [row for row in rows if row["class_type"] == name]
        held = [row for row in mine if row["eval_loss"] is not None]
        style = dict(color=COLOURS[name], linewidth=width)
        axes.plot([r["step"] for r in mine], [r["loss"] for r in mine], label=name, **style)
        label = f"{name}, the large icons, held out"
        style |= dict(marker="o", linestyle=":", markersize=2 * width)
        axes.plot([r["step"] for r in held], [r["eval_loss"] for r in held], label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss of a token of the name")
    axes.legend()
    fig.tight_layout()
    plt.close(fig)
    return fig


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=results_file, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    args = parser.parse_args(argv)
    pyplot()  # missing? better known now
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_icons(folder)
        lines = [f"{QUESTION} {icon}" for icon in ICONS]
        torch.manual_seed(0)
        make_model(folder, lines, "qwen3_vl", hidden=128, layers=2)
        rows = [row for kind in ROWS for row in rows_of(folder, kind, args.steps)]
    write_results(args.output, rows)
    draw(rows).savefig(args.output.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
