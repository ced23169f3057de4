"""Attention of padding, for callers that read its outputs.

A row that is padded on either side, and what attends to what, as a mask makes it in transformers:

    [ left | document | right ]     real tokens    themselves and the real tokens before them
                                    on the right   all real tokens, not themselves
                                    on the left    nothing: their attention is 0

No token attends to padding, so that documents are computed as without it, and padding costs a
second call: its queries against the document's keys, not causal (cross.py). flash-attention in
transformers leaves padding out and gives 0 on both sides (`blind`).

The tokens are sorted: those of all documents, then those of all padding. `sorted_rows` finds the
order. With a window of W tokens, only the first W - 1 tokens on the right see the last W - 1 of the
document, and the others nothing.

    FLOPs of forward    4 n L H d for n tokens on the right of L
    memory              do, o and the gradients of the right's queries in backward, a row at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.cross import Cross
from longctx.attention.documents import Documents, Padding
from longctx.attention.prefixes import inside, needed, parts_of
from longctx.attention.protocol import QKV, AddsSinks, Attention, AttentionCall


class Row(NamedTuple):
    """The tokens of a padded row, in their order."""

    left: int
    real: int
    right: int


def rows_of(mask: Tensor) -> list[Row] | None:  # (B, S)
    """Returns the rows of a mask; None if a row has padding between real tokens. One
    synchronisation."""
    real, length = (mask != 0).int(), mask.shape[1]
    found = torch.stack([real.argmax(1), real.sum(1), real.flip(1).argmax(1)], dim=1).tolist()
    rows = [Row(*numbers) if numbers[1] else Row(length, 0, 0) for numbers in found]
    return rows if all(sum(row) == length for row in rows) else None


def sorted_rows(
    rows: Sequence[Row], device: torch.device, *, blind: bool
) -> tuple[Documents, Tensor]:  # (B S,) int64
    """Returns the documents with their padding, and the number in the batch of each sorted token.
    Padding on the right sees its document unless it is `blind`."""
    documents = Documents.of([row.real for row in rows], device=device)
    numbers = torch.arange(sum(map(sum, rows))).split([n for row in rows for n in row])
    padding: list[Padding] = []
    start, end = 0, documents.tokens  # of the row's document, of the padding so far
    for row in rows:
        own = slice(start, start + row.real)
        nothing = slice(own.start, own.start)
        for tokens, seen in ((row.left, nothing), (row.right, nothing if blind else own)):
            padding += [Padding(slice(end, end + tokens), seen)] if tokens else []
            end += tokens
        start = own.stop
    pads = [n for i, n in enumerate(numbers) if i % 3 != 1]
    order = torch.cat([*numbers[1::3], *pads]).to(device, non_blocking=True)
    return replace(documents, padding=tuple(padding)), order


@dataclass(frozen=True)
class Padded(AddsSinks):
    """Runs `attention` by documents, and `cross` between padding and the document before it."""

    attention: Attention
    cross: Cross

    def plain_forward(self, call: AttentionCall) -> None:
        real, own = self._real(call)
        own = own._replace(lse=call.lse.new_empty(own.lse.shape))
        self.attention.forward(own)
        call.lse[:, real] = own.lse
        for padding in call.documents.padding:
            call.o[padding.tokens] = 0
            call.lse[:, padding.tokens] = 0
        for queries, keys in _seeing(call.documents, call.window):
            parts = parts_of(call.qkv, queries, keys)
            found = self.cross.forward(parts, call.scale, needed(parts, call.window))
            call.o[queries], call.lse[:, queries] = found

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        real, own = self._real(call)
        # o of padding is copied, since dq may take its place.
        seen = _seeing(call.documents, call.window)
        seeing = [(queries, keys, call.o[queries].clone()) for queries, keys in seen]
        grads = call.room(out)
        self.attention.backward(do[real], own.dense(), grads.of(real))
        for grad in grads:
            grad[real.stop :] = 0
        for queries, keys, o in seeing:
            parts, lse = parts_of(call.qkv, queries, keys), call.lse[:, queries].contiguous()
            given = do[queries], parts, call.scale, o, lse, needed(parts, call.window)
            dq, dk, dv = self.cross.backward(*given)
            grads.q[queries] = dq
            grads.k[keys] += dk
            grads.v[keys] += dv
        return grads

    def _real(self, call: AttentionCall) -> tuple[slice, AttentionCall]:
        """Returns where documents lie, and their call without padding."""
        real, alone = slice(call.documents.tokens), inside(call.documents, call.window)
        return real, call.of(real, call.documents)._replace(window=alone)


def _seeing(documents: Documents, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yields the padding that sees tokens of its document, and these tokens."""
    for tokens, seen in documents.padding:
        if window is not None:
            tokens = slice(tokens.start, min(tokens.stop, tokens.start + window - 1))
            seen = slice(max(seen.start, seen.stop - window + 1), seen.stop)
        if tokens.start < tokens.stop and seen.start < seen.stop:
            yield tokens, seen
