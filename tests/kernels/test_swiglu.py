"""SwiGLU forward and backward against fp64, and against HF's expression in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from pairs import pairs
from torch import Tensor

from exactness import DEVICE, DTYPES, WIDTHS, assert_exact
from longctx.kernels.swiglu import (
    _activate,
    geglu,
    swiglu,
    swiglu_backward_,
    swiglu_forward,
    swiglu_reference,
)

SHAPES = [
    (1, 64),  # one row, narrower than a block
    (127, 100),  # nothing is a power of two
    (257, 16),  # short rows: 16 a program, and a last program with a single one
    (3, 2049),  # one element past a block
    (2, 3, 200),  # a batch: (..., F)
    (2, 14336),  # Llama-3.1-8B
]


def _naive(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _naive_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """What a gate of attention's output does (layer/parts/output_gate.py), with autograd."""
    return _activate(gate, up, "sigmoid")


def _naive_gated(gate: Tensor, up: Tensor) -> Tensor:
    return torch.sigmoid(gate) * up


OPS = [(swiglu, _naive), (geglu, _naive_gelu), (_gated, _naive_gated)]


def _run(op, gate: Tensor, up: Tensor, d: Tensor):
    """(product, d_gate, d_up) of an autograd op."""
    gate, up = gate.detach().clone().requires_grad_(), up.detach().clone().requires_grad_()
    product = op(gate * 1, up * 1)  # not leaves: swiglu overwrites them in backward
    value = product.detach().clone()
    product.backward(d)
    return value, gate.grad, up.grad


def _inputs(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(shape[-1])
    scales = (4.0, 1.0, 1.0)  # gates of 4: sigmoid saturates in places
    return [(torch.randn(*shape, dtype=torch.float64) * s).to(DEVICE, dtype) for s in scales]


@pytest.mark.parametrize(("shape", "dtype", "ops"), pairs(SHAPES, WIDTHS, OPS))
def test_forward_and_backward(shape, dtype, ops):
    op, hf = ops
    gate, up, d = _inputs(*shape, dtype=dtype)
    truths = _run(hf, gate.double(), up.double(), d.double())
    naives = _run(hf, gate, up, d)
    ours = _run(op, gate, up, d)
    names = ("product", "d_gate", "d_up")
    for name, our, naive, truth in zip(names, ours, naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize(("op", "hf"), OPS, ids=["swiglu", "geglu", "gate"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, op, hf, reference_kernels):
    """swiglu without a GPU and without the interpreter: its gradient is written by hand."""
    gate, up, d = (x.cpu() for x in _inputs(2, 3, 200, dtype=dtype))
    truths = _run(hf, gate.double(), up.double(), d.double())
    naives = _run(hf, gate, up, d)
    names = ("product", "d_gate", "d_up")
    for name, our, naive, truth in zip(names, _run(op, gate, up, d), naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("has_up", [True, False])
def test_a_factor_of_the_gate(has_up, plain, dtype, request):
    """As Falcon-H1 has one, with `up` and without."""
    if plain:
        request.getfixturevalue("reference_kernels")
    c = 0.37

    def hf(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate * c) * (up if has_up else torch.ones_like(up))

    gate, up, d = _inputs(3, 200, dtype=dtype)
    truths, naives = _run(hf, gate.double(), up.double(), d.double()), _run(hf, gate, up, d)
    given = up.clone() if has_up else None
    product, d_gate = swiglu_forward(gate, given, gate_scale=c), gate.clone()
    again = torch.full_like(d, float("nan"))
    swiglu_backward_(d, d_gate, given, product=again, gate_scale=c)
    assert_exact("product again", again, naives[0], truths[0])
    names, found = ("product", "d_gate", "d_up"), (product, d_gate, given)
    for name, our, naive, truth in zip(names, found, naives, truths, strict=True):
        if our is not None:
            assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("op", [swiglu, geglu])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_any_size(dtype, op):
    """Beyond where the activation is 0 or the gate itself, nothing overflows."""
    most = torch.finfo(dtype).max
    gate = torch.tensor([[-most, -1e4, -101.0, 101.0, 1e4, most]], device=DEVICE).to(dtype)
    product, d_gate, d_up = _run(op, gate, torch.ones_like(gate), torch.ones_like(gate))
    expected = gate.clamp(min=0)
    assert torch.equal(product, expected) and torch.equal(d_up, expected)
    assert torch.equal(d_gate, (gate > 0).to(dtype))
    for result in _run(op, gate * float("nan"), *[torch.ones_like(gate)] * 2):
        assert result.isnan().all()


def test_gradient_of_a_sum():
    """Autograd passes one number for all elements, at strides of 0."""
    gate, up, _ = _inputs(5, 48, dtype=torch.float32)
    ones = torch.ones_like(gate)
    expected = _run(swiglu, gate, up, ones)
    for our, other in zip(
        _run(swiglu, gate, up, ones[0, 0].expand_as(gate)), expected, strict=True
    ):
        assert torch.equal(our, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alias", [True, False], ids=["over d_product", "own buffer"])
def test_backward_in_a_fused_buffer(alias, dtype):
    """gate|up in one buffer becomes d_gate|d_up, and the product comes back."""
    gate, up, d = _inputs(33, 144, dtype=dtype)
    product, d_gate, d_up = _run(swiglu, gate, up, d)
    fused = torch.cat((gate, up), dim=1)
    target = d.clone() if alias else torch.full_like(d, float("nan"))
    source = target if alias else d
    g, u = swiglu_backward_(source, fused[:, :144], fused[:, 144:], product=target)
    assert torch.equal(target, product)
    assert torch.equal(fused, torch.cat((d_gate, d_up), dim=1))
    assert g.data_ptr() == fused.data_ptr() and torch.equal(u, d_up)


def test_forward_into_a_buffer():
    gate, up, _ = _inputs(2, 5, 48, dtype=torch.bfloat16)
    expected = swiglu_forward(gate, up)
    assert_exact("product", expected, _naive(gate, up), _naive(gate.double(), up.double()))
    wide = torch.full((2, 5, 96), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(swiglu_forward(gate, up, out=wide[..., :48]), expected)
    assert wide[..., 48:].isnan().all()
    assert torch.equal(swiglu_forward(gate, up, out=gate), expected)
    assert torch.equal(gate, expected)


def test_reference_is_differentiable():
    gate, up, d = _inputs(4, 32, dtype=torch.float32)
    truths = _run(_naive, gate.double(), up.double(), d.double())
    for our, naive, truth in zip(
        _run(swiglu_reference, gate, up, d), _run(_naive, gate, up, d), truths, strict=True
    ):
        assert_exact("reference", our, naive, truth)


def test_overwritten_values_are_not_silently_wrong():
    gate, up, d = _inputs(4, 32, dtype=torch.float32)
    gate.requires_grad_()
    for of_leaf in (gate, gate[:, :]):
        with pytest.raises(ValueError, match="gate is overwritten in backward.*leaf"):
            swiglu(of_leaf, up)
    product = swiglu(gate * 1, up)
    product.backward(d, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward(d)


WRONG_INPUTS = [
    ({"gate": torch.zeros(3, 8).int()}, "gate must be bfloat16.*int32"),
    ({"gate": torch.zeros(8, 3).t()}, r"gate must be contiguous.*\(1, 3\)"),
    ({"up": torch.zeros(3, 9)}, r"up must have shape \(3, 8\), got \(3, 9\)"),
    ({"up": torch.zeros(3, 8).half()}, "up must have dtype torch.float32, got torch.float16"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_INPUTS, ids=str)
def test_wrong_inputs(change, message):
    arguments = {name: torch.zeros(3, 8) for name in ("gate", "up")} | change
    with pytest.raises(ValueError, match=message):
        swiglu(**{k: v.to(DEVICE) for k, v in arguments.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *WRONG_INPUTS,
        ({"d_product": torch.zeros(8)}, r"d_product must have shape \(3, 8\), got \(8,\)"),
        ({"product": torch.zeros(3, 8).half()}, "product must have dtype torch.float32"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {name: torch.zeros(3, 8) for name in ("d_product", "gate", "up")} | change
    arguments = {k: v.to(DEVICE) for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        swiglu_backward_(**arguments)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """160,000 x 14336 = 2.29e9 elements: offsets past int32 in the last rows."""
    T, F = 160_000, 14336
    gate, up, d = (torch.randn(T, F, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    rows = torch.tensor([0, 1, T // 2, T - 2, T - 1], device="cuda")
    few = gate[rows], up[rows], d[rows]
    truth, naive = _run(_naive, *(t.double() for t in few)), _run(_naive, *few)
    assert_exact("forward", swiglu_forward(gate, up)[rows], naive[0], truth[0])
    swiglu_backward_(d, gate, up, product=d)
    for name, our, n, t in zip("pgu", (d, gate, up), naive, truth, strict=True):
        assert_exact(name, our[rows], n, t)
