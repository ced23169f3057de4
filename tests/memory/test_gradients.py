"""Gradients of a step: their norm, their sums over batches, and their ways to the host and back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_states import HOST, place
from torch import Tensor, nn

from exactness import DEVICE
from longctx.memory import gradients as taking
from longctx.memory.gradients import WatchedGradients
from longctx.memory.place import Place
from longctx.memory.states import BlockSpec

pytestmark = pytest.mark.usefixtures("reference_kernels")
SHAPES = [(700, 301), (1000,), (33, 7), (1,)]
PIECE = 5120
BF16 = torch.bfloat16


def taker(
    on_host: bool = False,
    *,
    accumulates: bool = False,
    dtype: torch.dtype = BF16,
    shapes: list[tuple[int, ...]] = SHAPES,
    piece: int = PIECE,
) -> tuple[WatchedGradients, Any]:
    """A taker of gradients, and the one block that they are of."""
    weights = nn.ParameterList(torch.zeros(s, dtype=dtype, device=DEVICE) for s in shapes)
    named = {str(i): weight for i, weight in enumerate(weights)}
    spec = BlockSpec(name="block", parameters=named, modules=[weights], movable=True)
    where = HOST if on_host else Place()
    placed = place(weights, lambda _: where, specs=[spec], accumulates=accumulates, piece=piece)
    gradients, [block] = WatchedGradients(placed.stream), placed.stream.blocks
    for i, weight in enumerate(weights):
        gradients.watch(weight, (block, i))
    return gradients, block


def draw(seed: int, shapes=SHAPES, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(s, generator=generator) * 10.0 ** (i - 2) for i, s in enumerate(shapes)]
    return [grad.to(DEVICE, dtype) for grad in grads]


class Deliver(torch.autograd.Function):
    """A use of a weight whose gradient is this tensor."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def give(gradients: WatchedGradients, block: Any, i: int, grad: Tensor) -> None:
    gradients._stream.need(block)
    Deliver.apply(block.parameters[i], grad).backward()


def deliver(gradients: WatchedGradients, block: Any, grads: list[Tensor]) -> None:
    for i, grad in reversed([*enumerate(grads)]):
        give(gradients, block, i, grad.clone())


def forget(block: Any) -> None:
    for weight in block.parameters:
        weight.grad = None


def taken(gradients: WatchedGradients, block: Any) -> list[Tensor]:
    """The step's gradients, wherever they are."""
    gradients.settle()
    found = [gradients.take((block, i))[0] for i in range(len(block.parameters))]
    gradients.end()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    flat = [
        block.host_grad[block.ranges[i]] if grad is None else grad.flatten()
        for i, grad in enumerate(found)
    ]
    flat = [grad.to(DEVICE).clone() for grad in flat]
    forget(block)
    return flat


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (257, 4099)], ids=str)
def test_the_norm_is_that_of_fp64(dtype, shape) -> None:
    gradients, block = taker(dtype=dtype, shapes=[shape], piece=2**18)
    grads = draw(0, [shape], dtype)
    deliver(gradients, block, grads)
    expected = grads[0].double().norm().item()
    assert gradients.norm().item() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("accumulates", [False, True])
def test_places_change_no_bit(accumulates, batches, dtype) -> None:
    """Of the norm and the gradients, also where a step that was planned for one batch has more."""
    found = []
    for on_host in (False, True):
        gradients, block = taker(on_host, accumulates=accumulates, dtype=dtype)
        for n in range(batches):
            deliver(gradients, block, draw(n, dtype=dtype))
        assert len(gradients) == len(SHAPES)
        found.append([gradients.norm(), *taken(gradients, block)])
        assert len(gradients) == 0 and gradients.norm().item() == 0
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_batches_add_up_in_fp32(on_host, accumulates) -> None:
    """In bf16 1 + 2^-9 is 1, eight times over."""
    gradients, block = taker(on_host, accumulates=accumulates, shapes=[(100, 77)], piece=1024)
    for value in [1.0] + 8 * [2**-9]:
        deliver(gradients, block, [torch.full((100, 77), value, dtype=BF16, device=DEVICE)])
    expected = 1 + 2**-6
    assert gradients.norm().item() == pytest.approx(expected * 7700**0.5, rel=1e-6)
    [grad] = taken(gradients, block)
    assert grad.dtype == torch.float32 and torch.equal(grad, torch.full_like(grad, expected))


@pytest.mark.parametrize("on_host", [False, True])
def test_the_only_batch_keeps_its_dtype(on_host) -> None:
    gradients, block = taker(on_host)
    grads = draw(0)
    deliver(gradients, block, grads)
    for ours, grad in zip(taken(gradients, block), grads, strict=True):
        assert ours.dtype == BF16 and torch.equal(ours, grad.flatten())


def test_a_gradient_that_left_comes_back_for_a_second_batch() -> None:
    """To be added to in fp32: its room on the host has 16 bits."""
    gradients, block = taker(on_host=True)
    first, second = draw(0), draw(1)
    deliver(gradients, block, first)
    assert block.grad_is_on_host
    deliver(gradients, block, second[:1])
    assert block.grad_is_on_host  # the others still are there
    for i in (1, 2, 3):
        give(gradients, block, i, second[i].clone())
    assert not block.grad_is_on_host
    for ours, a, b in zip(taken(gradients, block), first, second, strict=True):
        assert torch.equal(ours, (a.float() + b.float()).flatten())


def test_where_the_room_is_in_use_a_gradient_stays() -> None:
    gradients, block = taker(on_host=True)
    block.has_room = lambda: False
    grads = draw(0)
    deliver(gradients, block, grads)
    assert not block.grad_is_on_host and not block.host_grad.any()
    assert all(gradients.take((block, i))[0] is not None for i in range(4))


def test_none_forgets_everything() -> None:
    for on_host in (False, True):
        gradients, block = taker(on_host)
        deliver(gradients, block, draw(0))
        forget(block)
        assert len(gradients) == 0 and not block.grad_is_on_host and gradients.broken() is None
        deliver(gradients, block, draw(1))
        expected = draw(1)
        for ours, grad in zip(taken(gradients, block), expected, strict=True):
            assert torch.equal(ours, grad.flatten())


def test_what_is_on_its_way_is_bounded(monkeypatch) -> None:
    """Its memory is the next layer's: at most IN_FLIGHT_BYTES are held."""
    monkeypatch.setattr(taking, "IN_FLIGHT_BYTES", 5000)
    shapes = [(random.Random(i).randint(1, 900),) for i in range(30)]
    for accumulates in (False, True):
        gradients, block = taker(True, shapes=shapes, accumulates=accumulates)
        for _ in range(1 + accumulates):
            for i, grad in enumerate(draw(0, shapes)):
                give(gradients, block, i, grad)
                assert sum(x.nbytes for x in gradients.tensors()) <= 5000


def test_a_gradient_in_any_layout() -> None:
    """Autograd may deliver a transposed one."""
    gradients, block = taker(shapes=[(70, 30)])
    grad = draw(0, [(30, 70)])[0].t()
    give(gradients, block, 0, grad)
    assert torch.equal(taken(gradients, block)[0], grad.flatten())


@pytest.mark.parametrize("on_host", [False, True])
def test_the_broken_gradient_is_the_first_that_came(on_host) -> None:
    gradients, block = taker(on_host)
    grads = draw(0)
    assert gradients.broken() is None
    grads[2][5, 3], grads[0][699, 300] = torch.nan, torch.inf
    deliver(gradients, block, grads)  # the last parameter first
    assert gradients.broken() == (block, 2)
    assert not gradients.norm().isfinite()


@pytest.mark.gpu
def test_the_norm_of_many_elements_on_a_gpu() -> None:
    """Square sums of 2^24 elements in fp32."""
    gradients, block = taker(shapes=[(2**26 + 3,)], piece=2**24)
    grad = torch.randn(2**26 + 3, device=DEVICE).to(BF16)
    give(gradients, block, 0, grad)
    expected = grad.double().norm().item()
    assert gradients.norm().item() == pytest.approx(expected, rel=1e-6)
