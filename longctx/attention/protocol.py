"""Causal grouped-query attention over packed documents, as a pair of functions per backend.

    o, lse     = attention.forward(qkv, documents)                         4 L^2 H d / 2 FLOPs
    dq, dk, dv = attention.backward(do, qkv, documents, o, lse)            2.5 times that

for each document of L tokens, with s = scale * q @ k.T (causal), o = softmax(s) @ v and
lse = logsumexp(s). With a window of W tokens, i attends to i - W + 1 ... i, in 4 L W H d FLOPs.
Nothing of size L x L exists and no mask is built: documents are given by their boundaries, and a
packed row costs the attention of its documents, not of the whole row.

Tokens of all rows of a batch stand one after another (T of them), heads are last but one:

    q, o, do, dq (T, H, d)      k, v, dk, dv (T, K, d)      lse (H, T) fp32      H a multiple of K
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from longctx.annotate import annotate
from longctx.attention.documents import Documents


class QKV(NamedTuple):
    """Queries, keys and values of T tokens, or the gradients of each."""

    q: Tensor  # (T, H, d)
    k: Tensor  # (T, K, d)
    v: Tensor  # (T, K, d)

    def of(self, tokens: slice) -> QKV:
        return QKV(self.q[tokens], self.k[tokens], self.v[tokens])

    def copied(self, out: QKV | None) -> QKV:
        """In `out`, if it is given."""
        if out is None:
            return self
        for there, here in zip(out, self, strict=True):
            there.copy_(here)
        return out


class Attention(ABC):
    """A backend. Tensors may be strided views; o and lse are written where they lie."""

    writes_gradients = False
    """dq, dk and dv too; else they are made, and copied there."""

    @abstractmethod
    def forward(
        self,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,  # (T, H, d), written
        lse: Tensor,  # (H, T) fp32 (fp64 for fp64 inputs), written
        window: int | None = None,
    ) -> None: ...

    @abstractmethod
    def backward(
        self,
        do: Tensor,  # (T, H, d)
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,  # (T, H, d)
        lse: Tensor,  # (H, T)
        window: int | None = None,
        out: QKV | None = None,  # written, and returned; its q may be o
    ) -> QKV: ...  # dq, dk, dv

    def forward_in_turns(
        self,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
    ) -> Iterator[None]:
        """`forward`, which begins when the iterator is first advanced, and pauses where an exchange
        with other ranks is under way; o and lse are there when it ends."""
        with annotate("attention"):
            self.forward(qkv, documents, scale, o, lse, window)
        yield from ()

    def backward_in_turns(
        self,
        do: Tensor,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,
        lse: Tensor,
        window: int | None = None,
        *,
        out: QKV,
    ) -> Iterator[None]:
        """`backward` into `out`, likewise."""
        with annotate("attention"):
            self.backward(do, qkv, documents, scale, o, lse, window, out)
        yield from ()


def take_turns(parts: Iterable[Iterator[None]]) -> None:
    """Runs each part to its end. Where one pauses, the next one begins before it goes on:

    turn 1    part 0 begins
    turn 2    part 1 begins    part 0 goes on
    turn 3    part 2 begins    part 1 goes on    part 0 ends

    What never pauses runs one after the other.
    """
    under_way: list[Iterator[None]] = []
    for part in parts:
        under_way = [turn for turn in (part, *under_way) if _goes_on(turn)]
        del part  # what it holds goes with its end
    while under_way:
        under_way = [turn for turn in under_way if _goes_on(turn)]


def _goes_on(turn: Iterator[None]) -> bool:
    return next(turn, _END) is not _END


_END = object()
