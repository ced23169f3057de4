"""Attention on a CPU that reads where documents begin when it runs, as kernels of a GPU do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from longctx.attention.backends import FlashOnCpu, Math, Scores
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, AttentionCall


class ByBounds(FlashOnCpu):
    """In plain torch where documents have more keys than queries."""

    def reads_bounds(self, longest: int) -> bool:
        return True

    def plain_forward(self, call: AttentionCall) -> None:
        if call.documents.keys is None:
            return super().plain_forward(_found(call))
        for own, parts in _parts(call.qkv, call.documents):
            how = Scores(call.scale, call.window, after=len(parts.k) - len(parts.q))
            found = Math().document_forward(parts, how)
            call.o[own], call.lse[:, own] = found

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        if call.documents.keys is None:
            return super().plain_backward(do, _found(call), out)
        assert out is not None
        both = zip(_parts(call.qkv, call.documents), _parts(out, call.documents), strict=True)
        for (own, parts), (_, grads) in both:
            how = Scores(call.scale, call.window, after=len(parts.k) - len(parts.q))
            given = do[own], parts, call.o[own], call.lse[:, own], how
            QKV(*Math().document_backward(*given)).copied(grads)
        return out


def _found(call: AttentionCall) -> AttentionCall:
    found = Documents.of(call.documents.cu_seqlens.diff().tolist())
    return call._replace(documents=found)


def _parts(qkv: QKV, documents: Documents) -> Iterator[tuple[slice, QKV]]:
    """Yields the queries of each document that is not empty, with what they see."""
    for queries, keys in zip(*(pairwise(x.tolist()) for x in documents.bounds[:2]), strict=True):
        own, seen = slice(*queries), slice(*keys)
        if own.stop > own.start:
            yield own, QKV(qkv.q[own], qkv.k[seen], qkv.v[seen])
