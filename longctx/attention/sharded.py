"""Attention over rows that the ranks of a process group share. Each rank holds consecutive tokens
of every row, and during attention all tokens of some heads.

There are R ranks, B rows of S tokens, t = B S / R tokens per rank, h query and k key/value heads.
One all-to-all sends q, k, v to the heads' ranks, and one returns o (likewise for the gradients):

    a rank's tokens       q (t, h, d)        k, v (t, k, d)          o (t, h, d)
    all-to-all                 |                  |                       ^
    a rank's heads        q (R t, h / R, d)  k, v (R t, k / R, d) -> o (R t, h / R, d)

Any backend therefore runs as on one GPU, documents included, and one rank computes every sum of
attention in one order. With fewer key/value heads than ranks, each head goes to the R / k ranks
whose query heads read it, and the gradients of these ranks for it are added in fp32.

A rank sends (R - 1) / R t d (2 h + 2 k) elements in forward, (R - 1) / R t d (4 h + 4 k) in
backward. lse stays on its rank: the rank's (h, t) tensor holds its (h / R, R t) values.

Head groups take turns (`take_turns`): while attention of one group runs, q, k, v of the next and o
of the previous one are being exchanged. No sum changes. Each exchange holds two buffers, so that
beside this group's t d (h + 2 k) received and t d h of o these elements are allocated:

    forward     2 t d (h + 2 k) of the next group, 2 t d h of the previous one
    backward    2 t d (3 h + 2 k) of the next,     2 t d (h + 2 k) of the previous one

For 8B (H = 32, K = 8, d = 128) in bf16, 131072 tokens a row, R = 2 and 8 groups (h = 4, k = 1):
t d is 16 MiB, so forward holds 0.31 GiB more and backward 0.62, and a layer sends 0.63 and 1.25
GiB. Only the last group's exchanges of o in forward and of dq, dk, dv in backward overlap with no
computation: 32 and 48 MiB.

Source: DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, take_turns
from longctx.attention.shards import Shards
from longctx.attention.sinks import Sinks
from longctx.kernels.annotate import annotate

Parts = Callable[[], Sequence[Tensor]]
"""A function that waits for an exchange and returns the received tensors."""


@dataclass(frozen=True)
class Sharded(Attention):
    """Runs `attention` over `rows` rows that the ranks of `shards` share."""

    attention: Attention
    shards: Shards
    rows: int = 1

    @property
    def ranks(self) -> int:
        return self.shards.ranks

    def forward(self, *args: Any, **kwargs: Any) -> None:
        take_turns([self.forward_in_turns(*args, **kwargs)])

    def backward(
        self,
        do: Tensor,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
        sinks: Sinks | None = None,
        out: QKV | None = None,
    ) -> QKV:
        out = out or QKV(*map(torch.empty_like, qkv))
        rest = documents, scale, o, lse, window, sinks
        take_turns([self.backward_in_turns(do, qkv, *rest, out=out)])
        return out

    def forward_in_turns(
        self,
        qkv: QKV,
        documents: Documents,  # of the whole rows
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
        sinks: Sinks | None = None,
    ) -> Iterator[None]:
        there = self._to_heads(self._for_all(qkv))
        del qkv  # here and below: it was copied, so its memory may be freed while others compute
        yield
        whole = QKV(*there())
        o_whole = torch.empty_like(whole.q, memory_format=torch.contiguous_format)
        with annotate("attention"):
            own_lse = self._of_heads(lse)
            rest = documents, scale, o_whole, own_lse, window, self._own(sinks)
            self.attention.forward(whole, *rest)
            del rest
        del whole
        back = self._to_tokens([o_whole])
        del o_whole
        yield
        o.copy_(back()[0])

    def backward_in_turns(
        self,
        do: Tensor,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
        sinks: Sinks | None = None,
        *,
        out: QKV,
    ) -> Iterator[None]:
        there = self._to_heads([*self._for_all(qkv), do, o])
        del qkv, do, o
        yield
        *whole, do, o = there()
        with annotate("attention"):
            own_lse = self._of_heads(lse)
            rest = documents, scale, o, own_lse, window, self._own(sinks)
            grads = self.attention.backward(do, QKV(*whole), *rest)
        del whole, do, o, rest
        back = self._to_tokens(grads)
        del grads
        yield
        dq, dk, dv = back()
        QKV(dq, *(_sum_repeated(grad, out.k.shape[1]) for grad in (dk, dv))).copied(out)

    def _for_all(self, qkv: QKV) -> QKV:
        """Repeats each key/value head for each rank whose query heads read it."""
        # 0 or 1 where there are at least as many key/value heads as ranks.
        times = self.ranks // qkv.k.shape[1]
        if times <= 1:
            return qkv
        return QKV(qkv.q, *(x.repeat_interleave(times, dim=1) for x in (qkv.k, qkv.v)))

    def _of_heads(self, lse: Tensor) -> Tensor:  # (h, t) -> (h / R, R t)
        return lse.view(len(lse) // self.ranks, -1)

    def _own(self, sinks: Sinks | None) -> Sinks | None:
        """Returns the sinks of this rank's heads. Other ranks have the gradients of other heads, as
        they have those of other tokens, and all are summed."""
        if sinks is None:
            return None
        share = len(sinks.logits) // self.ranks
        return sinks.of(slice(self.shards.rank * share, (self.shards.rank + 1) * share))

    def _to_heads(self, parts: Sequence[Tensor]) -> Parts:
        """Exchanges (t, n, d), own tokens of all heads, for (R t, n / R, d), all of own heads."""
        by_rank = [x.unflatten(1, (self.ranks, -1)).transpose(0, 1) for x in parts]
        heads = [x.shape[2] for x in by_rank]
        exchange = self.shards.exchange(torch.cat(by_rank, dim=2))

        def received() -> Sequence[Tensor]:
            whole = exchange.received()  # (R, t, sum of n / R, d)
            if self.rows > 1:
                # Ranks hold a part of every row, so rows come first and ranks' parts in order
                # within.
                whole = whole.unflatten(1, (self.rows, -1)).transpose(0, 1).flatten(1, 2)
            return whole.flatten(0, 1).split(heads, dim=1)

        return received

    def _to_tokens(self, parts: Sequence[Tensor]) -> Parts:
        """The inverse of `_to_heads`: exchanges (R t, n / R, d) each for (t, n, d)."""
        heads = [x.shape[1] for x in parts]
        whole = torch.cat(tuple(parts), dim=1).unflatten(0, (self.rows, self.ranks, -1))
        exchange = self.shards.exchange(whole.transpose(0, 1).flatten(1, 2))

        def received() -> Sequence[Tensor]:
            by_rank = exchange.received().split(heads, dim=2)  # (R, t, n / R, d) each
            return [x.transpose(0, 1).flatten(1, 2) for x in by_rank]

        return received


def _sum_repeated(grad: Tensor, heads: int) -> Tensor:  # (t, n heads, d) -> (t, heads, d)
    if grad.shape[1] == heads:
        return grad
    # Gradients of one head from several ranks are added before they are rounded.
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=wide).to(grad.dtype)
