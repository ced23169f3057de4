"""RoPE by tables against HF's apply_rotary_pos_emb: in fp64, and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as theirs

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.rope_tables import apply_rotary_pos_emb

SHAPES = [
    (1, 1, 1, 1, 64),  # one token, one head
    (2, 7, 9, 3, 64),  # SmolLM2: head counts that are no powers of two
    (1, 127, 3, 1, 16),  # 64 tokens a program, and a ragged last program
    (2, 3, 32, 8, 128),  # Llama-3.1-8B
    (3, 3, 4, 2, 80),  # a head size that is no power of two
]


def _inputs(B: int, S: int, H: int, K: int, d: int, dtype: torch.dtype, tables: int = 0):
    """q, k and their gradients, (B, heads, S, d) as a projection's output is viewed; tables (B, S,
    d) in the same dtype, or (1, S, d)."""
    torch.manual_seed(S + d)
    q, k, dq, dk = (
        torch.randn(B, S, h, d, dtype=torch.float64).to(DEVICE, dtype).transpose(1, 2)
        for h in (H, K, H, K)
    )
    positions = torch.randint(4000, (tables or B, S), device=DEVICE)
    inv_freq = 1 / 500000 ** (torch.arange(0, d, 2, device=DEVICE).float() / d)
    angles = (positions[..., None] * inv_freq).repeat(1, 1, 2)
    return q, k, dq, dk, (angles.cos() * 1.1).to(dtype), (angles.sin() * 1.1).to(dtype)


def _run(op, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, **more):
    """(q', k', gradient of q, gradient of k) of an autograd op, whose arguments are leaves."""
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    rotated = op(*leaves, cos, sin, **more)
    torch.autograd.backward(rotated, (dq, dk))
    return *(r.detach() for r in rotated), *(leaf.grad for leaf in leaves)


def _assert_as_theirs(*inputs: Tensor, **more):
    truths = _run(theirs, *(x.double() for x in inputs), **more)
    naives = _run(theirs, *inputs, **more)
    ours = _run(apply_rotary_pos_emb, *inputs, **more)
    for name, our, naive, truth in zip(("q", "k", "dq", "dk"), ours, naives, truths, strict=True):
        assert our.dtype == naive.dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape, dtype):
    _assert_as_theirs(*_inputs(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, reference_kernels):
    _assert_as_theirs(*(x.cpu() for x in _inputs(2, 7, 4, 2, 32, dtype)))


def test_fp64_is_plain_torch():
    inputs = _inputs(2, 7, 4, 2, 32, torch.float64)
    for our, their in zip(_run(apply_rotary_pos_emb, *inputs), _run(theirs, *inputs), strict=True):
        assert our.dtype == torch.float64
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


def test_layouts():
    """Contiguous (B, H, S, d), which takes a launch a batch row, one table for all rows, heads
    after tokens, tables in fp32, and gradients at strides of 0."""
    q, k, dq, dk, cos, sin = _inputs(3, 7, 4, 2, 32, torch.bfloat16, tables=1)
    wide = cos.float(), sin.float()
    expected = _run(apply_rotary_pos_emb, q, k, dq, dk, *(x.repeat(3, 1, 1) for x in wide))
    heads_first = [x.contiguous() for x in (q, k, dq, dk)]
    tokens_first = [x.transpose(1, 2) for x in (q, k, dq, dk)]
    found = _run(apply_rotary_pos_emb, *heads_first, *wide)
    turned = _run(apply_rotary_pos_emb, *tokens_first, *wide, unsqueeze_dim=2)
    for our, other, truth in zip(found, turned, expected, strict=True):
        assert torch.equal(our, truth) and torch.equal(other.transpose(1, 2), truth)
    ones = [torch.ones_like(x) for x in (q, k)]
    expanded = [x[:1, :1, :1, :1].expand(x.shape) for x in ones]
    expected = _run(apply_rotary_pos_emb, q, k, *ones, cos, sin)
    for our, truth in zip(
        _run(apply_rotary_pos_emb, q, k, *expanded, cos, sin), expected, strict=True
    ):
        assert torch.equal(our, truth)


def test_nothing_is_overwritten_and_only_tables_are_saved():
    q, k, dq, dk, cos, sin = _inputs(2, 7, 4, 2, 32, torch.float32)
    before = [x.clone() for x in (q, k, dq, dk, cos, sin)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        _run(apply_rotary_pos_emb, q, k, dq, dk, cos, sin)
    assert [x.data_ptr() for x in saved] == [cos.data_ptr(), sin.data_ptr()]
    for x, old in zip((q, k, dq, dk, cos, sin), before, strict=True):
        assert torch.equal(x, old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": torch.zeros(3, 2, 8)},
            r"q must have shape \(B, heads, S, even d\), got \(3, 2, 8\)",
        ),
        ({"k": torch.zeros(1, 1, 3, 7)}, r"k must have shape \(B, heads, S, even d\)"),
        ({"k": torch.zeros(1, 1, 4, 8)}, r"k must have shape \(1, 1, 3, 8\), got \(1, 1, 4, 8\)"),
        ({"k": torch.zeros(1, 1, 3, 8).half()}, "k must have dtype torch.float32, got torch.float"),
        ({"q": torch.zeros(1, 2, 8, 3).mT}, "q must be contiguous in its last dimension"),
        ({"cos": torch.zeros(1, 3, 4)}, r"cos must have shape \(1, 3, 8\), got \(1, 3, 4\)"),
        ({"sin": torch.zeros(3, 8)}, r"sin must have shape \(1, 3, 8\), got \(3, 8\)"),
        ({"sin": torch.zeros(1, 3, 8).long()}, "sin must be bfloat16, float16 or float32"),
        ({"cos": torch.zeros(1, 3, 8, requires_grad=True)}, "cos gets no gradient.*detach it"),
        ({"unsqueeze_dim": 3}, r"unsqueeze_dim must be 1 \(heads first\) or 2, got 3"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {
        "q": torch.zeros(1, 2, 3, 8),
        "k": torch.zeros(1, 1, 3, 8),
        "cos": torch.zeros(1, 3, 8),
        "sin": torch.zeros(1, 3, 8),
    } | change
    with pytest.raises(ValueError, match=message):
        apply_rotary_pos_emb(**arguments)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """600,000 tokens x 32 heads x 128 = 2.46e9 elements: offsets past int32 in the last tokens."""
    S = 600_000
    q = torch.randn(1, S, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    k = torch.randn(1, S, 8, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    angles = torch.randn(1, S, 64, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    rows = torch.tensor([0, 1, S // 2, S - 2, S - 1], device="cuda")
    few = q[:, :, rows], k[:, :, rows], cos[:, rows], sin[:, rows]
    truth = theirs(*(x.double() for x in few))
    naive = theirs(*(x.bfloat16() for x in few))
    for our, n, t in zip(apply_rotary_pos_emb(q, k, cos, sin), naive, truth, strict=True):
        assert_exact("rotated", our[:, :, rows], n, t)
