"""Attention of n queries to all of m keys that stand before them, as forward and backward of each
backend: the second call of prefixes.py.

    o, lse     = cross.forward(qkv, scale)                                 4 n m H d FLOPs
    dq, dk, dv = cross.backward(do, qkv, scale, o, lse)                    2.5 times that

    q, o, do, dq (n, H, d)      k, v, dk, dv (m, K, d)      lse (H, n) fp32      H a multiple of K

Query i is at position m + i of the keys. With a window of W tokens it sees the keys j with
m + i - j < W; there are at most W - 1 queries and W - 1 keys then, so that each query sees a key
and each key is seen. flash-attention's windows count from the end of both (flash_attn/cute/mask.py,
row i of n sees keys i + m - n - left to i + m - n + right): left = W - 1 - n gives the first key,
and right = n - 1 all to the last.

Backward takes any o and lse of these queries, also those over more keys: with them it gives the
gradients of this part of the keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from longctx.attention.backends import (
    Cudnn,
    Flash,
    FlashAttention4,
    FlashOnCpu,
    Math,
    Scores,
)
from longctx.attention.by_length import ByLength
from longctx.attention.protocol import QKV, Attention
from longctx.errors import UserError

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


def cross_of(attention: Attention) -> Cross:
    """Returns the second call of this backend. Raises UserError for a backend without one."""
    if isinstance(attention, ByLength):
        return CrossByLength(attention)
    kind = CROSS.get(type(attention))
    if kind is None:
        raise UserError(
            f"{type(attention).__name__} attention cannot share prompts between documents: "
            f"use {', '.join(known.__name__ for known in CROSS)}, or rows without parents"
        )
    return kind(attention)


class Cross(ABC):
    """A backend's attention of queries to keys before them. Tensors may be strided views."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    @abstractmethod
    def forward(
        self, qkv: QKV, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]: ...  # o (n, H, d), lse (H, n)

    @abstractmethod
    def backward(
        self,
        do: Tensor,  # (n, H, d)
        qkv: QKV,
        scale: float,
        o: Tensor,  # (n, H, d)
        lse: Tensor,  # (H, n), contiguous
        window: int | None = None,
    ) -> Gradients: ...  # dq (n, H, d), dk and dv (m, K, d)


class CrossFlash4(Cross):
    """flash-attn-4 on a batch of one row, which needs no bounds. If it has no deterministic
    backward, the first call has raised an error before."""

    def forward(self, qkv: QKV, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
        o, lse, *_ = self.attention.run_forward(
            *_rows(*qkv),
            softmax_scale=scale,
            causal=False,
            softcap=self.attention.softcap or 0.0,
            return_lse=True,
            **_sides(qkv, window),
        )
        return o[0], lse[0]

    def backward(
        self, do: Tensor, qkv: QKV, scale: float, o: Tensor, lse: Tensor, window: int | None = None
    ) -> Gradients:
        dq, dk, dv = self.attention.run_backward(
            *_rows(*qkv, o, do, lse),
            softmax_scale=scale,
            causal=False,
            softcap=self.attention.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_sides(qkv, window),
        )
        return dq[0], dk[0], dv[0]


class CrossFlash(Cross):
    """torch's FlashAttention-2 op on CUDA, on a batch of one row."""

    def forward(self, qkv: QKV, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
        o, lse, *_ = aten._flash_attention_forward(
            *(*_rows(*qkv), None, None, len(qkv.q), len(qkv.k), 0.0, False, False),
            scale=scale,
            **_sides(qkv, window),
        )
        return o[0], lse[0]

    def backward(
        self, do: Tensor, qkv: QKV, scale: float, o: Tensor, lse: Tensor, window: int | None = None
    ) -> Gradients:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=do.device)
        dq, dk, dv = aten._flash_attention_backward(
            *(*_rows(do, *qkv, o, lse), None, None, len(qkv.q), len(qkv.k), 0.0, False),
            *(no_dropout, no_dropout[:0]),
            scale=scale,
            **_sides(qkv, window),
        )
        return dq[0], dk[0], dv[0]


class CrossDocument(Cross):
    """A backend that takes one document at a time: here its queries come after all of its keys."""

    def forward(self, qkv: QKV, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
        return self.attention.document_forward(qkv, Scores(scale, window, after=len(qkv.k)))

    def backward(
        self, do: Tensor, qkv: QKV, scale: float, o: Tensor, lse: Tensor, window: int | None = None
    ) -> Gradients:
        how = Scores(scale, window, after=len(qkv.k))
        return self.attention.document_backward(do, qkv, o, lse, how)


class CrossByLength(Cross):
    """The second call of the backend in which a document with as many scores would run."""

    def forward(self, qkv: QKV, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
        return self._cross(qkv).forward(qkv, scale, window)

    def backward(
        self, do: Tensor, qkv: QKV, scale: float, o: Tensor, lse: Tensor, window: int | None = None
    ) -> Gradients:
        return self._cross(qkv).backward(do, qkv, scale, o, lse, window)

    def _cross(self, qkv: QKV) -> Cross:
        return cross_of(self.attention.of_scores(len(qkv.q), len(qkv.k)))


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views each tensor as a batch of one row."""
    return tuple(x[None] for x in tensors)


def _sides(qkv: QKV, window: int | None) -> dict[str, int]:
    """Returns the keys that flash-attention's window shows on both sides of the diagonal that ends
    in the last query and the last key."""
    n = len(qkv.q)
    return {} if window is None else dict(window_size_left=window - 1 - n, window_size_right=n - 1)


CROSS: dict[type[Attention], type[Cross]] = {
    FlashAttention4: CrossFlash4,
    Flash: CrossFlash,
    Cudnn: CrossDocument,
    FlashOnCpu: CrossDocument,
    Math: CrossDocument,
}
