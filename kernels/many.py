"""One launch for many tensors: a table on the device says where each is, and which programs it has.

A row of the table is ROW words of 8 bytes. The first is the number of the row's first program, the
second the tensor's elements; a kernel says what the others are: addresses, and pairs of fp32
numbers. A program finds its row by a binary search over the first words, 9 steps for 448 tensors.

The table is made anew for each launch. It is small, 96 bytes a tensor, and can so never be out of
date, whatever was moved, added or frozen since the last step. It goes up in one copy from pinned
memory for which the host does not wait: torch's allocator keeps that memory until the copy is done.

Loads of 16 bytes need addresses and sizes that are multiples of 16. Tensors that have both and
those that have not are therefore rows of two launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from longctx.kernels.launch import tl, triton

ROW = 12
"""Words of 8 bytes in a row, an even number: a part of the table then begins at 16 bytes."""
FIRST, NUMEL = 0, 1
"""The first word of a row is the number of its first program, the second its elements."""
_WORDS = tl.constexpr(ROW)


@triton.jit
def find_row(table_ptr, rows):
    """Returns a pointer to the row of this program: the last row that begins at it or before."""
    program = tl.program_id(0)
    low = tl.full((), 0, tl.int32)
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table_ptr + middle * _WORDS) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return table_ptr + low * _WORDS


@triton.jit
def pointer_at(word_ptr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns the pointer whose address is in the table."""
    pointer = tl.load(word_ptr).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def size_at(word_ptr, ALIGNED: tl.constexpr):
    """Returns the number of elements that is in the table."""
    size = tl.load(word_ptr)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return size


def launches(
    table: np.ndarray,  # (rows, ROW) int64
    kinds: np.ndarray,  # (rows,) int64
    per_program: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor, int]]:
    """Yields (kind, its rows on the device, programs) for each kind that occurs, and writes each
    row's first program. Within a kind the order stays; a tensor without elements has no row."""
    some = table[:, NUMEL] > 0
    if not some.any():
        return
    order = np.argsort(kinds[some], kind="stable")
    table, kinds = table[some][order], kinds[some][order]
    programs = -(-table[:, NUMEL] // per_program)
    ends = np.cumsum(programs)
    table[:, FIRST] = ends - programs
    found, starts = np.unique(kinds, return_index=True)
    parts = [*zip(found, starts, [*starts[1:], len(table)], strict=True)]
    for _, start, stop in parts:
        table[start:stop, FIRST] -= table[start, FIRST]
    on_device = _to_device(table, device)
    for kind, start, stop in parts:
        yield int(kind), on_device[start:stop], int(programs[start:stop].sum())


def are_aligned(words: np.ndarray) -> np.ndarray:  # (rows, n) int64 -> (rows,) bool
    """Whether all words of a row are multiples of 16."""
    found: np.ndarray = np.bitwise_or.reduce(words, axis=1) % 16 == 0
    return found


def _to_device(table: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(table)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
