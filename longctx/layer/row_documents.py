"""Several documents in one row of a mixer, as data: what crosses tokens in it reads on the GPU
where each begins, and nothing depends on the lengths on the host. So a CUDA graph serves any
documents.

A recurrence that computes chunks of tokens has each document begin a chunk, and at least one place
behind its last token, where a recurrence may forget: `Chunks` moves tokens to such places, and
back. Of documents of 5, 2 and 8 tokens in chunks of 4,

    a b c d   e . . .   f g . .   h i j k   l m n o   . . . .
    begins              begins    begins
                    f         f                             f

Behind these there are spare chunks: as many chunks as any documents of so many tokens may need.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import once_differentiable
from longctx.kernels.state_space import CHUNK

FORGOTTEN = -1e4
"""The logarithm of a decay of which fp32 has no number but 0. It stands behind all tokens of its
chunk, whose sums of decays it leaves as they are."""
SPARE_PLACES = 16 * CHUNK
"""The places that 16 documents need at most beside those of a row's tokens."""


def most_places(tokens: int) -> int:
    """Returns how many places in chunks a row of these tokens may take, which decide the memory of
    a mixer: an eighth more, or those that 16 documents need."""
    return tokens + max(SPARE_PLACES, tokens // 8)


def places_of(length: int) -> int:
    """Returns the places of a document."""
    return (length // CHUNK + 1) * CHUNK


class RowDocuments:
    """The bounds of the documents that lie behind each other in a row, and what follows from them.

    bounds: (documents + 1,) int32, from 0 to the row's tokens. Documents may be empty.
    """

    def __init__(self, bounds: Tensor, tokens: int) -> None:
        self.bounds, self._tokens = bounds, tokens

    @cached_property
    def positions(self) -> Tensor:  # (T,) int32
        """The position of each token in its document."""
        at = torch.arange(self._tokens, dtype=torch.int32, device=self.bounds.device)
        return at - self.bounds[_document(self.bounds, at)]

    @cached_property
    def chunks(self) -> Chunks:
        return Chunks(self.bounds, self._tokens, CHUNK)


def _document(bounds: Tensor, at: Tensor) -> Tensor:
    """Returns the document of each token, none of which is in an empty one."""
    return torch.searchsorted(bounds, at, right=True) - 1


class Chunks:
    """The places of a row's tokens in chunks that have tokens of one document each."""

    def __init__(self, bounds: Tensor, tokens: int, size: int) -> None:
        def numbers(count: int) -> Tensor:
            return torch.arange(count, device=bounds.device)

        starts, lengths = bounds[:-1].long(), bounds.diff().long()
        counts = (lengths // size + 1) * (lengths > 0)
        ends = counts.cumsum(0)
        firsts, last = ends - counts, len(counts) - 1
        chunk = numbers(tokens // size + len(counts))
        found = torch.searchsorted(ends, chunk, right=True)
        document = found.clamp(max=last)
        own = chunk - firsts[document]
        inside = own[:, None] * size + numbers(size)
        self.begins = (own == 0) | (found > last)  # (chunks,)
        """The chunks that begin a document, and spare ones."""
        self._is_behind = (inside == counts[document, None] * size - 1).flatten()
        is_real = (inside < lengths[document, None]) & (found <= last)[:, None]
        self._is_real = is_real.flatten()
        self._tokens = (starts[document, None] + inside).flatten().clamp(max=tokens - 1)
        of = _document(bounds, token := numbers(tokens))
        self._places = firsts[of] * size + token - starts[of]

    def spread(self, x: Tensor, *, zeros: bool = False) -> Tensor:
        """Returns x (rows, T, ...) in chunks, (rows, chunks size, ...). Other places have a copy of
        some token, or with `zeros` zeros."""
        found: Tensor = _Moved.apply(x, self._tokens, self._places, None)
        return _masked(found, self._is_real) if zeros else found

    def decays(self, g: Tensor) -> Tensor:
        """Returns logarithms of decays (rows, T, ...) in chunks, with which nothing is left of a
        state behind a document."""
        return _masked(self.spread(g, zeros=True), ~self._is_behind, FORGOTTEN)

    def collect(self, x: Tensor) -> Tensor:
        """Returns the tokens (rows, T, ...) of x (rows, chunks size, ...)."""
        found: Tensor = _Moved.apply(x, self._places, self._tokens, self._is_real)
        return found


class _Moved(torch.autograd.Function):
    """Tokens from elsewhere in a row. Their gradients come from where `back` says, but for those
    that `is_real` leaves out: torch's own would be added up by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, is_real: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, is_real)
        return x.index_select(1, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        back, is_real = ctx.saved_tensors
        dx = dy.index_select(1, back)
        return dx if is_real is None else _masked(dx, is_real), None, None, None


def _masked(x: Tensor, is_real: Tensor, value: float = 0.0) -> Tensor:
    return x.masked_fill(~is_real.view(1, -1, *(1,) * (x.dim() - 2)), value)
