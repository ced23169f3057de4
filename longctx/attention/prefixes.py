"""Attention of documents that continue others: a prompt is computed once for all of its answers.

A row holds each prompt of P tokens with its answers, of A tokens together, directly after it:

    [prompt | answer 1 | answer 2 | ...]         an answer's positions go on from the prompt's

An answer's tokens attend to all of the prompt and to their own answer, in two calls:

    1. causal, by documents: the prompt by itself and each answer by itself
    2. the answers' queries against the prompt's keys, not causal (cross.py)

whose results o1, lse1 and o2, lse2 are merged in fp32, in place of those of the first call:

    lse = logaddexp(lse1, lse2)           o = o1 exp(lse1 - lse) + o2 exp(lse2 - lse)

Backward runs both calls with the merged o and lse. p = exp(s - lse) and rowsum(do o) are then those
of the whole softmax, so that each call gives its keys' part of dq, which add up, and so do dk and
dv of a prompt. The sums are rounded once, from fp32.

    FLOPs of forward      2 H d (P^2 + 2 A P + sum of the answers' lengths squared)
    separate rows         2 H d (sum of (P + answer's length)^2)

Nothing is copied for the second call: the answers of a prompt are consecutive tokens, and so is the
prompt, so that q, k and v of each are slices. Without a window all answers of a prompt are the
queries of one launch. Beside the first call, with elements of 2 bytes and one prompt at a time:

    forward     2 A H d bytes (o2), at most 32 MiB of fp32 while they are merged
    backward    2 A H d bytes for all prompts (the merged o, if dq takes its place), and the second
                call's own: gradients of A queries and P keys, after those of the first were freed

With a window of W tokens, distances are those of positions: token i of an answer is at position
P + i and sees the prompt's keys from P + i - W + 1 on. So only the first W - 1 tokens of an answer
see the last W - 1 of the prompt, and each answer has a launch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.attention.cross import Cross
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, AddsSinks, Attention, AttentionCall

PIECE = 2**22
"""Elements of o that are merged at a time: 16 MiB in fp32."""


@dataclass(frozen=True)
class Prefixed(AddsSinks):
    """Runs `attention` by documents, and `cross` between answers and their prompts."""

    attention: Attention
    cross: Cross

    def plain_forward(self, call: AttentionCall) -> None:
        self.attention.forward(_alone(call))
        for keys, answers in continuations(call.documents, call.window):
            for queries in answers:
                parts = parts_of(call.qkv, queries, keys)
                found = self.cross.forward(parts, call.scale, needed(parts, call.window))
                merge_(call.o[queries], call.lse[:, queries], *found)

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        o, window = call.o, call.window
        # The second call still needs the merged o after the first call wrote dq over it.
        taken = out is not None and out.q.data_ptr() == o.data_ptr()  # dq takes o's place
        pieces = [
            (keys, [(queries, o[queries].clone() if taken else o[queries]) for queries in answers])
            for keys, answers in continuations(call.documents, window)
        ]
        grads = self.attention.backward(do, _alone(call), out)
        for keys, answers in pieces:
            sums: list[Tensor] = []
            for queries, merged in answers:
                parts, lse = parts_of(call.qkv, queries, keys), call.lse[:, queries].contiguous()
                given = do[queries], parts, call.scale, merged, lse, needed(parts, window)
                dq, *dkv = self.cross.backward(*given)
                grads.q[queries].add_(dq)
                sums = [_sum(a, b) for a, b in zip(sums, dkv, strict=True)] if sums else dkv
            for grad, total in zip(grads[1:], sums, strict=True):
                grad[keys].add_(total)
        return grads


def _alone(call: AttentionCall) -> AttentionCall:
    """Returns the first call, of each document by itself."""
    return call._replace(window=inside(call.documents, call.window))


def continuations(documents: Documents, window: int | None) -> Iterator[tuple[slice, list[slice]]]:
    """Yields, for each prompt, its keys that answers attend to, and the queries of each launch."""
    for prompt, answers in documents.prompts:
        if window is None:
            # Answers are consecutive and all see the whole prompt: one launch takes them together.
            yield prompt, [slice(answers[0].start, answers[-1].stop)]
        elif window > 1:
            seen = slice(max(prompt.start, prompt.stop - window + 1), prompt.stop)
            yield seen, [slice(a.start, min(a.stop, a.start + window - 1)) for a in answers]


def merge_(o: Tensor, lse: Tensor, o2: Tensor, lse2: Tensor) -> None:
    """Merges attention of the same n queries to other keys, o2 (n, H, d) and lse2 (H, n), into o
    and lse, in the wider of the dtypes of lse and lse2."""
    # exp(lse1) + exp(lse2) would overflow; logaddexp takes the larger one out first.
    both = torch.logaddexp(lse, lse2)
    shares = [(part - both).exp().t()[:, :, None] for part in (lse, lse2)]  # (n, H, 1) each
    n, heads, head_dim = o.shape
    piece = max(1, PIECE // (heads * head_dim))
    for start in range(0, n, piece):
        rows = slice(start, start + piece)
        first, second = (share[rows] * x[rows] for share, x in zip(shares, (o, o2), strict=True))
        o[rows] = first.add_(second)
    lse.copy_(both)


def parts_of(qkv: QKV, queries: slice, keys: slice) -> QKV:
    return QKV(qkv.q[queries], qkv.k[keys], qkv.v[keys])


def inside(documents: Documents, window: int | None) -> int | None:
    """Returns the window of the first call: None if no document alone is longer than it."""
    return window if window is not None and window < max(documents.lengths) else None


def needed(parts: QKV, window: int | None) -> int | None:
    """Returns the window of a launch of the second call: None if every query sees every key."""
    return window if window is not None and window < len(parts.q) + len(parts.k) else None


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Returns a sum in fp32 or wider, so that the gradients of several answers are rounded once."""
    return a.to(torch.promote_types(b.dtype, torch.float32)) + b
