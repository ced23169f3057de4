"""Slots sorted by expert, against Python's stable sort."""

from __future__ import annotations

import pytest
import torch

from exactness import DEVICE
from longctx.kernels.sort_slots import Sorted, sort_slots, sort_slots_reference

SIZES = [(50, 3, 7), (5, 4, 4), (9, 1, 1), (4, 2, 99), (150, 4, 70), (64, 2, 300)]


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
@pytest.mark.parametrize(("t", "k", "experts"), SIZES)
def test_as_pythons(t, k, experts, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(t)
    chosen = torch.rand(t, min(experts, 256), device=DEVICE).topk(k).indices
    chosen = (chosen * 2 // 3) if experts > 50 else chosen  # the last third has none
    order, rows, places, ends = sort_slots(chosen.to(dtype), experts)
    slots = sorted(range(t * k), key=lambda slot: chosen.flatten().tolist()[slot])
    assert order.tolist() == slots  # Python's sort is stable
    assert rows.tolist() == [slot // k for slot in slots] and rows.dtype == torch.int32
    assert places.shape == (t, k) and places.dtype == ends.dtype == torch.int32
    assert torch.equal(order[places.flatten().long()], torch.arange(t * k, device=DEVICE))
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    assert ends.tolist() == counts.cumsum(0).tolist()


@pytest.mark.parametrize("t", [0, 3])
def test_no_slots_and_few(t) -> None:
    ids = torch.zeros(t, 2, dtype=torch.int16, device=DEVICE)
    found, plain = sort_slots(ids, 5), sort_slots_reference(ids, 5)
    for name, own, other in zip(Sorted._fields, found, plain, strict=True):
        assert torch.equal(own, other) and own.dtype == other.dtype, name


@pytest.mark.gpu
def test_a_million_slots() -> None:
    """One expert has most of them."""
    torch.manual_seed(0)
    ids = (torch.rand(131072, 8, device="cuda") ** 4 * 512).to(torch.int16)
    for own, other in zip(sort_slots(ids, 512), sort_slots_reference(ids, 512), strict=True):
        assert torch.equal(own, other)
