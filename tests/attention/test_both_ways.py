"""Attention of images that are seen both ways, against a dense mask in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE
from longctx.attention import images
from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.attention.images import BothWays, turned, with_images
from longctx.attention.protocol import QKV, AttentionCall

LENGTHS = (13, 20, 4)
SEEN = [*range(3, 9), *range(10, 11), *range(15, 24), *range(28, 37)]
"""Images of 6, 1 and 9 tokens, and one that a document's end cuts into 5 and 4."""
IMAGES = (slice(3, 9), slice(10, 11), slice(15, 24), slice(28, 33), slice(33, 37))


def documents() -> Documents:
    seen = torch.zeros(sum(LENGTHS), dtype=torch.bool, device=DEVICE)
    seen[SEEN] = True
    return with_images(Documents.of(LENGTHS, device=DEVICE), seen)


def mask(window: int | None) -> Tensor:  # (T, T)
    T = sum(LENGTHS)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    number = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    image = torch.full((T,), -1)
    for n, tokens in enumerate(IMAGES):
        image[tokens] = n
    both = (image[:, None] == image[None]) & (image[:, None] >= 0)
    found = ((j <= i) | both) & (number[:, None] == number[None])
    return (found if window is None else found & (j > i - window)).to(DEVICE)


def dense(qkv: QKV, window: int | None, softcap: float | None) -> Tensor:  # (T, H, d)
    k, v = (x.repeat_interleave(qkv.q.shape[1] // x.shape[1], dim=1) for x in qkv[1:])
    scores = torch.einsum("ihd,jhd->hij", qkv.q, k) * 0.3
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask(window), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def test_images_are_cut_at_documents() -> None:
    assert documents().images == IMAGES


@pytest.mark.parametrize("piece", [1, 14, 16384])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 12, 4, 1])
def test_as_a_dense_mask(window, softcap, in_place, piece, monkeypatch) -> None:
    monkeypatch.setattr(images, "PIECE", piece)
    torch.manual_seed(0)
    T, of = sum(LENGTHS), dict(dtype=torch.float64, device=DEVICE)
    qkv = QKV(*(torch.randn(T, heads, 16, **of).requires_grad_() for heads in (4, 2, 2)))
    do = torch.randn(T, 4, 16, **of)
    expected = dense(qkv, window, softcap)
    grads = torch.autograd.grad(expected, qkv, do)
    attention = choose_attention("math", torch.device(DEVICE), torch.float64, softcap=softcap)[1]
    found = documents()
    both = BothWays(attention, attention, tuple(turned(found.images, torch.device(DEVICE))))
    assert len(both.turned) == {1: 4, 14: 3}.get(piece, 1)
    qkv = QKV(*(x.detach() for x in qkv))
    o, lse = torch.empty_like(qkv.q), torch.empty(4, T, **of)
    call = AttentionCall(qkv, found, 0.3, o, lse, window)
    both.forward(call)
    torch.testing.assert_close(o, expected.detach(), rtol=1e-12, atol=1e-12)
    out = QKV(o, torch.empty_like(qkv.k), torch.empty_like(qkv.v)) if in_place else None
    ours = both.backward(do, call, out)
    for grad, theirs in zip(ours, grads, strict=True):
        torch.testing.assert_close(grad, theirs, rtol=1e-11, atol=1e-12)
