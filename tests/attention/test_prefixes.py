"""Prompts that are computed once: o and the gradients against separate rows [prompt + answer]."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config

from exactness import DEVICE, assert_exact, relative_error
from longctx.attention.backends import Math, choose_attention
from longctx.attention.cross import Cross, CrossDocument, cross_of
from longctx.attention.documents import Documents
from longctx.attention.prefixes import Prefixed
from longctx.attention.protocol import QKV, Attention, AttentionCall
from longctx.cost.flops import squared_length
from longctx.errors import UserError
from longctx.loop.metrics import attended

Tree = tuple[int, list[int]]
"""The tokens of a prompt and of its answers."""

BACKENDS = [
    pytest.param("math", torch.float32),
    pytest.param("math", torch.bfloat16),
    pytest.param("flash", torch.bfloat16),
    pytest.param("flash", torch.float32, marks=pytest.mark.skipif(DEVICE == "cuda", reason="half")),
    pytest.param("cudnn", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("fa4", torch.bfloat16, marks=pytest.mark.gpu),
]


def backend(name: str, dtype: torch.dtype) -> Prefixed:
    if name == "fa4":
        pytest.importorskip("flash_attn.cute")
    attention = choose_attention(name, torch.device(DEVICE), dtype)[1]
    return Prefixed(attention, cross_of(attention))


def documents_of(trees: list[Tree]) -> Documents:
    lengths: list[int] = []
    parents: list[int | None] = []
    for prompt, answers in trees:
        parents += [None, *[len(lengths)] * len(answers)]
        lengths += [prompt, *answers]
    return Documents.of(lengths, parents, device=DEVICE)


def seen(documents: Documents, window: int | None) -> Tensor:  # (T, T)
    """Which tokens (columns) each token (row) attends to, by the definition."""
    positions = documents.position_ids()
    number = torch.arange(len(documents.lengths), device=DEVICE)
    parents = torch.tensor(
        [i if p is None else p for i, p in enumerate(documents.parents)] or number.tolist(),
        device=DEVICE,
    )
    own = number.repeat_interleave(torch.tensor(documents.lengths, device=DEVICE))
    distance = positions[:, None] - positions
    family = (own[:, None] == own) | (parents[own][:, None] == own)
    return family & (distance >= 0) & (distance < (window or len(positions)))


def as_one_mask(tensors: list[Tensor], documents: Documents, window: int | None) -> list[Tensor]:
    """o, dq, dk, dv through torch's attention and autograd, each token over all that it sees."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = scaled_dot_product_attention(
        *heads_first, attn_mask=seen(documents, window), enable_gqa=True
    )
    o[0].transpose(0, 1).backward(tensors[3])
    return [o[0].transpose(0, 1).detach(), q.grad, k.grad, v.grad]


def as_rows(
    tensors: list[Tensor],
    documents: Documents,
    window: int | None,
    attention: Attention | None = None,
) -> list[Tensor]:
    """The same by separate rows [prompt + answer], by default through `Math`. A prompt's own do
    counts in the first row, and a shared token's gradients add up over the rows, in fp32."""
    q, k, v, do = tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    found = [torch.zeros_like(x, dtype=wide) for x in (q, q, k, v)]
    tokens = list(documents.slices())
    for prompt in sorted(
        {*range(len(tokens))} - {i for i, p in enumerate(documents.parents) if p is not None}
    ):
        answers = [tokens[i] for i, p in enumerate(documents.parents) if p == prompt]
        for number, answer in enumerate(answers or [slice(0, 0)]):
            row = torch.cat([torch.arange(s.start, s.stop) for s in (tokens[prompt], answer)])
            given = do[row].clone()
            given[: documents.lengths[prompt]] *= number == 0
            alone = Documents.of([len(row)], device=DEVICE)
            parts = run(attention or Math(), [q[row], k[row], v[row], given], alone, window)
            found[0][row] = parts[0].to(wide)
            for total, part in zip(found[1:], parts[1:], strict=True):
                total[row] += part
    return [x.to(q.dtype) for x in found]


def run(
    attention: Attention, tensors: list[Tensor], documents: Documents, window: int | None
) -> list[Tensor]:
    """o, dq, dk, dv as a layer gets them: dq takes the place of o."""
    q, k, v, do = tensors
    scale = q.shape[-1] ** -0.5
    o = torch.full_like(do, torch.nan)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((q.shape[1], len(q)), torch.nan, dtype=wide, device=q.device)
    call = AttentionCall(QKV(q, k, v), documents, scale, o, lse, window)
    attention.forward(call)
    given = o.clone()
    out = QKV(o, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan))
    return [given, *attention.backward(do, call, out)]


def draw(documents: Documents, H: int, K: int, d: int, dtype: torch.dtype, seed=0) -> list[Tensor]:
    """q, k, v, of which k and v are slices of a wider tensor, and do."""
    torch.manual_seed(seed)
    T = sum(documents.lengths)
    q, k, v, do = torch.randn(T, 2 * H + 2 * K, d, device=DEVICE).to(dtype).split([H, K, K, H], 1)
    return [q, k, v, do.contiguous()]


def random_trees(draws: random.Random) -> list[Tree]:
    """Prompts of one token and more, without answers and with up to four."""
    return [
        (draws.choice([1, 2, 9, 31]), draws.choices([1, 2, 7, 20], k=draws.choice([0, 1, 2, 4])))
        for _ in range(draws.choice([1, 2, 3]))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_any_tree_in_fp64(seed) -> None:
    """Windows from one token to longer than all rows; scores that are capped."""
    draws = random.Random(seed)
    documents = documents_of(random_trees(draws))
    window = draws.choice([None, None, 1, 2, 5, 8, 21, 40, 100])
    H, K = draws.choice([(4, 4), (4, 2), (6, 1)])
    attention = Math(draws.choice([None, None, 0.7]))
    tensors = draw(documents, H, K, 8, torch.float64, seed)
    found = run(Prefixed(attention, cross_of(attention)), tensors, documents, window)
    truths = [as_rows(tensors, documents, window, attention)]
    if attention.softcap is None:
        truths.append(as_one_mask(tensors, documents, window))
    for truth in truths:
        for label, x, y in zip("o dq dk dv".split(), found, truth, strict=True):
            # A token that sees itself alone has dq = dk = 0 but for rounding.
            size = max(y.norm().item(), truth[0].norm().item())
            assert (x - y).norm().item() < 1e-12 * size, label


@pytest.mark.parametrize(("name", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("H", "K", "d", "trees", "window"),
    [
        (4, 4, 64, [(33, [7, 12])], None),  # no GQA, a pair
        (4, 1, 96, [(1, [1, 130]), (5, []), (40, [3])], None),  # one token; no answer; one answer
        (8, 1, 128, [(64, [64, 64, 64])], None),  # GQA 8, halves of a block
        (6, 2, 64, [(110, [30, 103])], None),  # more than one tile of queries of `math`
        (4, 2, 64, [(33, [7, 12]), (3, [40])], 9),  # answers shorter and longer than the window
        (4, 2, 64, [(50, [7, 12])], 60),  # a window that all of one answer lies in
        (4, 1, 128, [(300, [130, 5, 200, 1]), (1, [1])], 129),
        (6, 2, 64, [(110, [40, 106])], 77),  # `math`: a window over two tiles
    ],
)
def test_against_truth(name, dtype, H, K, d, trees, window, monkeypatch) -> None:
    monkeypatch.setattr(Math, "TILE", 64)
    if name == "cudnn" and window is not None:
        pytest.skip("cuDNN has no windows")
    documents = documents_of(trees)
    tensors = draw(documents, H, K, d, dtype)
    found = run(backend(name, dtype), tensors, documents, window)
    truth = as_one_mask([x.double() for x in tensors], documents, window)
    naive = as_one_mask(tensors, documents, window)
    for label, ours, plainly, true in zip("o dq dk dv".split(), found, naive, truth, strict=True):
        assert_exact(label, ours, plainly, true)


class Watched(Cross):
    """Records what it is given, and whether it lies in the whole row's tensors."""

    def __init__(self, cross: Cross, whole: list[Tensor]) -> None:
        self.cross = cross
        self.whole = {x.untyped_storage().data_ptr() for x in whole}
        self.sizes: list[tuple[int, int]] = []
        self.copied: list[int] = []

    def _watch(self, *tensors: Tensor) -> None:
        self.copied.append(
            sum(len(x) for x in tensors if x.untyped_storage().data_ptr() not in self.whole)
        )

    def forward(self, qkv, scale, window=None):
        self.sizes.append((len(qkv.q), len(qkv.k)))
        self._watch(*qkv)
        return self.cross.forward(qkv, scale, window)

    def backward(self, do, qkv, scale, o, lse, window=None):
        self._watch(do, o, *qkv)
        return self.cross.backward(do, qkv, scale, o, lse, window)


@pytest.mark.parametrize(
    ("window", "sizes"),
    [
        (None, [(13, 30), (6, 4)]),  # all answers of a prompt in one launch
        (8, [(7, 7), (3, 7), (6, 4)]),  # no more than can see each other
    ],
)
def test_nothing_but_o_of_the_answers_is_copied(window, sizes) -> None:
    documents = documents_of([(30, [10, 3]), (9, []), (4, [6])])
    tensors = draw(documents, 4, 2, 8, torch.float32)
    watched = Watched(cross_of(Math()), tensors)
    run(Prefixed(Math(), watched), tensors, documents, window)
    assert watched.sizes == sizes
    assert watched.copied == [0] * len(sizes) + [queries for queries, _ in sizes]


def test_every_pair_is_counted() -> None:
    """FLOPs count the pairs of tokens that attend to each other, and so do metrics, by positions;
    a prompt of P tokens with answers of A and B has (P^2 + A^2 + B^2) / 2 + (A + B) P."""
    documents = documents_of([(31, [20, 7]), (5, []), (3, [40])])
    positions = documents.position_ids()
    for window in (None, 1, 6, 25, 100):
        pairs = 2 * int(seen(documents, window).sum()) - len(positions)
        parts = zip(documents.lengths, documents.before, strict=True)
        assert pairs == sum(squared_length(n, window, before) for n, before in parts)
        config = Qwen2Config(
            num_hidden_layers=2,
            use_sliding_window=window is not None,
            sliding_window=window,
            max_window_layers=0,
        )
        assert attended(config, positions[None]) == 2 * 4096 * pairs
    P, A, B = 31, 20, 7
    area = squared_length(P) + squared_length(A, before=P) + squared_length(B, before=P)
    assert area == 2 * (P * P / 2 + A * P + B * P + A * A / 2 + B * B / 2)


def test_a_backend_without_a_second_call_is_refused_by_name() -> None:
    class Strange(Math):
        pass

    with pytest.raises(UserError, match="Strange attention cannot share prompts .* use Flash"):
        cross_of(Strange())


class Rounding(CrossDocument):
    """Gives gradients in the inputs' dtype, as kernels for GPUs do."""

    def backward(self, do, qkv, scale, o, lse, window=None):
        grads = super().backward(do, qkv, scale, o, lse, window)
        return tuple(grad.to(do.dtype) for grad in grads)


def test_gradients_of_many_answers_are_rounded_once() -> None:
    """With a window each answer has a launch, and a bf16 sum of sixteen would round each time."""
    documents = documents_of([(40, [30] * 16)])
    tensors = draw(documents, 4, 1, 16, torch.bfloat16)
    found = run(Prefixed(Math(), Rounding(Math())), tensors, documents, 25)
    truth = run(backend("math", torch.float64), [x.double() for x in tensors], documents, 25)
    for x, true in zip(found[2:], truth[2:], strict=True):
        # A rounding costs 2^-9 at most: of each answer's part, of the first call's, of the sum.
        assert relative_error(x[:40], true[:40]) < 2 * 2**-9


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa4", "flash", "cudnn"])
def test_long_prompts_on_a_gpu(name) -> None:
    """A pair, and eight answers, of the length where tiles are full, against fp32 `math`."""
    for trees in ([(20000, [1000, 900])], [(4096, [512] * 8), (3000, [77, 1, 2048])]):
        documents = documents_of(trees)
        tensors = draw(documents, 8, 2, 128, torch.bfloat16)
        for window in (None, 1024)[: 1 + (name != "cudnn")]:
            found = run(backend(name, torch.bfloat16), tensors, documents, window)
            wide = [x.float() for x in tensors]
            truth = run(backend("math", torch.float32), wide, documents, window)
            naive = as_rows(tensors, documents, window, backend(name, torch.bfloat16).attention)
            for label, *x in zip("o dq dk dv".split(), found, naive, truth, strict=True):
                assert_exact(label, *x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa4", "flash"])
def test_repeats_itself_where_it_is_asked_to(name) -> None:
    documents = documents_of([(700, [130, 300]), (60, [9])])
    tensors = draw(documents, 8, 2, 128, torch.bfloat16)
    attention = backend(name, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        for window in (None, 100):
            first, second = (run(attention, tensors, documents, window) for _ in range(2))
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
