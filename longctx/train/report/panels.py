"""The figures of `longctx report`: each shows some of a run's numbers by step, for one run or more.

One run's curves differ by colour. Of several runs each has a colour, and the kinds of curve differ
by their stroke. Steps whose value is not finite are crosses on the axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from longctx.train.report.page import legend_name, pyplot
from longctx.train.report.runs import LoggedRun

PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "Loss": ("loss", {"loss": "training", "eval_loss": "evaluation"}),
    "Rewards": (
        "reward",
        {
            "rewards/chosen": "chosen or desirable answers",
            "rewards/rejected": "rejected or undesirable answers",
            "mean_reward": "all answers",
        },
    ),
    "Reward margins": (
        "margin",
        {
            "rewards/margins": "training",
            "eval_rewards/margins": "evaluation",
            "margin": "training",
            "eval_margin": "evaluation",
        },
    ),
    "Accuracy": (
        "share of pairs",
        {
            "rewards/accuracies": "training",
            "eval_rewards/accuracies": "evaluation",
            "accuracy": "training",
            "eval_accuracy": "evaluation",
        },
    ),
    "Log-probabilities of answers": (
        "log-probability",
        {
            "logps/chosen": "chosen or desirable",
            "logps/rejected": "rejected or undesirable",
        },
    ),
    "KL from the reference": ("KL", {"kl": "estimate"}),
    "Throughput": ("tokens/s", {"tokens_per_s": "tokens/s"}),
    "Time of a step": ("s", {"step_s": "step"}),
    "MFU": ("share of the dense bf16 peak", {"mfu": "MFU"}),
    "Peak memory since the start": (
        "GiB",
        {
            "peak_gpu_gib": "GPU, allocated",
            "peak_reserved_gib": "GPU, reserved by the allocator",
            "peak_host_gib": "host (resident)",
        },
    ),
    "Gradient norm": ("norm before clipping", {"grad_norm": "gradient norm"}),
    "Learning rate": ("learning rate", {"learning_rate": "learning rate"}),
}
"""Title -> (unit, {key of metrics.jsonl: what it is}), in the order of the page."""
CAPTIONS = {"Accuracy": "pairs whose chosen answer has the larger reward"}
SIGNED = ("loss", "learning rate", "reward", "margin", "log-probability")
"""Units whose axis does not begin at 0."""
SIZE_INCHES = (5.0, 2.6)
"""A picture is as wide as a phone, where its letters stay readable."""
STROKES = ("-", "--", ":")
FEW = 60
"""Points that are marked one by one: a curve of one point would not be seen."""


def draw_all(runs: Sequence[LoggedRun]) -> Iterator[tuple[Any, str]]:
    """Yields the panels for which some run logged a number, each with its caption."""
    for title, (unit, keys) in PANELS.items():
        drawn = draw(runs, unit, keys)
        if drawn is not None:
            what = CAPTIONS.get(title, unit)
            yield drawn, f"{title} by step" + f", {what}" * (what != title.lower())


def draw(runs: Sequence[LoggedRun], unit: str, keys: dict[str, str]) -> Any | None:
    """Returns one panel, or None where no run logged any of its keys."""
    found = [
        (run, name, points)
        for run in runs
        for key, name in keys.items()
        if (points := run.series(key))
    ]
    if not found:
        return None
    plt = pyplot()
    drawn, axes = plt.subplots(figsize=SIZE_INCHES)
    kinds = list(dict.fromkeys(name for _, name, _ in found))
    colours = plt.colormaps["tab10" if len(runs) <= 10 else "tab20"].colors
    for run, name, points in found:
        kind = kinds.index(name)
        hue = kind if len(runs) == 1 else next(i for i, x in enumerate(runs) if x is run)
        style = {"color": colours[hue % len(colours)], "label": _label(runs, kinds, run, name)}
        if len(runs) > 1:
            style["linestyle"] = STROKES[kind % len(STROKES)]
        _curve(axes, points, style)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    if unit not in SIGNED:
        values = [y for _, _, points in found for _, y in points if math.isfinite(y) and y > 0]
        axes.set_ylim(0, 1.05 * max(values, default=1.0))
    if len(found) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    axes.xaxis.set_major_locator(plt.MaxNLocator(integer=True, min_n_ticks=1))
    plt.close(drawn)
    return drawn


def _label(runs: Sequence[LoggedRun], kinds: Sequence[str], run: LoggedRun, name: str) -> str:
    if len(runs) == 1:
        return name
    return legend_name(run.name if len(kinds) == 1 else f"{run.name}, {name}")


def _curve(axes: Any, points: Sequence[tuple[int, float]], style: dict[str, Any]) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, marker="." if len(points) < FEW else None, **style)
    broken = [step for step, value in points if not math.isfinite(value)]
    if broken:
        axes.plot(
            broken,
            [0.02] * len(broken),
            linestyle="none",
            marker="x",
            color=style["color"],
            label=f"{style['label']}: not finite",
            transform=axes.get_xaxis_transform(),
        )
