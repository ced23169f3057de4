"""Sinks with each backend, against an explicit softmax with one column more, in fp64."""

from __future__ import annotations

import pytest
import torch
from test_attention import BACKENDS, backend
from torch import Tensor

from exactness import DEVICE, assert_exact
from longctx.attention.cross import cross_of
from longctx.attention.documents import Documents
from longctx.attention.prefixes import Prefixed
from longctx.attention.protocol import QKV, Attention, take_turns
from longctx.attention.sinks import Sinks

TREES = {
    "documents": ([33, 1, 14], None),
    "a shared prompt": ([20, 9, 12], [None, 0, 0]),
}


def seen(documents: Documents, window: int | None) -> Tensor:  # (T, T)
    positions, number = documents.position_ids(), torch.arange(len(documents.lengths))
    own = number.repeat_interleave(torch.tensor(documents.lengths)).to(DEVICE)
    parents = documents.parents or (None,) * len(documents.lengths)
    parent = torch.tensor([-1 if p is None else p for p in parents], device=DEVICE)
    distance = positions[:, None] - positions
    family = (own[:, None] == own) | (parent[own][:, None] == own)
    return family & (distance >= 0) & (distance < (window or len(positions)))


def draw(tokens: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v of six query and two key/value heads, sinks, and do."""
    torch.manual_seed(seed)
    q, k, v, do = (torch.randn(tokens, n, 64, device=DEVICE).to(dtype) for n in (6, 2, 2, 6))
    return [q, k, v, torch.linspace(-2, 5, 6, device=DEVICE).to(dtype), do]


def plain(tensors: list[Tensor], mask: Tensor) -> list[Tensor]:
    """o, dq, dk, dv, d_sinks through a softmax over all scores and the sink, and autograd."""
    *given, do = tensors
    q, k, v, sinks = (x.detach().requires_grad_() for x in given)
    heads = [x.transpose(0, 1).repeat_interleave(len(sinks) // x.shape[1], 0) for x in (q, k, v)]
    scores = (heads[0] @ heads[1].mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    column = sinks[:, None, None].expand(-1, len(q), 1)
    p = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    o = (p @ heads[2]).transpose(0, 1)
    o.backward(do)
    return [o.detach(), *(x.grad for x in (q, k, v, sinks))]


def run(
    attention: Attention, tensors: list[Tensor], documents: Documents, window: int | None
) -> list[Tensor]:
    """A layer's attention gives the same o, lse and gradients, with dq written over o."""
    q, k, v, sinks, do = tensors
    o, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), device=DEVICE)
    given = Sinks(sinks, torch.zeros(len(sinks), device=DEVICE))
    call = (QKV(q, k, v), documents, q.shape[-1] ** -0.5, o, lse, window, given)
    take_turns([attention.forward_in_turns(*call)])
    made, out = o.clone(), QKV(o, *map(torch.empty_like, (k, v)))
    take_turns([attention.backward_in_turns(do, *call, out=out)])
    return [made, *out, given.grad]


@pytest.mark.parametrize(("name", "dtype"), BACKENDS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("window", [None, 7])
def test_against_an_explicit_softmax(name, dtype, tree, window) -> None:
    if name == "cudnn" and window:
        pytest.skip("cuDNN has no windows")
    lengths, parents = TREES[tree]
    documents = Documents.of(lengths, parents, device=DEVICE)
    attention, mask = backend(name, dtype), seen(documents, window)
    if parents:
        attention = Prefixed(attention, cross_of(attention))
    runs = []
    for seed in range(6):  # the few numbers of d_sinks scatter in 16 bits
        tensors = draw(sum(lengths), dtype, seed)
        truth, naive = plain([x.double() for x in tensors], mask), plain(tensors, mask)
        runs.append(zip(run(attention, tensors, documents, window), naive, truth, strict=True))
    for label, found in zip("o dq dk dv d_sinks".split(), zip(*runs, strict=True), strict=True):
        ours, naive, truth = map(torch.stack, zip(*found, strict=True))
        assert_exact(label, ours.to(dtype), naive, truth)


def test_frozen_sinks_have_no_gradient() -> None:
    o, lse = torch.ones(3, 2, 8, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    sinks = Sinks(torch.zeros(2, device=DEVICE))
    sinks.add_(o, lse)
    sinks.add_grad_(o, o, lse)
    assert sinks.grad is None and o.unique().tolist() == [0.5]
