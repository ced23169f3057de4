"""Log-probabilities without logits against ordinary autograd, in fp64 and in the dtype under
test."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
from counted import allocated, flops
from paths import ROOT
from small_model import tiny_config
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaForCausalLM

import longctx
from exactness import DEVICE, DTYPES, assert_exact
from longctx.head.log_probs import OUTPUTS, linear_log_probs, linear_log_probs_reference

IGNORED = -100
BOTH = ("log_probs", "entropy")
pytestmark = pytest.mark.usefixtures("reference_kernels")
Grads = dict[str, Tensor | None]


def _inputs(T: int, D: int, V: int, dtype: torch.dtype, ignored: float = 0.0, scale: float = 1.0):
    torch.manual_seed(T + D + V)
    hidden = torch.randn(T, D, dtype=torch.float64, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, device=DEVICE) * (scale * D**-0.5)
    labels = torch.randint(V, (T,), device=DEVICE)
    labels[torch.rand(T, device=DEVICE) < ignored] = IGNORED
    return hidden, weight.to(dtype).requires_grad_(), labels


def _bias(V: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(V, dtype=torch.float64, device=DEVICE).to(dtype).requires_grad_()


def _run(op, hidden, weight, labels, bias=None, size=1.0, outputs=OUTPUTS, **options):
    """(values, {name: gradient}) on fresh leaves, for random gradients of each token."""
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in leaves.items()}
    found = op(
        leaves["hidden"],
        leaves["weight"],
        labels,
        bias=leaves.get("bias"),
        outputs=outputs,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    total: Any = 0.0
    for name in BOTH:
        given = torch.randn(labels.shape, generator=generator).to(labels.device) * size
        if name in outputs:
            total = total + (getattr(found, name) * given).sum()
    if torch.is_tensor(total) and total.requires_grad:
        total.backward()
    return found, {k: v.grad for k, v in leaves.items()}


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors
    ]


def _check(hidden, weight, labels, bias=None, logits_bytes=None, **options) -> Grads:
    wide = _double(hidden, weight)
    truth, truth_grads = _run(linear_log_probs_reference, *wide, labels, *_double(bias), **options)
    naive, naive_grads = _run(linear_log_probs_reference, hidden, weight, labels, bias, **options)
    chunk = {} if logits_bytes is None else {"logits_bytes": logits_bytes}
    ours, grads = _run(linear_log_probs, hidden, weight, labels, bias, **chunk, **options)
    for name in OUTPUTS:
        if (found := getattr(ours, name)) is None:
            assert name not in options["outputs"]
            continue
        assert found.shape == labels.shape and (found[labels == IGNORED] == 0).all()
        if name == "is_top1":  # near ties are decided by the rounding of logits
            assert found.dtype == torch.bool
            assert (found == truth.is_top1).float().mean() >= (0.95 if len(found) > 20 else 0.5)
        else:
            assert found.dtype == torch.float32
            assert_exact(name, found, getattr(naive, name), getattr(truth, name))
    for name, grad in truth_grads.items():
        if grad is None:
            assert grads[name] is None
        else:
            assert grads[name].dtype == hidden.dtype
            assert_exact(f"gradient of {name}", grads[name], naive_grads[name], grad)
    return grads


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outputs", [("log_probs",), ("entropy",), OUTPUTS], ids="+".join)
@pytest.mark.parametrize(
    ("T", "D", "V", "ignored", "logits_bytes"),
    [
        (1, 64, 100, 0.0, None),  # one row
        (127, 100, 333, 0.3, 50_000),  # several groups of ragged pieces
        (300, 64, 128, 0.9, 1),  # mostly a prompt, one row at a time
        (250, 32, 200, 0.005, 60_000),  # too few ignored to be dropped
    ],
)
def test_fp64(T, D, V, ignored, logits_bytes, outputs, frozen) -> None:
    """Values and every gradient within 1e-12 of plain torch, with a cap and a temperature."""
    hidden, weight, labels = _inputs(T, D, V, torch.float64, ignored)
    bias = _bias(V, torch.float64).requires_grad_(not frozen)
    weight.requires_grad_(not frozen)
    options = {"outputs": outputs, "temperature": 0.7, "softcap": 3.0}
    truth, truth_grads = _run(linear_log_probs_reference, hidden, weight, labels, bias, **options)
    chunk = {} if logits_bytes is None else {"logits_bytes": logits_bytes}
    ours, grads = _run(linear_log_probs, hidden, weight, labels, bias, **chunk, **options)
    for name in outputs:
        found, expected = getattr(ours, name), getattr(truth, name)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name, expected in truth_grads.items():
        assert (grads[name] is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(grads[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [("log_probs",), BOTH], ids="+".join)
@pytest.mark.parametrize("frozen", ["", "weight", "hidden"])
def test_exact(frozen, outputs, dtype) -> None:
    hidden, weight, labels = _inputs(150, 48, 500, dtype, ignored=0.2)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    _check(hidden, weight, labels, logits_bytes=40_000, outputs=outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 0.001, "outputs": ("log_probs",)},  # whose factor of 1000 leaves fp16
        {"softcap": 5.0},
        {"temperature": 2.0, "softcap": 4.0},
        {"size": 1e-7},  # a mean over millions of tokens: below fp16's smallest number
        {"size": 3e4},
    ],
    ids=str,
)
def test_options(options, frozen, dtype) -> None:
    scale = 0.01 if options.get("temperature") == 0.001 else 3.0
    hidden, weight, labels = _inputs(50, 64, 300, dtype, ignored=0.2, scale=scale)
    weight.requires_grad_(not frozen)
    if dtype == torch.float16 and options.get("size"):
        return _small_in_fp16(hidden, weight, labels, options["size"])
    _check(hidden, weight, labels, logits_bytes=60_000, **{"outputs": OUTPUTS, **options})


def _small_in_fp16(hidden, weight, labels, size) -> None:
    """The gradients are those of size one, times the size: naive fp16 loses them."""
    one = _run(linear_log_probs, hidden, weight, labels)[1]
    found = _run(linear_log_probs, hidden, weight, labels, size=size)[1]
    for name, grad in found.items():
        if grad is None or not (one[name].double() * size).abs().max() < 65504:
            continue
        # of an fp16 result only this much can be asked: its numbers have steps of 6e-8
        torch.testing.assert_close(
            grad.double(), one[name].double() * size, rtol=2e-3, atol=max(6e-8, size * 1e-3)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype) -> None:
    for frozen in (False, True):  # a bias of its own needs the logits' gradients, too
        hidden, weight, labels = _inputs(50, 64, 300, dtype, ignored=0.2)
        weight.requires_grad_(not frozen)
        grads = _check(
            hidden, weight, labels, _bias(300, dtype), logits_bytes=60_000, outputs=("log_probs",)
        )
        assert grads["bias"] is not None


def test_trl_agrees() -> None:
    """TRL's own functions over the logits."""
    utils = pytest.importorskip("trl.trainer.utils", reason="needs trl")
    hidden, weight, labels = _inputs(40, 32, 200, torch.float32)
    logits = (hidden @ weight.t()).view(2, 20, 200)
    found = linear_log_probs(hidden.view(2, 20, 32), weight, labels.view(2, 20), temperature=0.8)
    theirs = utils.selective_log_softmax_and_entropy(logits, labels.view(2, 20), temperature=0.8)
    for ours, truth in zip(found, theirs, strict=False):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


def test_the_example_of_the_docs() -> None:
    """docs/in_your_code.md over patched models gives what plain logits give."""
    page = (ROOT / "docs/in_your_code.md").read_text()
    example = page[page.index("## Log-probabilities") :].split("```python\n")[1].split("```")[0]
    config = tiny_config()
    torch.manual_seed(0)
    models = [LlamaForCausalLM(config) for _ in range(2)]
    ids, mask = torch.randint(331, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
    logits = [model(input_ids=ids, attention_mask=mask).logits[:, :-1] for model in models]
    log_p, log_q = (z.log_softmax(-1) for z in logits)
    picked = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    truth = picked.sum() - 0.01 * (log_p.exp() * log_p).sum()
    expected = torch.autograd.grad(truth, models[0].parameters())

    model, teacher = (longctx.patch(copy.deepcopy(model)) for model in models)
    names = {"model": model, "teacher": teacher, "ids": ids, "mask": mask, "longctx": longctx}
    exec(example, names)
    assert_close(names["found"].log_probs[:, :-1], picked, rtol=1e-4, atol=1e-5)
    by_hand = model(input_ids=ids, attention_mask=mask, labels=ids).logits[:, :-1].log_softmax(-1)
    assert_close(by_hand.gather(-1, ids[:, 1:, None]).squeeze(-1), picked, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(names["objective"], model.parameters(), retain_graph=True)
    for name, ours, gradient in zip(dict(model.named_parameters()), found, expected, strict=True):
        assert_close(ours, gradient, rtol=1e-3, atol=1e-4, msg=name)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    jsd = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2
    assert_close(names["loss"], jsd.mean(), rtol=1e-4, atol=1e-6)


# --- what it costs ---------------------------------------------------------------------------

UNIT = 2 * 64 * 256 * 96  # FLOPs of one product over all rows


@pytest.mark.parametrize(
    ("frozen", "outputs", "forward", "backward"),
    [
        ("", ("log_probs",), 1, 3),
        ("", OUTPUTS, 1, 3),
        ("hidden", ("log_probs",), 1, 2),
        ("weight", ("log_probs", "is_top1", "mean_logits"), 2, 0),  # LoRA
        ("weight", OUTPUTS, 1, 2),
        ("both", OUTPUTS, 1, 0),
        ("", ("is_top1",), 1, 0),
    ],
)
def test_flops(frozen, outputs, forward, backward) -> None:
    """As the docstring counts them; three quarters of the labels are ignored and cost nothing."""
    hidden, weight, labels = _inputs(256, 96, 64, torch.bfloat16)
    labels[torch.arange(256) % 4 > 0] = IGNORED
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    found, counted = flops(lambda: linear_log_probs(hidden, weight, labels, outputs=outputs))
    assert counted == forward * UNIT // 4
    totals = [x.float().sum() for x in found if x is not None and x.requires_grad]
    assert bool(totals) == (backward > 0 or forward > 1)
    if totals:
        assert flops(lambda: sum(totals).backward())[1] == backward * UNIT // 4


def test_no_gradients_are_computed_for_a_reference() -> None:
    hidden, weight, labels = _inputs(256, 96, 64, torch.bfloat16)
    truth = linear_log_probs(hidden, weight, labels)
    with torch.no_grad():
        found, counted = flops(lambda: linear_log_probs(hidden, weight, labels))
    assert counted == UNIT and not found.log_probs.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outputs", [("log_probs",), OUTPUTS], ids="+".join)
def test_memory_does_not_grow_with_tokens_times_vocabulary(outputs, frozen) -> None:
    """The largest tensor is a piece of logits; and twice the tokens need no more than twice what is
    as long as they are."""
    D, V, budget, peaks = 4, 4096, 2**16, []  # 4 rows a piece
    for T in (144, 288):
        hidden, weight, labels = _inputs(T, D, V, torch.bfloat16)
        weight.requires_grad_(not frozen)

        def step(hidden=hidden, weight=weight, labels=labels) -> None:
            found = linear_log_probs(hidden, weight, labels, outputs=outputs, logits_bytes=budget)
            sum(getattr(found, name).sum() for name in BOTH if name in outputs).backward()

        largest, peak = allocated(step)
        assert largest <= 2 * budget < 4 * T * V / 16  # on the CPU gradients are copied to fp32
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= 144 * (3 * 4 * D + 200)


# --- as an operation of autograd -------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_runs_as_often_as_the_graph_is_kept(frozen) -> None:
    hidden, weight, labels = _inputs(30, 8, 16, torch.float32, ignored=0.3)
    weight.requires_grad_(not frozen)
    total = linear_log_probs(hidden, weight, labels, outputs=("log_probs",)).log_probs.sum()
    first = torch.autograd.grad(total, hidden, retain_graph=True)[0]
    total.backward(retain_graph=True)
    assert torch.equal(hidden.grad, first)
    total.backward()
    assert torch.equal(hidden.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


def test_second_derivatives_are_refused() -> None:
    found = linear_log_probs(*_inputs(4, 8, 16, torch.float32))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        found.log_probs.sum().backward(create_graph=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_returned_may_be_changed_in_place(frozen) -> None:
    """Backward reads nothing of the caller's: neither values nor a mask multiplied into them."""
    hidden, weight, labels = _inputs(20, 8, 50, torch.float32)
    weight.requires_grad_(not frozen)
    truth = _run(linear_log_probs_reference, hidden, weight, labels)[1]["hidden"]

    def changing(*args, **kwargs):
        found = linear_log_probs(*args, **kwargs)
        with torch.no_grad():
            for name in BOTH:
                getattr(found, name).detach().zero_()
        return found

    torch.testing.assert_close(_run(changing, hidden, weight, labels)[1]["hidden"], truth)
    hidden, weight, labels = _inputs(4, 8, 16, torch.float32)
    total = linear_log_probs(hidden, weight, labels).log_probs.sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_counts(frozen) -> None:
    """Every label ignored, or no row at all: zeros that belong to the graph, and gradients of 0."""
    for T in (6, 0):
        hidden, weight, _ = _inputs(T, 32, 100, torch.bfloat16)
        weight.requires_grad_(not frozen)
        labels = torch.full((T,), IGNORED, device=DEVICE)
        found, grads = _run(linear_log_probs, hidden, weight, labels)
        assert all(x.shape == (T,) and not x.any() for x in found)
        for name, grad in grads.items():
            if frozen and name == "weight":
                assert grad is None
            else:
                assert (grad == 0).all()


@pytest.mark.parametrize("ignored", [2, 60])  # too few to be dropped, and dropped
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outputs", [("log_probs",), OUTPUTS], ids="+".join)
def test_ignored_rows_may_be_nan(outputs, frozen, ignored) -> None:
    """Hidden states of padding, and gradients of what is masked afterwards. (Rows that are not
    dropped do reach the weight's gradient, with a factor of 0, as in plain torch.)"""
    hidden, weight, labels = _inputs(300, 16, 40, torch.float32)
    weight.requires_grad_(not frozen)
    where = torch.arange(300) < ignored
    labels[where] = IGNORED
    truth = _run(linear_log_probs, hidden, weight, labels, outputs=outputs)[1]
    bad = hidden.detach().clone()
    bad[where] = float("nan")
    bad.requires_grad_()
    found = linear_log_probs(bad, weight, labels, outputs=outputs)
    scale = torch.where(where, float("nan"), 1.0).to(DEVICE)
    sum((getattr(found, n) * scale)[~where].sum() for n in BOTH if n in outputs).backward()
    assert bad.grad.isfinite().all() and (bad.grad[where] == 0).all()
    assert truth["hidden"].isfinite().all()
    if not frozen and ignored > 2:
        assert weight.grad.isfinite().all()


def test_shapes_and_strides() -> None:
    hidden, weight, labels = _inputs(40, 32, 100, torch.float32)
    truth = linear_log_probs(hidden, weight, labels)
    for given, y in (
        (hidden.view(2, 20, 32), labels.view(2, 20)),
        (hidden.repeat_interleave(2, 0)[::2], labels.repeat_interleave(2)[::2]),
        (hidden.detach().t().contiguous().t().requires_grad_(), labels),
    ):
        found = linear_log_probs(given, weight.detach().t().contiguous().t(), y)
        assert found.entropy.shape == y.shape
        for ours, expected in zip(found, truth, strict=True):
            torch.testing.assert_close(ours.flatten(), expected)
        gradient = torch.autograd.grad(found.log_probs.sum(), given)[0]
        expected = torch.autograd.grad(truth.log_probs.sum(), hidden, retain_graph=True)[0]
        torch.testing.assert_close(gradient.reshape(40, 32), expected)


def test_outputs_in_any_order() -> None:
    hidden, weight, labels = _inputs(20, 8, 50, torch.float32)
    whole = linear_log_probs(hidden, weight, labels)
    for count in (1, 2, 3):
        for names in combinations(reversed(OUTPUTS), count):
            found = linear_log_probs(hidden, weight, labels, outputs=names)
            for name in OUTPUTS:
                if name in names:
                    assert torch.equal(getattr(found, name), getattr(whole, name))
                else:
                    assert getattr(found, name) is None
    _check(hidden, weight, labels, outputs=("entropy", "log_probs"))


def test_autocast() -> None:
    """fp32 parameters under autocast: bf16 products, fp32 gradients, backward inside it or not."""
    hidden, weight, labels = _inputs(40, 32, 100, torch.float32)
    low = _run(linear_log_probs, hidden.bfloat16(), weight.bfloat16(), labels)
    with torch.autocast(DEVICE, torch.bfloat16):
        found, grads = _run(linear_log_probs, hidden, weight, labels)
    assert torch.equal(found.log_probs, low[0].log_probs)
    for name in ("hidden", "weight"):
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name], low[1][name].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(8)}, r"hidden must have shape \(T, D\) or \(B, S, D\), got \(8,\)"),
        ({"weight": torch.zeros(9, 7)}, r"weight must have shape \(V, 8\), got \(9, 7\)"),
        (
            {"weight": torch.zeros(9, 8).half()},
            "weight must have dtype torch.float32, got torch.float16",
        ),
        ({"hidden": torch.zeros(4, 8).int()}, "hidden must be bfloat16.*int32"),
        ({"labels": torch.zeros(2, 2).long()}, r"labels must have shape \(4,\), got \(2, 2\)"),
        ({"labels": torch.zeros(4)}, "labels must be int64, got torch.float32"),
        (
            {"labels": torch.tensor([0, 9, -100, -1])},
            r"labels must be in \[0, 9\) or -100, got values in \[-1, 9\]",
        ),
        ({"bias": torch.zeros(9).double()}, "bias must be bfloat16.*float64"),
        ({"bias": torch.zeros(8)}, r"bias must have shape \(9,\), got \(8,\)"),
        ({"labels": torch.zeros(4, device="meta").long()}, "labels must be on cpu, got meta"),
        ({"weight": torch.zeros(9, 8, device="meta")}, "weight must be on cpu, got meta"),
        ({"weight": torch.zeros(0)}, "weight is empty or sharded: gather it first"),  # ZeRO-3's
        ({"temperature": torch.ones(())}, "temperature must be a number, got Tensor"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
        ({"softcap": -1.0}, "softcap must be positive, got -1.0"),
        ({"outputs": "log_probs"}, "outputs must be a tuple of log_probs, .*, got 'log_probs'"),
        ({"outputs": ("logits",)}, r"outputs must be a tuple of log_probs, .*got \('logits',\)"),
        ({"outputs": ()}, "outputs must be a tuple of log_probs"),
        ({"outputs": ("entropy",) * 2}, "outputs must be named once each"),
        ({"logits_bytes": 0}, "logits_bytes must be positive, got 0"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message) -> None:
    arguments = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(9, 8),
        "labels": torch.zeros(4).long(),
    } | change
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_at_full_vocabulary(dtype, frozen) -> None:
    hidden, weight, labels = _inputs(700, 512, 151_936, dtype, ignored=0.2)
    weight.requires_grad_(not frozen)
    _check(hidden, weight, labels, logits_bytes=2**27, outputs=BOTH)
    _check(hidden, weight, labels, outputs=("log_probs",), temperature=0.7, softcap=30.0)
