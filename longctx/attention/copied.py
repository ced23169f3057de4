"""Attention of short documents that continue others: a prompt's keys are copied before each of its
answers' own, and all documents run in one call.

    tokens     [prompt | answer 1 | answer 2]
    queries    [prompt | answer 1 | answer 2]                                     in their place
    keys       [prompt | prompt, answer 1 | prompt, answer 2]                     copied

Query i of an answer's n stands m - n + i tokens after the first of its m keys, as it does in a row
of its own, and that is what causal means to flash-attention where there are more keys than queries.
The FLOPs are those of prefixes.py, without its second call for each prompt and without a merge, and
the GPU alone reads where documents begin, so that CUDA graphs can have it (runtime/graphs.py). In
backward a key's gradients of all its places are added up in fp32, always in the same order
(kernels/places.py).

Copies cost memory, twice their own in backward: where they have more than MOST_BYTES, where a
prompt has many answers, or where a window counts, prefixes.py computes the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from longctx.attention.documents import Documents, Keys
from longctx.attention.protocol import QKV, AddsSinks, Attention, AttentionCall
from longctx.kernels.places import sum_places

MOST_BYTES = 2**27
"""The most bytes of copied keys and values at a time, which are those of a head group."""
MOST_PLACES = 8
"""The most places of one key: its own, and one for each answer of its prompt."""


def with_copies(
    documents: Documents,
    attention: Attention,
    *,
    windows: Iterable[int | None],
    key_bytes: int,
) -> Documents:
    """Returns the documents of a batch with the places of their keys, if `Copied` is to compute it.
    `key_bytes` are the bytes of a token's keys and values."""
    longest = documents.longest
    if not documents.parents or documents.padding or not attention.reads_bounds(longest):
        return documents
    if any(window is not None and window < longest for window in windows):
        return documents
    copies = sum(documents.lengths) + sum(documents.before)
    most = 1 + max(len(answers) for _, answers in documents.prompts)
    if copies * key_bytes > MOST_BYTES or most > MOST_PLACES:
        return documents
    return replace(documents, keys=_keys(documents, most))


def _keys(documents: Documents, most: int) -> Keys:
    """Numbers the places of keys: each document's own come after those of the documents that it
    continues."""
    slices, device = [*documents.slices()], documents.cu_seqlens.device
    places = np.full((documents.tokens, most), -1, np.int32)
    used = np.zeros(documents.tokens, np.int64)
    tokens: list[np.ndarray] = []
    bounds, held = [0], 0
    for own, parent in zip(slices, documents.parents, strict=True):
        for part in (own,) if parent is None else (slices[parent], own):
            numbers = np.arange(part.start, part.stop)
            places[numbers, used[numbers]] = np.arange(held, held + len(numbers))
            used[numbers] += 1
            tokens.append(numbers)
            held += len(numbers)
        bounds.append(held)
    found = np.concatenate(tokens), np.array(bounds, np.int32), places
    moved = [torch.from_numpy(x).to(device, non_blocking=True) for x in found]
    return Keys(moved[0], moved[1], moved[2], max(np.diff(bounds).tolist()))


class Copied(AddsSinks):
    """Runs `attention`, which reads bounds, on queries in their place and copies of keys."""

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention.softcap)
        self.attention = attention

    def plain_forward(self, call: AttentionCall) -> None:
        self.attention.forward(_copied(call))

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        given, grads = _copied(call), call.room(out)
        copies = QKV(grads.q, *map(torch.empty_like, given.qkv[1:]))
        self.attention.backward(do, given, copies)
        assert call.documents.keys is not None
        sum_places(copies[1:], call.documents.keys.places, grads[1:])
        return grads


def _copied(call: AttentionCall) -> AttentionCall:
    """Returns the call with each document's keys before it. `with_copies` admits no window that
    is shorter than a document."""
    assert call.documents.keys is not None
    k, v = (x.index_select(0, call.documents.keys.tokens) for x in call.qkv[1:])
    return call._replace(qkv=QKV(call.qkv.q, k, v), window=None)
