"""Cross-entropy of logits against torch's: values, gradients, and whose memory these take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import longctx
from exactness import DEVICE, DTYPES, assert_exact
from longctx.head.logits import lazy_logits

B, S, V = 3, 5, 300


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(B, S, V, dtype=torch.float64) * 3).to(DEVICE, dtype)
    labels = torch.randint(V, (B, S), device=DEVICE)
    labels[0, 2:] = labels[2, 0] = -100
    return logits, labels


def theirs(
    logits: Tensor, labels: Tensor, softcap=None, lse_square_scale=0.0, reduction="mean", **options
) -> Tensor:
    """torch's loss, with what Liger's adds to it."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = torch.nn.functional.cross_entropy(
        z.flatten(0, -2), labels.flatten(), reduction=reduction, **options
    )
    loss = loss.view(labels.shape) if reduction == "none" else loss
    if lse_square_scale:
        squares = lse_square_scale * z.logsumexp(-1).square().masked_fill(labels == -100, 0)
        mean = squares.sum() / (labels != -100).sum()
        loss = loss + {"mean": mean, "sum": squares.sum(), "none": squares}[reduction]
    return loss


def run(op, logits: Tensor, labels: Tensor, upstream: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The loss and the logits' gradient, of logits that some other operation has made."""
    leaf = logits.detach().clone().requires_grad_()
    loss = op(leaf * 1, labels, **options)
    loss.backward(upstream.to(loss.dtype).expand(loss.shape))
    return loss.detach(), leaf.grad


def assert_as_theirs(logits: Tensor, labels: Tensor, upstream: Tensor, **options) -> None:
    double = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    truth = run(theirs, logits.double(), labels, upstream, **double)
    wide = {k: v.to(logits.dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    naive = run(theirs, logits, labels, upstream, **wide)
    ours = run(longctx.cross_entropy, logits, labels, upstream, **options)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == logits.dtype
    for name, *values in zip(("loss", "gradient"), ours, naive, truth, strict=True):
        assert_exact(name, *values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradient(reduction, dtype):
    logits, labels = inputs(dtype)
    upstream = torch.tensor(0.5, device=DEVICE)
    if reduction == "none":  # another gradient for each row
        upstream = torch.linspace(-1, 2, B * S, device=DEVICE).view(B, S)
    assert_as_theirs(logits, labels, upstream, reduction=reduction)


WEIGHT = torch.linspace(0.1, 3, V, device=DEVICE)
OPTIONS = {
    "smoothing and softcap": {"label_smoothing": 0.1, "softcap": 5.0},
    "square": {"lse_square_scale": 1e-2},
    "square of each": {"lse_square_scale": 1e-2, "reduction": "none", "softcap": 5.0},
    "weight": {"weight": WEIGHT},
    "weight of each": {"weight": WEIGHT, "reduction": "none"},
    "weight and softcap": {"weight": WEIGHT, "reduction": "sum", "softcap": 5.0},
}


@pytest.mark.parametrize("kernels", ["kernel", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, kernels, request):
    if kernels == "reference":
        request.getfixturevalue("reference_kernels")
    assert_as_theirs(*inputs(), torch.tensor(2.0, device=DEVICE), **OPTIONS[name])


def test_another_ignore_index():
    """A label of -100 is no class then, and gives NaN."""
    logits, labels = inputs()
    labels = labels.masked_fill(labels == -100, 7)
    assert_as_theirs(logits, labels, torch.tensor(1.0, device=DEVICE), ignore_index=7)
    labels[1, 1] = -100
    found = longctx.cross_entropy(logits, labels, ignore_index=7, reduction="none")
    assert found[1, 1].isnan() and found.isnan().sum() == 1


@pytest.mark.usefixtures("reference_kernels")
def test_fp64_runs_in_plain_torch():
    logits, labels = (x.cpu() for x in inputs(torch.float64))
    for options in ({}, {"reduction": "none", "softcap": 5.0, "lse_square_scale": 0.1}):
        upstream = torch.linspace(-1, 2, B * S, dtype=torch.float64).view(B, S)
        upstream = upstream if options else upstream[0, 0]
        truth = run(theirs, logits, labels, upstream, **options)
        for ours, other in zip(
            run(longctx.cross_entropy, logits, labels, upstream, **options), truth, strict=True
        ):
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)


def test_the_gradient_takes_the_memory_of_logits():
    """Forward leaves the logits; backward allocates no second tensor of their size."""
    logits, labels = inputs()
    made = logits.clone().requires_grad_() * 1
    seen: list[Tensor] = []
    made.register_hook(seen.append)
    loss = longctx.cross_entropy(made, labels)
    assert torch.equal(made, logits)
    loss.backward()
    assert seen[0].data_ptr() == made.data_ptr()


@pytest.mark.parametrize("cut", [slice(None), slice(None, -1)], ids=["all", "all but the last"])
def test_logits_that_are_cut(cut):
    """`logits[:, :-1]`, as whoever shifts does: no copy is made, and the last row stays."""
    logits, labels = inputs()
    leaf = logits.clone().requires_grad_()
    made = leaf * 1
    before, labels = made[:, -1].detach().clone(), labels[:, cut]
    longctx.cross_entropy(made[:, cut], labels).backward()
    other = logits.clone().requires_grad_()
    theirs(other[:, cut], labels).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=1e-7)
    written = made[:, cut].detach()
    torch.testing.assert_close(written, other.grad[:, cut], rtol=1e-5, atol=1e-7)
    assert cut == slice(None) or torch.equal(made[:, -1], before)


def test_memory_of_others_is_left_alone():
    """A leaf, a view of a leaf, and one row that is expanded to many."""
    logits, labels = inputs()
    leaf = logits.clone().requires_grad_()
    made = {
        "a leaf": lambda: (leaf, labels),
        "a view of a leaf": lambda: (leaf.view(-1, V), labels.view(-1)),
        "one row": lambda: ((leaf[:1, :1] * 1).expand(B, S, V), labels),
    }
    for name, make in made.items():
        given, targets = make()
        before = given.detach().clone()
        longctx.cross_entropy(given, targets).backward()
        assert torch.equal(given, before) and torch.equal(leaf, logits), name
        ours, leaf.grad = leaf.grad, None
        theirs(*make()).backward()
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-5, atol=1e-7)
        leaf.grad = None


def test_logits_that_somebody_else_saved_fail_clearly():
    logits, labels = inputs()
    made = logits.clone().requires_grad_() * 1
    squared = made.square().mean()  # keeps the logits
    loss = longctx.cross_entropy(made, labels)
    loss.backward(retain_graph=True)
    for later in (squared, loss):  # and a second backward
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()


def test_no_gradient_and_no_label():
    logits, labels = inputs()
    with torch.no_grad():
        found = longctx.cross_entropy(logits, labels)
    torch.testing.assert_close(found, theirs(logits, labels), rtol=1e-5, atol=1e-6)
    made = logits.clone().requires_grad_() * 1
    for options in ({}, {"weight": WEIGHT}):
        loss = longctx.cross_entropy(made, torch.full_like(labels, -100), **options)
        assert loss.item() == 0
    assert longctx.cross_entropy(logits[:0], labels[:0]).item() == 0
    assert longctx.cross_entropy(logits[0, :0], labels[0, :0], reduction="none").shape == (0,)


def test_lazy_logits_are_read():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
    lazy = lazy_logits(hidden, lambda x: x @ weight.T, 16, torch.zeros(()))
    labels = torch.tensor([1, -100, 5, 15])
    longctx.cross_entropy(lazy, labels).backward()
    found, hidden.grad = hidden.grad, None
    theirs(hidden @ weight.T, labels).backward()
    torch.testing.assert_close(found, hidden.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(5)}, r"logits must have shape \(T, V\) or \(B, S, V\), got \(5,\)"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int32)}, "logits must be bfloat16.*int32"),
        ({"logits": torch.zeros(5, 4).t()}, r"logits must be contiguous in its last dimension"),
        ({"labels": torch.zeros(2, 2).long()}, r"labels must have shape \(4,\), got \(2, 2\)"),
        ({"labels": torch.zeros(4)}, "labels must be int64, got torch.float32"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"lse_square_scale": "x"}, "lse_square_scale must be a number, got str"),
        ({"softcap": 0.0}, "softcap must be positive, got 0.0"),
        ({"weight": torch.ones(4)}, r"weight must have shape \(5,\), got \(4,\)"),
        (
            {"weight": torch.ones(5), "label_smoothing": 0.1},
            "weight goes with neither label_smoothing nor lse_square_scale",
        ),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"logits": torch.zeros(4, 5), "labels": torch.zeros(4).long()} | change
    with pytest.raises(ValueError, match=message):
        longctx.cross_entropy(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.gpu
def test_memory_of_logits_on_a_gpu():
    """1 GiB of logits: neither forward nor backward takes a hundredth of that beside them."""
    logits = torch.randn(4096, 131_072, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(131_072, (4096,), device="cuda")
    made = logits * 1
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (d_logits,) = torch.autograd.grad(longctx.cross_entropy(made, labels), made)
    assert torch.cuda.max_memory_allocated() - held < made.nbytes / 100
    assert d_logits.data_ptr() == made.data_ptr()
