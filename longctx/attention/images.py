"""Attention of images whose tokens see each other both ways, as in Gemma 3.

    text     itself and all before it           [text | image | text | image]
    image    that, and its own later tokens

No mask is made. Each image's later tokens are a second causal call, of the image turned around: of
n tokens, the queries n-2, ..., 0 and the keys n-1, ..., 1, so that query i sees exactly the keys
above i. What it gives is merged with the first call's o and lse (prefixes.py), and backward runs
both calls with the merged ones; dq, dk and dv add up. A window looks back, and bounds the first
call alone, as in transformers' masks.

    FLOPs of forward    2 n^2 H d for an image of n tokens, beside the row's own
    memory              q, k, v and o of PIECE tokens of images, turned around; in backward their
                        gradients, and the merged o of all images
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.prefixes import merge_
from longctx.attention.protocol import QKV, AddsSinks, Attention, AttentionCall

PIECE = 16384
"""The most tokens of images of one second call, unless a single image has more."""


class Turned(NamedTuple):
    """The images of one second call."""

    queries: Tensor  # (n,) int64
    keys: Tensor  # (n,) int64
    documents: Documents
    """The documents of the second call, one for each image."""


def with_images(documents: Documents, seen: Tensor) -> Documents:  # (T,) bool
    """Returns the documents with their images: runs of tokens that are `seen` as parts of an image,
    each within a document. One synchronisation."""
    flags = seen.cpu()
    begins = torch.zeros(len(flags) + 1, dtype=torch.bool)
    begins[documents.cu_seqlens.cpu().long()] = True
    changes = torch.ones(len(flags) + 1, dtype=torch.bool)
    changes[1:-1] = flags.diff()
    bounds = (begins | changes).nonzero()[:, 0].tolist()
    runs = (slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
    return replace(documents, images=tuple(run for run in runs if flags[run.start]))


def turned(images: Sequence[slice], device: torch.device) -> Iterator[Turned]:
    """Yields the second calls. An image of one token needs none."""
    long = [image for image in images if image.stop - image.start > 1]
    while long:
        taken, tokens = 1, long[0].stop - long[0].start
        while taken < len(long) and tokens + long[taken].stop - long[taken].start <= PIECE:
            tokens += long[taken].stop - long[taken].start
            taken += 1
        now, long = long[:taken], long[taken:]
        numbers = [torch.arange(image.stop - 1, image.start, -1) for image in now]
        keys = torch.cat(numbers).to(device, non_blocking=True)
        lengths = [len(of_image) for of_image in numbers]
        yield Turned(keys - 1, keys, Documents.of(lengths, device=device))


@dataclass(frozen=True)
class BothWays(AddsSinks):
    """Runs `attention` by documents, and `own` over images that are turned around. These are two
    where documents continue others, which no image does."""

    attention: Attention
    own: Attention
    turned: tuple[Turned, ...]

    def plain_forward(self, call: AttentionCall) -> None:
        o, lse = call.o, call.lse
        self.attention.forward(call)
        for queries, keys, of_images in self.turned:
            parts = _parts(call.qkv, queries, keys)
            later = torch.empty_like(parts.q), lse.new_empty(len(lse), len(queries))
            self.own.forward(AttentionCall(parts, of_images, call.scale, *later))
            merged = o[queries], lse[:, queries]
            merge_(*merged, *later)
            o[queries], lse[:, queries] = merged

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        # The second calls still need the merged o after the first call wrote dq over it.
        merged = [call.o[queries] for queries, _, _ in self.turned]
        grads = self.attention.backward(do, call, out)
        for (queries, keys, of_images), whole in zip(self.turned, merged, strict=True):
            parts, lse = _parts(call.qkv, queries, keys), call.lse[:, queries].contiguous()
            of_turned = AttentionCall(parts, of_images, call.scale, whole, lse)
            found = self.own.backward(do[queries], of_turned)
            for grad, where, more in zip(grads, (queries, keys, keys), found, strict=True):
                grad.index_add_(0, where, more)
        return grads


def _parts(qkv: QKV, queries: Tensor, keys: Tensor) -> QKV:
    return QKV(qkv.q[queries], qkv.k[keys], qkv.v[keys])
