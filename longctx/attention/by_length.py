"""Runs long documents in one backend and short ones in another.

`auto` takes this if flash-attn-4 is missing and cuDNN is torch's fastest kernel.

cuDNN builds an execution plan for every length that a process has not seen. On an H200 forward and
backward of a new length take 0.083 s more than of a known one, however long it is, and 4 MiB of
host memory for the rest of the process (profiling/results/h200_attention_lengths.json). torch's
flash op needs no plans, and takes the documents of a whole row in one launch, but it is up to 1.8
times slower. With L layers, a length that never comes again is worth a plan if L times the
difference is more than 0.083 s:

    tokens                  4096      16384     32768           L
    Llama-3.1-8B            0.02 s    0.30 s    1.6 s           32
    SmolLM2-135M            0.00 s    0.04 s    0.21 s          30

TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1, which rounds the lengths of plans up (pytorch#155958), is no way
out: dq of a document was wrong by hundreds of times its size with torch 2.11 (same file).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, AddsSinks, Attention, AttentionCall

LONG = 16384
"""The fewest tokens of a long document."""


class BackendRun(NamedTuple):
    """Consecutive documents that run in the same backend."""

    attention: Attention
    tokens: slice
    documents: Documents


class ByLength(AddsSinks):
    """Runs documents of at least `long_tokens` tokens in `long`, and others in `short`."""

    def __init__(self, short: Attention, long: Attention, long_tokens: int = LONG) -> None:
        super().__init__(short.softcap)
        self.short, self.long, self.long_tokens = short, long, long_tokens
        self.limits = (long_tokens - 1,)

    def reads_bounds(self, longest: int) -> bool:
        return longest < self.long_tokens and self.short.reads_bounds(longest)

    def plain_forward(self, call: AttentionCall) -> None:
        for attention, at, inside in self.runs(call.documents):
            attention.forward(call.of(at, inside))

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        grads = call.room(out)
        for attention, at, inside in self.runs(call.documents):
            attention.backward(do[at], call.of(at, inside).dense(), grads.of(at))
        return grads

    def of_scores(self, queries: int, keys: int) -> Attention:
        """Returns the backend for these queries and keys: the one for a document with as many
        scores, of which a document sees half."""
        return self.long if 2 * queries * keys >= self.long_tokens**2 else self.short

    def runs(self, documents: Documents) -> Iterator[BackendRun]:
        """Yields the runs of documents, in their order."""
        lengths, bounds = documents.lengths, documents.cu_seqlens
        if max(lengths, default=0) < self.long_tokens:
            yield BackendRun(self.short, slice(None), documents)
            return
        first = start = 0
        for is_long, group in groupby(lengths, lambda length: length >= self.long_tokens):
            part = tuple(group)
            last, stop = first + len(part), start + sum(part)
            inside = Documents(lengths=part, cu_seqlens=bounds[first : last + 1] - start)
            yield BackendRun(self.long if is_long else self.short, slice(start, stop), inside)
            first, start = last, stop
