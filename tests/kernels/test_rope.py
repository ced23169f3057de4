"""RoPE against HF's apply_rotary_pos_emb: in fp64 over fp32 angles, and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as of_neighbours
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from exactness import DEVICE, DTYPES, WIDTHS, assert_exact, relative_error
from longctx.kernels.rope import rope, rope_, rope_reference

SHAPES = [
    (1, 1, 1, 64),  # one token, one head
    (7, 9, 3, 64),  # SmolLM2: head counts that are no powers of two
    (127, 3, 1, 16),  # 64 tokens a program, and a ragged last program
    (1025, 1, 1, 8),  # 512 tokens a program, and a last program with a single one
    (5, 32, 8, 128),  # Llama-3.1-8B
    (3, 4, 2, 80),  # a head size that is no power of two
    (2, 2, 2, 256),  # a large head
]


def _inputs(T: int, H: int, K: int, d: int, dtype: torch.dtype):
    torch.manual_seed(T + d)
    q, k, dq, dk = (
        torch.randn(T, h, d, dtype=torch.float64).to(DEVICE, dtype) for h in (H, K, H, K)
    )
    position_ids = torch.arange(T, device=DEVICE) % max(1, T // 2 + 1)  # restart: two documents
    inv_freq = 1 / 500000 ** (torch.arange(0, d, 2, device=DEVICE).float() / d)
    return q, k, dq, dk, position_ids, inv_freq


def _hf(dtype: torch.dtype, attention_scaling: float, interleaved: bool = False):
    """HF's rotation, Llama's or GLM-4's: fp32 angles, cos and sin rounded to the model's dtype
    (fp64: to nothing)."""

    def op(q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor):
        angle = position_ids.float()[:, None] * inv_freq
        emb = torch.cat((angle, angle), dim=-1)[None].to(
            torch.float64 if dtype.itemsize == 8 else None
        )
        cos, sin = (
            (emb.cos() * attention_scaling).to(dtype),
            (emb.sin() * attention_scaling).to(dtype),
        )
        rotate = of_neighbours if interleaved else apply_rotary_pos_emb
        q, k = rotate(q[None], k[None], cos, sin, unsqueeze_dim=2)
        return q[0], k[0]

    return op


def _run(op, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, position_ids: Tensor, inv_freq: Tensor):
    """(q', k', gradient of q, gradient of k) of an autograd op."""
    leaves = [q.detach().clone().requires_grad_(), k.detach().clone().requires_grad_()]
    rotated = op(leaves[0] * 1, leaves[1] * 1, position_ids, inv_freq)
    torch.autograd.backward(rotated, (dq, dk))
    return *(r.detach() for r in rotated), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize(("attention_scaling", "interleaved"), [(1.2, False), (1.0, True)])
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(shape, dtype, attention_scaling, interleaved):
    how = attention_scaling, interleaved
    *tensors, position_ids, inv_freq = _inputs(*shape, dtype)
    double = [t.double() for t in tensors]
    truths = _run(_hf(torch.float64, *how), *double, position_ids, inv_freq)
    naives = _run(_hf(dtype, *how), *tensors, position_ids, inv_freq)

    def op(*inputs: Tensor):
        return rope(*inputs, attention_scaling, interleaved=interleaved)

    ours = _run(op, *tensors, position_ids, inv_freq)
    for name, our, naive, truth in zip(("q", "k", "dq", "dk"), ours, naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, reference_kernels):
    """rope without a GPU and without the interpreter."""
    *tensors, position_ids, inv_freq = (x.cpu() for x in _inputs(21, 4, 2, 32, dtype))
    double = [t.double() for t in tensors]
    truths = _run(_hf(torch.float64, 1.2), *double, position_ids, inv_freq)
    naives = _run(_hf(dtype, 1.2), *tensors, position_ids, inv_freq)
    ours = _run(lambda *a: rope(*a, 1.2), *tensors, position_ids, inv_freq)
    for name, our, naive, truth in zip(("q", "k", "dq", "dk"), ours, naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


def test_positions_up_to_4_million():
    """fp32 in, fp32 out: at angles up to 4e6 rad, no less exact than HF's own sine."""
    q, k, dq, dk, _, inv_freq = _inputs(512, 2, 1, 128, torch.float32)
    position_ids = torch.randint(3_000_000, 4_194_304, (512,), device=DEVICE)
    position_ids[:3] = torch.tensor([4_194_303, 2_097_153, 0], device=DEVICE)
    double = [t.double() for t in (q, k, dq, dk)]
    truths = _run(_hf(torch.float64, 1.0), *double, position_ids, inv_freq)
    naives = _run(_hf(torch.float32, 1.0), q, k, dq, dk, position_ids, inv_freq)
    ours = _run(rope, q, k, dq, dk, position_ids, inv_freq)
    for our, naive, truth in zip(ours, naives, truths, strict=True):
        assert_exact("4 million", our, naive, truth)
        assert (our - truth).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_in_a_fused_buffer(dtype):
    """q and k inside q|k|v: v is left alone, and the inverse rotation undoes it."""
    q, k, _, _, position_ids, inv_freq = _inputs(21, 4, 2, 32, dtype)
    fused = torch.cat((q, k, k), dim=1)  # (T, H + 2K, d)
    before = fused.clone()
    expected = rope(q.clone(), k.clone(), position_ids, inv_freq)
    views = fused[:, :4], fused[:, 4:6]
    rope_(*views, position_ids, inv_freq)
    assert torch.equal(fused[:, :4], expected[0]) and torch.equal(fused[:, 4:6], expected[1])
    assert torch.equal(fused[:, 6:], before[:, 6:])
    rope_(*views, position_ids, inv_freq, inverse=True)
    assert relative_error(fused, before) < 2 * torch.finfo(dtype).eps


def test_head_major_layout():
    """HF keeps (heads, tokens, d): a transposed view works without a copy."""
    q, k, dq, dk, position_ids, inv_freq = _inputs(21, 4, 2, 32, torch.bfloat16)
    expected = _run(rope, q, k, dq, dk, position_ids, inv_freq)
    head_major = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, dq, dk)]
    ours = _run(rope, *head_major, position_ids, inv_freq)
    for our, other in zip(ours, expected, strict=True):
        assert torch.equal(our, other)


def test_reference_is_differentiable():
    q, k, dq, dk, position_ids, inv_freq = _inputs(21, 4, 2, 32, torch.float32)

    def both(q, k, position_ids, inv_freq):
        return tuple(rope_reference(x, position_ids, inv_freq) for x in (q, k))

    tensors = (q, k, dq, dk)
    naives = _run(_hf(torch.float32, 1.0), *tensors, position_ids, inv_freq)
    double = [t.double() for t in tensors]
    truths = _run(_hf(torch.float64, 1.0), *double, position_ids, inv_freq)
    ours = _run(both, *tensors, position_ids, inv_freq)
    for our, naive, truth in zip(ours, naives, truths, strict=True):
        assert_exact("reference", our, naive, truth)


def test_overwritten_values_are_not_silently_wrong():
    q, k, _, _, position_ids, inv_freq = _inputs(5, 2, 1, 16, torch.float32)
    q.requires_grad_()
    for of_leaf in (q, q[:]):
        with pytest.raises(ValueError, match="q is overwritten.*leaf"):
            rope(of_leaf, k, position_ids, inv_freq)
    old = q * 1
    saved = old.exp()  # keeps its result
    squared = old.square()  # keeps its input, which rope overwrites
    rope(old, k, position_ids, inv_freq)
    saved.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_a_shared_gradient_is_left_alone():
    """The sum's gradient goes to both terms as one tensor: rotating it in place would spoil one."""
    q, k, dq, dk, position_ids, inv_freq = _inputs(5, 2, 2, 16, torch.float32)
    expected = _run(rope, q, k, dq, torch.zeros_like(dk), position_ids, inv_freq)[2]
    before = dq.clone()
    leaf, other = q.clone().requires_grad_(), q.clone().requires_grad_()
    rotated, _ = rope(leaf * 1, k, position_ids, inv_freq)
    (rotated + other).backward(dq)
    assert torch.equal(dq, before) and torch.equal(other.grad, before)
    assert torch.equal(leaf.grad, expected)


def test_gradient_of_a_sum():
    """Autograd passes one number for all elements, at strides of 0."""
    q, k, _, _, position_ids, inv_freq = _inputs(5, 2, 1, 16, torch.float32)
    ones = torch.ones_like(q), torch.ones_like(k)
    expected = _run(rope, q, k, *ones, position_ids, inv_freq)
    expanded = (x[0, 0, 0].expand_as(x) for x in ones)
    for our, other in zip(
        _run(rope, q, k, *expanded, position_ids, inv_freq), expected, strict=True
    ):
        assert torch.equal(our, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 8)}, r"q must have shape \(T, heads, even d\), got \(3, 8\)"),
        ({"k": torch.zeros(3, 1, 7)}, r"k must have shape \(T, heads, even d\), got \(3, 1, 7\)"),
        ({"k": torch.zeros(4, 1, 8)}, r"k must have shape \(3, 1, 8\), got \(4, 1, 8\)"),
        ({"k": torch.zeros(3, 1, 8).half()}, "k must have dtype torch.float32, got torch.float16"),
        ({"q": torch.zeros(3, 8, 2).transpose(1, 2)}, "q must be contiguous in its last dimension"),
        (
            {"position_ids": torch.zeros(2).long()},
            r"position_ids must have shape \(3,\), got \(2,\)",
        ),
        (
            {"position_ids": torch.zeros(3)},
            "position_ids must be int64 or int32, got torch.float32",
        ),
        ({"inv_freq": torch.zeros(8)}, r"inv_freq must have shape \(4,\), got \(8,\)"),
        ({"inv_freq": torch.zeros(4).half()}, "inv_freq must have dtype torch.float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", [rope, rope_])
def test_wrong_arguments(op, change, message):
    arguments = {
        "q": torch.zeros(3, 2, 8),
        "k": torch.zeros(3, 1, 8),
        "position_ids": torch.zeros(3).long(),
        "inv_freq": torch.zeros(4),
    } | change
    with pytest.raises(ValueError, match=message):
        op(**{name: t.to(DEVICE) for name, t in arguments.items()})


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """600,000 tokens x 32 heads x 128 = 2.46e9 elements: offsets past int32 in the last tokens."""
    T = 600_000
    q = torch.randn(T, 32, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(T, 8, 128, dtype=torch.bfloat16, device="cuda")
    position_ids = torch.arange(T, device="cuda")
    inv_freq = 1 / 500000 ** (torch.arange(0, 128, 2, device="cuda").float() / 128)
    rows = torch.tensor([0, 1, T // 2, T - 2, T - 1], device="cuda")
    few = q[rows], k[rows]
    truth = _hf(torch.float64, 1.0)(few[0].double(), few[1].double(), rows, inv_freq)
    naive = _hf(torch.bfloat16, 1.0)(*few, rows, inv_freq)
    rope_(q, k, position_ids, inv_freq)
    for our, n, t in zip((q, k), naive, truth, strict=True):
        assert_exact("rotated", our[rows], n, t)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_pair_reads_its_row_of_positions(dtype, interleaved):
    """The bits of a rotation by one row of positions at a time."""
    q, k, _, _, _, inv_freq = _inputs(21, 4, 2, 32, dtype)
    positions = torch.randint(0, 5000, (3, 40), device=DEVICE)[:, 7:28]  # a tile of a longer batch
    rows = (torch.arange(16, device=DEVICE) * 7 % 3).int()
    for inverse in (False, True):
        how = dict(inverse=inverse, interleaved=interleaved)
        found = q.clone(), k.clone()
        rope_(*found, positions, inv_freq, 1.2, rows=rows, **how)
        for row, position_ids in enumerate(positions):
            expected = q.clone(), k.clone()
            rope_(*expected, position_ids, inv_freq, 1.2, **how)
            pairs = (rows == row).nonzero()[:, 0]
            places = [2 * pairs, 2 * pairs + 1] if interleaved else [pairs, pairs + 16]
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours[..., torch.cat(places)], theirs[..., torch.cat(places)])
    with pytest.raises(ValueError, match="rows must be int32"):
        rope_(q, k, positions, inv_freq, rows=rows.long())
    with pytest.raises(ValueError, match=r"position_ids must have shape \(3, 21\)"):
        rope_(q, k, positions[:, 1:], inv_freq, rows=rows)
