"""The second call of the backends that need a GPU, over stand-ins for their kernels in plain torch:
which arguments they get, which keys their windows show, and what they give. The stand-ins of
torch's ops take their arguments by the ops' own schemas."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_prefixes import as_one_mask, as_rows, documents_of, draw, run
from torch import Tensor

from longctx.attention import backends, cross, flash4
from longctx.attention.backends import (
    BACKENDS,
    Cudnn,
    Flash,
    FlashAttention4,
    FlashOnCpu,
    Math,
)
from longctx.attention.by_length import ByLength
from longctx.attention.cross import CROSS, cross_of
from longctx.attention.prefixes import Prefixed
from longctx.attention.protocol import Attention
from longctx.errors import UserError


def scores(q: Tensor, k: Tensor, scale: float, left: Any, right: Any, cap: float) -> Tensor:
    """Of (1, H, n, d) and (1, K, m, d), where row i of n sees i + m - n - left to i + m - n + right
    (flash_attn/cute/mask.py of flash-attn-4, src/mask.h of FlashAttention-2)."""
    n, m = q.shape[2], k.shape[2]
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    s = (s / cap).tanh() * cap if cap else s
    if left is None:
        return s
    assert left >= 0 and right >= 0
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    return s.masked_fill((j < i - left) | (j > i + right), -torch.inf)


def attend(q, k, v, scale, left=None, right=None, cap=0.0) -> tuple[Tensor, Tensor]:
    s = scores(q, k, scale, left, right, cap)
    return s.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), s.logsumexp(-1)


def attend_back(do, q, k, v, o, lse, scale, left=None, right=None, cap=0.0) -> tuple[Tensor, ...]:
    """As flash-attention's: of whatever o and lse it is given."""
    assert lse.is_contiguous() and lse.shape == q.shape[:3]
    s = scores(q, k, scale, left, right, cap)
    p = (s - lse[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    ds = p * (do @ wide_v.mT - (do * o).sum(-1, keepdim=True)) * scale
    if cap:
        ds = ds * (1 - (s / cap).clamp(min=-1) ** 2)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (ds.mT @ q, p.mT @ do))
    return ds @ wide_k, dk, dv


def swapped(*tensors: Tensor) -> list[Tensor]:
    """(1, n, H, d) -> (1, H, n, d), and back."""
    return [x.transpose(1, 2) for x in tensors]


def flash4_forward(
    *tensors,
    softmax_scale,
    causal,
    softcap,
    return_lse,
    window_size_left=None,
    window_size_right=None,
) -> Any:
    assert return_lse and not causal
    sides = window_size_left, window_size_right
    o, lse = attend(*swapped(*tensors), softmax_scale, *sides, softcap)
    return o.transpose(1, 2), lse, None, None, None


def flash4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    softmax_scale,
    causal,
    softcap,
    deterministic,
    window_size_left=None,
    window_size_right=None,
) -> Any:
    assert not causal and deterministic == torch.are_deterministic_algorithms_enabled()
    sides = window_size_left, window_size_right
    tensors = swapped(dout, q, k, v, out)
    return swapped(*attend_back(*tensors, lse, softmax_scale, *sides, softcap))


def by_schema(op: str, function: Any) -> Any:
    """Calls `function` with the arguments of torch's op by name, which must all be known."""
    schema = getattr(torch.ops.aten, op).default._schema

    def call(*args: Any, **kwargs: Any) -> Any:
        positional = [a.name for a in schema.arguments if not a.kwarg_only]
        given = dict(zip(positional[: len(args)], args, strict=True)) | kwargs
        assert given.keys() <= {a.name for a in schema.arguments}
        missing = [a.name for a in schema.arguments if not a.has_default_value()]
        assert [name for name in missing if name not in given] == []
        return function(SimpleNamespace(**given))

    return call


def sides(a: SimpleNamespace) -> tuple[int | None, int | None]:
    return getattr(a, "window_size_left", None), getattr(a, "window_size_right", None)


def flash_forward(a: SimpleNamespace) -> tuple[Any, ...]:
    assert (a.cum_seq_q, a.cum_seq_k, a.dropout_p, a.is_causal) == (None, None, 0.0, False)
    assert (a.max_q, a.max_k) == (a.query.shape[1], a.key.shape[1])
    o, lse = attend(*swapped(a.query, a.key, a.value), a.scale, *sides(a))
    return o.transpose(1, 2), lse, None, None, None


def flash_backward(a: SimpleNamespace) -> list[Tensor]:
    assert (a.cum_seq_q, a.cum_seq_k, a.dropout_p, a.is_causal) == (None, None, 0.0, False)
    assert (a.max_q, a.max_k) == (a.query.shape[1], a.key.shape[1])
    do, *tensors = swapped(a.grad_out, a.query, a.key, a.value, a.out)
    return swapped(*attend_back(do, *tensors, a.logsumexp, a.scale, *sides(a)))


def cudnn_forward(a: SimpleNamespace) -> tuple[Any, ...]:
    assert (a.attn_bias, a.compute_log_sumexp, a.dropout_p, a.is_causal) == (None, True, 0.0, False)
    assert 1 not in (a.query.shape[2], a.key.shape[2])
    o, lse = attend(a.query, a.key, a.value, a.scale)
    return o, lse[..., None], *(None,) * 7


def cudnn_backward(a: SimpleNamespace) -> tuple[Tensor, ...]:
    assert (a.attn_bias, a.cum_seq_q, a.cum_seq_k, a.is_causal) == (None, None, None, False)
    assert (a.max_q, a.max_k) == (a.query.shape[2], a.key.shape[2]) and 1 not in (a.max_q, a.max_k)
    lse = a.logsumexp[..., 0]
    return attend_back(a.grad_out, a.query, a.key, a.value, a.out, lse, a.scale)


OPS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


@pytest.fixture
def kernels(monkeypatch) -> None:
    interface = SimpleNamespace(_flash_attn_fwd=flash4_forward, _flash_attn_bwd=flash4_backward)
    monkeypatch.setattr(flash4, "load", lambda: interface)
    ops = SimpleNamespace(**{name: by_schema(name, function) for name, function in OPS.items()})
    monkeypatch.setattr(cross, "aten", ops)
    monkeypatch.setattr(backends, "aten", ops)


WINDOWS = [None, 2, 6, 8, 21, 29, 40]
"""Shorter than, as long as and longer than answers and prompts."""


Backend = Callable[[], Attention]


def by_length() -> ByLength:
    """Its second call runs some of the tests' answers in cuDNN, and others in flash."""
    return ByLength(Flash(), Cudnn(), long_tokens=20)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *((kind, window) for kind in (FlashAttention4, Flash) for window in WINDOWS),
        *((Cudnn, window) for window in (None, 40)),
        *((by_length, window) for window in (None, 40)),
    ],
)
def test_kernels_get_and_give_what_they_should(
    kind: Callable[[], Attention], window, kernels
) -> None:
    documents = documents_of([(20, [9, 1, 8]), (7, [2, 20]), (1, [3]), (5, [])])
    tensors = draw(documents, 4, 2, 8, torch.float64)
    found = run(Prefixed(Math(), cross_of(kind())), tensors, documents, window)
    for x, true in zip(found, as_one_mask(tensors, documents, window), strict=True):
        torch.testing.assert_close(x, true, rtol=1e-12, atol=1e-12)


def test_cudnn_has_no_windows() -> None:
    documents = documents_of([(20, [9])])
    with pytest.raises(UserError, match="cudnn has no sliding windows"):
        tensors = draw(documents, 4, 2, 8, torch.float64)
        run(Prefixed(Math(), cross_of(Cudnn())), tensors, documents, 8)


@pytest.mark.parametrize("kind", [FlashAttention4, FlashOnCpu, Math])
def test_scores_are_capped_where_the_backend_caps_them(kind: type[Attention], kernels) -> None:
    documents = documents_of([(20, [9, 8])])
    tensors = draw(documents, 4, 2, 8, torch.float64)
    for window in (None, 6):
        found = run(Prefixed(Math(0.7), cross_of(kind(0.7))), tensors, documents, window)
        for x, true in zip(found, as_rows(tensors, documents, window, Math(0.7)), strict=True):
            torch.testing.assert_close(x, true, rtol=1e-12, atol=1e-12)


def test_every_backend_has_a_second_call() -> None:
    assert CROSS.keys() == {*BACKENDS.values(), FlashOnCpu}
