"""The workspace of logits and gradients. What is computed in it is tested with each objective."""

from __future__ import annotations

import pytest
import torch

from exactness import DTYPES
from longctx.head.pieces import Workspace, _pieces

LAYOUTS = [(1, True), (1, False), (2, False)]  # heads, gradients in place of their logits


@pytest.mark.parametrize("lines", [2, 3, 5, 100, 300, 4185, 20_000])
@pytest.mark.parametrize("per_row", [2, 3, 5])
def test_the_pieces_fit(lines, per_row):
    """No piece's logits and gradients touch the gradients before them, of one line a row."""
    pieces = _pieces(lines, per_row)
    for i, rows in enumerate(pieces):
        assert rows > 0 and sum(pieces[:i]) + per_row * rows <= lines
    assert sum(pieces) >= lines // per_row
    if (lines, per_row) == (4185, 2):  # Llama 3 at 1 GiB
        assert pieces == [2048, 1024]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, in_place", LAYOUTS)
def test_the_workspace_is_bounded(heads, in_place, dtype, grad):
    """1 GiB at any length, and less where fewer rows need less."""
    sizes = []
    for n in (1, 1000, 2048, 3000, 2**20):
        hidden = torch.empty(n, 8, dtype=dtype, device="meta")
        sizes.append(Workspace(n, 128256, hidden, grad, 2**30, heads, in_place).buffer.nbytes)
    apart = grad and dtype != torch.float32 and not in_place
    assert sizes[0] == (4 * heads + 2 * apart) * 128256
    assert sorted(sizes) == sizes and sizes[-1] <= 2**30
    if heads == 1 and not apart:
        assert sizes[1:] == [1000 * sizes[0], *[2048 * sizes[0]] * 3]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("heads, in_place", LAYOUTS)
def test_nothing_in_the_workspace_overlaps_that_may_not(heads, in_place, dtype):
    """A gradient lies over its own piece's logits or over nothing that is still needed."""
    vocab, n = 100, 70
    hidden = torch.empty(n, 8, dtype=dtype)
    work = Workspace(n, vocab, hidden, True, 40 * 2 * 128, heads, in_place)
    assert len(work.pieces) == 1 or work.compacts
    group = work.parts(sum(work.pieces))
    for number, part in enumerate(group):
        gradient = work.gradient(part).fill_(number + 1)
        assert gradient.shape == (part.stop - part.start, vocab)
        logits = [work.logits(part, head) for head in range(heads)]
        over_logits = in_place or not work.compacts
        for z in logits[over_logits:]:
            z.fill_(-1)
            assert z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (gradient == number + 1).all()
        if over_logits:
            assert gradient.data_ptr() == logits[0].data_ptr()
    found = work.gradients(sum(work.pieces))
    for number, part in enumerate(group):
        assert (found[part] == number + 1).all()
