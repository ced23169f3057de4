"""Divergences without logits against ordinary autograd and TRL's loss, in fp64 and in the dtype
under test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted import allocated, flops
from pairs import pairs
from torch import Tensor

from exactness import DEVICE, DTYPES, WIDTHS, assert_exact
from longctx.head.distillation import linear_jsd, linear_jsd_reference, linear_kl

IGNORED = -100
BETAS = [0.0, 0.3, 1.0]
pytestmark = pytest.mark.usefixtures("reference_kernels")
Inputs = dict[str, Tensor]


def _inputs(T: int, V: int, dtype: torch.dtype, ignored: float = 0.0, D: int = 32, E: int = 48):
    """Arguments of linear_jsd: a student of D features and a teacher of E, both with biases."""
    torch.manual_seed(T + V)

    def new(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, dtype=torch.float64, device=DEVICE) * scale
        return x.to(dtype).requires_grad_()

    labels = torch.randint(V, (T,), device=DEVICE)
    labels[torch.rand(T, device=DEVICE) < ignored] = IGNORED
    return {
        **{"hidden": new(T, D), "weight": new(V, D, scale=2 * D**-0.5), "bias": new(V)},
        **{"teacher_hidden": new(T, E), "teacher_weight": new(V, E, scale=2 * E**-0.5)},
        **{"teacher_bias": new(V), "labels": labels},
    }


def _run(op, inputs: Inputs, size: float = 1.0, **options: Any):
    """(value, {name: gradient}) on fresh leaves; values of tokens get random gradients."""
    leaves = {
        k: v if k == "labels" else v.detach().clone().requires_grad_(v.requires_grad)
        for k, v in inputs.items()
    }
    value = op(**leaves, **options)
    if value.requires_grad:
        given = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        value.backward(given.to(value) * size)
    return value.detach(), {k: v.grad for k, v in leaves.items()}


def _double(inputs: Inputs) -> Inputs:
    return {
        k: v if k == "labels" else v.detach().double().requires_grad_(v.requires_grad)
        for k, v in inputs.items()
    }


def _freeze(inputs: Inputs, *names: str) -> None:
    for name in names:
        inputs[name].requires_grad_(False)


def _check(inputs: Inputs, logits_bytes: int | None = None, **options: Any) -> None:
    truth, truth_grads = _run(linear_jsd_reference, _double(inputs), **options)
    naive, naive_grads = _run(linear_jsd_reference, inputs, **options)
    chunk = {} if logits_bytes is None else {"logits_bytes": logits_bytes}
    ours, grads = _run(linear_jsd, inputs, **chunk, **options)
    assert ours.dtype == torch.float32
    assert_exact("value", ours, naive, truth)
    for name in ("hidden", "weight", "bias"):
        assert (grads[name] is None) == (not inputs[name].requires_grad)
        if grads[name] is not None:
            assert grads[name].dtype == inputs[name].dtype
            assert_exact(name, grads[name], naive_grads[name], truth_grads[name])
    assert all(grads[name] is None for name in grads if name.startswith("teacher"))


ROWS = [
    # T, V, ignored, logits_bytes
    (1, 100, 0.0, None),  # one row
    (127, 333, 0.3, 200_000),  # several ragged pieces
    (250, 64, 0.005, 1),  # too few ignored to be dropped, one row at a time
]


@pytest.mark.parametrize(
    ("rows", "beta", "reduction", "frozen"), pairs(ROWS, BETAS, ["mean", "none"], [False, True])
)
def test_fp64(rows, beta, reduction, frozen) -> None:
    """The value and every gradient within 1e-12 of plain torch; the teacher gets none."""
    T, V, ignored, logits_bytes = rows
    inputs = _inputs(T, V, torch.float64, ignored)
    if frozen:
        _freeze(inputs, "weight", "bias")
    options = {"beta": beta, "reduction": reduction, "temperature": 0.8}
    options |= {"softcap": 5.0, "teacher_softcap": 7.0}
    truth, truth_grads = _run(linear_jsd_reference, inputs, **options)
    chunk = {} if logits_bytes is None else {"logits_bytes": logits_bytes}
    ours, grads = _run(linear_jsd, inputs, **chunk, **options)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    for name, expected in truth_grads.items():
        assert (grads[name] is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(grads[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("beta", BETAS)
def test_exact(beta, reduction, dtype) -> None:
    inputs = _inputs(150, 500, dtype, ignored=0.2)
    for frozen in ((), ("weight", "bias"), ("hidden",)):
        _freeze(inputs, *frozen)
        _check(inputs, logits_bytes=200_000, beta=beta, reduction=reduction)
        inputs = _inputs(150, 500, dtype, ignored=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2.5},
        {"softcap": 6.0, "teacher_softcap": 8.0},
        {"reduction": "sum"},
        {"num_items": 1000},
        {"num_items": torch.tensor(77, device=DEVICE)},
        {"reduction": "none", "size": 1e-7},
    ],
    ids=str,
)
def test_options(options, dtype) -> None:
    _check(_inputs(50, 300, dtype, ignored=0.2), logits_bytes=100_000, **options)


def test_kl_is_the_end_of_jsd() -> None:
    inputs = _inputs(40, 100, torch.float32, ignored=0.2)
    for reverse in (False, True):
        options = {"reduction": "none", "temperature": 1.5}
        found = linear_kl(**inputs, reverse=reverse, **options)
        assert torch.equal(found, linear_jsd(**inputs, beta=float(reverse), **options))
        assert (found >= 0).all()


@pytest.mark.parametrize("beta", [0, 0.0, 0.5, 1, 1.0])
def test_trl_agrees(beta) -> None:
    """TRL's generalised JSD over all logits, whose mean is over tokens that count."""
    module = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="needs trl")
    inputs = _inputs(40, 100, torch.float32, ignored=0.3)
    logits = [
        torch.nn.functional.linear(
            inputs[f"{of}hidden"], inputs[f"{of}weight"], inputs[f"{of}bias"]
        )
        for of in ("", "teacher_")
    ]
    truth = module.GKDTrainer.generalized_jsd_loss(
        *(z.detach().view(2, 20, -1) for z in logits),
        labels=inputs["labels"].view(2, 20),
        beta=beta,
        temperature=0.9,
    )
    ours = linear_jsd(**inputs, beta=beta, temperature=0.9)
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


def test_student_and_teacher_may_differ_in_dtype() -> None:
    inputs = _inputs(40, 100, torch.float32)
    low = {k: v.detach().bfloat16() for k, v in inputs.items() if k.startswith("teacher")}
    wide = {k: v.float() for k, v in low.items()}
    options = {"beta": 0.3}
    for reduction in ("mean", "none"):
        found, grads = _run(linear_jsd, {**inputs, **low}, reduction=reduction, **options)
        truth, expected = _run(linear_jsd, {**inputs, **wide}, reduction=reduction, **options)
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads["weight"], expected["weight"], rtol=1e-4, atol=1e-6)
    student = {
        k: v.detach().bfloat16().requires_grad_() for k, v in inputs.items() if k != "labels"
    }
    student |= {k: v.float() for k, v in student.items() if k.startswith("teacher")}
    assert linear_jsd(**student).requires_grad


def test_a_model_teaches_itself() -> None:
    """One head for both: only the student's use of it has a gradient."""
    inputs = _inputs(30, 80, torch.float32, E=32)
    del inputs["teacher_bias"], inputs["bias"]
    inputs["teacher_weight"] = inputs["weight"]
    loss = linear_jsd(**inputs)
    found = torch.autograd.grad(loss, inputs["weight"])[0]
    truth = linear_jsd_reference(**inputs)
    torch.testing.assert_close(found, torch.autograd.grad(truth, inputs["weight"])[0])
    equal = linear_jsd(**{**inputs, "teacher_hidden": inputs["hidden"]})
    assert abs(equal.item()) < 1e-6


# --- what it costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("weight", "bias", "hidden")])
def test_flops(frozen, reduction) -> None:
    """As the docstring counts them; three quarters of the labels are ignored and cost nothing."""
    inputs = _inputs(256, 64, torch.bfloat16, D=96, E=32)
    inputs["labels"][torch.arange(256) % 4 > 0] = IGNORED
    _freeze(inputs, *frozen)
    logits, product = 2 * 64 * 64 * (96 + 32), 2 * 64 * 64 * 96
    loss, forward = flops(lambda: linear_jsd(**inputs, reduction=reduction))
    products = 2 - len(frozen[::2])
    if reduction == "mean" or products == 1:
        assert forward == logits + products * product
        expected = 0
    else:
        assert forward == logits
        expected = logits + products * product
    if loss.requires_grad:
        assert flops(loss.sum().backward)[1] == expected
    with torch.no_grad():
        assert flops(lambda: linear_jsd(**inputs, reduction=reduction))[1] == logits


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(reduction) -> None:
    V, budget, peaks = 4096, 2**16, []  # 4 rows a piece
    for T in (144, 288):
        inputs = _inputs(T, V, torch.bfloat16, D=4, E=4)

        def step(inputs=inputs) -> None:
            linear_jsd(**inputs, reduction=reduction, logits_bytes=budget).sum().backward()

        largest, peak = allocated(step)
        assert largest <= 2 * budget < 4 * T * V / 16  # on the CPU gradients are copied to fp32
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= 144 * (3 * 4 * 4 + 200)


# --- as an operation of autograd -------------------------------------------------------------


def test_backward_again() -> None:
    """A mean overwrites what it saved; values of tokens are as any operation of torch."""
    inputs = _inputs(10, 30, torch.float32)
    loss = linear_jsd(**inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()
    values = linear_jsd(**inputs, reduction="none").sum()
    first, second = (
        torch.autograd.grad(values, inputs["hidden"], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(reduction) -> None:
    for T in (6, 0):
        inputs = _inputs(T, 30, torch.bfloat16)
        inputs["labels"].fill_(IGNORED)
        value, grads = _run(linear_jsd, inputs, reduction=reduction)
        assert not value.any()
        assert all((grads[name] == 0).all() for name in ("hidden", "weight", "bias"))


@pytest.mark.parametrize("ignored", [2, 60])  # too few to be dropped, and dropped
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_may_be_nan(reduction, ignored) -> None:
    inputs = _inputs(300, 40, torch.float32)
    _freeze(inputs, "weight", "bias")
    where = torch.arange(300) < ignored
    inputs["labels"][where] = IGNORED
    with torch.no_grad():
        inputs["teacher_hidden"][where] = float("nan")
        inputs["hidden"][where] = float("nan")
    value, grads = _run(linear_jsd, inputs, reduction=reduction)
    assert value.isfinite().all()
    assert grads["hidden"].isfinite().all() and (grads["hidden"][where] == 0).all()


def test_shapes() -> None:
    inputs = _inputs(40, 30, torch.float32)
    flat = linear_jsd(**inputs, reduction="none")
    tokens = ("hidden", "teacher_hidden", "labels")
    batch = {k: v.view(2, 20, *v.shape[1:]) if k in tokens else v for k, v in inputs.items()}
    assert torch.equal(linear_jsd(**batch, reduction="none"), flat.view(2, 20))
    inputs.pop("labels")
    assert torch.equal(linear_jsd(**inputs, reduction="none"), flat)
    strided = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in inputs.items()}
    torch.testing.assert_close(linear_jsd(**strided, reduction="none"), flat)
    torch.testing.assert_close(linear_jsd(**strided), flat.mean())


def test_autocast() -> None:
    inputs = _inputs(40, 100, torch.float32)
    low = {
        k: v if k == "labels" else v.detach().bfloat16().requires_grad_() for k, v in inputs.items()
    }
    for reduction in ("mean", "none"):
        with torch.autocast(DEVICE, torch.bfloat16):
            value, grads = _run(linear_jsd, inputs, reduction=reduction)
        expected, expected_grads = _run(linear_jsd, low, reduction=reduction)
        assert torch.equal(value, expected)
        assert torch.equal(grads["weight"], expected_grads["weight"].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"teacher_weight": torch.zeros(11, 6)},
            "one vocabulary, got 9 entries in weight and 11 in teacher_weight",
        ),
        (
            {"teacher_hidden": torch.zeros(5, 6)},
            r"teacher_hidden must have shape \(4, 6\), got \(5, 6\)",
        ),
        (
            {"teacher_hidden": torch.zeros(4, 7)},
            r"teacher_weight must have shape \(V, 7\), got \(9, 6\)",
        ),
        ({"teacher_hidden": torch.zeros(6)}, r"teacher_hidden must have shape \(T, D\) or"),
        ({"teacher_bias": torch.zeros(8)}, r"teacher_bias must have shape \(9,\), got \(8,\)"),
        (
            {
                "teacher_hidden": torch.zeros(4, 6).double(),
                "teacher_weight": torch.zeros(9, 6).double(),
            },
            "teacher_hidden must be torch.float32 as hidden is, got torch.float64",
        ),
        (
            {"teacher_weight": torch.zeros(9, 6).half()},
            "teacher_weight must have dtype torch.float32, got torch.float16",
        ),
        ({"hidden": torch.zeros(4, 8).int()}, "hidden must be bfloat16.*int32"),
        ({"labels": torch.zeros(5).long()}, r"labels must have shape \(4,\), got \(5,\)"),
        ({"labels": torch.full((4,), 9)}, r"labels must be in \[0, 9\) or -100"),
        (
            {"teacher_hidden": torch.zeros(4, 6, device="meta")},
            "teacher_weight must be on meta, got cpu",
        ),
        ({"beta": torch.ones(())}, "beta must be a number, got Tensor"),
        ({"beta": 1.5}, r"beta must be in \[0, 1\], got 1.5"),
        ({"beta": float("nan")}, r"beta must be in \[0, 1\], got nan"),
        ({"reduction": "batchmean"}, "reduction must be 'mean', 'sum' or 'none', got 'batchmean'"),
        ({"reduction": "none", "num_items": 3}, "num_items divides a sum"),
        ({"temperature": -1.0}, "temperature must be positive, got -1.0"),
        ({"teacher_softcap": 0.0}, "teacher_softcap must be positive, got 0.0"),
        ({"logits_bytes": -1}, "logits_bytes must be positive, got -1"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message) -> None:
    arguments = {
        **{"hidden": torch.zeros(4, 8), "weight": torch.zeros(9, 8)},
        **{"teacher_hidden": torch.zeros(4, 6), "teacher_weight": torch.zeros(9, 6)},
        "labels": torch.zeros(4).long(),
    } | change
    with pytest.raises(ValueError, match=message):
        linear_jsd(**arguments)


def test_kl_has_no_beta() -> None:
    with pytest.raises(TypeError, match="linear_kl has no beta"):
        linear_kl(*[torch.zeros(4, 8)] * 4, beta=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_at_full_vocabulary(dtype, reduction) -> None:
    for beta in BETAS:
        inputs = _inputs(500, 151_936, dtype, ignored=0.2, D=256, E=512)
        _check(inputs, logits_bytes=2**27, beta=beta, reduction=reduction)
