"""Attention over rows that the ranks of a process group share: each has consecutive tokens of every
row, and for attention all tokens of some heads.

R ranks, B rows of S tokens, t = B S / R tokens a rank, h query and k key/value heads. One
all-to-all carries q, k, v there, one o back (the gradients likewise):

    a rank's tokens       q (t, h, d)        k, v (t, k, d)          o (t, h, d)
    all-to-all                 |                  |                       ^
    a rank's heads        q (R t, h / R, d)  k, v (R t, k / R, d) -> o (R t, h / R, d)

so that any backend runs as on one GPU, documents included, and every sum of attention is made by
one rank in one order. Where there are fewer key/value heads than ranks each goes to the R / k ranks
whose query heads read it; their gradients for it are added in fp32.

Elements that a rank sends: (R - 1) / R t d (2 h + 2 k) in forward, (R - 1) / R t d (4 h + 4 k) in
backward. lse stays where it was made: (h, t) of a rank holds its (h / R, R t).

Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention
from longctx.attention.shards import Shards


@dataclass(frozen=True)
class Sharded(Attention):
    """`attention` for `rows` rows that the ranks of `shards` share."""

    attention: Attention
    shards: Shards
    rows: int = 1

    @property
    def ranks(self) -> int:
        return self.shards.ranks

    def forward(
        self,
        qkv: QKV,
        documents: Documents,  # of the whole rows
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
    ) -> None:
        whole = QKV(*self._to_heads(self._for_all(qkv)))
        o_whole = torch.empty_like(whole.q, memory_format=torch.contiguous_format)
        self.attention.forward(whole, documents, scale, o_whole, self._of_heads(lse), window)
        o.copy_(self._to_tokens([o_whole])[0])

    def backward(
        self,
        do: Tensor,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
        out: QKV | None = None,
    ) -> QKV:
        *whole, do, o = self._to_heads([*self._for_all(qkv), do, o])
        grads = self.attention.backward(
            do, QKV(*whole), documents, scale, o, self._of_heads(lse), window
        )
        dq, dk, dv = self._to_tokens(grads)
        dk, dv = (_sum_repeated(grad, qkv.k.shape[1]) for grad in (dk, dv))
        return QKV(dq, dk, dv).copied(out)

    def _for_all(self, qkv: QKV) -> QKV:
        """Key/value heads as often as there are ranks that read them."""
        times = self.ranks // qkv.k.shape[1]
        if times <= 1:
            return qkv
        return QKV(qkv.q, *(x.repeat_interleave(times, dim=1) for x in (qkv.k, qkv.v)))

    def _of_heads(self, lse: Tensor) -> Tensor:  # (h, t) -> (h / R, R t)
        return lse.view(len(lse) // self.ranks, -1)

    def _to_heads(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """(t, n, d) each, own tokens of all heads -> (R t, n / R, d), all tokens of own heads."""
        by_rank = [x.unflatten(1, (self.ranks, -1)).transpose(0, 1) for x in parts]
        whole = self.shards.exchange(torch.cat(by_rank, dim=2))  # (R, t, sum of n / R, d)
        if self.rows > 1:
            whole = whole.unflatten(1, (self.rows, -1)).transpose(0, 1).flatten(1, 2)
        return whole.flatten(0, 1).split([x.shape[2] for x in by_rank], dim=1)

    def _to_tokens(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The way back: (R t, n / R, d) each -> (t, n, d)."""
        whole = torch.cat(tuple(parts), dim=1).unflatten(0, (self.rows, self.ranks, -1))
        own = self.shards.exchange(whole.transpose(0, 1).flatten(1, 2))  # (R, t, sum of n / R, d)
        by_rank = own.split([x.shape[1] for x in parts], dim=2)
        return [x.transpose(0, 1).flatten(1, 2) for x in by_rank]


def _sum_repeated(grad: Tensor, heads: int) -> Tensor:  # (t, n heads, d) -> (t, heads, d)
    if grad.shape[1] == heads:
        return grad
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=wide).to(grad.dtype)
