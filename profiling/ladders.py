"""What layers kept in a measured step, as data in its row.

    "ladder": [{"layers": 15, "kept": ["x", "o"], "hosted": ["x", "o"]}, ...]
    "cut": {"tile_tokens": 8192, "head_groups": 8, "logits_bytes": 1050673152}

The entries of `ladder` follow the layers' order, first layer first. `layers` counts neighbours that
keep the same, `kept` names the tensors (longctx/cost/kept.py), and `hosted` is the part of them
that waits in host memory. Rows that were recorded before this format have a `description`, the line
that the run printed, beside what was read from it; their cut holds what that line named.
"""

from __future__ import annotations

from typing import Any

from longctx.cost.kept import ORDER, Keep, Ladder, in_order, runs
from longctx.cost.sizes import Cut

Row = dict[str, Any]


def ladder_columns(ladder: Ladder, cut: Cut | None) -> Row:
    """The columns of a row. `cut` is None where a run cuts each batch by its own length."""
    columns: Row = {
        "ladder": [
            {"layers": layers, "kept": in_order(keep.kept), "hosted": in_order(keep.hosted)}
            for keep, layers in runs(ladder)
        ]
    }
    return columns | ({} if cut is None else {"cut": cut._asdict()})


def ladder_of(row: Row) -> Ladder:
    """The ladder of a row that has one. Raises ValueError for names that no layer keeps."""
    ladder: list[Keep] = []
    for part in row["ladder"]:
        keep = Keep(frozenset(part["kept"]), frozenset(part["hosted"]))
        if not keep.hosted <= keep.kept <= {*ORDER}:
            raise ValueError(f"layers cannot keep this: {part}")
        ladder += part["layers"] * [keep]
    return tuple(ladder)
