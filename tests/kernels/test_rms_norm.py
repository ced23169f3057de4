"""RMSNorm against fp64 and against HF's LlamaRMSNorm in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from pairs import pairs
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from exactness import DEVICE, DTYPES, WIDTHS, assert_exact
from longctx.kernels import norm as module
from longctx.kernels.launch import sm_count
from longctx.kernels.norm import (
    backward_config,
    norm_backward,
    norm_forward,
    norm_reference,
    rms_norm,
)

EPS = 1e-5
# 4 sweeps of backward's persistent grid and one row more. A sweep is programs x 16 rows: 4 programs
# in the interpreter, 264 on a GPU of 132 multiprocessors.
MANY_ROWS = 257 if DEVICE == "cpu" else 16897
SHAPES = [
    (1, 64),  # one row, the smallest head
    (127, 64),  # several rows a program, and a ragged last program
    (MANY_ROWS, 128),  # each of backward's programs adds up dw over several blocks of rows
    (5, 100),  # not a power of two
    (2, 3, 200),  # a batch: (..., D)
    (21, 576),  # SmolLM2: 448 of the block's 1024 elements are idle, the last program is ragged
    (2, 4096),  # Llama-3.1-8B
    (3, 5120),  # Llama-2-13B: not a power of two
    (2, 8192),  # Llama-3.1-70B
]


def _tensor(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(DEVICE, dtype)


def _run(op, x: Tensor, weight: Tensor, dy: Tensor):
    """(y, dx, dw) of an autograd op."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = op(x, weight)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    norm = LlamaRMSNorm(x.shape[-1], eps=EPS)
    norm.weight = torch.nn.Parameter(weight)
    norm.__dict__["_parameters"]["weight"] = weight  # so that the leaf itself gets the gradient
    return norm(x)


def _truth(x: Tensor, weight: Tensor) -> Tensor:
    return norm_reference(x, weight, EPS, llama_rounding=False)


@pytest.mark.parametrize(("shape", "dtype", "llama_rounding"), pairs(SHAPES, WIDTHS, (True, False)))
def test_forward_and_backward(shape, dtype, llama_rounding):
    torch.manual_seed(0)
    x, dy = _tensor(*shape, dtype=dtype, scale=3.0), _tensor(*shape, dtype=dtype)
    weight = _tensor(shape[-1], dtype=dtype)
    truths = _run(_truth, x.double(), weight.double(), dy.double())
    naives = _run(_llama, x, weight, dy)
    ours = _run(lambda x, w: rms_norm(x, w, EPS, llama_rounding=llama_rounding), x, weight, dy)
    for name, our, naive, truth in zip(("y", "dx", "dw"), ours, naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    norm = Gemma3RMSNorm(x.shape[-1], eps=EPS)
    norm.__dict__["_parameters"]["weight"] = weight  # so that the leaf itself gets the gradient
    return norm(x)


def _gemma_truth(x: Tensor, weight: Tensor) -> Tensor:
    return norm_reference(x, weight, EPS, llama_rounding=False, offset=1.0)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemmas_weight_is_stored_less_one(shape, dtype):
    torch.manual_seed(0)
    x, dy = _tensor(*shape, dtype=dtype, scale=3.0), _tensor(*shape, dtype=dtype)
    weight = _tensor(shape[-1], dtype=dtype, scale=0.1)
    truths = _run(_gemma_truth, x.double(), weight.double(), dy.double())
    naives = _run(_gemma, x, weight, dy)
    how = dict(llama_rounding=False, offset=1.0)
    ours = _run(lambda x, w: rms_norm(x, w, EPS, **how), x, weight, dy)
    for name, our, naive, truth in zip(("y", "dx", "dw"), ours, naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_heads_of_a_wider_buffer(dtype, in_place):
    """q of a buffer of q, k and v, as a decoder layer norms it; the rest stays as it is."""
    torch.manual_seed(0)
    wide = _tensor(37, 7, 48, dtype=dtype, scale=3.0)  # (T, H + 2 K, d)
    d_wide = _tensor(37, 9, 48, dtype=dtype)
    weight, q, dy = _tensor(48, dtype=dtype), wide[:, :5], d_wide[:, 2:7]
    truths = _run(_truth, q.double(), weight.double(), dy.double())
    naives = _run(_llama, q, weight, dy)
    given, given_dy = wide.clone(), d_wide.clone()
    dw = torch.zeros(48, device=DEVICE)
    dx = norm_backward(dy, q, weight, EPS, dw=dw, out=dy if in_place else None)
    y = norm_forward(q, weight, EPS, out=q if in_place else None)
    ours = (y, dx, dw.to(dtype))
    for name, our, naive, truth in zip(("y", "dx", "dw"), ours, naives, truths, strict=True):
        assert_exact(name, our, naive, truth)
    changed, d_changed = (5, slice(2, 7)) if in_place else (0, slice(0, 0))
    assert torch.equal(wide[:, changed:], given[:, changed:])
    rest = torch.ones(9, dtype=torch.bool)
    rest[d_changed] = False
    assert torch.equal(d_wide[:, rest], given_dy[:, rest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_weight_over_16_bits(dtype):
    """As in autocast: y is fp32, and so is its gradient."""
    torch.manual_seed(0)
    wide = _tensor(37, 7, 48, dtype=dtype, scale=3.0)
    weight, dy = _tensor(48, dtype=torch.float32), _tensor(37, 5, 48, dtype=torch.float32)
    q, d_wide = wide[:, :5], _tensor(37, 9, 48, dtype=dtype)
    truths = _run(_truth, q.double(), weight.double(), dy.double())
    naives = _run(_llama, q, weight, dy)
    dw = torch.zeros(48, device=DEVICE)
    dx = norm_backward(dy, q, weight, EPS, dw=dw, out=d_wide[:, 2:7])
    y = norm_forward(q, weight, EPS)
    ours = (y, dx, dw)
    for name, our, naive, truth in zip(("y", "dx", "dw"), ours, naives, truths, strict=True):
        assert our.dtype == naive.dtype
        assert_exact(name, our, naive, truth)
    for name, our, same in zip(
        ("y", "dx", "dw"), _run(lambda x, w: rms_norm(x, w, EPS), q, weight, dy), ours, strict=True
    ):
        assert our.dtype == same.dtype and torch.equal(our, same), name


def test_many_rows_are_several_blocks_of_every_program():
    """What the comment beside that shape says, on the device at hand."""
    pytest.importorskip("triton", reason="without triton there are no programs")
    config = backward_config(128)
    programs = sm_count(torch.empty(0, device=DEVICE)) * config.programs_per_sm
    assert MANY_ROWS >= 2 * programs * config.rows  # partial sums over two blocks or more
    assert MANY_ROWS % config.rows == 1  # and a last block with a single row


@pytest.mark.parametrize("llama_rounding", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, llama_rounding, reference_kernels):
    """rms_norm without a GPU and without the interpreter: its gradient is written by hand."""
    torch.manual_seed(0)
    x, dy = (_tensor(2, 3, 200, dtype=dtype).cpu() for _ in range(2))
    weight = _tensor(200, dtype=dtype).cpu()
    truths = _run(_truth, x.double(), weight.double(), dy.double())
    naives = _run(_llama, x, weight, dy)
    ours = _run(lambda x, w: rms_norm(x, w, EPS, llama_rounding=llama_rounding), x, weight, dy)
    for name, our, naive, truth in zip(("y", "dx", "dw"), ours, naives, truths, strict=True):
        assert our.dtype == dtype
        assert_exact(name, our, naive, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_rounding_is_llamas(dtype):
    """Bit for bit but for elements that a last-digit difference of rstd moves across a boundary."""
    torch.manual_seed(0)
    x, weight = _tensor(64, 512, dtype=dtype), _tensor(512, dtype=dtype)
    llama = _llama(x, weight)
    assert (rms_norm(x, weight, EPS) != llama).float().mean() < 1e-3
    assert (rms_norm(x, weight, EPS, llama_rounding=False) != llama).float().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_residual(dtype):
    """dx = d_residual + gradient, in one pass with one rounding."""
    torch.manual_seed(0)
    x, dy, d_residual = (_tensor(13, 320, dtype=dtype) for _ in range(3))
    weight = _tensor(320, dtype=dtype)
    dx = norm_backward(dy, x, weight, EPS, d_residual=d_residual)
    truth = _run(_truth, x.double(), weight.double(), dy.double())[1] + d_residual.double()
    naive = _run(_llama, x, weight, dy)[1] + d_residual
    assert_exact("dx", dx, naive, truth)


@pytest.mark.parametrize("target", ["dy", "d_residual"])
def test_a_gradient_may_overwrite_its_inputs(target):
    torch.manual_seed(0)
    x, dy, d_residual = (_tensor(9, 200, dtype=torch.bfloat16) for _ in range(3))
    weight = _tensor(200, dtype=torch.bfloat16)
    dx = norm_backward(dy, x, weight, EPS, d_residual=d_residual)
    over = {"dy": dy, "d_residual": d_residual}[target]
    assert norm_backward(dy, x, weight, EPS, d_residual=d_residual, out=over) is over
    assert torch.equal(over, dx)


def test_weight_gradient_adds_up_over_tiles():
    """Tile by tile into one fp32 dw, as over the whole row: no rounding in between."""
    torch.manual_seed(0)
    x, dy = _tensor(300, 96, dtype=torch.bfloat16), _tensor(300, 96, dtype=torch.bfloat16)
    weight = _tensor(96, dtype=torch.bfloat16)
    dw = torch.zeros(96, device=DEVICE)
    parts = [
        norm_backward(dy[i : i + 128], x[i : i + 128], weight, EPS, dw=dw, llama_rounding=False)
        for i in range(0, 300, 128)
    ]
    _, dx_truth, dw_truth = _run(_truth, x.double(), weight.double(), dy.double())
    _, dx_fp32, dw_fp32 = _run(_truth, x.float(), weight.float(), dy.float())
    assert_exact("dw", dw, dw_fp32, dw_truth)
    assert_exact("dx", torch.cat(parts), dx_fp32.bfloat16(), dx_truth)
    again = torch.zeros(96, device=DEVICE)
    norm_backward(dy, x, weight, EPS, dw=again)
    once = again.clone()
    again.zero_()
    norm_backward(dy, x, weight, EPS, dw=again)
    assert torch.equal(once, again)  # deterministic


def test_strided_input():
    """Rows at a stride work; a transposed input is copied, or refused without autograd."""
    torch.manual_seed(0)
    wide = _tensor(6, 7, 192, dtype=torch.float32)
    weight = _tensor(64, dtype=torch.float32)
    x = wide[..., 64:128]
    expected = rms_norm(x.contiguous(), weight, EPS)
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert torch.equal(norm_forward(x, weight, EPS), expected)
    transposed = x.transpose(0, 1)
    assert torch.equal(rms_norm(transposed, weight, EPS), expected.transpose(0, 1))


def test_frozen_weight(monkeypatch):
    """x gets the same gradient, and the weight's is not even computed."""
    torch.manual_seed(0)
    x, weight = _tensor(4, 64, dtype=torch.float32), _tensor(64, dtype=torch.float32)
    accumulators = []

    def backward(*args, dw, **kwargs):
        accumulators.append(dw)
        return norm_backward(*args, dw=dw, **kwargs)

    monkeypatch.setattr(module, "norm_backward", backward)
    frozen = x.clone().requires_grad_()
    rms_norm(frozen, weight, EPS).sum().backward()
    _, dx, dw = _run(lambda x, w: rms_norm(x, w, EPS), x, weight, torch.ones_like(x))
    assert torch.equal(frozen.grad, dx)
    assert accumulators[0] is None and torch.equal(accumulators[1], dw)


WRONG_INPUTS = [
    ({"x": torch.zeros(3, 8).int()}, "x must be bfloat16.*int32"),
    ({"x": torch.zeros(3, 0)}, "x must have 1 to 32768 elements a row, got 0"),
    ({"weight": torch.zeros(9)}, r"weight must have shape \(8,\), got \(9,\)"),
    ({"weight": torch.zeros(8).half()}, "weight must have dtype torch.float32, got torch.float16"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_INPUTS, ids=str)
def test_wrong_inputs(change, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(8)} | change
    with pytest.raises(ValueError, match=message):
        rms_norm(**{k: v.to(DEVICE) for k, v in arguments.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *WRONG_INPUTS,
        ({"x": torch.zeros(8, 3).t()}, r"x must be contiguous in its last dimension.*\(1, 3\)"),
        (
            {"x": torch.zeros(2, 4, 3, 8).transpose(1, 2)},
            r"x must be rows at one stride, got shape \(2, 3, 4, 8\) with strides \(96, 8, 24, 1\)",
        ),
        ({"out": torch.zeros(3, 9)}, r"out must have shape \(3, 8\), got \(3, 9\)"),
        ({"out": torch.zeros(3, 8).half()}, "out must have dtype torch.float32, got torch.float16"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(8)} | change
    arguments = {k: v.to(DEVICE) for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        norm_forward(arguments.pop("x"), arguments.pop("weight"), EPS, **arguments)


@pytest.mark.parametrize("dw", [torch.zeros(9), torch.zeros(8).half()], ids=["shape", "dtype"])
def test_wrong_accumulator(dw):
    x = torch.zeros(3, 8, device=DEVICE)
    with pytest.raises(ValueError, match="dw must have"):
        norm_backward(x, x, torch.zeros(8, device=DEVICE), EPS, dw=dw.to(DEVICE))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """600,000 x 4096 = 2.46e9 elements: offsets past int32 in the last rows."""
    T, D = 600_000, 4096
    x = torch.randn(T, D, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(T, D, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(D, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 1, T // 2, T - 2, T - 1], device="cuda")
    few = x[rows], weight, dy[rows]
    truth = _run(_truth, *(t.double() for t in few))
    naive = _run(_llama, *few)
    assert_exact("y", norm_forward(x, weight, EPS)[rows], naive[0], truth[0])
    dw = torch.zeros(D, device="cuda")
    norm_backward(dy, x, weight, EPS, dw=dw, out=dy)
    assert_exact("dx", dy[rows], naive[1], truth[1])
    assert dw.isfinite().all()
