"""The cross-entropy kernel against autograd: in fp64, and in the dtype under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, WIDTHS, assert_exact
from longctx.kernels import cross_entropy as module
from longctx.kernels.cross_entropy import (
    IGNORE_INDEX,
    _parts,
    cross_entropy_forward,
    cross_entropy_reference,
)
from longctx.kernels.launch import Config

SHAPES = [
    (1, 64),  # one row, narrower than a block
    (127, 50),  # ragged rows, vocabulary below the smallest block
    (3, 4097),  # one element past a block
    (2, 50257),  # odd vocabulary: rows are not 16-byte aligned
    (4, 128256),  # Llama 3
]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"label_smoothing": 0.2, "softcap": 3.0},
    {"lse_square_scale": 0.01},
    {"lse_square_scale": 0.1, "label_smoothing": 0.2, "softcap": 3.0},
]


def _truth(x: Tensor, y: Tensor, label_smoothing=0.0, softcap=None, lse_square_scale=0.0):
    """(losses, gradient of their sum) through autograd, in x's dtype."""
    x = x.detach().clone().requires_grad_()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    loss = torch.nn.functional.cross_entropy(
        z, y, reduction="none", ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing
    )
    counts = y != IGNORE_INDEX
    loss = loss + lse_square_scale * torch.where(counts, z.logsumexp(dim=-1) ** 2, 0)
    loss.sum().backward()
    return loss.detach(), x.grad


def _inputs(T: int, V: int, dtype: torch.dtype, scale: float = 3.0):
    torch.manual_seed(T + V)
    x = (torch.randn(T, V, dtype=torch.float64) * scale).to(DEVICE, dtype)
    y = torch.randint(V, (T,), device=DEVICE)
    y[T // 2 + 1 :: 2] = IGNORE_INDEX
    return x, y


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in WIDTHS), (SHAPES[1], torch.float16)],
    ids=str,
)
def test_loss_and_gradient(shape, dtype):
    x, y = _inputs(*shape, dtype)
    loss, grad = _truth(x.double(), y)
    naive_loss, naive_grad = _truth(x, y)
    ours_grad = torch.full_like(x, float("nan"))
    ours = cross_entropy_forward(x, y, d_logits=ours_grad)
    assert_exact("loss", ours, naive_loss, loss)
    assert_exact("d_logits", ours_grad, naive_grad, grad)
    assert torch.equal(cross_entropy_forward(x, y), ours)  # the same without a gradient
    assert (ours_grad[y == IGNORE_INDEX] == 0).all()


@pytest.mark.parametrize("op", [cross_entropy_forward, cross_entropy_reference])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, op):
    x, y = _inputs(5, 1000, torch.float32)
    loss, grad = _truth(x.double(), y, **options)
    naive_loss, naive_grad = _truth(x, y, **options)
    ours_grad = torch.empty_like(x)
    ours = op(x, y, d_logits=ours_grad, scale=torch.tensor(0.25, device=DEVICE), **options)
    assert_exact("loss", ours, naive_loss, loss)
    assert_exact("d_logits", ours_grad, naive_grad * 0.25, grad * 0.25)


def test_in_place_and_into_another_dtype():
    x, y = _inputs(7, 300, torch.float32)
    padded = torch.full((7, 320), float("nan"), device=DEVICE)
    padded[:, :300] = x
    into_bf16 = torch.empty(7, 300, dtype=torch.bfloat16, device=DEVICE)
    loss = cross_entropy_forward(padded[:, :300], y, d_logits=into_bf16)
    assert torch.equal(padded[:, :300], x)
    assert torch.equal(cross_entropy_forward(padded[:, :300], y, d_logits=padded[:, :300]), loss)
    assert torch.equal(padded[:, :300].bfloat16(), into_bf16)
    assert padded[:, 300:].isnan().all()  # nothing is written past the vocabulary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (2, 64), (37, 300), (5, 4097)], ids=str)
def test_compacted_into_the_logits(shape, dtype):
    """Row i of the gradient lies over half of the logits of row i // 2."""
    (T, V), stride = shape, -(-shape[1] // 64) * 64
    logits, y = _inputs(T, V, torch.float32)
    elsewhere = torch.empty(T, V, dtype=dtype, device=DEVICE)
    expected = cross_entropy_forward(logits, y, d_logits=elsewhere)
    buffer = torch.zeros(T, stride, device=DEVICE)
    buffer[:, :V] = logits
    before = buffer.view(torch.int16).view(2 * T, stride).clone()
    gradient = buffer.view(-1).view(dtype)[: T * stride].view(T, stride)[:, :V]
    loss = cross_entropy_forward(buffer[:, :V], y, d_logits=gradient)
    assert_exact("loss", loss, expected, expected)
    assert_exact("d_logits", gradient, elsewhere, elsewhere)
    after = buffer.view(torch.int16).view(2 * T, stride)
    assert torch.equal(after[:, V:], before[:, V:]) and torch.equal(after[T:], before[T:])


def test_labels_at_the_edges_of_a_part():
    """Whichever program holds a label's logit: it counts once, in place too."""
    V = 128256
    y = torch.tensor([0, 8191, 8192, 122879, 122880, V - 1, IGNORE_INDEX], device=DEVICE)
    x = _inputs(len(y), V, torch.float32)[0]
    truth, naive = _truth(x.double(), y), _truth(x, y)
    loss = cross_entropy_forward(x, y, d_logits=x)
    assert_exact("loss", loss, naive[0], truth[0])
    assert_exact("d_logits", x, naive[1], truth[1])


def test_a_part_of_nothing_but_minus_infinity():
    """Half the vocabulary is masked out: programs whose slice has no probability at all."""
    x, y = _inputs(3, 128256, torch.float32)
    x[:, 60_000:] = float("-inf")
    y %= 60_000
    grad = torch.empty_like(x)
    truth, naive = _truth(x.double(), y), _truth(x, y)
    assert_exact("loss", cross_entropy_forward(x, y, d_logits=grad), naive[0], truth[0])
    assert_exact("d_logits", grad, naive[1], truth[1])


def test_all_logits_zero():
    """Parts whose maximum and sum of logits are 0: a word of zeros would mean "not published"."""
    x, y = torch.zeros(2, 20_000, device=DEVICE), torch.tensor([0, 19_999], device=DEVICE)
    loss, grad = _truth(x.double(), y, label_smoothing=0.1)
    naive_loss, naive_grad = _truth(x, y, label_smoothing=0.1)
    ours_grad = torch.full_like(x, float("nan"))
    ours = cross_entropy_forward(x, y, d_logits=ours_grad, label_smoothing=0.1)
    assert_exact("loss", ours, naive_loss, loss)
    assert_exact("loss by hand", ours, naive_loss, torch.full_like(loss, 20_000).log())
    assert_exact("d_logits", ours_grad, naive_grad, grad)


def test_too_few_programs_at_once():
    """Programs that cannot run together would wait for each other for ever."""
    config = Config(block=128, num_warps=4)
    logits = torch.empty(1, 1 << 20, device=DEVICE)
    with pytest.raises(ValueError, match="1048576 logits needs 8192 programs of 128 at once"):
        _parts(logits, config)


def test_extreme_logits():
    """Masked-out words (-inf), large logits, and a row that is certain of its label."""
    x = torch.tensor(
        [[1e4, -1e4, 0.0], [float("-inf"), 2.0, 1.0], [88.0, 0.0, -88.0]], device=DEVICE
    )
    y = torch.tensor([0, 1, 0], device=DEVICE)
    grad = torch.empty_like(x)
    loss = cross_entropy_forward(x, y, d_logits=grad)
    truth = _truth(x.double(), y)
    assert_exact("loss", loss, truth[0].float(), truth[0])
    assert_exact("d_logits", grad, truth[1].float(), truth[1])


def test_label_outside_the_vocabulary_gives_nan():
    x = torch.randn(2, 100, device=DEVICE)
    loss = cross_entropy_forward(x, torch.tensor([100, 5], device=DEVICE))
    assert loss[0].isnan() and loss[1].isfinite()


def _overlap(stride: int, V: int, start: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """4 rows of gradients in the memory of 4 rows of fp32 logits."""
    logits = torch.zeros(8, V)
    d_logits = logits.view(-1).view(dtype)[start:].as_strided((4, V), (stride, 1))
    return {"logits": logits[:4], "d_logits": d_logits}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 5, 6)}, r"logits must have shape \(T, V\), got \(4, 5, 6\)"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int32)}, "logits must be bfloat16.*int32"),
        ({"logits": torch.zeros(5, 4).t()}, r"logits must be contiguous.*\(1, 4\)"),
        (
            {"labels": torch.zeros(3, dtype=torch.int64)},
            r"labels must have shape \(4,\), got \(3,\)",
        ),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "labels must be int64.*int32"),
        ({"d_logits": torch.zeros(4, 6)}, r"d_logits must have shape \(4, 5\), got \(4, 6\)"),
        (_overlap(6, 4, 0, torch.float16), "got bytes 0 to 48 of 64"),  # another stride
        (_overlap(4, 4, 4, torch.float16), "got bytes 8 to 40 of 64"),  # another address
        (_overlap(4, 4, 4, torch.float32), "got bytes 16 to 80 of 64"),
        ({"scale": torch.ones(3)}, r"scale must have shape \(\), got \(3,\)"),
        ({"softcap": -1.0}, "softcap must be positive, got -1.0"),
        ({"labels": torch.zeros(4, dtype=torch.int64, device="meta")}, "one device.*meta"),
    ],
    ids=str,
)
def test_wrong_arguments(change, message):
    arguments = {"logits": torch.zeros(4, 5), "labels": torch.zeros(4, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        cross_entropy_forward(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """17,000 x 128,256 = 2.18e9 logits: offsets past int32 in the last rows."""
    T, V = 17_000, 128_256
    x = torch.randn(T, V, dtype=torch.bfloat16, device="cuda")
    y = torch.randint(V, (T,), device="cuda")
    rows = torch.tensor([0, 1, T - 2, T - 1], device="cuda")
    few = x[rows].clone()
    loss, grad = _truth(few.double(), y[rows])
    naive_loss, naive_grad = _truth(few, y[rows])
    ours = cross_entropy_forward(x, y, d_logits=x)
    assert_exact("loss", ours[rows], naive_loss, loss)
    assert_exact("d_logits", x[rows], naive_grad, grad)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["elsewhere", "in place", "compacted"])
@pytest.mark.parametrize("block", [1024, 8192, 16384, 131072])
def test_programs_wait_for_each_other(block, where, monkeypatch):
    """4096 rows whose maxima and sums all differ, and in every row a slice that outweighs the
    others: a pair that is stale, torn or another row's changes the result. Products on another
    stream take and free multiprocessors meanwhile, so that parts start in ever changing order.
    """
    config = Config(block=block, num_warps=4 if block < 131072 else 32)
    monkeypatch.setattr(module, "default_config", lambda *_: config)
    T, V = 4096, 128_256
    torch.manual_seed(0)
    logits = torch.randn(T, V, device="cuda") + torch.randn(T, 1, device="cuda") * 20
    logits[torch.arange(T), torch.randint(V, (T,))] += 15
    y = torch.randint(V, (T,), device="cuda")
    y[::7] = IGNORE_INDEX
    expected = torch.empty_like(logits)
    expected_loss = cross_entropy_reference(logits, y, d_logits=expected)
    buffer = logits.clone()
    d_logits = {
        "elsewhere": torch.empty_like(logits, dtype=torch.bfloat16),
        "in place": buffer,
        "compacted": buffer.view(-1).view(torch.bfloat16)[: T * V].view(T, V),
    }[where]

    side, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    first = None
    for _ in range(20):
        with torch.cuda.stream(side):
            for _ in range(20):
                a @ a
        buffer.copy_(logits)
        if where == "elsewhere":
            d_logits.fill_(float("nan"))
        loss = cross_entropy_forward(buffer, y, d_logits=d_logits)
        if first is None:
            first = loss, d_logits.clone()
            assert_exact("loss", loss, expected_loss, expected_loss)
            error = (d_logits.float() - expected).norm(dim=1)  # row by row
            limit = 1e-4 if where == "in place" else 2**-8  # an lse near 100 is good to 8e-6
            assert (error <= limit * expected.norm(dim=1)).all()
        assert torch.equal(loss, first[0]) and torch.equal(d_logits, first[1])


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_at_full_vocabulary(options):
    """The options where parts share a row; test_options has rows of one part."""
    x, y = _inputs(300, 128_256, torch.float32)
    loss, grad = _truth(x.double(), y, **options)
    naive_loss, naive_grad = _truth(x, y, **options)
    into_bf16 = torch.empty_like(x, dtype=torch.bfloat16)
    ours = cross_entropy_forward(x, y, d_logits=into_bf16, **options)
    assert_exact("loss", ours, naive_loss, loss)
    assert_exact("d_logits", into_bf16, naive_grad.bfloat16(), grad)
    assert_exact(
        "loss in place", cross_entropy_forward(x, y, d_logits=x, **options), naive_loss, loss
    )
    assert_exact("d_logits in place", x, naive_grad, grad)
