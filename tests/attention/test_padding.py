"""Attention of padding that is read: o and the gradients against torch's with the mask itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from exactness import DEVICE, assert_exact
from longctx.attention.backends import choose_attention
from longctx.attention.cross import cross_of
from longctx.attention.padding import Padded, Row, rows_of, sorted_rows
from longctx.attention.protocol import QKV, AttentionCall

BACKENDS = [
    pytest.param("math", torch.float32),
    pytest.param("flash", torch.bfloat16),
    pytest.param("flash", torch.float32, marks=pytest.mark.skipif(DEVICE == "cuda", reason="half")),
    pytest.param("cudnn", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("fa4", torch.bfloat16, marks=pytest.mark.gpu),
]
ROWS = {
    "left": [Row(5, 24, 0), Row(28, 1, 0), Row(0, 29, 0)],
    "right": [Row(0, 20, 9), Row(0, 1, 28), Row(0, 29, 0)],
    "both": [Row(3, 19, 7), Row(14, 1, 14), Row(1, 27, 1)],
    "an empty row": [Row(0, 20, 9), Row(29, 0, 0), Row(4, 25, 0)],
}


def by_mask(
    tensors: list[Tensor], rows: list[Row], window: int | None, blind: bool
) -> list[Tensor]:
    """o, dq, dk, dv of each row by itself; tokens that see nothing have o = 0."""
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
    found = []
    for number, (left, real, right) in enumerate(rows):
        length = left + real + right
        tokens = slice(number * length, (number + 1) * length)
        at = torch.arange(length, device=DEVICE)
        is_real = (at >= left) & (at < left + real)
        distance = at[:, None] - at
        seen = is_real & (distance >= 0) & (distance < (window or length))
        seen = seen & is_real[:, None] if blind else seen
        heads = (x[tokens].transpose(0, 1)[None] for x in (q, k, v))
        o = scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)[0]
        found.append(o.transpose(0, 1) * seen.any(1)[:, None, None])
    o = torch.cat(found)
    o.backward(tensors[3])
    return [o.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("blind", [False, True], ids=["", "blind"])
@pytest.mark.parametrize("window", [None, 1, 2, 8, 40])
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize(("name", "dtype"), BACKENDS)
def test_as_by_the_mask(name, dtype, case, window, blind) -> None:
    if name == "fa4":
        pytest.importorskip("flash_attn.cute")
    if name == "cudnn" and window is not None:
        pytest.skip("cuDNN has no windows")
    torch.manual_seed(0)
    rows, H, K, d = ROWS[case], 4, 2, 64
    T = 29 * len(rows)
    tensors = torch.randn(T, 2 * H + 2 * K, d, device=DEVICE).to(dtype).split([H, K, K, H], 1)
    tensors = [x.contiguous() for x in tensors]
    documents, order = sorted_rows(rows, torch.device(DEVICE), blind=blind)
    attention = choose_attention(name, torch.device(DEVICE), dtype)[1]
    padded = Padded(attention, cross_of(attention))

    q, k, v, do = (x[order] for x in tensors)
    o = torch.full_like(do, torch.nan)
    lse = torch.full((H, T), torch.nan, device=DEVICE)
    given = None if window is None or window >= documents.longest else window
    call = AttentionCall(QKV(q, k, v), documents, d**-0.5, o, lse, given)
    padded.forward(call)
    found = [o.clone()]
    out = QKV(o, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan))
    found += padded.backward(do, call, out)

    truths = by_mask([x.double() for x in tensors], rows, window, blind)
    naives = by_mask(tensors, rows, window, blind)
    # In a window of one token dq and dk are 0 as the difference of two terms, which are about as
    # large as q and k: errors are relative to these.
    cancels = window == 1 and dtype == torch.float32
    added = [0, q, k, 0] if cancels else [0] * 4
    for what, x, *three in zip("o dq dk dv".split(), added, found, naives, truths, strict=True):
        ours, naive, truth = three[0], three[1][order], three[2][order]
        assert_exact(what, ours + x, naive + x, truth + x)


def test_rows_of_a_mask() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert rows_of(mask) == [(2, 3, 0), (0, 4, 1), (1, 2, 2), (5, 0, 0)]
    assert rows_of(mask.bool()) == rows_of(mask.float()) == rows_of(mask)
    mask[1, 2] = 0
    assert rows_of(mask) is None
