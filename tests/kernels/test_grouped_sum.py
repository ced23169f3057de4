"""Sums of rows by expert, against a loop in fp64."""

from __future__ import annotations

import pytest
import torch
from pairs import pairs
from test_grouped_mm import SEGMENTS, draw, ends_of, rows_of

from exactness import DEVICE, assert_exact
from longctx.kernels.grouped_sum import grouped_sum_, grouped_sum_reference_


@pytest.mark.parametrize(
    ("counts", "dtype", "plain"),
    pairs([*SEGMENTS.values()], [torch.bfloat16, torch.float32], [False, True]),
)
def test_sums(counts, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(sum(counts))
    n, width = sum(counts), 70
    for gathered in (False, True):
        a = draw(11 if gathered else n, 2 * width, dtype=dtype)[:, :width]
        rows = rows_of(n, 11) if gathered else None
        weights = torch.rand(n, device=DEVICE) if gathered else None
        acc = torch.full((len(counts), width), torch.nan, device=DEVICE)
        truth, naive = acc.double(), acc.clone()
        for add in (False, True):
            given = a, ends_of(counts)
            assert grouped_sum_(acc, *given, rows=rows, weights=weights, add=add) is acc
            for total in (truth, naive):
                grouped_sum_reference_(total, *given, rows, weights, add)
        slots = a if rows is None else a[rows] * weights[:, None].double()
        loop = torch.stack([2 * part.double().sum(0) for part in slots.split(counts)])
        torch.testing.assert_close(truth, loop)
        assert_exact("acc", acc, naive, truth)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 7)}, r"a must have shape \(4, 8\)"),
        ({"ends": torch.zeros(2).int()}, r"ends must have shape \(3,\)"),
        ({"weights": torch.zeros(5)}, r"weights must have shape \(4,\)"),
        ({"weights": torch.zeros(4).half()}, "weights must have dtype torch.float32"),
        ({"acc": torch.zeros(3, 8).half()}, "acc must have dtype torch.float32"),
        ({"acc": torch.zeros(8, 3).t()}, "acc must be contiguous"),
    ],
)
def test_wrong_arguments(change, message) -> None:
    given = {"acc": torch.zeros(3, 8), "a": torch.zeros(4, 8), "ends": torch.tensor([1, 1, 4])}
    given["ends"] = given["ends"].int()
    with pytest.raises(ValueError, match=message):
        grouped_sum_(**{n: x.to(DEVICE) for n, x in (given | change).items()}, add=False)
