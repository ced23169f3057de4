"""Attention on a CPU that reads where documents begin when it runs, as kernels of a GPU do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from longctx.attention.backends import FlashOnCpu, Math
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV


class ByBounds(FlashOnCpu):
    """In plain torch where documents have more keys than queries."""

    def reads_bounds(self, longest: int) -> bool:
        return True

    def forward(
        self,
        qkv: Any,
        documents: Documents,
        scale: Any,
        o: Any,
        lse: Any,
        window: Any = None,
        sinks: Any = None,
    ) -> None:
        if documents.keys is None:
            return super().forward(qkv, _found(documents), scale, o, lse, window, sinks)
        for own, parts in _parts(qkv, documents):
            after = len(parts.k) - len(parts.q)
            o[own], lse[:, own] = Math().document_forward(parts, scale, window, after)

    def backward(
        self,
        do: Any,
        qkv: Any,
        documents: Documents,
        scale: Any,
        o: Any,
        lse: Any,
        window: Any = None,
        sinks: Any = None,
        out: Any = None,
    ) -> Any:
        if documents.keys is None:
            return super().backward(do, qkv, _found(documents), scale, o, lse, window, sinks, out)
        both = zip(_parts(qkv, documents), _parts(out, documents), strict=True)
        for (own, parts), (_, grads) in both:
            after = len(parts.k) - len(parts.q)
            given = (do[own], parts, scale, o[own], lse[:, own], window, after)
            QKV(*Math().document_backward(*given)).copied(grads)
        return out


def _found(documents: Documents) -> Documents:
    return Documents.of(documents.cu_seqlens.diff().tolist())


def _parts(qkv: Any, documents: Documents) -> Iterator[tuple[slice, QKV]]:
    """Yields the queries of each document that is not empty, with what they see."""
    for queries, keys in zip(*(pairwise(x.tolist()) for x in documents.bounds[:2]), strict=True):
        own, seen = slice(*queries), slice(*keys)
        if own.stop > own.start:
            yield own, QKV(qkv.q[own], qkv.k[seen], qkv.v[seen])
