"""Sorts the slots of a mixture-of-experts layer by expert.

A tile of t tokens, each of which goes to k of E experts, has n = t k slots. Slots of one expert
stay in the order of their tokens. With so few different keys it is enough to count: a program has
128 slots, and for each expert

    counts[e, program]      its slots that go to e
    behind[e, program]      the slots of experts before e, and those of e in the programs up to
                            this one: a cumulative sum of all counts

    place = behind - counts + how many slots before it in its program go to the same expert

torch's stable sort takes some sixteen launches, of which four pass over all slots; here there are
four. All numbers are integers, so that the result is that of the stable sort.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.launch import Config, on_device, runs_kernel, tl, triton


class Sorted(NamedTuple):
    """The slots of a tile of tokens, sorted by expert."""

    order: Tensor
    """(n,) int64: the slot at each place. Slot t k + j is the j-th choice of token t."""
    rows: Tensor
    """(n,) int32: the token at each place, order // k."""
    places: Tensor
    """(t, k) int32: the place of each slot, the inverse of `order`."""
    ends: Tensor
    """(E,) int32: the place behind each expert's last."""


def sort_slots_reference(
    ids: Tensor,  # (t, k) integers from 0 to experts - 1
    experts: int,
) -> Sorted:
    """Sorts with torch's stable sort."""
    t, k = ids.shape
    chosen, order = ids.reshape(-1).to(torch.int32).sort(stable=True)
    places = torch.empty_like(chosen)
    places.scatter_(0, order, torch.arange(t * k, dtype=torch.int32, device=ids.device))
    numbers = torch.arange(experts, dtype=torch.int32, device=ids.device)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    return Sorted(order, (order // k).to(torch.int32), places.view(t, k), ends)


@triton.jit
def _count_kernel(
    ids_ptr,  # (n,)
    counts_ptr,  # (E, programs) int32
    n,
    E,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + slot, mask=slot < n, other=0).to(tl.int32)
    ids = tl.where(slot < n, ids, -1)
    for first in range(0, E, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        found = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), axis=0)
        at = expert * tl.num_programs(0) + tl.program_id(0)
        tl.store(counts_ptr + at, found, mask=expert < E)


@triton.jit
def _place_kernel(
    ids_ptr,  # (n,)
    counts_ptr,  # (E, programs) int32
    behind_ptr,  # (E, programs) int32
    order_ptr,  # (n,) int64
    rows_ptr,  # (n,) int32
    places_ptr,  # (n,) int32
    ends_ptr,  # (E,) int32
    n,
    E,
    k,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    own = tl.arange(0, BLOCK)
    slot = tl.program_id(0) * BLOCK + own
    ids = tl.load(ids_ptr + slot, mask=slot < n, other=0).to(tl.int32)
    alike = (ids[:, None] == ids[None, :]) & (own[None, :] < own[:, None])
    before = tl.sum(alike.to(tl.int32), axis=1)
    at = ids * tl.num_programs(0) + tl.program_id(0)
    behind = tl.load(behind_ptr + at, mask=slot < n, other=0)
    place = behind - tl.load(counts_ptr + at, mask=slot < n, other=0) + before
    tl.store(places_ptr + slot, place, mask=slot < n)
    tl.store(order_ptr + place, slot.to(tl.int64), mask=slot < n)
    tl.store(rows_ptr + place, slot // k, mask=slot < n)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for first in range(0, E, EXPERTS):
            expert = first + tl.arange(0, EXPERTS)
            of_expert = expert * tl.num_programs(0) + tl.program_id(0)
            end = tl.load(behind_ptr + of_expert, mask=expert < E, other=0)
            tl.store(ends_ptr + expert, end, mask=expert < E)


def sort_slots(
    ids: Tensor,  # (t, k) integers from 0 to experts - 1
    experts: int,
) -> Sorted:
    """Sorts the slots by expert; those of one expert stay in the order of their tokens. It never
    waits for a GPU, so ids are not checked there."""
    (t, k), device = ids.shape, ids.device
    n, c = t * k, CONFIG
    if not n or not runs_kernel(ids):
        return sort_slots_reference(ids, experts)
    ids, programs = ids.contiguous(), triton.cdiv(n, c.block)
    counts = torch.empty(experts, programs, dtype=torch.int32, device=device)
    order = torch.empty(n, dtype=torch.int64, device=device)
    rows, places = torch.empty(2, n, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    sizes = dict(BLOCK=c.block, EXPERTS=min(EXPERTS, triton.next_power_of_2(experts)))
    with on_device(ids):
        _count_kernel[(programs,)](ids, counts, n, experts, **sizes, num_warps=c.num_warps)
        behind = counts.view(-1).cumsum(0, dtype=torch.int32)
        _place_kernel[(programs,)](
            *(ids, counts, behind, order, rows, places, ends, n, experts, k),
            **sizes,
            num_warps=c.num_warps,
        )
    return Sorted(order, rows, places.view(t, k), ends)


EXPERTS = 64
"""The most experts that a program counts at a time."""
CONFIG = Config(block=128, num_warps=4)
"""A program has 128 slots, which it compares with each other."""
