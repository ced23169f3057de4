"""LayerNorm against fp64, and against torch's and Cohere's in the dtype under test."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pairs import pairs
from torch import Tensor
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from exactness import DEVICE, DTYPES, WIDTHS, assert_exact
from longctx.kernels import norm as module
from longctx.kernels.norm import layer_norm, norm_backward, norm_forward, norm_reference

EPS = 1e-5
layer_norm_forward = partial(norm_forward, centred=True)
layer_norm_backward = partial(norm_backward, centred=True)
NAMES = ("y", "dx", "dw", "db")
# 4 sweeps of backward's persistent grid and one row more, as in test_rms_norm.py.
MANY_ROWS = 257 if DEVICE == "cpu" else 16897
SHAPES = [
    (1, 64),  # one row, the smallest head
    (127, 64),  # several rows a program, and a ragged last program
    (MANY_ROWS, 128),  # each of backward's programs adds up dw and db over several blocks of rows
    (5, 100),  # not a power of two: the mean must not count idle elements
    (2, 3, 200),  # a batch: (..., D)
    (3, 4608),  # StarCoder2-7B
    (2, 8192),  # Command R
]


def _tensor(*shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale + mean).to(DEVICE, dtype)


def _run(op, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor):
    """(y, dx, dw) and, if there is a bias, db of an autograd op."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = op(*leaves, *([None] if bias is None else []))
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS)


def _cohere(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    norm = Cohere2LayerNorm(x.shape[-1], eps=EPS)
    norm.__dict__["_parameters"]["weight"] = weight  # so that the leaf itself gets the gradient
    return norm(x)


def _nemotron(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    norm = NemotronLayerNorm1P(x.shape[-1], eps=EPS)
    norm.__dict__["_parameters"] |= {"weight": weight, "bias": bias}
    return norm(x)


def _truth(offset: float):
    def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _torch(x, weight + offset, bias)

    return op


def _ours(offset: float):
    return lambda x, w, b: layer_norm(x, w, EPS, bias=b, offset=offset)


def _inputs(*shape: int, dtype: torch.dtype, bias: bool = True):
    torch.manual_seed(shape[-1])
    x, dy = _tensor(*shape, dtype=dtype, scale=3.0, mean=2.0), _tensor(*shape, dtype=dtype)
    weight = _tensor(shape[-1], dtype=dtype)
    return x, weight, _tensor(shape[-1], dtype=dtype) if bias else None, dy


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


KINDS = {"torch": (_torch, True, 0.0), "cohere": (_cohere, False, 0.0)}
KINDS |= {"nemotron": (_nemotron, True, 1.0)}


@pytest.mark.parametrize(("shape", "dtype", "kind"), pairs(SHAPES, WIDTHS, [*KINDS]))
def test_forward_and_backward(shape, dtype, kind):
    naive_op, bias, offset = KINDS[kind]
    inputs = _inputs(*shape, dtype=dtype, bias=bias)
    truths = _run(_truth(offset), *_double(*inputs))
    naives, ours = _run(naive_op, *inputs), _run(_ours(offset), *inputs)
    assert len(ours) == 3 + bias
    for name, our, naive, truth in zip(NAMES, ours, naives, truths, strict=False):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, kind, reference_kernels):
    """layer_norm without a GPU and without the interpreter: its gradient is written by hand."""
    naive_op, bias, offset = KINDS[kind]
    inputs = [None if t is None else t.cpu() for t in _inputs(2, 3, 200, dtype=dtype, bias=bias)]
    truths, naives = _run(_truth(offset), *_double(*inputs)), _run(naive_op, *inputs)

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return norm_reference(x, weight, EPS, bias=bias, centred=True, offset=offset)

    for op in (_ours(offset), reference):
        for name, our, naive, truth in zip(NAMES, _run(op, *inputs), naives, truths, strict=False):
            assert our.dtype == dtype
            assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_a_mean_of_many_deviations(plain, request):
    """fp32 rows around 3000 of deviation 1: a difference of mean squares would be off by 1."""
    if plain:
        request.getfixturevalue("reference_kernels")
    x, weight, bias, dy = _inputs(9, 200, dtype=torch.float32)
    x = _tensor(9, 200, dtype=torch.float32, mean=3000.0)
    truths = _run(_truth(0.0), *_double(x, weight, bias, dy))
    for name, our, truth in zip(NAMES, _run(_ours(0.0), x, weight, bias, dy), truths, strict=True):
        torch.testing.assert_close(our.double(), truth, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_heads_of_a_wider_buffer(dtype, in_place):
    """q of a buffer of q, k and v; the rest stays as it is."""
    _, weight, bias, _ = _inputs(48, dtype=dtype)
    wide = _tensor(37, 7, 48, dtype=dtype, scale=3.0)  # (T, H + 2 K, d)
    d_wide = _tensor(37, 9, 48, dtype=dtype)
    q, dy = wide[:, :5], d_wide[:, 2:7]
    truths = _run(_truth(0.0), *_double(q, weight, bias, dy))
    naives = _run(_torch, q, weight, bias, dy)
    given, given_dy = wide.clone(), d_wide.clone()
    dw, db = torch.zeros(2, 48, device=DEVICE)
    dx = layer_norm_backward(dy, q, weight, EPS, dw=dw, db=db, out=dy if in_place else None)
    y = layer_norm_forward(q, weight, EPS, bias=bias, out=q if in_place else None)
    ours = (y, dx, dw.to(dtype), db.to(dtype))
    for name, our, naive, truth in zip(NAMES, ours, naives, truths, strict=True):
        assert_exact(name, our, naive, truth)
    changed, d_changed = (5, slice(2, 7)) if in_place else (0, slice(0, 0))
    assert torch.equal(wide[:, changed:], given[:, changed:])
    rest = torch.ones(9, dtype=torch.bool)
    rest[d_changed] = False
    assert torch.equal(d_wide[:, rest], given_dy[:, rest])


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_an_fp32_weight_over_16_bits(narrow, plain, request):
    """As in autocast: y is fp32; or has x's dtype, as Cohere's, where the caller gives `out`."""
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(0)
    x = _tensor(37, 5, 48, dtype=torch.bfloat16, scale=3.0)
    weight, y_dtype = _tensor(48, dtype=torch.float32), torch.bfloat16 if narrow else torch.float32
    dy = _tensor(37, 5, 48, dtype=y_dtype)
    truths = _run(_truth(0.0), *_double(x, weight, None, dy))
    naives = _run(lambda *a: _cohere(*a).to(y_dtype), x, weight, None, dy)
    dw = torch.zeros(48, device=DEVICE)
    dx = layer_norm_backward(dy, x, weight, EPS, dw=dw)
    y = layer_norm_forward(x, weight, EPS, out=torch.empty_like(x) if narrow else None)
    for name, our, naive, truth in zip(NAMES, (y, dx, dw), naives, truths, strict=False):
        assert our.dtype == naive.dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_residual(dtype):
    """dx = d_residual + gradient, in one pass with one rounding, over either of its inputs."""
    x, weight, bias, dy = _inputs(13, 320, dtype=dtype)
    d_residual = _tensor(13, 320, dtype=dtype)
    dx = layer_norm_backward(dy, x, weight, EPS, d_residual=d_residual)
    truth = _run(_truth(0.0), *_double(x, weight, bias, dy))[1] + d_residual.double()
    naive = _run(_torch, x, weight, bias, dy)[1] + d_residual
    assert_exact("dx", dx, naive, truth)
    for target in ("dy", "d_residual"):
        given = {"dy": dy.clone(), "d_residual": d_residual.clone()}
        over = given[target]
        how = dict(d_residual=given["d_residual"], out=over)
        assert layer_norm_backward(given["dy"], x, weight, EPS, **how) is over
        assert torch.equal(over, dx)


def test_gradients_add_up_over_tiles():
    """Tile by tile into one fp32 dw and db, as over the whole row; and the same in every run."""
    x, weight, bias, dy = _inputs(300, 96, dtype=torch.bfloat16)
    sums = torch.zeros(2, 96, device=DEVICE)
    for i in range(0, 300, 128):
        tile = dy[i : i + 128], x[i : i + 128]
        layer_norm_backward(*tile, weight, EPS, dw=sums[0], db=sums[1])
    truths = _run(_truth(0.0), *_double(x, weight, bias, dy))
    naives = _run(_torch, *(t.float() for t in (x, weight, bias, dy)))
    for name, our, naive, truth in zip(NAMES[2:], sums, naives[2:], truths[2:], strict=True):
        assert_exact(name, our, naive, truth)
    again = torch.zeros(2, 2, 96, device=DEVICE)
    for dw, db in again:
        layer_norm_backward(dy, x, weight, EPS, dw=dw, db=db)
    assert torch.equal(*again)


def test_strided_input():
    """Rows at a stride work; a transposed input is copied, or refused without autograd."""
    _, weight, bias, _ = _inputs(64, dtype=torch.float32)
    x = _tensor(6, 7, 192, dtype=torch.float32)[..., 64:128]
    expected = layer_norm(x.contiguous(), weight, EPS, bias=bias)
    assert torch.equal(layer_norm(x, weight, EPS, bias=bias), expected)
    assert torch.equal(layer_norm_forward(x, weight, EPS, bias=bias), expected)
    transposed = layer_norm(x.transpose(0, 1), weight, EPS, bias=bias)
    assert torch.equal(transposed, expected.transpose(0, 1))


@pytest.mark.parametrize("trained", [(), ("weight",), ("bias",)], ids=str)
def test_what_is_frozen_is_not_computed(trained, monkeypatch):
    x, weight, bias, dy = _inputs(4, 64, dtype=torch.float32)
    _, dx, dw, db = _run(_ours(0.0), x, weight, bias, dy)
    asked = []

    def backward(*args, dw, db, **kwargs):
        asked.append((dw is not None, db is not None))
        return layer_norm_backward(*args, dw=dw, db=db, **kwargs)

    monkeypatch.setattr(module, "norm_backward", backward)
    leaf = x.clone().requires_grad_()
    weight.requires_grad_("weight" in trained)
    bias.requires_grad_("bias" in trained)
    layer_norm(leaf, weight, EPS, bias=bias).backward(dy)
    assert asked == [("weight" in trained, "bias" in trained)]
    assert torch.equal(leaf.grad, dx)
    assert weight.grad is None or torch.equal(weight.grad, dw)
    assert bias.grad is None or torch.equal(bias.grad, db)


WRONG_INPUTS = [
    ({"x": torch.zeros(3, 8).int()}, "x must be bfloat16.*int32"),
    ({"x": torch.zeros(3, 0)}, "x must have 1 to 32768 elements a row, got 0"),
    ({"weight": torch.zeros(9)}, r"weight must have shape \(8,\), got \(9,\)"),
    ({"weight": torch.zeros(8).half()}, "weight must have dtype torch.float32, got torch.float16"),
    ({"bias": torch.zeros(9)}, r"bias must have shape \(8,\), got \(9,\)"),
    ({"bias": torch.zeros(8).half()}, "bias must have dtype torch.float32, got torch.float16"),
]
WRONG_OUTPUTS = [
    ({"x": torch.zeros(8, 3).t()}, r"x must be contiguous in its last dimension.*\(1, 3\)"),
    ({"x": torch.zeros(2, 4, 3, 8).transpose(1, 2)}, "x must be rows at one stride"),
    ({"out": torch.zeros(3, 9)}, r"out must have shape \(3, 8\), got \(3, 9\)"),
    ({"out": torch.zeros(3, 8).half()}, "out must have dtype torch.float32, got torch.float16"),
]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        *((layer_norm, *case) for case in WRONG_INPUTS),
        *((layer_norm_forward, *case) for case in WRONG_INPUTS + WRONG_OUTPUTS),
    ],
)
def test_wrong_arguments(op, change, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(8)} | change
    with pytest.raises(ValueError, match=message):
        op(eps=EPS, **{k: v.to(DEVICE) for k, v in arguments.items()})


@pytest.mark.parametrize("name", ["dw", "db"])
@pytest.mark.parametrize("sums", [torch.zeros(9), torch.zeros(8).half()], ids=["shape", "dtype"])
def test_wrong_accumulator(sums, name):
    x = torch.zeros(3, 8, device=DEVICE)
    with pytest.raises(ValueError, match=f"{name} must have"):
        layer_norm_backward(x, x, x[0], EPS, **{name: sums.to(DEVICE)})


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """600,000 x 4096 = 2.46e9 elements: offsets past int32 in the last rows."""
    T, D = 600_000, 4096
    x, dy = (torch.randn(T, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight, bias = (torch.randn(D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = torch.tensor([0, 1, T // 2, T - 2, T - 1], device="cuda")
    few = x[rows], weight, bias, dy[rows]
    truth, naive = _run(_truth(0.0), *_double(*few)), _run(_torch, *few)
    y = layer_norm_forward(x, weight, EPS, bias=bias)
    assert_exact("y", y[rows], naive[0], truth[0])
    dw, db = torch.zeros(2, D, device="cuda")
    layer_norm_backward(dy, x, weight, EPS, dw=dw, db=db, out=dy)
    assert_exact("dx", dy[rows], naive[1], truth[1])
    assert dw.isfinite().all() and db.isfinite().all()
