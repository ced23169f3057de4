"""Causal grouped-query attention over packed documents, as forward and backward of each backend.

    attention.forward(call)                      writes o and lse          4 L^2 H d / 2 FLOPs
    dq, dk, dv = attention.backward(do, call)                              2.5 times that

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

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.sinks import Sinks, add_grad_, merge_sinks_
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


class AttentionCall(NamedTuple):
    """One call of attention: what is read, how, and where the results lie.

    A wrapper makes the call of the attention inside it by `_replace`, or by `of`, and so names only
    what it changes.
    """

    qkv: QKV
    documents: Documents
    scale: float
    o: Tensor  # (T, H, d), written by forward
    lse: Tensor  # (H, T) fp32 (fp64 for fp64 inputs), written by forward
    window: int | None = None
    sinks: Sinks | None = None  # of these heads; o and lse are those with sinks

    def of(self, tokens: slice, documents: Documents) -> AttentionCall:
        """Returns the call of some tokens, which are those of `documents`."""
        return self._replace(
            qkv=self.qkv.of(tokens),
            documents=documents,
            o=self.o[tokens],
            lse=self.lse[:, tokens],
        )

    def dense(self) -> AttentionCall:
        """Returns the call with lse contiguous, as kernels of backward read it."""
        return self._replace(lse=self.lse.contiguous())

    def room(self, out: QKV | None) -> QKV:
        """Returns where gradients are written: `out`, or without it new memory."""
        return QKV(*map(torch.empty_like, self.qkv)) if out is None else out


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
    def forward(self, call: AttentionCall) -> None:
        """Writes o and lse."""

    @abstractmethod
    def backward(self, do: Tensor, call: AttentionCall, out: QKV | None = None) -> QKV:
        """Returns dq, dk and dv from do (T, H, d), and adds to the gradient of sinks. With `out`
        they are written there; its q may be o."""

    def forward_in_turns(self, call: AttentionCall) -> Iterator[None]:
        """Runs `forward` as an iterator. It starts at the first advance and pauses while it
        exchanges tensors with other ranks; o and lse are written when it ends."""
        with annotate("attention"):
            self.forward(call)
        yield from ()

    def backward_in_turns(self, do: Tensor, call: AttentionCall, out: QKV) -> Iterator[None]:
        """Runs `backward` into `out` as an iterator that pauses like `forward_in_turns`, which gave
        o and lse."""
        with annotate("attention"):
            self.backward(do, call, out)
        yield from ()


class AddsSinks(Attention):
    """Attention that knows no sinks while it computes. They are merged into the final o and lse,
    and backward takes their gradient first, before dq is written over o."""

    def forward(self, call: AttentionCall) -> None:
        self.plain_forward(call._replace(sinks=None))
        merge_sinks_(call.o, call.lse, call.sinks)

    def backward(self, do: Tensor, call: AttentionCall, out: QKV | None = None) -> QKV:
        add_grad_(call.sinks, do, call.o, call.lse)
        return self.plain_backward(do, call._replace(sinks=None), out)

    @abstractmethod
    def plain_forward(self, call: AttentionCall) -> None:
        """Runs `forward` of a call without sinks."""

    @abstractmethod
    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        """Runs `backward` of a call without sinks, whose o and lse may be those with sinks."""


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
