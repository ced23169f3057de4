"""Matmuls by expert against fp64 loops, for segments of every kind, and sums in a fixed order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact
from longctx.kernels.grouped_mm import (
    LowRank,
    TileConfig,
    combine,
    grouped_mm,
    grouped_outer_,
    mm_config,
    outer_config,
    slot_dots,
)
from longctx.kernels.sort_slots import sort_slots

SMALL = TileConfig(rows=16, block=32, depth=16, num_warps=1, group=2)
HALVES = TileConfig(rows=32, block=32, depth=16, num_warps=1, halves=True)
SEGMENTS = {
    "balanced": [16, 16, 16, 16],  # whole tiles
    "unbalanced": [1, 40, 17, 0, 70],  # one row, parts of tiles, an empty expert
    "one has all": [0, 0, 67, 0],
    "the last has all": [0, 0, 33],
    "one expert": [50],
    "a slot each": [1] * 5,
    "no slots": [0, 0, 0],
}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def rows_of(n: int, m: int) -> Tensor:
    return torch.randint(m, (n,), dtype=torch.int32, device=DEVICE)


def mm_loop(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([s @ w.t() for s, w in zip(x.split(counts), weight, strict=True)])


def outer_loop(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    pairs = zip(a.split(counts), b.split(counts), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def check_mm(counts, width, inputs, dtype, *, gathered, transposed, config=SMALL) -> None:
    torch.manual_seed(sum(counts))
    n, m = sum(counts), 11
    x = draw(m if gathered else n, inputs, dtype=dtype)
    weight = draw(len(counts), *((inputs, width) if transposed else (width, inputs)), dtype=dtype)
    weight = weight.transpose(1, 2) if transposed else weight
    rows = rows_of(n, m) if gathered else None
    y = grouped_mm(x, weight, ends_of(counts), rows=rows, config=config)
    assert y.shape == (n, width) and y.dtype == dtype
    x = x[rows] if gathered else x
    truth = mm_loop(x.double(), weight.double(), counts)
    # Naive is the loop in fp32, rounded once: bf16 products on a CPU may be summed in bf16.
    naive = mm_loop(x.float(), weight.float(), counts).to(dtype)
    assert_exact("y", y, naive, truth)


def check_outer(counts, width, inputs, dtype, *, gathered, add, config=SMALL) -> None:
    torch.manual_seed(sum(counts))
    n, m = sum(counts), 11
    a, b = (draw(m if gathered else n, size, dtype=dtype) for size in (width, inputs))
    rows_a, rows_b = (rows_of(n, m) if gathered else None for _ in range(2))
    acc = torch.full((len(counts), width, inputs), torch.nan, device=DEVICE, dtype=dtype)
    if add:
        acc = draw(*acc.shape, dtype=torch.float32)
    before = acc.clone()
    how = dict(rows_a=rows_a, rows_b=rows_b, add=add, config=config)
    assert grouped_outer_(acc, a, b, ends_of(counts), **how) is acc
    a, b = (x if r is None else x[r] for x, r in ((a, rows_a), (b, rows_b)))
    truth, naive = (outer_loop(a.to(t), b.to(t), counts) for t in (torch.double, torch.float))
    if add:
        truth, naive = before.double() + truth, before + naive
    assert_exact("acc", acc, naive.to(acc.dtype), truth)
    for e, count in enumerate(counts):
        if not count:
            assert torch.equal(acc[e], before[e] if add else torch.zeros_like(acc[e]))


@pytest.mark.parametrize("counts", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product(dtype, counts) -> None:
    """test_plain_torch_on_the_cpu has fp16, which takes the paths of bf16."""
    check_mm(counts, 40, 48, dtype, gathered=True, transposed=False)
    check_mm(counts, 64, 32, dtype, gathered=False, transposed=False, config=HALVES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", SEGMENTS.values(), ids=SEGMENTS)
def test_product_with_transposed_weights(counts, dtype) -> None:
    """The gradient of an expert's input is such a product."""
    check_mm(counts, 40, 48, dtype, gathered=False, transposed=True)
    # Inputs are no multiple of a step.
    check_mm(counts, 64, 27, dtype, gathered=True, transposed=True, config=HALVES)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_before_rounding(dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(0)
    counts = SEGMENTS["unbalanced"]
    x, weight = draw(sum(counts), 48, dtype=dtype), draw(len(counts), 40, 48, dtype=dtype)
    bias = 9 * draw(len(counts), 40, dtype=dtype)
    y = grouped_mm(x, weight, ends_of(counts), bias=bias, config=SMALL)
    truth, naive = (
        mm_loop(x.to(t), weight.to(t), counts)
        + bias.to(t).repeat_interleave(torch.tensor(counts, device=DEVICE), 0)
        for t in (torch.double, torch.float)
    )
    assert_exact("y", y, naive.to(dtype), truth)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("r", [3, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_is_added_before_rounding(dtype, r, plain, request) -> None:
    """Its second factor may be transposed: the gradient of an expert's input has such a one."""
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(r)
    counts = [1, 0, 20]
    n, experts = sum(counts), len(counts)
    x, weight = draw(7, 16, dtype=dtype), draw(experts, 40, 16, dtype=dtype)
    rows, u, b = rows_of(n, 7), draw(n, r, dtype=dtype), draw(experts, r, 40, dtype=dtype)
    truth, naive = (
        mm_loop(x[rows].to(t), weight.to(t), counts)
        + mm_loop(u.to(t), b.to(t).transpose(1, 2), counts)
        for t in (torch.double, torch.float)
    )
    for second in (b.transpose(1, 2), b.transpose(1, 2).contiguous()):
        low_rank = LowRank(u, second)
        y = grouped_mm(x, weight, ends_of(counts), rows=rows, low_rank=low_rank, config=SMALL)
        assert_exact("y", y, naive.to(dtype), truth)


@pytest.mark.parametrize(
    ("segments", "dtype", "add"),
    [
        (segments, dtype, (i + j) % 2 > 0)
        for i, segments in enumerate(SEGMENTS)
        for j, dtype in enumerate((torch.bfloat16, torch.float32))
    ],
)
def test_outer_products(segments, dtype, add) -> None:
    counts = SEGMENTS[segments]
    check_outer(counts, 40, 48, dtype, gathered=True, add=add)
    check_outer(counts, 32, 64, dtype, gathered=False, add=add)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_on_the_cpu(dtype, reference_kernels) -> None:
    for counts in SEGMENTS.values():
        for flag in (False, True):
            check_mm(counts, 40, 27, dtype, gathered=flag, transposed=flag)
            check_outer(counts, 40, 27, dtype, gathered=flag, add=flag)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_tiles_that_are_chosen(dtype) -> None:
    counts = [130, 0, 300]  # past a tile of 128, and past two
    check_mm(counts, 300, 130, dtype, gathered=True, transposed=False, config=None)
    check_mm([40, 30], 128, 64, dtype, gathered=False, transposed=True, config=None)
    check_outer(counts, 260, 300, dtype, gathered=True, add=True, config=None)


def test_tiles_suit_the_segments_and_the_card() -> None:
    wide = mm_config(65536, 128, 1536)  # Qwen3-30B-A3B, 8192 tokens
    assert (wide.rows, wide.block) == (128, 256)
    assert mm_config(512, 128, 1536).rows == 64  # 4 slots an expert
    for shared_bytes in (99 * 1024, 163 * 1024, 227 * 1024):
        for itemsize in (2, 4):
            for n in (100, 10**6):
                for width in (100, 1536):
                    configs = [mm_config(n, 8, width, itemsize, shared_bytes)]
                    configs += [outer_config(n, 8, width, 2048, itemsize, shared_bytes)]
                    assert all(c.shared_bytes(itemsize) <= shared_bytes for c in configs)


def test_rows_and_results_at_strides() -> None:
    """Halves of wider buffers, and one expert's slice of a stack of all layers."""
    torch.manual_seed(0)
    counts = [20, 0, 13]
    wide = draw(33, 96, dtype=torch.bfloat16)
    x, a = wide[:, :48], wide[:, 48:]
    weight = draw(2, 3, 40, 96, dtype=torch.bfloat16)[1, :, :, :48]
    out = torch.full((33, 80), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    y = grouped_mm(x, weight, ends_of(counts), out=out[:, 40:], config=SMALL)
    expected = grouped_mm(x.contiguous(), weight.contiguous(), ends_of(counts), config=SMALL)
    assert y.data_ptr() == out[:, 40:].data_ptr() and torch.equal(out[:, 40:], expected)
    assert out[:, :40].isnan().all()
    acc = torch.zeros(3, 2, 48, 96, device=DEVICE)
    ours = acc[:, 1, :, 48:]
    grouped_outer_(ours, a, x, ends_of(counts), add=True, config=SMALL)
    whole = torch.zeros(3, 48, 48, device=DEVICE)
    args = (a.contiguous(), x.contiguous(), ends_of(counts))
    assert torch.equal(ours, grouped_outer_(whole, *args, add=True, config=SMALL))
    assert not acc[:, 0].any() and not acc[..., :48].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf - inf
def test_rows_of_other_experts_do_not_matter() -> None:
    """An infinite row stays in its own segment."""
    counts = [5, 6, 7]
    x, weight = draw(18, 32, dtype=torch.bfloat16), draw(3, 32, 32, dtype=torch.bfloat16)
    x[5:11] = torch.inf
    y = grouped_mm(x, weight, ends_of(counts), config=SMALL)
    assert y[:5].isfinite().all() and y[11:].isfinite().all()
    acc = torch.empty(3, 32, 32, device=DEVICE)
    grouped_outer_(acc, x, x, ends_of(counts), add=False, config=SMALL)
    assert acc[0].isfinite().all() and acc[2].isfinite().all()


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("each", [1, 2, 5])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("counts", SEGMENTS.values(), ids=SEGMENTS)
def test_some_experts_at_a_time_are_all_of_them(counts, gathered, each, plain, request) -> None:
    """Products with biases and adapters have the same bits, and other experts' places stay."""
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(sum(counts))
    n, m, experts = sum(counts), 11, len(counts)
    dtype = torch.float32
    x = draw(m if gathered else n, 24, dtype=dtype)
    weight, bias = draw(experts, 40, 24, dtype=dtype), draw(experts, 40, dtype=dtype)
    added = LowRank(draw(n, 3, dtype=dtype), draw(experts, 40, 3, dtype=dtype))
    how = dict(ends=ends_of(counts), rows=rows_of(n, m) if gathered else None)
    whole = grouped_mm(x, weight, **how, bias=bias, low_rank=added)
    found, before = torch.full_like(whole, 7), 0
    for first in range(0, experts, each):
        some = slice(first, first + each)
        low_rank = LowRank(added.u, added.b[some])
        given = dict(how, bias=bias[some], low_rank=low_rank, out=found, first=first)
        grouped_mm(x, weight[some], **given)
        before += sum(counts[some])
        assert torch.equal(found[:before], whole[:before]) and (found[before:] == 7).all()


def test_experts_that_are_not_there() -> None:
    x, weight, ends = draw(4, 8, dtype=torch.float32), draw(2, 8, 8, dtype=torch.float32), [1, 2, 1]
    for first in (2, -1):
        with pytest.raises(ValueError, match=rf"2 experts from the one at {first} on .* among 3"):
            grouped_mm(x, weight, ends_of(ends), first=first)


@pytest.mark.gpu
def test_tiles_do_not_change_a_row() -> None:
    """A row's bits depend on neither its place in a tile nor the slots of others."""
    x, weight = draw(40, 64, dtype=torch.float32), draw(1, 32, 64, dtype=torch.float32)
    whole = grouped_mm(x, weight, ends_of([40]), config=SMALL)
    part = grouped_mm(x[7:], weight, ends_of([33]), config=SMALL)
    assert torch.equal(whole[7:], part)


# --- combine and slot_dots -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "k", "D", "wide", "with_weights"),
    [
        *((9, 1, 8, False, True), (13, 3, 100, False, False)),
        *((13, 3, 100, True, True), (3, 8, 1030, True, False)),
    ],
)
def test_combine_is_a_loop_in_fp32(t, k, D, wide, with_weights, dtype) -> None:
    torch.manual_seed(t)
    z = draw(t * k, D, dtype=dtype)
    places = torch.randperm(t * k, device=DEVICE).to(torch.int32).view(t, k)
    weights = torch.rand(t, k, device=DEVICE) if with_weights else None
    onto = draw(t, D, dtype=torch.float32 if wide else dtype)
    for base in (None, onto):
        total = torch.zeros(t, D, device=DEVICE)
        for j in range(k):
            rows = z[places[:, j].long()].float()
            total = total + (rows * weights[:, j, None] if with_weights else rows)
        total = total * 0.3
        total = total if base is None else base + total
        ours = combine(z, places, weights=weights, onto=base, scale=0.3)
        assert torch.equal(ours, total.to(dtype if base is None else base.dtype))
    fp32 = combine(z, places, weights=weights, onto=onto, scale=0.3, out=torch.empty_like(total))
    assert torch.equal(fp32, total)
    assert combine(z, places, weights=weights, onto=onto, scale=0.3, out=onto) is onto
    assert torch.equal(onto, total.to(onto.dtype))


def test_combine_on_the_cpu(reference_kernels) -> None:
    z = torch.tensor([[1.0], [2**-9], [2**-9 + 2**-16]], dtype=torch.bfloat16)
    places = torch.tensor([[0, 2, 1]], dtype=torch.int32)
    assert combine(z, places).item() == 1 + 2**-7  # each alone would be lost
    assert combine(z, places, onto=torch.ones(1, 1), scale=2.0).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "D"), [(1, 8), (7, 513), (0, 16), (33, 100)])
def test_slot_dots(n, D, dtype) -> None:
    torch.manual_seed(n)
    a, b = (draw(n, 2 * D, dtype=dtype)[:, D:] for _ in range(2))
    ours = slot_dots(a, b)
    assert ours.dtype == torch.float32
    naive, truth = ((a.to(t) * b.to(t)).sum(-1) for t in (torch.float32, torch.float64))
    assert_exact("dots", ours, naive, truth)


# --- a layer ---------------------------------------------------------------------------------


def test_a_layer_of_experts_is_the_sum_over_tokens() -> None:
    """sort_slots, both products and combine together, against one token after the other."""
    torch.manual_seed(1)
    x, weight = draw(10, 32, dtype=torch.float32), draw(4, 48, 32, dtype=torch.float32)
    scores, ids = torch.rand(10, 4, device=DEVICE).topk(2)
    slots = sort_slots(ids, 4)
    z = grouped_mm(x, weight, slots.ends, rows=slots.rows, config=SMALL)
    y = combine(z, slots.places, weights=scores)
    for t in range(10):
        expected = sum(s * (weight[e] @ x[t]) for s, e in zip(scores[t], ids[t], strict=True))
        torch.testing.assert_close(y[t], expected)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x, weight = torch.randn(64, 128, device="cuda"), torch.randn(4, 64, 128, device="cuda")
    ids, acc = torch.rand(64, 4, device="cuda").topk(2).indices, torch.empty_like(weight)

    def run() -> None:
        slots = sort_slots(ids, 4)
        y = grouped_mm(x, weight, slots.ends, rows=slots.rows)
        grouped_outer_(acc, y, x, slots.ends, rows_b=slots.rows, add=False)
        combine(y, slots.places, onto=torch.empty(64, 64, device="cuda"))
        slot_dots(y, y)

    run()  # kernels are compiled and loaded here
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """Rows of x and y beyond 2^31 elements."""
    m, inputs, width = 1_100_000, 2048, 2048
    x = torch.randn(m, inputs, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(2, width, inputs, dtype=torch.bfloat16, device="cuda")
    y = grouped_mm(x, weight, torch.tensor([100, m], dtype=torch.int32, device="cuda"))
    naive = x[-64:] @ weight[1].t()
    assert_exact("y", y[-64:], naive, x[-64:].double() @ weight[1].double().t())


WRONG = [
    ({"x": torch.zeros(6, 9)}, r"x must have shape \(6, 8\), got \(6, 9\)"),
    ({"x": torch.zeros(6, 8).half()}, "must have one dtype, got torch.float16"),
    ({"x": torch.zeros(8, 6).t()}, "x must be contiguous in its last dimension"),
    (
        {"weight": torch.zeros(2, 4, 16, device=DEVICE)[..., ::2]},
        "weight must be contiguous in its last dim",
    ),
    ({"ends": torch.zeros(3, dtype=torch.int32)}, r"ends must have shape \(2,\)"),
    ({"ends": torch.zeros(2, dtype=torch.int64)}, "ends must be int32, got torch.int64"),
    ({"rows": torch.zeros(6)}, "rows must be int32, got torch.float32"),
    ({"out": torch.zeros(5, 4)}, r"out must have shape \(6, 4\), got \(5, 4\)"),
    (
        {"low_rank": (torch.zeros(6, 2), torch.zeros(2, 2, 4))},
        r"b must have shape \(2, 4, 2\), got \(2, 2, 4\)",
    ),
    (
        {"low_rank": (torch.zeros(6, 2).half(), torch.zeros(2, 4, 2))},
        "u must have dtype torch.float32, got torch.float16",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_wrong_arguments_of_a_product(change, message) -> None:
    given = {"x": torch.zeros(6, 8), "weight": torch.zeros(2, 4, 8)}
    given |= {"ends": torch.tensor([3, 6], dtype=torch.int32)} | change
    given = {name: x.to(DEVICE) for name, x in given.items() if name != "low_rank"} | {
        name: LowRank(*(x.to(DEVICE) for x in pair))
        for name, pair in given.items()
        if name == "low_rank"
    }
    with pytest.raises(ValueError, match=message):
        grouped_mm(**given)


WRONG_OUTER = [
    ({"a": torch.zeros(6, 5)}, r"a must have shape \(6, 4\), got \(6, 5\)"),
    ({"b": torch.zeros(7, 8)}, "a and b must have as many rows as there are slots"),
    ({"b": torch.zeros(6, 8).half()}, "b must have dtype torch.float32, got torch.float16"),
    ({"acc": torch.zeros(2, 4, 8).half()}, "acc must have dtype torch.float32, got torch.float16"),
    ({"rows_a": torch.zeros(6, 1).int()}, r"rows_a must have shape \(6,\), got \(6, 1\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_OUTER, ids=str)
def test_wrong_arguments_of_outer_products(change, message) -> None:
    given = {"acc": torch.zeros(2, 4, 8), "a": torch.zeros(6, 4), "b": torch.zeros(6, 8)}
    given |= {"ends": torch.tensor([3, 6], dtype=torch.int32)} | change
    given = {name: x.to(DEVICE) for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        grouped_outer_(**given, add=True)


def test_wrong_arguments_of_combine_and_slot_dots() -> None:
    z, places = torch.zeros(6, 8, device=DEVICE), torch.zeros(3, 2, device=DEVICE).int()
    for change, message in (
        ({"weights": torch.zeros(3, 2).half()}, "weights must have dtype torch.float32"),
        ({"weights": torch.zeros(3)}, r"weights must have shape \(3, 2\)"),
        ({"onto": torch.zeros(2, 8)}, r"onto must have shape \(3, 8\)"),
        ({"out": torch.zeros(3, 9)}, r"out must have shape \(3, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            combine(z, places, **{name: x.to(DEVICE) for name, x in change.items()})
    with pytest.raises(ValueError, match="places must be int32"):
        combine(z, places.long())
    with pytest.raises(ValueError, match=r"b must have shape \(6, 8\), got \(3, 2\)"):
        slot_dots(z, places)
