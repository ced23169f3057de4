"""lm_head + cross-entropy against ordinary autograd in fp64 and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from pairs import pairs

from exactness import DEVICE, DTYPES, WIDTHS, assert_exact
from longctx.head import loss as loss_module
from longctx.head import pieces as pieces_module
from longctx.head.logits_loss import cross_entropy
from longctx.head.loss import linear_cross_entropy, linear_cross_entropy_reference
from longctx.head.pieces import _pieces
from longctx.kernels.scale import scale_into, scale_reference

IGNORED = -100
PLAIN = pytest.mark.usefixtures("reference_kernels")
"""Takes the torch references: kernels have tests of their own, and `test_exact` runs both."""


def _inputs(T: int, D: int, V: int, dtype: torch.dtype, ignored: float = 0.0, scale: float = 1.0):
    torch.manual_seed(T + D + V)
    hidden = torch.randn(T, D, dtype=torch.float64, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, device=DEVICE) * (scale * D**-0.5)
    weight = weight.to(dtype).requires_grad_()
    labels = torch.randint(V, (T,), device=DEVICE)
    labels[torch.rand(T, device=DEVICE) < ignored] = IGNORED
    return hidden, weight, labels


def _run(op, hidden, weight, labels, bias=None, d_loss=1.0, **options):
    """(loss, {name: gradient}) on fresh leaves that share the arguments' values."""
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in leaves.items()}
    loss = op(leaves["hidden"], leaves["weight"], labels, bias=leaves.get("bias"), **options)
    if loss.requires_grad:
        (loss * d_loss).backward()
    return loss.detach(), {k: v.grad for k, v in leaves.items()}


def _check(hidden, weight, labels, bias=None, chunk=None, **options):
    double = {"bias": None if bias is None else bias.double()}
    truth_hidden, truth_weight = hidden.double(), weight.double()
    for leaf, source in ((truth_hidden, hidden), (truth_weight, weight)):
        leaf.requires_grad_(source.requires_grad)
    truth, truth_grads = _run(
        linear_cross_entropy_reference, truth_hidden, truth_weight, labels, **double, **options
    )
    naive, naive_grads = _run(
        linear_cross_entropy_reference, hidden, weight, labels, bias, **options
    )
    extra = {} if chunk is None else {"logits_bytes": chunk}
    ours, grads = _run(linear_cross_entropy, hidden, weight, labels, bias, **extra, **options)
    assert ours.dtype == torch.float32 and ours.shape == ()
    assert_exact("loss", ours, naive, truth)
    for name, grad in truth_grads.items():
        if grad is None:
            assert grads[name] is None
        else:
            assert grads[name].dtype == hidden.dtype
            assert_exact(name, grads[name], naive_grads[name], grad)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(
    ("T", "D", "V", "ignored"),
    [
        (1, 64, 100, 0.0),  # one row
        (127, 100, 333, 0.3),  # nothing is a power of two
        (300, 64, 128, 0.9),  # mostly a prompt: few rows count
        (8, 16, 128256, 0.2),  # the vocabulary of Llama 3
        (64, 512, 1000, 0.0),  # nothing ignored: no gather
    ],
)
def test_exact(T, D, V, ignored, dtype):
    _check(*_inputs(T, D, V, dtype, ignored))


@PLAIN
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(
    "chunk", [1, 40_000, 400_000]
)  # 1 row, a few rows and several chunks at a time
def test_chunks_change_nothing(chunk, dtype):
    _check(*_inputs(150, 48, 500, dtype, ignored=0.2), chunk=chunk)


@PLAIN
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"num_items": 1000},
        {"num_items": torch.tensor(77, device=DEVICE)},
        {"label_smoothing": 0.1},
        {"softcap": 5.0},
        {"logits_scaling": 3.0},
        {"logits_scaling": 0.7, "softcap": 5.0, "label_smoothing": 0.1},
        {"label_smoothing": 0.1, "softcap": 10.0, "num_items": 40},
        {"lse_square_scale": 1e-2},
        {"lse_square_scale": 1e-2, "softcap": 5.0, "logits_scaling": 3.0, "reduction": "sum"},
        {"d_loss": 0.37},  # gradient accumulation, or a loss that is one of several terms
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options(options, dtype):
    _check(*_inputs(50, 64, 300, dtype, ignored=0.2, scale=3.0), chunk=100_000, **options)


def _torchs(hidden, weight, labels, bias=None, logits_scaling=1.0, lse_square_scale=0.0, **more):
    """torch's own cross-entropy of all logits, with its options and the square of lse."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    z = (logits if logits.dtype == torch.float64 else logits.float()) / logits_scaling
    reduction, factors = more.pop("reduction", "mean"), more.pop("ce_weight", None)
    factors = None if factors is None else factors.to(z.dtype)
    given = dict(reduction=reduction, weight=factors, **more)
    loss = torch.nn.functional.cross_entropy(z.flatten(0, -2), labels.flatten(), **given)
    if reduction == "none":
        loss = loss.view(labels.shape)
        counts = labels != more.get("ignore_index", IGNORED)
        loss = loss + lse_square_scale * z.logsumexp(-1).square() * counts
    return loss


EACH = {
    "each": ({"reduction": "none"}, (37, 48, 333)),
    "one token": ({"reduction": "none"}, (1, 48, 333)),
    "terms": ({"reduction": "none", "label_smoothing": 0.1, "logits_scaling": 3.0}, (37, 48, 100)),
    "z-loss": ({"reduction": "none", "lse_square_scale": 1e-2}, (37, 48, 333)),
    "classes": ({"ce_weight": True}, (50, 64, 300)),
    "sum of classes": ({"ce_weight": True, "reduction": "sum", "ignore_index": 7}, (50, 64, 300)),
    "each of classes": ({"ce_weight": True, "reduction": "none"}, (37, 48, 333)),
    "another index": ({"ignore_index": 7}, (50, 64, 16)),
}


@PLAIN
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("hidden",)], ids=str)
@pytest.mark.parametrize("case", EACH)
def test_losses_by_themselves(case, frozen):
    """Each with a gradient of its own, of several pieces: the weights of their sum are random. A
    frozen head has its gradient from forward, any other from logits that are computed again."""
    options, (T, D, V) = EACH[case]
    dtype = torch.bfloat16 if len(frozen) == 1 else torch.float32
    hidden, weight, labels = _inputs(T, D, V, dtype, ignored=0.3 if T > 1 else 0.0)
    if "ignore_index" in options:
        labels[labels == IGNORED] = options["ignore_index"]
    given = {"hidden": hidden, "weight": weight, "bias": torch.randn(V, device=DEVICE).to(dtype)}
    options = dict(options)
    if "ce_weight" in options:
        options["ce_weight"] = torch.rand(V, device=DEVICE) + 0.5
    d_losses = torch.randn(T, device=DEVICE, dtype=torch.float64)
    found = []
    for op, to in ((linear_cross_entropy, dtype), (_torchs, dtype), (_torchs, torch.float64)):
        x = {n: t.detach().to(to).requires_grad_(n not in frozen) for n, t in given.items()}
        more = {"logits_bytes": 4 * 16 * V} if op is linear_cross_entropy else {}
        loss = op(x["hidden"], x["weight"], labels, bias=x["bias"], **options, **more)
        (loss * (d_losses.to(loss.dtype) if loss.dim() else 1.0)).sum().backward()
        found.append((loss.detach(), {n: t.grad for n, t in x.items() if n not in frozen}))
    (ours, grads), (naive, naive_grads), (truth, truth_grads) = found
    assert ours.shape == truth.shape and ours.dtype == torch.float32
    assert_exact("loss", ours, naive, truth)
    for name, grad in truth_grads.items():
        assert grads[name].dtype == dtype
        assert_exact(name, grads[name], naive_grads[name], grad)


def test_losses_by_themselves_have_the_labels_shape():
    hidden, weight, labels = _inputs(6, 16, 20, torch.float32, ignored=0.5)
    loss = linear_cross_entropy(hidden.view(2, 3, 16), weight, labels.view(2, 3), reduction="none")
    assert loss.shape == (2, 3) and not loss[labels.view(2, 3) == IGNORED].any()
    for index in (IGNORED, 3):
        nothing = torch.full_like(labels, index)
        for more in ({}, {"ce_weight": torch.ones(20, device=DEVICE)}):
            assert linear_cross_entropy(hidden, weight, nothing, ignore_index=index, **more) == 0
    # -100 is a label that does not exist where another one is ignored
    labels[0] = IGNORED
    with pytest.raises(ValueError, match=r"labels must be in \[0, 20\)"):
        linear_cross_entropy(hidden, weight, labels, ignore_index=3, reduction="none")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("return_z_loss", "lse_square_scale=0"),
        ("return_token_accuracy", "longctx.linear_log_probs .* is_top1"),
        ("return_predicted_tokens", "argmax"),
        ("use_token_scaling", "reduction='none'"),
        ("accum_dtype", "in fp32 anyway"),
        ("shift", r"hidden\[:, :-1\]"),
        ("return_lse", "linear_log_probs"),
    ],
)
def test_arguments_of_other_losses_name_what_to_do(name, says):
    hidden, weight, labels = _inputs(3, 8, 12, torch.float32)
    with pytest.raises(ValueError, match=f"linear_cross_entropy has no {name}: .*{says}"):
        linear_cross_entropy(hidden, weight, labels, **{name: torch.float32})
    linear_cross_entropy(hidden, weight, labels, **{name: None})
    with pytest.raises(ValueError, match=f"cross_entropy has no {name}"):
        cross_entropy(hidden @ weight.T, labels, **{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'smoothing'"):
        linear_cross_entropy(hidden, weight, labels, smoothing=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    bias = torch.randn(300, dtype=torch.float64, device=DEVICE).to(dtype).requires_grad_()
    _check(*_inputs(50, 64, 300, dtype, ignored=0.2), bias=bias, chunk=100_000)


def test_frozen_inputs_cost_nothing(monkeypatch):
    """A frozen lm_head gets no product for d_weight, a frozen hidden state none for d_hidden."""
    calls = []
    for name in ("mm", "addmm_"):
        original = getattr(pieces_module, name)
        monkeypatch.setattr(
            pieces_module, name, lambda *a, f=original, n=name: (calls.append(n), f(*a))[1]
        )
    for frozen, expected in ((None, 3), ("hidden", 2), ("weight", 2), ("both", 1)):
        hidden, weight, labels = _inputs(20, 32, 100, torch.bfloat16)
        hidden.requires_grad_(frozen not in ("hidden", "both"))
        weight.requires_grad_(frozen not in ("weight", "both"))
        _check(hidden, weight, labels)
        calls.clear()
        loss = linear_cross_entropy(hidden, weight, labels)
        assert len(calls) == expected, (frozen, calls)
        assert loss.requires_grad == (frozen != "both")


def test_evaluation_computes_no_gradient(monkeypatch):
    hidden, weight, labels = _inputs(20, 32, 100, torch.bfloat16, ignored=0.3)
    with_grad = linear_cross_entropy(hidden, weight, labels)
    seen = []
    original = loss_module.cross_entropy_forward
    monkeypatch.setattr(
        loss_module,
        "cross_entropy_forward",
        lambda *a, d_logits, **k: (seen.append(d_logits), original(*a, d_logits=d_logits, **k))[1],
    )
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, labels)
    assert seen == [None]
    assert torch.equal(with_grad, without) and not without.requires_grad


def test_tied_embeddings():
    """The weight is used twice: its gradient is the sum of the embedding's and the head's."""

    def step(op, weight, ids, labels):
        weight = weight.detach().clone().requires_grad_()
        op(torch.nn.functional.embedding(ids, weight), weight, labels).backward()
        return weight.grad

    _, weight, labels = _inputs(40, 32, 100, torch.bfloat16, scale=4.0)
    ids = torch.randint(100, (40,), device=DEVICE)
    assert_exact(
        "tied weight",
        step(linear_cross_entropy, weight, ids, labels),
        step(linear_cross_entropy_reference, weight, ids, labels),
        step(linear_cross_entropy_reference, weight.double(), ids, labels),
    )


@pytest.mark.parametrize("num_items", [None, 5])
def test_nothing_to_learn(num_items):
    """Every label ignored, or no row at all: loss 0 and gradients 0, not NaN."""
    for T in (6, 0):
        hidden, weight, _ = _inputs(T, 32, 100, torch.bfloat16)
        labels = torch.full((T,), IGNORED, device=DEVICE)
        loss, grads = _run(linear_cross_entropy, hidden, weight, labels, num_items=num_items)
        assert loss == 0 and all((g == 0).all() for g in grads.values())


def test_one_label_in_a_batch():
    hidden, weight, labels = _inputs(30, 512, 100, torch.bfloat16)
    labels = torch.full((2, 15), IGNORED, device=DEVICE)
    labels[1, 7] = 3
    _check(hidden.view(2, 15, 512), weight, labels)


@PLAIN
def test_the_count_is_exact():
    """257 has no bf16 representation (256 has): the loss of equal rows is that of one row."""
    hidden, weight, _ = _inputs(1, 8, 16, torch.bfloat16)
    labels = torch.zeros(257, dtype=torch.int64, device=DEVICE)
    many = linear_cross_entropy(hidden.expand(257, 8), weight, labels, logits_bytes=2**13)
    one = linear_cross_entropy(hidden, weight, labels[:1])
    assert_exact("loss", many, one, one.double())


def test_strided_inputs():
    hidden, weight, labels = _inputs(40, 32, 100, torch.float32)
    truth, truth_grads = _run(linear_cross_entropy, hidden[::2], weight, labels[::2])
    leaf = hidden.detach().clone().requires_grad_()
    transposed = weight.detach().t().contiguous().requires_grad_()
    loss = linear_cross_entropy(leaf[::2], transposed.t(), labels[::2])
    loss.backward()
    assert_exact("loss", loss, truth, truth)
    assert_exact("hidden", leaf.grad[::2], truth_grads["hidden"], truth_grads["hidden"])
    assert_exact("weight", transposed.grad.t(), truth_grads["weight"], truth_grads["weight"])


def test_autocast():
    """fp32 parameters under autocast: the products run in bf16, the gradients come back in fp32."""
    hidden, weight, labels = _inputs(40, 32, 100, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss, grads = _run(linear_cross_entropy, hidden, weight, labels)
    low = _run(linear_cross_entropy, hidden.bfloat16(), weight.bfloat16(), labels)
    assert torch.equal(loss, low[0])
    assert grads["weight"].dtype == torch.float32
    assert torch.equal(grads["weight"], low[1]["weight"].float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_scaling_rounds_once(dtype):
    x = torch.randn(3, 1001, device=DEVICE)
    scale = torch.tensor(1 / 3, device=DEVICE)
    out = scale_into(x, scale, torch.empty_like(x, dtype=dtype))
    assert torch.equal(out, scale_reference(x, scale, dtype))
    expected = scale_reference(x, scale, x.dtype)
    assert torch.equal(scale_into(x, scale, x), expected)  # in place
    with pytest.raises(ValueError, match=r"out must have shape \(3, 1001\), got \(1001,\)"):
        scale_into(x, scale, x[0])
    with pytest.raises(ValueError, match=r"x must be contiguous, got strides \(1, 1001\)"):
        scale_into(x.t(), scale, x.t())


@PLAIN
@pytest.mark.parametrize(
    ("dtype", "ignored", "frozen"), pairs(WIDTHS, [0.0, 0.4], [None, "hidden", "weight"])
)
def test_groups_of_pieces(dtype, ignored, frozen):
    """Two groups of pieces and a ragged rest, with every frozen input and with ignored rows."""
    lines = 40
    assert _pieces(lines) == [20, 10, 5]
    hidden, weight, labels = _inputs(92, 32, 200, dtype, ignored)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    _check(hidden, weight, labels, chunk=lines * 2 * 256)  # lines of 256, to whole 128 bytes


def test_backward_runs_once():
    loss = linear_cross_entropy(*_inputs(4, 8, 16, torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


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
        ({"labels": torch.zeros(5).long()}, r"labels must have shape \(4,\), got \(5,\)"),
        ({"labels": torch.zeros(4)}, "labels must be int64, got torch.float32"),
        (
            {"labels": torch.full((4,), 9)},
            r"labels must be in \[0, 9\) or -100, got values in \[9, 9\]",
        ),
        ({"bias": torch.zeros(8)}, r"bias must have shape \(9,\), got \(8,\)"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        ({"reduction": "none", "num_items": 3}, "num_items goes with neither ce_weight nor"),
        ({"ce_weight": torch.ones(8)}, r"ce_weight must have shape \(9,\), got \(8,\)"),
        ({"ce_weight": torch.ones(9), "label_smoothing": 0.1}, "ce_weight goes with neither"),
        ({"label_smoothing": 1.5}, "label_smoothing must be in .0, 1., got 1.5"),
        ({"softcap": 0.0}, "softcap must be positive, got 0.0"),
        ({"logits_scaling": 0.0}, "logits_scaling must be positive, got 0.0"),
        ({"logits_bytes": 0}, "logits_bytes must be positive, got 0"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {
        "hidden": torch.zeros(4, 8),
        "weight": torch.zeros(9, 8),
        "labels": torch.zeros(4).long(),
    } | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(
            arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("labels"), **arguments
        )
