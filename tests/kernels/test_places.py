"""Sums over places: the bits of plain torch, whatever stands where nobody looks."""

from __future__ import annotations

import pytest
import torch

from exactness import DEVICE
from longctx.kernels.places import sum_places, sum_places_reference


def draw(tokens: int, most: int, K: int, d: int, dtype: torch.dtype) -> tuple:
    torch.manual_seed(tokens)
    counts = torch.randint(1, most + 1, (tokens,))
    order = torch.randperm(int(counts.sum()))
    places = torch.full((tokens, most), -1, dtype=torch.int32)
    for row, own in zip(places, order.split(counts.tolist()), strict=True):
        row[: len(own)] = own
    copies = [torch.randn(len(order) + 5, K, d, device=DEVICE).to(dtype) for _ in range(2)]
    for x in copies:
        x[len(order) :] = torch.nan
    wide = torch.full((tokens, 4 * K, d), torch.nan, dtype=dtype, device=DEVICE)
    return copies, places.to(DEVICE), [wide[:, K : 2 * K], wide[:, 3 * K :]], wide


@pytest.mark.parametrize(
    ("tokens", "most", "K", "d", "dtype"),
    [
        *((1, 1, 1, 8, torch.float16), (33, 3, 2, 16, torch.float32)),
        *((33, 3, 2, 16, torch.bfloat16), (70, 8, 9, 128, torch.bfloat16)),
        (0, 2, 1, 8, torch.bfloat16),
    ],
)
def test_as_plain_torch(tokens, most, K, d, dtype) -> None:
    copies, places, out, wide = draw(tokens, most, K, d, dtype)
    sum_places(copies, places, out)
    for x, y in zip(copies, out, strict=True):
        assert torch.equal(y, sum_places_reference(x, places))
    assert wide[:, :K].isnan().all() and wide[:, 2 * K : 3 * K].isnan().all()


def test_sums_are_rounded_once() -> None:
    """Rounded after each, both small ones would be lost."""
    x = torch.tensor([1.0, 2**-9, 2**-9 + 2**-16], dtype=torch.bfloat16, device=DEVICE).view(
        3, 1, 1
    )
    out = x.new_empty(1, 1, 1)
    sum_places([x, x], torch.tensor([[0, 1, 2]], dtype=torch.int32, device=DEVICE), [out, out])
    assert out.item() == 1 + 2**-7


def test_what_is_refused() -> None:
    x, places = torch.empty(4, 2, 8, device=DEVICE), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="out must have shape"):
        sum_places([x, x], places, [x, x])
