"""Few combinations of several settings in which every two values of different settings meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A covering set of the product of `axes`, the same at every call, by the greedy rule: the next
    combination is the first of those with the most pairs that have not met."""
    rows = list(product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(_met, rows)) if rows else set()
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(_met(row) & missing))  # max takes the first of equals
        missing -= _met(row)
        chosen.append(tuple(axis[i] for axis, i in zip(axes, row, strict=True)))
    return chosen


def _met(row: Sequence[int]) -> set[Any]:
    """The pairs of a combination of indices, each with its axis."""
    return set(combinations(enumerate(row), 2))
