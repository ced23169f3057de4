"""Activations of one tensor against fp64, and against HF's in the dtype under test."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pairs import pairs
from torch import Tensor
from transformers.activations import ACT2FN

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.swiglu import activate, swiglu_backward_, swiglu_forward, swiglu_reference

HF = {"relu2": "relu2", "gelu_tanh": "gelu_pytorch_tanh", "sigmoid": "sigmoid"}
SHAPES = [
    (1, 64),  # one row, narrower than a block
    (127, 100),  # nothing is a power of two
    (257, 16),  # short rows: 16 a program, and a last program with a single one
    (3, 2049),  # one element past a block
    (2, 3, 200),  # a batch: (..., F)
    (2, 18432),  # StarCoder2-7B
]


def _inputs(*shape: int, dtype: torch.dtype, device: str = DEVICE) -> list[Tensor]:
    torch.manual_seed(shape[-1])
    return [(torch.randn(*shape, dtype=torch.float64) * s).to(device, dtype) for s in (3.0, 1.0)]


def _run(op, x: Tensor, dy: Tensor):
    """(y, dx) of an autograd op."""
    leaf = x.detach().clone().requires_grad_()
    y = op(leaf * 1)  # not a leaf: backward overwrites it
    value = y.detach().clone()
    y.backward(dy)
    return value, leaf.grad


def _assert_right(op, kind: str, x: Tensor, dy: Tensor) -> None:
    hf = ACT2FN[HF[kind]]
    truths, naives = _run(hf, x.double(), dy.double()), _run(hf, x, dy)
    ours = _run(lambda x: op(x, kind), x, dy)
    for name, our, naive, truth in zip(("y", "dx"), ours, naives, truths, strict=True):
        assert our.dtype == x.dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize(("shape", "dtype", "kind"), pairs(SHAPES, DTYPES, [*HF]))
def test_forward_and_backward(shape, dtype, kind):
    _assert_right(activate, kind, *_inputs(*shape, dtype=dtype))


@pytest.mark.parametrize("op", [activate, lambda x, kind: swiglu_reference(x, activation=kind)])
@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, kind, op, reference_kernels):
    """Without a GPU and without the interpreter: the gradient is written by hand."""
    _assert_right(op, kind, *_inputs(2, 3, 200, dtype=dtype, device="cpu"))


@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_inputs_of_any_size(plain, dtype, kind, request):
    """Nothing but the square overflows, and what is no number stays none."""
    if plain:
        request.getfixturevalue("reference_kernels")
    most = torch.finfo(dtype).max
    x = torch.tensor([[-most, -1e4, -101.0, -0.0, 101.0, most]], device=DEVICE).to(dtype)
    y, dx = _run(lambda x: activate(x, kind), x, torch.ones_like(x))
    positive, one = x.clamp(min=0), torch.tensor([0, 0, 0, 0.5, 1, 1], device=DEVICE)
    if kind == "sigmoid":
        half = one.where(one > 0, x.double().sigmoid()[0])[None].to(dtype)
        assert torch.allclose(y, half, atol=1e-40, rtol=1e-6)
        assert dx.isfinite().all() and dx[0, 3] == 0.25 and (dx[0, [0, 1, 4, 5]] == 0).all()
    elif kind == "relu2":
        assert torch.equal(y, positive.square()) and torch.equal(dx, 2 * positive)
    else:
        assert torch.equal(y, positive) and torch.equal(dx, one[None].to(dtype))
    y, dx = _run(lambda x: activate(x, kind), x * float("nan"), torch.ones_like(x))
    assert y.isnan().all() and dx.isnan().all()


@pytest.mark.parametrize(
    ("alias", "plain", "dtype", "kind"), pairs((True, False), (False, True), DTYPES, [*HF])
)
def test_in_place_in_a_wider_buffer(alias, plain, dtype, kind, request):
    """x becomes dx, and y comes back; what lies beside x stays as it is."""
    # torch's tanh on the CPU differ in the last digit with where a tensor lies.
    equal = partial(torch.allclose, rtol=1e-4, atol=1e-6) if plain else torch.equal
    if plain:
        request.getfixturevalue("reference_kernels")
    x, dy = _inputs(33, 144, dtype=dtype)
    y, dx = _run(lambda x: activate(x, kind), x, dy)
    wide = torch.cat((x, x), dim=1)
    target = dy.clone() if alias else torch.full_like(dy, float("nan"))
    source, half = target if alias else dy, wide[:, :144]
    assert swiglu_backward_(source, half, product=target, activation=kind) == (half, None)
    assert equal(target, y) and equal(half, dx) and torch.equal(wide[:, 144:], x)
    assert swiglu_forward(wide[:, 144:], out=half, activation=kind) is half
    assert equal(half, y) and torch.equal(wide[:, 144:], x)
    assert equal(swiglu_forward(x, out=x, activation=kind), y)


def test_gradient_of_a_sum():
    """Autograd passes one number for all elements, at strides of 0."""
    x, _ = _inputs(5, 48, dtype=torch.float32)
    ones = torch.ones_like(x)
    expected = _run(lambda x: activate(x, "relu2"), x, ones)[1]
    found = _run(lambda x: activate(x, "relu2"), x, ones[0, 0].expand_as(x))[1]
    assert torch.equal(found, expected)


def test_overwritten_values_are_not_silently_wrong():
    x, dy = _inputs(4, 32, dtype=torch.float32)
    x.requires_grad_()
    with pytest.raises(ValueError, match="gate is overwritten in backward.*leaf"):
        activate(x, "relu2")
    y = activate(x * 1, "relu2")
    y.backward(dy, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def _forward(gate: Tensor, activation: str = "relu2", **more: Tensor) -> Tensor:
    return swiglu_forward(gate, activation=activation, **more)


def _backward(gate: Tensor, activation: str = "relu2", dy: Tensor | None = None, **more: Tensor):
    d_product = torch.zeros_like(gate) if dy is None else dy
    return swiglu_backward_(d_product, gate, activation=activation, **more)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        *(
            (op, change, message)
            for op in (_forward, _backward)
            for change, message in (
                ({"activation": "relu"}, "one of silu, gelu_tanh, relu2, sigmoid, got 'relu'"),
                ({"gate": torch.zeros(3, 8).int()}, "gate must be bfloat16.*int32"),
                ({"gate": torch.zeros(8, 3).t()}, r"must be contiguous.*\(1, 3\)"),
            )
        ),
        (_forward, {"out": torch.zeros(3, 9)}, r"out must have shape \(3, 8\), got \(3, 9\)"),
        (_backward, {"dy": torch.zeros(8)}, r"d_product must have shape \(3, 8\), got \(8,\)"),
        (_backward, {"product": torch.zeros(3, 8).half()}, "product must have dtype torch.float32"),
    ],
)
def test_wrong_arguments(op, change, message):
    arguments = {"gate": torch.zeros(3, 8)} | change
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        op(**moved)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """160,000 x 14336 = 2.29e9 elements: offsets past int32 in the last rows."""
    T, F = 160_000, 14336
    x, dy = (torch.randn(T, F, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = torch.tensor([0, 1, T // 2, T - 2, T - 1], device="cuda")
    few, hf = (x[rows], dy[rows]), ACT2FN["relu2"]
    truth, naive = _run(hf, *(t.double() for t in few)), _run(hf, *few)
    swiglu_backward_(dy, x, product=dy, activation="relu2")
    for name, our, n, t in zip(("y", "dx"), (dy, x), naive, truth, strict=True):
        assert_exact(name, our[rows], n, t)
