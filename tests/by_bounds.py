"""Attention on a CPU that reads where documents begin when it runs, as kernels of a GPU do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
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


class ByMask(ByBounds):
    """In plain torch, over a row of documents without windows: a mask that is computed of their
    bounds leaves nothing to the host, unless keys are copied."""

    def plain_forward(self, call: AttentionCall) -> None:
        if call.documents.keys is not None:
            return super().plain_forward(call)
        p, _, v, lse = self._scores(call)
        call.o.copy_((p @ v).transpose(0, 1))
        call.lse.copy_(lse)

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        if call.documents.keys is not None:
            return super().plain_backward(do, call, out)
        p, k, v, _ = self._scores(call)
        d_out, own, q = (x.transpose(0, 1) for x in (do, call.o, call.qkv.q))
        ds = p * (d_out @ v.mT - (d_out * own).sum(-1, keepdim=True)) * call.scale
        of_keys = (ds.mT @ q, p.mT @ d_out)
        dk, dv = (x.unflatten(0, (call.qkv.k.shape[1], -1)).sum(1) for x in of_keys)
        return QKV(*(x.transpose(0, 1) for x in (ds @ k, dk, dv))).copied(out)

    def _scores(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the probabilities (H, T, T), keys and values (H, T, d), and lse (H, T)."""
        assert call.window is None
        T, H, _ = call.qkv.q.shape
        q, k, v = (x.repeat_interleave(H // x.shape[1], 1).transpose(0, 1) for x in call.qkv)
        token = torch.arange(T, dtype=torch.int32)
        document = torch.searchsorted(call.documents.cu_seqlens, token, right=True)
        seen = (document[:, None] == document) & (token[:, None] >= token)
        scores = (q @ k.mT * call.scale).where(seen, -torch.inf)
        lse = scores.logsumexp(-1)
        return (scores - lse[..., None]).exp(), k, v, lse


def _found(call: AttentionCall) -> AttentionCall:
    found = Documents.of(call.documents.cu_seqlens.diff().tolist())
    return call._replace(documents=found)


def _parts(qkv: QKV, documents: Documents) -> Iterator[tuple[slice, QKV]]:
    """Yields the queries of each document that is not empty, with what they see."""
    for queries, keys in zip(*(pairwise(x.tolist()) for x in documents.bounds[:2]), strict=True):
        own, seen = slice(*queries), slice(*keys)
        if own.stop > own.start:
            yield own, QKV(qkv.q[own], qkv.k[seen], qkv.v[seen])
