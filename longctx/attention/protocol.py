"""Causal grouped-query attention over packed documents, as forward and backward of each backend.

    o, lse     = attention.forward(qkv, documents)                         4 L^2 H d / 2 FLOPs
    dq, dk, dv = attention.backward(do, qkv, documents, o, lse)            2.5 times that

The FLOPs are for each document of L tokens, with s = scale * q @ k.T (causal), o = softmax(s) @ v
and lse = logsumexp(s). With a softcap c, s = c * tanh(scale * q @ k.T / c). With a window of W
tokens, token i attends to i - W + 1 ... i, in 4 L W H d FLOPs. No tensor of size L x L and no mask
exists: documents are given by their boundaries, and a packed row costs the attention of its
documents, not of the whole row.

The T tokens of all rows of a batch are concatenated; heads are the last dimension but one:

    q, o, do, dq (T, H, d)      k, v, dk, dv (T, K, d)      lse (H, T) fp32      H a multiple of K
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.sinks import Sinks
from longctx.kernels.annotate import annotate


class QKV(NamedTuple):
    """Queries, keys and values of T tokens, or the gradients of each."""

    q: Tensor  # (T, H, d)
    k: Tensor  # (T, K, d)
    v: Tensor  # (T, K, d)

    def of(self, tokens: slice) -> QKV:
        return QKV(self.q[tokens], self.k[tokens], self.v[tokens])

    def copied(self, out: QKV | None) -> QKV:
        """Copies these tensors into `out` and returns `out`; without `out` returns self."""
        if out is None:
            return self
        for there, here in zip(out, self, strict=True):
            there.copy_(here)
        return out


class Attention(ABC):
    """An attention backend. Tensors may be strided views; o and lse are written in place. `softcap`
    bounds the scores of all layers, as in Gemma 2 (arXiv 2408.00118); None: no bound."""

    writes_gradients = False
    """Whether backward writes dq, dk and dv in place; otherwise it allocates and copies them."""
    fuses_sinks = False
    """Whether its kernels add attention sinks in their softmax, so that o is rounded once;
    otherwise forward merges them into o and lse (attention/sinks.py)."""
    limits: tuple[int, ...] = ()
    """Lengths of the longest document up to which its work is the same."""

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def reads_bounds(self, longest: int) -> bool:
        """Whether the GPU alone reads where documents begin, if no document has more than `longest`
        tokens."""
        return False

    @abstractmethod
    def forward(
        self,
        qkv: QKV,
        documents: Documents,
        scale: float,
        o: Tensor,  # (T, H, d), written
        lse: Tensor,  # (H, T) fp32 (fp64 for fp64 inputs), written
        window: int | None = None,
        sinks: Sinks | None = None,  # of these heads; o and lse are those with sinks
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
        sinks: Sinks | None = None,  # their gradient is added to
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
        sinks: Sinks | None = None,
    ) -> Iterator[None]:
        """Runs `forward` as an iterator. It starts at the first advance and pauses while it
        exchanges tensors with other ranks; o and lse are written when it ends."""
        with annotate("attention"):
            self.forward(qkv, documents, scale, o, lse, window, sinks)
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
        sinks: Sinks | None = None,
        *,
        out: QKV,
    ) -> Iterator[None]:
        """Runs `backward` into `out` as an iterator that pauses like `forward_in_turns`, which gave
        o and lse."""
        with annotate("attention"):
            self.backward(do, qkv, documents, scale, o, lse, window, sinks, out)
        yield from ()


def take_turns(parts: Iterable[Iterator[None]]) -> None:
    """Runs each part to its end. When a part pauses, the next part begins before it goes on:

    turn 1    part 0 begins
    turn 2    part 1 begins    part 0 goes on
    turn 3    part 2 begins    part 1 goes on    part 0 ends

    Parts that never pause run one after the other.
    """
    under_way: list[Iterator[None]] = []
    for part in parts:
        under_way = [turn for turn in (part, *under_way) if _goes_on(turn)]
        del part  # the tensors that it holds are freed when it ends
    while under_way:
        under_way = [turn for turn in under_way if _goes_on(turn)]


def _goes_on(turn: Iterator[None]) -> bool:
    return next(turn, _END) is not _END


_END = object()
