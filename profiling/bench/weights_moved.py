"""How far runs moved the weights that all of them began with, compared with a run in fp32 (truth).

With w of a run, t of truth and w0 at the start, over all weights and in fp64:

    distance          |w - t| / |t - w0|
    share_moved       <w - w0, t - w0> / |t - w0|^2      the part of truth's movement that happened
    share_unchanged   of the weights in bf16, those that are bit by bit what they were in w0

w are the weights in bf16; `..._masters` is the same of the fp32 masters. rms_loss_difference is the
root mean square of the losses' differences from truth's. This is smollm2.py's study `states`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longctx.errors import UserError
from longctx.kernels.adamw import split_master
from longctx.train.report.page import pyplot
from profiling.bench.convergence import distance
from profiling.bench.runner import Row
from profiling.bench.smollm2_steps import FP32, Args, Study, train
from profiling.pictures import CUSTOM, RED
from profiling.results import read_rows

RUNS = {
    "truth": FP32,
    "fp32": "--dtype bfloat16 --optimizer_states fp32 --save_fp32 true".split(),
    "as_weights": "--dtype bfloat16 --optimizer_states as_weights".split(),
}
CONSTANT = "--max_steps 20 --lr_scheduler_type constant --warmup_steps 0".split()
PARTS: dict[str, tuple[float, list[str]]] = {"": (3e-4, []), "-1e-5": (1e-5, CONSTANT)}
"""Ending of a run's name -> its learning rate, and flags."""
COLOURS = {"fp32": CUSTOM, "as_weights": RED}
BARS = {
    "fp32, its masters": ("fp32", "_masters", "#55a868"),
    "fp32, its bf16 weights": ("fp32", "", COLOURS["fp32"]),
    "as_weights": ("as_weights", "", COLOURS["as_weights"]),
}
"""Label -> run, ending of the measure, colour."""

Weights = Mapping[str, Tensor]


def train_states(name: str, args: Args, *, run: str, part: str) -> Row:
    """Trains, and compares a bf16 run with its truth."""
    learning_rate, flags = PARTS[part]
    batch = ["--per_device_train_batch_size", str(args.rows)]
    flags = [*flags, *batch, "--learning_rate", str(learning_rate), *RUNS[run]]
    trained = train(name, args, flags=flags)
    del trained["step"]
    row = {"states": run, "learning_rate": learning_rate, **shape(args), **trained}
    if run != "truth":
        row["rms_loss_difference"] = distance(row["losses"], truth_of(part, args)["losses"])
        finals = (args.runs / f"{kind}{part}" / "final" for kind in ("truth", run))
        row |= compare(*map(read, (args.model, *finals)))
    return row


def shape(args: Args) -> Row:
    return {"seq_len": args.seq_len, "rows": args.rows}


def truth_of(part: str, args: Args) -> Row:
    """Its row. Raises UserError where its run is not there, or had other rows."""
    wanted = {"states": "truth", "learning_rate": PARTS[part][0], **shape(args)}
    for row in read_rows(args.output):
        if wanted.items() <= row.items() and (args.runs / f"truth{part}" / "final").is_dir():
            return row
    raise UserError(
        f"{args.output} and {args.runs} hold no run to compare with: add truth{part} to --only"
    )


def check_states(args: Args) -> None:
    """Raises UserError for what would end the work only after a run."""
    check_start(args.model)
    for part in PARTS:
        asked = {run for run in RUNS if run + part in args.only}
        if asked and "truth" not in asked:
            truth_of(part, args)


# --- weights -------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder. Raises UserError where it holds none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no .safetensors: give a folder of scripts/get_smollm2.py")
    return {name: weight for file in files for name, weight in load_file(file).items()}


def check_start(folder: Path) -> None:
    """Raises UserError for a model that bf16 would round: its runs would have two starts."""
    for name, weight in read(folder).items():
        if weight.dtype != torch.bfloat16:
            raise UserError(f"{folder}: {name} is in {weight.dtype}: bfloat16 is needed")


def compare(start: Weights, truth: Weights, final: Weights) -> Row:
    """The measures of weights in bf16, or of fp32 masters and of the bf16 weights they are for."""
    if not start.keys() == truth.keys() == final.keys():
        raise UserError("the runs and the model they began with hold weights of different names")
    if all(weight.dtype == torch.bfloat16 for weight in final.values()):
        return measure(start, truth, final)
    masters = measure(start, truth, final)
    del masters["share_unchanged"]
    rounded = {name: split_master(weight)[0] for name, weight in final.items()}
    return measure(start, truth, rounded) | {f"{k}_masters": x for k, x in masters.items()}


def measure(start: Weights, truth: Weights, final: Weights) -> Row:
    """distance, share_moved and share_unchanged, in fp64, a tensor at a time."""
    error = product = square = 0.0
    unchanged = count = 0
    for name, begun in start.items():
        moved, true = (x[name].double() - begun.double() for x in (final, truth))
        error += (moved - true).square().sum().item()
        product += (moved * true).sum().item()
        square += true.square().sum().item()
        unchanged += int((moved == 0).sum())
        count += moved.numel()
    return {
        "distance": math.sqrt(error / square),
        "share_moved": product / square,
        "share_unchanged": unchanged / count,
    }


# --- picture -------------------------------------------------------------------------------------


def draw(rows: list[Row]) -> Any:
    """Left the recipe's losses, above, and their differences from truth's, below; right a bar for
    each measure, run and learning rate. Raises UserError where a run of the recipe is missing."""
    plt = pyplot()
    found = {(row["states"], row["learning_rate"]): row for row in rows}
    rates = [rate for rate, _ in PARTS.values() if all((run, rate) in found for run in RUNS)]
    if PARTS[""][0] not in rates:
        raise UserError(f"the picture needs the runs {', '.join(RUNS)} first")
    fig = plt.figure(figsize=(12, 7), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=[3, 2])
    above, below = left.subplots(2, 1, sharex=True)
    _draw_losses(above, below, {run: found[run, rates[0]]["losses"] for run in RUNS})
    measures = {
        "distance": "distance to truth / how far truth moved",
        "share_moved": "share of truth's movement that happened",
        "share_unchanged": "share of bf16 weights that did not change",
    }
    for axis, (name, title) in zip(right.subplots(3, 1), measures.items(), strict=True):
        _draw_bars(axis, name, found, rates)
        axis.set_title(title, fontsize=10)
    plt.close(fig)
    return fig


def _draw_losses(above: Any, below: Any, losses: dict[str, list[float]]) -> None:
    truth = losses["truth"]
    steps = range(1, len(truth) + 1)
    above.plot(steps, truth, color="black", linewidth=3, alpha=0.35, label="truth: all in fp32")
    for run, colour in COLOURS.items():
        style = dict(color=colour, linewidth=1.2)
        above.plot(steps, losses[run], label=f"bf16, states {run}", **style)
        difference = [x - y for x, y in zip(losses[run], truth, strict=True)]
        rms = distance(losses[run], truth)
        below.plot(steps, difference, label=f"{run} - truth: rms {rms:.1e}", **style)
    above.set_ylabel("loss")
    below.set_ylabel("difference of the losses")
    below.set_xlabel("step")
    title = f"learning rate {_rate(PARTS[''][0])}, {len(truth)} steps"
    above.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, title=title)
    below.legend()


def _draw_bars(axis: Any, measure: str, found: Any, rates: list[float]) -> None:
    """A group of bars for each learning rate, from top to bottom."""
    at, ticks = 0.0, {}
    for rate in rates:
        steps = len(found["truth", rate]["losses"])
        group = f" learning rate {_rate(rate)}, {steps} steps:"
        axis.text(0, at, group, va="center", fontsize=8, color="#555555")
        for label, (run, ending, colour) in BARS.items():
            value = found[run, rate].get(measure + ending)
            if value is not None:
                at += 1
                ticks[at] = label
                axis.barh(at, value, color=colour, height=0.8)
                axis.text(max(value, 0), at, f" {_percent(value)}", va="center", fontsize=8)
        at += 1.2
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.set_ylim(at - 0.6, -0.6)
    axis.set_xlim(0, max(1.0, *(bar.get_width() for bar in axis.patches)) * 1.12)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(False, axis="y")


def _rate(learning_rate: float) -> str:
    """3e-4, not 0.0003."""
    return f"{learning_rate:.0e}".replace("e-0", "e-")


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.1 <= share <= 0.99 else f"{share:.1%}"


STATES = Study(
    steps={run + part: partial(train_states, run=run, part=part) for part in PARTS for run in RUNS},
    options={"seq_len": 2048, "rows": 8},
    key=("states", "learning_rate"),
    prepare=check_states,
    draw=draw,
)
