"""Attention backends against fp64 truth by the rule of tests/exactness.py, documents included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from exactness import DEVICE, assert_exact
from longctx.attention.backends import Efficient, choose_attention
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, AttentionCall
from longctx.errors import UserError
from longctx.layer.passes import Schedule
from longctx.layer.specs.attention_spec import AttentionSpec

BACKENDS = [
    pytest.param("math", torch.float32),
    pytest.param("math", torch.bfloat16),
    pytest.param("flash", torch.bfloat16),
    pytest.param("flash", torch.float32, marks=pytest.mark.skipif(DEVICE == "cuda", reason="half")),
    pytest.param("cudnn", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("fa4", torch.bfloat16, marks=pytest.mark.gpu),
]


def backend(name: str, dtype: torch.dtype, **needs: Any) -> Attention:
    if name == "fa4":
        pytest.importorskip("flash_attn.cute")
    return choose_attention(name, torch.device(DEVICE), dtype, **needs)[1]


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lengths: list[int],
    window: int | None = None,
    repeat: bool = False,
) -> list[Tensor]:
    """o, dq, dk, dv document by document, through torch's attention and autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    shared = q.shape[1] // k.shape[1] if repeat else 1
    wide = (q, *(x.repeat_interleave(shared, dim=1) for x in (k, v)))
    pieces = []
    for parts in zip(*(x.split(lengths) for x in wide), strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in parts)
        i = torch.arange(len(parts[0]), device=q.device)
        mask = i[:, None] >= i
        if window is not None:
            mask &= i > i[:, None] - window  # as transformers.masking_utils.sliding_window_overlay
        causal = dict(is_causal=True) if window is None else dict(attn_mask=mask)
        o = scaled_dot_product_attention(*heads_first, **causal, enable_gqa=True)
        pieces.append(o[0].transpose(0, 1))
    o = torch.cat(pieces)
    o.backward(do)
    return [o, q.grad, k.grad, v.grad]


@pytest.mark.parametrize(("name", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("H", "K", "d", "lengths"),
    [
        (4, 4, 64, [33]),  # no GQA, one document
        (4, 1, 96, [1, 130, 5]),  # GQA 4, a document of one token, one over a block of 128
        (8, 1, 128, [64, 64]),  # GQA 8, documents of exactly half a block
        (4, 2, 24, [65]),  # the smallest heads of flash-attn-4
        (6, 2, 64, [1100]),  # GQA 3, more than one tile of queries of the math backend
    ],
)
def test_against_truth(name, dtype, H, K, d, lengths) -> None:
    check(backend(name, dtype), dtype, H, K, d, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[333], [1, 130, 64]])
def test_heads_over_256(lengths) -> None:
    """Gemma 4's, of 512, in torch's memory-efficient op, which is what torch takes for keys that
    were repeated; for keys that queries share it computes in fp32 on a GPU, with all scores."""
    attention = backend("auto", torch.bfloat16, head_dim=512)
    assert isinstance(attention, Efficient)
    check(attention, torch.bfloat16, 4, 2, 512, lengths, repeat=True)


def check(
    attention: Attention,
    dtype: torch.dtype,
    H: int,
    K: int,
    d: int,
    lengths: list[int],
    repeat: bool = False,
) -> None:
    """Forward and backward, into strided views as the layer has them. `repeat`: beside torch's
    attention over repeated keys and values."""
    torch.manual_seed(0)
    T = sum(lengths)
    buffer = torch.randn(T, H + 2 * K, d, device=DEVICE, dtype=dtype)  # q, k, v are strided views
    q, k, v = buffer.split([H, K, K], dim=1)
    do = torch.randn(T, H, d, device=DEVICE, dtype=dtype)
    truth = plain(*(x.double() for x in (q, k, v, do)), lengths)
    naive = plain(q, k, v, do, lengths, repeat=repeat)

    documents = Documents.of(lengths, device=DEVICE)
    wide = torch.full((T, 2 * H, d), torch.nan, device=DEVICE, dtype=dtype)
    o = wide[:, :H]  # a slice of a wider buffer, as a head group writes it
    lse = torch.full((H, T), torch.nan, device=DEVICE)
    call = AttentionCall(QKV(q, k, v), documents, d**-0.5, o, lse)
    attention.forward(call)
    given = o.clone()
    dkv = torch.full((T, 2 * K, d), torch.nan, device=DEVICE, dtype=dtype)
    out = QKV(o, *dkv.split(K, dim=1))  # as the layer has them: dq in o's place
    grads = attention.backward(do, call, out)
    assert all(x is y for x, y in zip(grads, out, strict=True))
    assert wide[:, H:].isnan().all()
    for label, ours, plainly, true in zip(
        "o dq dk dv".split(), (given, *grads), naive, truth, strict=True
    ):
        assert_exact(label, ours, plainly, true)


@pytest.mark.parametrize(
    ("name", "dtype"), [backend for backend in BACKENDS if backend.values[0] != "cudnn"]
)
@pytest.mark.parametrize(
    ("H", "K", "d", "lengths", "window"),
    [
        (4, 2, 64, [33], 2),  # each token sees itself and one more
        (4, 1, 96, [1, 130, 5], 7),  # documents shorter and longer than the window
        (8, 1, 128, [300, 64], 64),  # a window of half a block, one as long as its document
        (6, 2, 64, [1100, 40], 1025),  # math: a window over two tiles
        (4, 2, 128, [1100], 129),
    ],
)
def test_windows(name, dtype, H, K, d, lengths, window) -> None:
    torch.manual_seed(0)
    attention = backend(name, dtype)
    T = sum(lengths)
    q, k, v = torch.randn(T, H + 2 * K, d, device=DEVICE, dtype=dtype).split([H, K, K], dim=1)
    do = torch.randn(T, H, d, device=DEVICE, dtype=dtype)
    truth = plain(*(x.double() for x in (q, k, v, do)), lengths, window)
    naive = plain(q, k, v, do, lengths, window)
    documents = Documents.of(lengths, device=DEVICE)
    o, lse = torch.empty_like(do), torch.full((H, T), torch.nan, device=DEVICE)
    call = AttentionCall(QKV(q, k, v), documents, d**-0.5, o, lse, window)
    attention.forward(call)
    grads = attention.backward(do, call)
    for label, ours, plainly, true in zip(
        "o dq dk dv".split(), (o, *grads), naive, truth, strict=True
    ):
        assert_exact(label, ours, plainly, true)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [b for b in BACKENDS if b.values[0] in ("math", "fa4") or DEVICE == "cpu"],
)
@pytest.mark.parametrize(
    ("H", "K", "d", "lengths", "window"),
    [(4, 1, 96, [1, 130, 5], None), (4, 2, 64, [300, 64], 64), (1, 1, 256, [1030], None)],
)
def test_capped_scores(name, dtype, H, K, d, lengths, window) -> None:
    """Against the same with eager attention, as in Gemma 2: both for small caps and for large."""
    torch.manual_seed(0)
    T, documents = sum(lengths), Documents.of(lengths, device=DEVICE)
    q, k, v = torch.randn(T, H + 2 * K, d, device=DEVICE, dtype=dtype).split([H, K, K], dim=1)
    do = torch.randn(T, H, d, device=DEVICE, dtype=dtype)
    for cap in (0.7, 50.0):
        attention = backend(name, dtype, softcap=cap, head_dim=d)
        truth = eager(*(x.double() for x in (q, k, v, do)), lengths, window, cap)
        naive = eager(q, k, v, do, lengths, window, cap)
        o, lse = torch.empty_like(do), torch.full((H, T), torch.nan, device=DEVICE)
        call = AttentionCall(QKV(q, k, v), documents, d**-0.5, o, lse, window)
        attention.forward(call)
        grads = attention.backward(do, call)
        for label, ours, plainly, true in zip(
            "o dq dk dv".split(), (o, *grads), naive, truth, strict=True
        ):
            assert_exact(f"{label}, cap {cap}", ours, plainly, true)


def eager(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lengths: list[int], window: int | None, cap: float
) -> list[Tensor]:
    """o, dq, dk, dv through Gemma 2's eager attention."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    pieces = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        i = torch.arange(len(parts[0]), device=q.device)
        unseen = (i[:, None] < i) | (i <= i[:, None] - (window or len(i)))
        mask = torch.zeros(len(i), len(i), device=q.device, dtype=q.dtype)
        mask = mask.masked_fill_(unseen, torch.finfo(q.dtype).min)
        groups = SimpleNamespace(
            num_key_value_groups=q.shape[1] // k.shape[1], head_dim=q.shape[2], training=True
        )
        heads_first = (x.transpose(0, 1)[None] for x in parts)
        scale = q.shape[2] ** -0.5
        o, _ = eager_attention_forward(groups, *heads_first, mask, scaling=scale, softcap=cap)
        pieces.append(o[0])
    o = torch.cat(pieces)
    o.backward(do)
    return [o, q.grad, k.grad, v.grad]


def test_a_window_as_long_as_the_longest_document_is_none() -> None:
    """The schedule passes none then, so that cuDNN runs and no kernel is a slower one."""
    sizes = dict(hidden=8, heads=1, kv_heads=1, head_dim=8)
    spec, seen = AttentionSpec(**sizes, scale=1.0, window=5), []
    for lengths, parents in (
        ([5, 3], None),
        ([6, 3], None),
        ([3, 2], [None, 0]),
        ([3, 3], [None, 0]),
    ):
        documents = Documents.of(lengths, parents)
        seen.append(Schedule.window(SimpleNamespace(documents=documents), spec))
    assert seen == [None, 5, None, 5]


def test_documents_start_where_positions_do_not_go_on() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [5, 6, 7, 8, 0, 0, 1, 2]])
    documents = Documents.from_position_ids(positions)
    assert documents.lengths == (3, 5, 4, 1, 3)
    assert documents.cu_seqlens.tolist() == [0, 3, 8, 12, 13, 16]
    assert [s.stop - s.start for s in documents.slices()] == [3, 5, 4, 1, 3]


def test_a_mask_leaves_out_what_is_not_real() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]]).repeat(3, 1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
    documents, real = Documents.of_batch(positions, mask)
    assert documents.lengths == (4, 3) and real.tolist() == [0, 1, 2, 3, 8, 10, 11]
    documents, real = Documents.of_batch(positions, torch.ones_like(mask))
    assert documents.lengths == (6, 6, 6) and real is None
    documents, real = Documents.of_batch(positions, None, torch.tensor([0, 3, 9, 9, 18]))
    assert documents.lengths == (3, 6, 9) and real is None
    assert Documents.of_batch(positions)[0].lengths == (3, 3, 3, 3, 3, 3)


def test_an_answer_goes_on_from_its_prompt() -> None:
    documents = Documents.of([4, 2, 3, 5], [None, 0, 0, None])
    assert documents.parents == (None, 0, 0, None)
    assert documents.before == (0, 4, 4, 0) and documents.longest == 7
    assert documents.position_ids().tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3, 4]
    assert documents.prompts == [(slice(0, 4), [slice(4, 6), slice(6, 9)])]
    arguments = documents.arguments()
    assert arguments["parents"].tolist() == [-1, 0, 0, -1]
    again, _ = Documents.of_batch(
        arguments["position_ids"], None, arguments["cu_seq_lens_q"], arguments["parents"]
    )
    assert (again.lengths, again.parents) == (documents.lengths, documents.parents)
    alone = Documents.of([4, 2], [None, -1])
    assert alone.parents == () and alone.longest == 4 and "parents" not in alone.arguments()


def test_empty_documents_are_left_out() -> None:
    """Numbers count the documents that were given; who continues an empty one continues none."""
    documents = Documents.of([0, 4, 0, 2, 0, 3, 1], [None, None, 1, 1, None, 1, 4])
    assert documents.lengths == (4, 2, 3, 1) and documents.parents == (None, 0, 0, None)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([None, 0], "parents has 2 values for 4 documents"),
        (torch.device("cpu"), "parents is a sequence with an entry per document, got device"),
        ([None, 1, None, None], "the parent of document 1 must be the number of an earlier .* 1"),
        ([None, 4, None, None], "the parent of document 1 must be .* got 4"),
        ([None, -2, None, None], "the parent of document 1 must be .* got -2"),
        ([None, 0.0, None, None], "lengths and parents of documents are integers, got 0.0"),
        (torch.tensor(-1), "parents has 1 value for 4 documents"),
        ([None, 0, 1, None], "document 2 continues document 1, which continues document 0: .* one"),
        ([None, None, 0, None], "document 2 must follow its parent, document 0, or another"),
        ([None, 0, None, 0], "document 3 must follow its parent, document 0, or another"),
    ],
)
def test_parents_that_cannot_be(parents, message) -> None:
    with pytest.raises(UserError, match=message):
        Documents.of([3, 2, 2, 1], parents)


def test_lengths_are_whole_numbers() -> None:
    documents = Documents.of(torch.tensor([3, 2]), np.array([-1, 0]))
    assert documents.lengths == (3, 2) and documents.parents == (None, 0)
    with pytest.raises(UserError, match="no negative length"):
        Documents.of([3, -1])
    with pytest.raises(UserError, match="lengths and parents .* are integers, got 2.5"):
        Documents.of([3, 2.5])


def test_choice_of_the_backend() -> None:
    cpu = torch.device("cpu")
    assert choose_attention("auto", cpu, torch.float32)[0] == "flash"
    assert choose_attention("auto", cpu, torch.float16)[0] == "math"
    with pytest.raises(UserError, match="--attn_backend cudnn needs a GPU"):
        choose_attention("cudnn", cpu, torch.float32)
    with pytest.raises(UserError, match="--attn_backend sdpa is for --class_type vanilla"):
        choose_attention("sdpa", cpu, torch.float32)


@pytest.mark.gpu
def test_fp32_on_a_gpu_takes_math_or_says_why_not() -> None:
    gpu = torch.device("cuda")
    assert choose_attention("auto", gpu, torch.float32)[0] == "math"
    with pytest.raises(UserError, match="needs --dtype bfloat16"):
        choose_attention("cudnn", gpu, torch.float32)
