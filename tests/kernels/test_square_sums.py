"""Square sums against their reference bit by bit, alone, among many and in pieces."""

from __future__ import annotations

import pytest
import torch

from exactness import DEVICE
from longctx.kernels.square_sums import (
    CHUNK,
    LANES,
    many_square_sums,
    square_sums,
    square_sums_reference,
)

DTYPES = [torch.bfloat16, torch.float32]
NUMELS = [1, 160, LANES - 1, LANES, LANES + 16, CHUNK, CHUNK + 1, 3 * CHUNK + 48, 0]


def draw(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of many magnitudes."""
    generator = torch.Generator().manual_seed(n + seed)
    x, size = (torch.randn(n, generator=generator) for _ in range(2))
    return (x * torch.exp2(3 * size)).to(DEVICE, dtype)


def test_alone_among_many_and_on_a_cpu_bits_are_the_same() -> None:
    tensors = [draw(n, dtype) for n in NUMELS for dtype in DTYPES]
    tensors += [draw(2081, dtype)[1:] for dtype in DTYPES]  # no loads of 16 bytes
    tensors += [draw(60, torch.float32).view(3, 4, 5)]
    sums, starts = many_square_sums(tensors)
    assert starts[-1] == len(sums) and len(starts) == len(tensors) + 1
    for x, start, stop in zip(tensors, starts, starts[1:], strict=False):
        alone = square_sums(x)
        assert len(alone) == -(-x.numel() // CHUNK)
        assert torch.equal(sums[start:stop], alone)
        assert torch.equal(alone, square_sums_reference(x))
        assert torch.equal(alone.cpu(), square_sums_reference(x.cpu()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [LANES, 5 * LANES])
def test_pieces_make_the_whole(chunk, dtype) -> None:
    x = draw(7 * 5 * LANES // 2 + 3, dtype)
    whole = square_sums(x, chunk)
    pieces = [square_sums(piece, chunk) for piece in x.split(2 * chunk)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(dtype) -> None:
    x = draw(100_003, dtype)
    expected = x.double().square().sum().item()
    assert square_sums_reference(x).double().sum().item() == pytest.approx(expected, rel=2**-22)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_its_chunk(value) -> None:
    x = draw(CHUNK + 100, torch.float32)
    x[CHUNK + 3] = value
    assert square_sums(x).isfinite().tolist() == [True, False]


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.ones(2**31 + 5 * CHUNK, dtype=torch.bfloat16, device=DEVICE)
    for sums in (square_sums(x), many_square_sums([x])[0]):
        assert len(sums) == x.numel() // CHUNK and (sums == CHUNK).all()


@pytest.mark.parametrize(
    ("x", "chunk", "message"),
    [
        (torch.zeros(6).half(), CHUNK, "x must be bfloat16 or float32, got torch.float16"),
        (torch.zeros(12)[::2], CHUNK, r"x must be contiguous, got strides \(2,\)"),
        (torch.zeros(6), 1000, "a chunk must be a multiple of 1024 elements, got 1000"),
    ],
    ids=str,
)
def test_wrong_arguments(x, chunk, message) -> None:
    for op in (square_sums, lambda x, chunk: many_square_sums([x], chunk)):
        with pytest.raises(ValueError, match=message):
            op(x, chunk)
