"""Sinks with each backend, against an explicit softmax with one column more, in fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pairs import pairs
from test_attention import BACKENDS, backend
from torch import Tensor

from exactness import DEVICE, assert_exact
from longctx.attention import flash4
from longctx.attention.backends import FlashAttention4, Math, PerDocument
from longctx.attention.cross import cross_of
from longctx.attention.documents import Documents
from longctx.attention.prefixes import Prefixed
from longctx.attention.protocol import QKV, Attention, AttentionCall, take_turns
from longctx.attention.sinks import Sinks, add_grad_, merge_sinks_
from longctx.kernels.sinks import sinks_grad

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
    call = AttentionCall(QKV(q, k, v), documents, q.shape[-1] ** -0.5, o, lse, window, given)
    take_turns([attention.forward_in_turns(call)])
    made, out = o.clone(), QKV(o, *map(torch.empty_like, (k, v)))
    take_turns([attention.backward_in_turns(do, call, out)])
    return [made, *out, given.grad]


@pytest.mark.parametrize(
    ("name", "dtype", "tree", "window"),
    [
        pytest.param(*backend.values, tree, window, marks=backend.marks)
        for backend, tree, window in pairs(BACKENDS, [*TREES], (None, 7))
    ],
)
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
    merge_sinks_(o, lse, sinks)
    add_grad_(sinks, o, o, lse)
    assert sinks.grad is None and o.unique().tolist() == [0.5]


def call_of(dtype: torch.dtype, seed: int = 0) -> tuple[AttentionCall, Tensor]:
    """A call with sinks, over documents, and do."""
    q, k, v, logits, do = draw(48, dtype, seed)
    o, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), device=DEVICE)
    sinks = Sinks(logits, torch.zeros(len(logits), device=DEVICE))
    documents = Documents.of([33, 1, 14], device=DEVICE)
    return AttentionCall(QKV(q, k, v), documents, q.shape[-1] ** -0.5, o, lse, None, sinks), do


def test_plain_torch_rounds_o_once() -> None:
    """In 16 bits it gives what fp32 gives, rounded; merged into a result in 16 bits, sinks round
    once more."""
    attention = Math()
    (call, _), (wide, _) = call_of(torch.bfloat16), call_of(torch.bfloat16)
    wide = wide._replace(qkv=QKV(*(x.float() for x in wide.qkv)), o=wide.o.float())
    attention.forward(call)
    attention.forward(wide)
    once = call.o.clone()
    assert torch.equal(once, wide.o.bfloat16()) and torch.equal(call.lse, wide.lse)
    PerDocument.forward(attention, call)
    errors = [float((x.float() - wide.o).norm()) for x in (once, call.o)]
    assert 1.1 * errors[0] < errors[1]
    torch.testing.assert_close(call.lse, wide.lse)


class Package:
    """flash-attn-4's two functions in plain torch, which says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[torch.Tensor | None] = []

    def forward(
        self, *qkv, softmax_scale, out, lse, cu_seqlens_q, learnable_sink=None, **options
    ) -> None:
        self.asked.append(learnable_sink)
        sinks = None if self.asked[-1] is None else Sinks(self.asked[-1])
        given = QKV(*qkv), self._documents(cu_seqlens_q), softmax_scale, out, lse, None, sinks
        Math().forward(AttentionCall(*given))

    def backward(
        self, q, k, v, o, do, lse, *, softmax_scale, cu_seqlens_q, learnable_sink=None, **options
    ):
        self.asked.append(learnable_sink)
        given = self._documents(cu_seqlens_q), softmax_scale, o, lse
        grads = Math().backward(do, AttentionCall(QKV(q, k, v), *given))
        if self.asked[-1] is not None:
            found = sinks_grad(do, o, lse, self.asked[-1])
            return *grads, found.to(self.asked[-1].dtype)
        return (*grads,)

    @staticmethod
    def _documents(bounds: torch.Tensor) -> Documents:
        return Documents.of(bounds.diff().tolist(), device=DEVICE)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_flash_attention_4_has_sinks_in_its_softmax(inside, frozen, monkeypatch) -> None:
    """Where it can, in fp32, so that nothing of their gradient is rounded; and for a gradient only
    if somebody wants one. Elsewhere they are merged, and the numbers are the same to rounding."""
    package = Package()
    interface = SimpleNamespace(_flash_attn_fwd=package.forward, _flash_attn_bwd=package.backward)
    monkeypatch.setattr(flash4, "load", lambda: interface)
    monkeypatch.setattr(flash4, "takes_sinks", lambda device, head_dim: inside)
    found = []
    for attention in (FlashAttention4(), Math()):
        call, do = call_of(torch.float32)
        if frozen:
            call = call._replace(sinks=Sinks(call.sinks.logits))
        attention.forward(call)
        grads = attention.backward(do, call)
        found.append([call.o, call.lse, *grads, *([] if frozen else [call.sinks.grad])])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)
    forward, backward = package.asked
    assert (forward is not None) == inside and (backward is not None) == (inside and not frozen)
    assert all(x is None or (x.dtype, x.shape) == (torch.float32, (6,)) for x in package.asked)


def test_a_flash_attention_4_without_their_gradient(monkeypatch) -> None:
    def backward(q, k, v, out, dout, lse, softmax_scale=None): ...

    interface = SimpleNamespace(_flash_attn_fwd=None, _flash_attn_bwd=backward)
    monkeypatch.setattr(flash4, "load", lambda: interface)
    monkeypatch.setattr(flash4, "takes_sinks", lambda device, head_dim: True)
    assert not FlashAttention4()._has_sinks(torch.zeros(3, 2, 64))


@pytest.mark.parametrize(
    ("major", "head_dim", "takes"),
    [(9, 64, True), (9, 256, True), (10, 64, True), (10, 256, False), (12, 64, False)],
)
def test_gpus_whose_kernels_have_sinks(major, head_dim, takes, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert flash4.takes_sinks(torch.device("cuda"), head_dim) == takes


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7, 128])
def test_flash_attention_4_as_plain_torch_at_gpt_oss_shapes(window) -> None:
    """64 heads of 64 over 8 of keys, in one group of heads and in a slice of them: o, lse and the
    gradients of q, k, v and sinks under the rule, and o nearer than with sinks merged."""
    torch.manual_seed(0)
    attention, documents = (
        backend("fa4", torch.bfloat16),
        Documents.of([700, 1, 333], device=DEVICE),
    )
    q, do = (torch.randn(1034, 64, 64, device=DEVICE).bfloat16() for _ in range(2))
    k, v = (torch.randn(1034, 8, 64, device=DEVICE).bfloat16() for _ in range(2))
    logits = torch.linspace(-2, 5, 64, device=DEVICE).bfloat16()
    errors = []
    for which in (slice(0, 64), slice(24, 32)):
        of_keys = slice(which.start // 8, which.stop // 8)
        heads = [q[:, which], k[:, of_keys], v[:, of_keys], logits[which], do[:, which]]
        truth = run(Math(), [x.float() for x in heads], documents, window)
        for merged in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flash4, "takes_sinks", lambda device, head_dim, m=merged: not m)
                found = run(attention, heads, documents, window)
            for ours, wanted in zip(found, truth, strict=True):
                assert float((ours.float() - wanted).norm() / wanted.norm()) < 0.02
            errors.append(float((found[0].float() - truth[0]).norm()))
    assert errors[0] < errors[1] and errors[2] < errors[3]
