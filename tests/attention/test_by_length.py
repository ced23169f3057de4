"""Documents in two backends by their length, against one backend for all of them."""

from __future__ import annotations

import pytest
import torch
from test_attention import plain
from torch import Tensor

from exactness import DEVICE, assert_exact
from longctx.attention.backends import Cudnn, Flash, FlashOnCpu, Math
from longctx.attention.by_length import ByLength
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, AttentionCall

LENGTHS = [
    [3, 2, 40, 41, 1, 39, 64],  # runs of both, of one and of more documents
    [40],
    [1, 2, 3],
]
LONG = 40


def outputs(
    attention: Attention, qkv: QKV, do: Tensor, lengths: list[int], in_place: bool = False
) -> list[Tensor]:
    """o, lse, dq, dk, dv; dq in the place of o, as the layer has it, or in tensors of their own."""
    T, H, d = do.shape
    documents = Documents.of(lengths, device=do.device)
    sums = torch.float64 if do.dtype == torch.float64 else torch.float32
    o, lse = (torch.full_like(x, torch.nan) for x in (do, do.new_empty(H, T, dtype=sums)))
    call = AttentionCall(qkv, documents, d**-0.5, o, lse)
    attention.forward(call)
    kept = o.clone()
    out = QKV(o, *(torch.full_like(x, torch.nan) for x in qkv[1:])) if in_place else None
    grads = attention.backward(do, call, out)
    assert out is None or all(x is y for x, y in zip(grads, out, strict=True))
    return [kept, lse, *grads]


def draw(lengths: list[int], dtype: torch.dtype, d: int = 64) -> tuple[QKV, Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(sum(lengths), 12, d, device=DEVICE, dtype=dtype)
    return QKV(*rows[:, :8].split([4, 2, 2], dim=1)), rows[:, 8:].contiguous()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_each_document_is_that_of_its_backend(lengths: list[int], in_place: bool) -> None:
    short, long = Watched(), Watched()
    qkv, do = draw(lengths, torch.float64)
    found = outputs(ByLength(short, long, LONG), qkv, do, lengths, in_place)
    for x, true in zip(found, outputs(Math(), qkv, do, lengths), strict=True):
        torch.testing.assert_close(x, true, rtol=1e-12, atol=1e-12)
    assert sorted(short.seen + long.seen) == sorted(lengths)
    assert max(short.seen, default=0) < LONG <= min(long.seen, default=LONG)


class Watched(Math):
    """Keeps the lengths of the documents that forward was called with, and checks their bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, call: AttentionCall) -> None:
        documents = call.documents
        self.seen += documents.lengths
        assert documents.cu_seqlens.diff().tolist() == list(documents.lengths)
        assert documents.cu_seqlens[0] == 0 and len(call.qkv.q) == sum(documents.lengths)
        super().forward(call)


def test_a_continuation_is_in_the_backend_of_a_document_with_as_many_scores() -> None:
    attention = ByLength(FlashOnCpu(), Math(), LONG)
    assert attention.of_scores(40, 20) is attention.long
    assert attention.of_scores(39, 20) is attention.short
    assert attention.of_scores(1, 800) is attention.long


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[300, 1, 40, 1100, 1024, 17], [1024], [5, 900]], ids=str)
def test_on_a_gpu(lengths: list[int]) -> None:
    qkv, do = draw(lengths, torch.bfloat16, 128)
    o, _, *grads = outputs(ByLength(Flash(), Cudnn(), 1024), qkv, do, lengths, in_place=True)
    truth = plain(*(x.double() for x in (*qkv, do)), lengths)
    naive = plain(*qkv, do, lengths)
    for label, *tensors in zip("o dq dk dv".split(), (o, *grads), naive, truth, strict=True):
        assert_exact(label, *tensors)
