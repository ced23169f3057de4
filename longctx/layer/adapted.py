"""Linear layers that read one x as one function of autograd, each with a LoRA adapter or trained
itself, for modules that run under autograd inside the schedule: mixers (parts/mixer.py).

PEFT converts x to the adapter's fp32, multiplies in fp32, and adds the result to y in passes of
their own; autograd adds up what reaches x from each layer in further passes. Here the equations
and roundings are those of projection.py: the layers' u are one matmul, and each product of dx is
added to the ones before inside its matmul. Saved are x and u, which is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.kernels.launch import once_differentiable
from longctx.layer.adapters.lora import Lora, Low
from longctx.layer.linear import WeightGradient, sum_dtype
from longctx.layer.packed_weights import dense
from longctx.layer.projection import Projection, ProjectionGradient, inners, input_grads


class Linear(NamedTuple):
    """A linear layer. Its weight is in the dtype of x, or packed: then it is frozen, and made dense
    in each direction. With an adapter weight and bias are frozen."""

    weight: Tensor  # (O, I)
    bias: Tensor | None = None  # (O,)
    a: Tensor | None = None  # (r, I)
    b: Tensor | None = None  # (O, r)
    scale: float = 1.0

    def projection(self, x: Tensor) -> Projection:
        low = None
        if self.a is not None and self.b is not None:
            low = Low.of(self.a, self.b, Lora(scale=self.scale), x.dtype)
        return Projection(dense(self.weight), self.bias, low)


TENSORS = 4
"""The tensors of a Linear, its first fields."""


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: Sequence[float], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        layers = ctx.layers = _layers(tensors, scales)
        rows = x.reshape(-1, x.shape[-1])
        projections, tile = [layer.projection(x) for layer in layers], slice(0, len(rows))
        us = inners(rows, projections, tile)
        ctx.save_for_backward(x, *us)
        found = (p(rows, tile, u=u) for p, u in zip(projections, us, strict=True))
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *us), layers = ctx.saved_tensors, ctx.layers
        rows = x.reshape(-1, x.shape[-1])
        projections, tile = [layer.projection(x) for layer in layers], slice(0, len(rows))
        dys = [dy.reshape(-1, dy.shape[-1]) for dy in grads]
        vs = [p.inner_grad(dy) for p, dy in zip(projections, dys, strict=True)]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = input_grads(projections, dys, vs, tile).view_as(x)
        found: list[Tensor | None] = []
        for i, (layer, p) in enumerate(zip(layers, projections, strict=True)):
            wants = ctx.needs_input_grad[2 + TENSORS * i :][:TENSORS]
            found += _gradients(layer, p, wants, dys[i], rows, vs[i], us[i], tile)
        return dx, None, *found


def _layers(tensors: Sequence[Any], scales: Sequence[float]) -> list[Linear]:
    cut = (tensors[i : i + TENSORS] for i in range(0, len(tensors), TENSORS))
    return [Linear(*own)._replace(scale=scale) for own, scale in zip(cut, scales, strict=True)]


def _gradients(
    layer: Linear,
    projection: Projection,
    wants: Sequence[bool],  # of weight, bias, a and b
    dy: Tensor,  # (T, O)
    x: Tensor,  # (T, I)
    v: Tensor | None,
    u: Tensor | None,
    tile: slice,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a layer's four tensors, as far as they are wanted."""
    weight, bias, *factors = wants
    base = WeightGradient(weight, bias, dtype=sum_dtype(layer.weight, 1))
    names = [name for name, wanted in zip("ab", factors, strict=True) if wanted]
    grad = ProjectionGradient(projection, base, names)
    grad.add(dy, x, v, tile, u)
    own = grad.of_adapter()
    return *base.round(layer.weight.dtype), own.get("a"), own.get("b")


def linears(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:  # (..., I) -> (..., O)
    """x W' + bias + s x A' B' of each layer, differentiable in x and in what is trained."""
    tensors = [tensor for layer in layers for tensor in layer[:TENSORS]]
    result: tuple[Tensor, ...] = _Linears.apply(x, [layer.scale for layer in layers], *tensors)
    return result
