"""What the pictures of the benchmarks share: a colour for each class type, and one legend."""

from __future__ import annotations

from typing import Any

CUSTOM, RED = "#4c72b0", "#c44e52"
COLOURS = {"vanilla": RED, "liger": "#dd8452", "custom": CUSTOM}


def legend_below(fig: Any, columns: int) -> None:
    """One legend under the panels, with each label once."""
    found = {
        label: handle
        for axes in fig.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    fig.tight_layout()
    place = dict(loc="upper center", ncols=columns, bbox_to_anchor=(0.5, 0))
    fig.legend(found.values(), found.keys(), **place)
