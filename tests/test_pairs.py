"""The covering sets by which tests choose their settings."""

from __future__ import annotations

from itertools import combinations

import pytest
from pairs import pairs


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (5, 4, 3), (9, 8, 2, 2), (3, 3, 3, 3)])
def test_every_two_values_meet(sizes) -> None:
    axes = [[f"{axis}{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    found = pairs(*axes)
    for one, other in combinations(range(len(axes)), 2):
        met = {(row[one], row[other]) for row in found}
        assert met == {(x, y) for x in axes[one] for y in axes[other]}
    largest, second = sorted(sizes)[:-3:-1]
    assert largest * second <= len(found) <= 1.4 * largest * second
    assert found == pairs(*axes)


def test_an_axis_without_values_leaves_none() -> None:
    assert pairs([1, 2], []) == []
