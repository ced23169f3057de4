"""An adapter's numbers in 16 bits: fp32's first 16 bits of each, and the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from exactness import DEVICE
from longctx.kernels.spread import (
    spread_factors,
    spread_factors_reference,
    spread_reference,
    spread_sums,
)

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (300, 16), (129, 24), (3, 2049)])
def test_both_parts_add_up(rows: int, rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    wide = torch.randn(rows, 2 * rank + 6, device=DEVICE)
    sums = wide[:, 3 : 3 + 2 * rank]  # of several adapters, as in model/projection.py
    high, low, again = spread_sums(sums, 1.7, dtype).split(rank, 1)
    truth = 1.7 * (sums[:, :rank].double() + sums[:, rank:].double())
    assert torch.equal(high, again) and high.dtype == dtype
    torch.testing.assert_close(high.double(), truth, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(high.double() + low.double(), truth, rtol=2**-16, atol=2e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_as_plain_torch(dtype: torch.dtype) -> None:
    sums = torch.randn(500, 2 * 16, device=DEVICE)
    assert torch.equal(spread_sums(sums, 2.0, dtype), spread_reference(sums, 2.0, dtype))


def test_no_rows_and_what_is_refused() -> None:
    assert spread_sums(torch.empty(0, 8, device=DEVICE), 1.0, torch.bfloat16).shape == (0, 12)
    with pytest.raises(ValueError, match="two parts of one width"):
        spread_sums(torch.empty(4, 7, device=DEVICE), 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match="sums must have dtype torch.float32"):
        spread_sums(torch.empty(4, 8, dtype=torch.bfloat16, device=DEVICE), 1.0, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(1, 1, 3), (16, 130, 257), (64, 40, 7)])
def test_both_factors_at_once(rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    a, b = torch.randn(rank, inputs, device=DEVICE), torch.randn(outputs, rank, device=DEVICE)
    found, expected = spread_factors(a, b, dtype), spread_factors_reference(a, b, dtype)
    assert all(map(torch.equal, found, expected))
    wide = found[0].double()
    torch.testing.assert_close(
        wide[rank:].view(2, rank, inputs).sum(0), a.double(), rtol=2**-15, atol=1e-6
    )
    strided = spread_factors(a.t().contiguous().t(), b, dtype)
    assert all(map(torch.equal, strided, expected))


def test_factors_of_another_rank_are_refused() -> None:
    a, b = torch.empty(4, 8, device=DEVICE), torch.empty(8, 3, device=DEVICE)
    with pytest.raises(ValueError, match="b must have shape"):
        spread_factors(a, b, torch.bfloat16)
