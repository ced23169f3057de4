"""Many tensors in one launch, bit by bit as each alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import DEVICE
from longctx.kernels import adamw_many as many
from longctx.kernels.adamw import CHECKED, Options, adamw_reference, split_master, weight_checksums
from longctx.kernels.adamw_many import States, adamw_many_, prepared_adamw

BF16, FP32 = torch.bfloat16, torch.float32
NUMELS = [
    1,
    16,  # of one launch of 16 bytes' loads
    1023,
    1024,  # one block
    1040,  # a last block of one load
    4096,  # one program
    4097,
    5003,  # the second program has one block, and few elements of it
    0,  # no program
]
GROUPS = [
    Options(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1),
    Options(lr=3e-2, beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.0, step=10_000),
]


def tensors(n: int, seed: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> dict[str, Any]:
    """A weight, its states after some steps, and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    master, m, grad = (torch.randn(n, generator=generator) * s for s in (0.02, 1e-3, 1e-3))
    found = {"weight": master, "exp_avg": m, "exp_avg_sq": m.square() + 1e-9}
    if dtype == BF16:
        weight, found["remainder"] = split_master(master)
        found |= {"weight": weight, "checksums": weight_checksums(weight)}
    found["grad"] = grad.to(grad_dtype)
    return {name: x.to(DEVICE) for name, x in found.items()}


def step(all_tensors: Sequence[dict[str, Any]], options: Sequence[Options], scales) -> None:
    names = ("exp_avg", "exp_avg_sq", "remainder", "checksums")
    states = [States(**{name: x[name] for name in names if name in x}) for x in all_tensors]
    weights, grads = ([x[name] for x in all_tensors] for name in ("weight", "grad"))
    adamw_many_(weights, states, grads, options, scales)


def alone(x: dict[str, Tensor], options: Options, scale: Tensor | None) -> None:
    names = ("weight", "remainder", "exp_avg", "exp_avg_sq", "grad")
    given = [x.get(name) for name in names]
    adamw_reference(*given, options, scale=scale, checksums=x.get("checksums"))


def copies(all_tensors: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: x.clone() for name, x in each.items()} for each in all_tensors]


def assert_same(ours: Sequence[dict[str, Tensor]], others: Sequence[dict[str, Tensor]]) -> None:
    for i, (one, other) in enumerate(zip(ours, others, strict=True)):
        for name in one:
            assert torch.equal(one[name], other[name]), (i, name)


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_is_each_tensor_alone(seed) -> None:
    """Of dtypes, sizes, groups, counts of steps, scales and remainders that others made stale."""
    draw = random.Random(seed)
    kinds = [(n, d, g) for n in NUMELS for d in (BF16, FP32) for g in (BF16, FP32)]
    draw.shuffle(kinds)
    ours = [tensors(n, i, d, g) for i, (n, d, g) in enumerate(kinds)]
    options = [draw.choice(GROUPS) for _ in kinds]
    scales = [draw.choice([None, torch.tensor(0.37, device=DEVICE)]) for _ in kinds]
    for x in ours:
        if draw.random() < 0.3 and len(x["weight"]):
            x["weight"][-1] *= 2
    others = copies(ours)
    step(ours, options, scales)
    for x, given, scale in zip(others, options, scales, strict=True):
        alone(x, given, scale)
    assert_same(ours, others)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_guard_that_is_not_0_leaves_all_as_it_is(value) -> None:
    names = ("exp_avg", "exp_avg_sq", "remainder", "checksums")
    ours = [tensors(5003, 0, BF16, FP32), tensors(1040, 1, FP32, FP32)]
    others = copies(ours)
    of = [States(**{name: x[name] for name in names if name in x}) for x in ours]
    weights, grads = ([x[name] for x in ours] for name in ("weight", "grad"))
    launch = prepared_adamw(weights, of, grads, GROUPS, [None] * 2)
    launch(torch.tensor(value, device=DEVICE))
    for x, given in zip(others, GROUPS, strict=True):
        if value == 0.0:
            alone(x, given, None)
    assert_same(ours, others)


def test_tensors_that_begin_anywhere() -> None:
    """In larger buffers, where loads of 16 bytes are not allowed, beside others where they are."""
    ours, others = [], []
    for i, dtype in enumerate([FP32, BF16, FP32]):
        whole = tensors(2081, i, dtype, dtype)
        parts = {name: x[i : i + 2080] for name, x in whole.items() if name != "checksums"}
        if dtype == BF16:
            parts["checksums"] = weight_checksums(parts["weight"])
        others += copies([parts])
        ours.append(parts)
    step(ours, [GROUPS[0]] * 3, [None] * 3)
    for x in others:
        alone(x, GROUPS[0], None)
    assert_same(ours, others)


def test_a_kind_is_a_launch(monkeypatch) -> None:
    """Whatever the sizes, groups and counts of steps."""
    if many.runs_kernel(torch.zeros(1, device=DEVICE)) is False:
        pytest.skip("no kernel here")
    found = []

    def counted(*args: Any):
        for kind, rows, programs in launches(*args):
            found.append((kind, len(rows), programs))
            yield kind, rows, programs

    launches = many.launches
    monkeypatch.setattr(many, "launches", counted)
    ours = [tensors(n, n, FP32, FP32) for n in (16, 4112, 48) * 10]
    step(ours, GROUPS * 15, [None] * 30)
    assert [x[1:] for x in found] == [(30, 70)]


def test_parameters_of_any_shape() -> None:
    x = tensors(48, 0, BF16, FP32)
    other = copies([x])
    x |= {name: x[name].view(3, 16) for name in ("weight", "grad")}
    parameter = torch.nn.Parameter(x["weight"])
    with torch.no_grad():
        step([x | {"weight": parameter}], [GROUPS[0]], [None])
    alone(other[0], GROUPS[0], None)
    assert torch.equal(parameter.flatten(), other[0]["weight"])


def test_plain_torch_on_the_cpu(reference_kernels) -> None:
    ours = [{k: v.cpu() for k, v in tensors(n, n, BF16, FP32).items()} for n in (5, 2000)]
    others = copies(ours)
    step(ours, GROUPS, [None, torch.tensor(0.5)])
    for x, given, scale in zip(others, GROUPS, (None, torch.tensor(0.5)), strict=True):
        alone(x, given, scale)
    assert_same(ours, others)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last ones, beside a small tensor."""
    large = {name: torch.zeros(2**31 + 5008, device=DEVICE) for name in ("exp_avg", "exp_avg_sq")}
    large |= {name: torch.ones(2**31 + 5008, device=DEVICE) for name in ("weight", "grad")}
    small = tensors(5008, 0, FP32, FP32)
    for name, x in small.items():
        large[name][-5008:] = x
    step([small, large], [GROUPS[0]] * 2, [None] * 2)
    assert_same([small], [{name: large[name][-5008:] for name in small}])


def test_nothing_to_do() -> None:
    step([], [], [])
    step([tensors(0, 0, FP32, FP32)], [GROUPS[0]], [None])


WRONG = [
    ({"weight": torch.zeros(32).half()}, "dtype of a weight must be torch.bfloat16, got.*float16"),
    ({"weight": torch.zeros(32)}, "dtype of a weight must be torch.bfloat16, got torch.float32"),
    ({"weight": torch.zeros(31).bfloat16()}, "elements of a weight must be 32, got 31"),
    ({"weight": torch.zeros(64).bfloat16()[::2]}, "contiguity of a weight must be True, got False"),
    ({"grad": torch.zeros(33)}, "elements of a gradient must be 32, got 33"),
    ({"grad": torch.zeros(32).half()}, "a gradient must be bfloat16 or float32, got torch.float16"),
    ({"grad": torch.zeros(64)[::2]}, "contiguity of a gradient must be True, got False"),
    ({"exp_avg": torch.zeros(32).double()}, "dtype of exp_avg must be torch.float32.*float64"),
    ({"exp_avg_sq": torch.zeros(16)}, r"exp_avg_sq must have shape \(32,\), got \(16,\)"),
    ({"remainder": None}, "a bfloat16 weight needs its remainder and their checksums"),
    ({"checksums": torch.zeros(2).int()}, r"checksums must have shape \(1,\), got \(2,\)"),
    ({"scale": torch.ones(1)}, r"scale must have shape \(\), got \(1,\)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_wrong_arguments(change, message) -> None:
    """The last of three tensors is wrong."""
    given = [tensors(n, n, BF16, BF16) for n in (16, CHECKED, 32)]
    for name, x in change.items():
        x = x if x is None or not x.is_contiguous() else x.to(DEVICE)
        given[2][name] = x.to(DEVICE).repeat(2)[::2] if x is not None and x.stride() == (2,) else x
    scales = [None, None, given[2].pop("scale", None)]
    with pytest.raises(ValueError, match=message):
        step(given, [GROUPS[0]] * 3, scales)
