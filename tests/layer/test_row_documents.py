"""Documents behind each other in a row of a mixer (layer/row_documents.py), and which these are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE
from longctx.attention.documents import Documents
from longctx.kernels.state_space import CHUNK, scan
from longctx.layer.row_documents import FORGOTTEN, Chunks, RowDocuments, most_places
from longctx.layer.segments import segments

LENGTHS = [
    [64],  # a place behind it needs a chunk more
    [5, 2, 8],
    [1, 1, 1],
    [63, 64, 65, 128],
    [0, 3, 0, 0, 70, 0],  # a CUDA graph has room for more documents than there are
    [200, 0, 0],
]


def bounds_of(lengths: list[int]) -> Tensor:
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE)
    return bounds.cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("size", [4, 64])
def test_chunks_have_tokens_of_one_document(lengths, size) -> None:
    tokens = sum(lengths)
    chunks = Chunks(bounds_of(lengths), tokens, size)
    number = torch.arange(1, tokens + 1, device=DEVICE)[None]
    spread = chunks.spread(number, zeros=True)[0].view(-1, size).tolist()
    decays = chunks.decays(-number.double())[0].view(-1, size).tolist()
    begins = chunks.begins.tolist()
    assert len(spread) == len(begins) == tokens // size + len(lengths)
    documents = [slice(start, stop) for start, stop in _pairs(lengths)]
    at = 0
    for own in documents:
        expected = [*range(own.start + 1, own.stop + 1)]
        count = len(expected) // size + 1
        flat = [n for chunk in spread[at : at + count] for n in chunk]
        assert flat == expected + [0] * (len(flat) - len(expected))
        assert begins[at : at + count] == [True] + [False] * (count - 1)
        flat = [n for chunk in decays[at : at + count] for n in chunk]
        assert flat[:-1] == [-n for n in (expected + [0] * len(flat))[: len(flat) - 1]]
        assert flat[-1] == FORGOTTEN
        at += count
    assert all(begins[at:]) and not any(n for chunk in spread[at:] for n in chunk)
    assert chunks.collect(chunks.spread(number)).equal(number)


def _pairs(lengths: list[int]) -> list[tuple[int, int]]:
    """The bounds of documents that are not empty."""
    bounds = bounds_of(lengths).tolist()
    return [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gradients_of_tokens_that_moved(lengths) -> None:
    chunks = Chunks(bounds_of(lengths), sum(lengths), 8)
    x = torch.randn(1, sum(lengths), 3, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: chunks.spread(x, zeros=True), x)
    y = chunks.spread(x).detach().requires_grad_()
    assert torch.autograd.gradcheck(chunks.collect, y)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_positions(lengths) -> None:
    found = RowDocuments(bounds_of(lengths), sum(lengths)).positions
    assert found.dtype == torch.int32
    assert found.tolist() == [n for length in lengths for n in range(length)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scan_of_packed_documents_has_the_bits_of_each_alone(dtype) -> None:
    """Our kernels compute 16 bits, plain torch the rest."""
    lengths, (H, P, N) = [70, 1, 64, 0, 9], (2, 16, 16)
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, sum(lengths), *shape, device=DEVICE)

    x, B, C, dy = (drawn(*shape).to(dtype) for shape in ((H, P), (1, N), (1, N), (H, P)))
    dt, A = (
        drawn(H).exp() / 20,
        torch.tensor([-0.1, -0.9], device=DEVICE),
    )  # slow: a leak would show
    leaves = [y.requires_grad_() for y in (x, dt, B, C)]
    chunks = RowDocuments(bounds_of(lengths), sum(lengths)).chunks
    moved = (chunks.spread(x), chunks.spread(dt, zeros=True), A, *map(chunks.spread, (B, C)))
    y = chunks.collect(scan(*moved, starts=chunks.begins)[0])
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    for start, stop in _pairs(lengths):
        own = [z[:, start:stop].detach().requires_grad_() for z in leaves]
        alone, _ = scan(own[0], own[1], A, own[2], own[3])
        expected = [alone, *torch.autograd.grad(alone, own, dy[:, start:stop])]
        for packed, single in zip(found, expected, strict=True):
            if dtype == torch.float32:  # torch chooses its matmuls by the number of chunks
                torch.testing.assert_close(packed[:, start:stop], single)
            else:
                assert packed[:, start:stop].equal(single)


def test_a_scan_refuses_starts_of_other_chunks() -> None:
    x, dt = torch.zeros(1, 70, 1, 16, device=DEVICE), torch.zeros(1, 70, 1, device=DEVICE)
    A, shared = torch.zeros(1, device=DEVICE), torch.zeros(1, 70, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="starts must have shape"):
        scan(x, dt, A, shared, shared, starts=torch.zeros(70 // CHUNK, device=DEVICE).bool())


def cut(lengths: list[int], most: int, parents: list[int | None] | None = None) -> list[tuple]:
    """The tokens and the bounds of each segment."""
    documents = Documents.of(lengths, parents)
    return [
        (
            [(row.start, row.stop) for row in segment.rows],
            None if segment.packed is None else segment.packed.bounds.tolist(),
        )
        for segment in segments(documents, most, packs=True)
    ]


def test_short_documents_lie_in_a_row() -> None:
    assert cut([3, 4, 2], 16) == [([(0, 9)], [0, 3, 7, 9])]
    assert cut([9], 16) == [([(0, 9)], None)]  # a single one needs no bounds
    assert cut([9, 5, 4, 3], 16) == [([(0, 14)], [0, 9, 14]), ([(14, 21)], [0, 4, 7])]


def test_long_documents_and_answers_do_not() -> None:
    found = cut([4, 20, 3, 5], 16)
    assert found == [
        ([(4, 14)], None),
        ([(14, 24)], None),
        ([(0, 4)], None),
        ([(24, 32)], [0, 3, 8]),
    ]
    answered = cut([6, 2, 2, 3, 4], 16, [None, 0, 0, None, None])
    assert answered == [([(0, 6)], None), ([(10, 17)], [0, 3, 7]), ([(6, 8), (8, 10)], None)]


def test_many_short_documents_take_no_more_memory_than_the_plan_counts() -> None:
    found = cut([1] * 40, 16384)  # 64 places each, and 1064 at most
    assert [len(bounds) - 1 for _, bounds in found] == [16, 16, 8]
    assert most_places(40) == 1064 and most_places(16384) == 18432
