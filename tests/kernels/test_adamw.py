"""AdamW against its reference bit by bit, and against torch's and an fp64 run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, relative_error
from longctx.kernels.adamw import (
    CHECKED,
    Options,
    adamw_,
    adamw_reference,
    join_master,
    split_master,
    weight_checksums,
)

GRAD_DTYPES = [torch.bfloat16, torch.float32]
DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 1}
SIZES = [
    1,
    7,  # shorter than a SIMD vector
    1024,  # one full block
    5003,  # a last block with few elements
]


def _floats(*bits: int) -> Tensor:
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(torch.float32)


def _state(n: int, step: int, grad_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[master, exp_avg, exp_avg_sq, grad] of many magnitudes, as `step - 1` steps leave them."""
    generator = torch.Generator().manual_seed(n + step)

    def normal(spread: float) -> Tensor:
        x = torch.randn(n, generator=generator)
        return x * torch.exp2(torch.randn(n, generator=generator) * spread)

    p, g = 0.02 * normal(4.0), (1e-3 * normal(8.0)).to(grad_dtype)
    if step == 1:
        return [x.to(DEVICE) for x in (p, torch.zeros(n), torch.zeros(n), g)]
    m = 0.3 * normal(0.0) * g.float().abs()
    v = (0.2 + normal(0.0).square()) * g.float().square()
    return [x.to(DEVICE) for x in (p, m, v, g)]


def _torch_step(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, *, fused: bool = False, **hyper: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after one step of torch.optim.AdamW in p's dtype."""
    p = p.clone().requires_grad_()
    p.grad = g.to(p.dtype)
    betas = hyper["beta1"], hyper["beta2"]
    others = {k: hyper[k] for k in ("lr", "eps", "weight_decay")}
    how = {"fused": True} if fused else {"foreach": False}
    optimizer = torch.optim.AdamW([p], betas=betas, **others, **how)
    count = torch.tensor(hyper["step"] - 1.0, device=p.device if fused else "cpu")
    state = {"step": count, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.state[p] = state
    optimizer.step()
    return p.detach(), state["exp_avg"], state["exp_avg_sq"]


def _same(ours: Tensor, other: Tensor) -> bool:
    """Bit by bit, any NaN being equal to any other."""
    bits = [x.nan_to_num(nan=1.25, posinf=math.inf, neginf=-math.inf) for x in (ours, other)]
    return torch.equal(*(x.view(torch.int32) for x in bits))


def _masters() -> Tensor:
    """fp32 of all kinds: random bits and the edges."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (300_000,), generator=generator, dtype=torch.int64)
    positive = [
        *(0x0, 0x1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x18000),  # zero, denormals
        *(0x007FFFFF, 0x00800000),  # greatest denormal, smallest normal
        *(0x3F7F8000, 0x3F7FFFFF, 0x3F800000, 0x3F808000, 0x3F818000),  # up to 1.0, two ties
        *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000),  # the greatest, inf
        *(0x7F800001, 0x7FC00000, 0x7FFF7FFF, 0x7FFFFFFF),  # NaN
    ]
    edges = _floats(*positive, *(b | 0x80000000 for b in positive))
    return torch.cat((edges, random.int().view(torch.float32))).to(DEVICE)


def test_every_master_joins_back_to_itself():
    master = _masters()
    weight, remainder = split_master(master)
    assert weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert _same(join_master(weight, remainder), master)
    nan = master.isnan()
    assert torch.equal(weight.isnan(), nan) and nan.any()
    assert (weight[nan].view(torch.int16) == 0x7FC0).all() and (remainder[nan] == 0).all()


def test_the_weight_is_the_master_rounded():
    master = _masters()
    weight, _ = split_master(master)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert _same(weight[~tie].float(), master.bfloat16()[~tie].float())
    away = master[tie & ~master.isnan()]
    assert (split_master(away)[0].double().abs() > away.double().abs()).all() and len(away)


def _ulp(x: Tensor) -> Tensor:
    exponent = (torch.frexp(x.float())[1] - 24).clamp(min=-149)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent)


def assert_a_step_of_torch(ours: Tensor, torchs: Tensor, before: list[Tensor], **hyper) -> None:
    """Both weights are within 1 ulp of the weight, plus 8 epsilon of the step.

    The ulp is that of the larger of the weight before and after: that is what the sum rounds to. A
    weight much smaller than its step is only as exact as the step, whose dozen roundings differ
    between the two, and which m's own sum may cancel to almost nothing: it counts as the larger of
    that sum's terms. Where it is below a sixteenth of the weight the bound is 1 ulp.
    """
    p, m, v, g = (x.double() for x in before)
    bias1, bias2 = (1 - hyper[b] ** hyper["step"] for b in ("beta1", "beta2"))
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    root = ((beta2 * v + (1 - beta2) * g**2) / bias2).sqrt()
    terms = torch.maximum((beta1 * m).abs(), ((1 - beta1) * g).abs())
    step = hyper["lr"] / bias1 * terms / (root + hyper["eps"])
    ulp = _ulp(torch.maximum(p.abs(), ours.double().abs()))
    distance = (ours.double() - torchs.double()).abs()
    worst = (distance / (ulp + 8 * 2**-23 * step)).max().item()
    assert worst <= 1, worst
    small = step < p.abs() / 16
    assert (distance <= ulp)[small].all() and (small.any() or len(p) < 100)


@pytest.mark.parametrize("clip", [None, 0.37])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 10, 10_000])
def test_one_step_of_torch(step, weight_decay, grad_dtype, clip):
    before = _state(5003, step, grad_dtype)
    hyper = DEFAULTS | {"weight_decay": weight_decay, "step": step}
    scale = None if clip is None else torch.tensor(clip, device=DEVICE)
    p, m, v = (x.clone() for x in before[:3])
    adamw_(p, None, m, v, before[3], Options(**hyper), scale=scale)
    before[3] = before[3].float() if clip is None else before[3].float() * scale
    assert_a_step_of_torch(p, _torch_step(*before, **hyper)[0], before, **hyper)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [1, 10, 10_000])
def test_one_step_of_torch_fused(step):
    before = _state(300_007, step)
    hyper = DEFAULTS | {"step": step}
    p, m, v = (x.clone() for x in before[:3])
    adamw_(p, None, m, v, before[3], Options(**hyper))
    # Against fp64: at step 10 the fused kernel's bias corrections, in fp32, are off by 13 ulp.
    truth = _torch_step(*(x.double() for x in before), **hyper)[0]
    fused = _torch_step(*before, fused=True, **hyper)[0]
    assert_a_step_of_torch(p, truth, before, **hyper)
    assert relative_error(p, truth) <= relative_error(fused, truth)


def test_100_steps_are_closer_to_fp64_than_those_of_torch():
    n = 3000
    torch.manual_seed(0)
    start = 0.02 * torch.randn(n)
    size, mean = 1e-3 * torch.exp2(4 * torch.randn(n)), 0.3 * torch.randn(n)
    ours = [x.to(DEVICE) for x in (*split_master(start), torch.zeros(n), torch.zeros(n))]
    torchs = [x.to(DEVICE) for x in (start, torch.zeros(n), torch.zeros(n))]
    truth = [x.double() for x in torchs]
    for step in range(1, 101):
        grad = ((mean + torch.randn(n)) * size).bfloat16().to(DEVICE)
        hyper = DEFAULTS | {"step": step}
        adamw_(*ours, grad, Options(**hyper))
        torchs = list(_torch_step(*torchs, grad, **hyper))
        truth = list(_torch_step(*truth, grad, **hyper))
    ours = [join_master(*ours[:2]), *ours[2:]]
    for name, our, other, true in zip("pmv", ours, torchs, truth, strict=True):
        error, limit = relative_error(our, true), relative_error(other, true)
        if name == "m":  # torch's lerp contracts, one rounding less: 4.9e-8 against 5.4e-8
            limit = 2**-23
        assert error <= limit, (name, error, limit)


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_kernel_and_reference_agree_bit_by_bit(n, grad_dtype):
    """Also compiled, and with the reference on the CPU: neither contracts."""
    before = _state(n, 10, grad_dtype)
    scale = torch.tensor(0.37, device=DEVICE)
    hyper = DEFAULTS | {"step": 10}
    before = [*split_master(before[0]), *before[1:]]
    ours, plain, cpu = ([x.clone().to(d) for x in before] for d in (DEVICE, DEVICE, "cpu"))
    adamw_(*ours, Options(**hyper), scale=scale)
    adamw_reference(*plain, Options(**hyper), scale=scale)
    adamw_reference(*cpu, Options(**hyper), scale=scale.cpu())
    for our, other, third in zip(ours, plain, cpu, strict=True):
        assert torch.equal(our, other) and torch.equal(our.cpu(), third)
    assert torch.equal(ours[-1], before[-1])  # the gradient stays


def test_plain_torch_on_the_cpu(reference_kernels):
    """adamw_ without a GPU and without the interpreter."""
    before = [x.cpu() for x in _state(33, 10)]
    ours, plain = ([*split_master(before[0]), *(x.clone() for x in before[1:])] for _ in range(2))
    adamw_(*ours, Options(**DEFAULTS))
    adamw_reference(*plain, Options(**DEFAULTS))
    for our, other, old in zip(ours[2:4], plain[2:4], before[1:3], strict=True):
        assert torch.equal(our, other) and not torch.equal(our, old)
    assert _same(join_master(*ours[:2]), join_master(*plain[:2]))


@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 5003])
def test_remainders_count_under_their_own_weights_alone(n):
    """Of 1024 weights of which others wrote one, the weights as they are become the masters; the
    others keep theirs."""
    before = _state(n, 10)
    hyper = DEFAULTS | {"step": 10}
    found = []
    for op, device in ((adamw_, DEVICE), (adamw_reference, DEVICE), (adamw_reference, "cpu")):
        weight, remainder = (x.to(device) for x in split_master(before[0]))
        moments = [x.clone().to(device) for x in before[1:3]]
        sums = weight_checksums(weight)
        assert sums.shape == (-(-n // CHECKED),) and sums.dtype == torch.int32
        weight[n - 1] *= 2
        expected = [weight.clone(), remainder.clone(), *(x.clone() for x in moments)]
        expected[1][(n - 1) // CHECKED * CHECKED :] = 0
        op(weight, remainder, *moments, before[3].to(device), Options(**hyper), checksums=sums)
        adamw_reference(*expected, before[3].to(device), Options(**hyper))
        ours = [weight, remainder, *moments]
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        assert torch.equal(sums, weight_checksums(weight))
        found.append([x.cpu() for x in (*ours, sums)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.neg_(),
        lambda w: w.mul_(2),
        lambda w: w.copy_(w.flip(0)),
        lambda w: w.copy_(w.roll(1)),
        lambda w: w[5:7].copy_(w[5:7].flip(0)),
        lambda w: w[-1:].add_(w[-1:] / 64),
        lambda w: w.zero_(),
    ],
)
def test_a_checksum_sees_what_others_do_to_weights(change):
    torch.manual_seed(0)
    weight = torch.randn(3000).bfloat16().to(DEVICE)
    before = weight_checksums(weight)
    assert torch.equal(before, weight_checksums(weight.clone()))
    changed = weight.clone()
    change(changed)
    for i, (old, new) in enumerate(zip(weight.split(CHECKED), changed.split(CHECKED), strict=True)):
        assert (before[i] == weight_checksums(changed)[i]) == torch.equal(old, new)


OPS = [pytest.param(adamw_, id="kernel"), pytest.param(adamw_reference, id="reference")]


@pytest.mark.parametrize("op", OPS)
def test_pieces_make_the_whole(op):
    n = 5003
    before = _state(n, 10)
    whole, pieces = ([*split_master(before[0]), *(x.clone() for x in before[1:])] for _ in range(2))
    hyper = DEFAULTS | {"step": 10}
    op(*whole, Options(**hyper))
    cuts = [0, 1, 8, 8, 2049, 4096, 4999, n]  # odd places, an empty piece
    for a, b in zip(cuts, cuts[1:], strict=False):
        op(*(x[a:b] for x in pieces), Options(**hyper))
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", OPS)
def test_a_split_weight_moves_as_an_fp32_weight(op):
    p, m, v, _ = _state(5003, 1)
    split = [*split_master(p), m.clone(), v.clone()]
    wide = [p, None, m, v]
    for step in range(1, 6):
        grad = _state(5003, step, torch.bfloat16)[3]
        op(*split, grad, Options(**DEFAULTS | {"step": step}))
        op(*wide, grad, Options(**DEFAULTS | {"step": step}))
    assert torch.equal(join_master(*split[:2]), p)
    assert torch.equal(split[2], m) and torch.equal(split[3], v)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
def test_a_gradient_of_inf_or_nan_shows_in_the_weight(op, grad_dtype):
    p, m, v, grad = _state(40, 10, grad_dtype)
    nan = _floats(0x7FFFFFFF)[0]  # as CUDA computes it: plainly rounded up, it would be -0
    grad[3], grad[20], grad[39] = math.inf, nan, -math.inf
    weight, remainder = split_master(p)
    op(weight, remainder, m, v, grad, Options(**DEFAULTS))
    bad = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    bad[[3, 20, 39]] = True
    assert torch.equal(weight.isnan(), bad)
    assert torch.equal(join_master(weight, remainder).isnan(), bad)


@pytest.mark.parametrize("op", OPS)
def test_edges_survive_a_step_of_nothing(op):
    """Zero gradient, moments and decay: each finite master stays, through the split and back."""
    master = _masters()[:20_000]
    weight, remainder = split_master(master)
    m, v, grad = (torch.zeros_like(master) for _ in range(3))
    op(weight, remainder, m, v, grad, Options(**DEFAULTS | {"weight_decay": 0.0}))
    after = join_master(weight, remainder)
    finite = master.isfinite()
    assert torch.equal(after[finite], master[finite])
    assert torch.equal(weight.isnan(), ~finite)  # inf times a decay of zero is NaN


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do(op):
    empty = torch.zeros(0, device=DEVICE)
    op(*split_master(empty), empty, empty.clone(), empty.clone(), Options(**DEFAULTS))


HALF, WORDS = torch.zeros(6).half(), torch.zeros(6, dtype=torch.int16)
WRONG = [
    ({"weight": torch.zeros(2, 3).bfloat16()}, r"weight must have shape \(n,\), got \(2, 3\)"),
    ({"weight": HALF}, "weight must be bfloat16 or float32, got torch.float16"),
    ({"weight": torch.zeros(6)}, "float32 weight has no remainder, got one of torch.int16"),
    ({"weight": torch.zeros(12).bfloat16()[::2]}, r"weight must be contiguous.*\(2,\)"),
    ({"remainder": None}, "bfloat16 weight needs its remainder, got None"),
    ({"remainder": torch.zeros(6).int()}, "remainder must have dtype torch.int16.*int32"),
    ({"remainder": WORDS[:5]}, r"remainder must have shape \(6,\), got \(5,\)"),
    ({"exp_avg": torch.zeros(5)}, r"exp_avg must have shape \(6,\), got \(5,\)"),
    ({"exp_avg": torch.zeros(6).bfloat16()}, "exp_avg must have dtype torch.float32.*bfloat16"),
    ({"exp_avg_sq": torch.zeros(6).double()}, "exp_avg_sq must be.*float64"),
    ({"grad": HALF}, "grad must be bfloat16 or float32, got torch.float16"),
    ({"grad": torch.zeros(12)[::2]}, r"grad must be contiguous, got strides \(2,\)"),
    ({"grad": torch.zeros(6, device="meta")}, "must be on one device.*meta"),
    ({"scale": torch.ones(1)}, r"scale must have shape \(\), got \(1,\)"),
    ({"scale": torch.tensor(1.0).double()}, "scale must be.*float64"),
    ({"options": Options(**DEFAULTS | {"step": 0})}, "step must be at least 1, got 0"),
    ({"checksums": torch.zeros(2).int()}, r"checksums must have shape \(1,\), got \(2,\)"),
    ({"checksums": torch.zeros(1)}, "checksums must have dtype torch.int32, got torch.float32"),
    (
        {"weight": torch.zeros(6), "remainder": None, "checksums": torch.zeros(1).int()},
        "checksums are of remainders, and a float32 weight has none",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_wrong_arguments(change, message):
    names = ("exp_avg", "exp_avg_sq", "grad")
    arguments = {"weight": torch.zeros(6).bfloat16(), "remainder": WORDS}
    arguments["options"] = Options(**DEFAULTS)
    arguments |= {name: torch.zeros(6) for name in names} | change
    for name, x in arguments.items():
        if isinstance(x, Tensor) and not x.is_meta:
            arguments[name] = x.to(DEVICE) if x.is_contiguous() else x.to(DEVICE).repeat(2)[::2]
    with pytest.raises(ValueError, match=message):
        adamw_(**arguments)


def test_wrong_parts():
    with pytest.raises(ValueError, match="master must have dtype torch.float32.*bfloat16"):
        split_master(torch.zeros(3).bfloat16())
    with pytest.raises(ValueError, match="weight must have dtype torch.bfloat16.*float32"):
        join_master(torch.zeros(3), WORDS[:3])
    with pytest.raises(ValueError, match=r"remainder must have shape \(3,\), got \(6,\)"):
        join_master(torch.zeros(3).bfloat16(), WORDS)
