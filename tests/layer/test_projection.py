"""Adapters beside linear layers that read one x: against fp64, and with each sum rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exactness import DEVICE
from longctx.layer.adapters.lora import Lora, Low
from longctx.layer.projection import Projection, Together, inners, input_grads

TILE = slice(0, 24)
INPUTS, RANK, SCALE = 40, 4, 2.0


def linear_layer(outputs: int, adapted: bool, bias: bool, dtype: torch.dtype) -> Projection:
    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE).to(dtype)

    low = None
    if adapted:
        a, b = made(RANK, INPUTS).float(), made(outputs, RANK).float() / 64
        low = Low.of(a, b, Lora(scale=SCALE), dtype)
    return Projection(made(outputs, INPUTS), made(outputs) if bias else None, low)


def truth(p: Projection, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx in fp64, of the adapter's factors as they are spread."""
    weight = p.weight.double()
    if isinstance(p.adapter, Low):
        a, b = p.adapter.a.double(), p.adapter.b.double()
        if len(a) > RANK:  # [high; high; low] along the rank
            a, b = a[RANK : 2 * RANK] + a[2 * RANK :], b[:, RANK : 2 * RANK] + b[:, 2 * RANK :]
        weight = weight + SCALE * b @ a
    y = x.double() @ weight.t() + (0.0 if p.bias is None else p.bias.double())
    return y, dy.double() @ weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapted", ["qkv", "qv", "k", ""])
def test_together_as_one_by_one_and_as_in_fp64(adapted, bias, dtype) -> None:
    torch.manual_seed(len(adapted))
    sizes = {"q": 24, "k": 8, "v": 16}
    layers = [linear_layer(n, name in adapted, bias, dtype) for name, n in sizes.items()]
    x = torch.randn(24, INPUTS, device=DEVICE).to(dtype)
    dys = [torch.randn(24, n, device=DEVICE).to(dtype) for n in sizes.values()]
    us = inners(x, layers, TILE)
    out = torch.full((24, 48), torch.nan, dtype=dtype, device=DEVICE)
    Together(layers)(x, us, TILE, out=out)
    found = [layer(x, TILE, u=u) for layer, u in zip(layers, us, strict=True)]
    expected = [truth(layer, x, dy) for layer, dy in zip(layers, dys, strict=True)]
    # A bf16 result is the fp32 sum rounded once, up to half a unit in the last place; so is what
    # the sum begins with, which is smaller.
    close = {"rtol": 2**-8, "atol": 2**-6} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-4}
    for part, alone, (y, _) in zip(out.split([*sizes.values()], 1), found, expected, strict=True):
        torch.testing.assert_close(part.double(), y, **close)
        torch.testing.assert_close(alone.double(), y, **close)
    vs = [layer.inner_grad(dy) for layer, dy in zip(layers, dys, strict=True)]
    dx = input_grads(layers, dys, vs, TILE)
    more = {"rtol": 2**-7, "atol": 2**-4} if dtype.itemsize == 2 else close
    torch.testing.assert_close(dx.double(), sum(dx for _, dx in expected), **more)
    alone = [
        layer.input_grad(dy, v, TILE, scale=0.5)
        for layer, dy, v in zip(layers, dys, vs, strict=True)
    ]
    for part, (_, dx) in zip(alone, expected, strict=True):
        torch.testing.assert_close(part.double(), 0.5 * dx, **more)


def test_columns_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    layer = linear_layer(16, True, False, torch.float32)
    dy = torch.randn(24, 16, device=DEVICE)
    v, at = layer.inner_grad(dy), slice(8, 24)
    room = torch.empty(24, 16, device=DEVICE)
    found = layer.input_grad(dy, v, TILE, columns=at, out=room)
    assert found.data_ptr() == room.data_ptr()
    torch.testing.assert_close(found, layer.input_grad(dy, v, TILE)[:, at])
