"""The gradients of a layer's parameters in backward, by the names of `Weights`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.layer.linear import WeightGradient, sum_dtype
from longctx.layer.projection import ProjectionGradient, added_up
from longctx.layer.weights import Layer, Weights


class Gradients:
    """The gradients of the parameters that `wants` marks. Each is rounded when it is complete."""

    def __init__(self, given: Weights, w: Layer, wants: Weights, sums: int) -> None:
        """`sums` is the number of tiles that a gradient is summed over; a final scaling adds 1."""
        self.given, self.w, self.wants, self.sums = given, w, wants, sums
        self.done: dict[str, Tensor | None] = {}
        self._gate_up: Tensor | None = None

    def wanted(self, *names: str) -> bool:
        """Whether any parameter of these projections or norms is trained."""
        suffixes = ("", "_bias", "_a", "_b")
        return any(getattr(self.wants, n + s, False) for n in names for s in suffixes)

    def projection(self, name: str, base: WeightGradient | None = None) -> ProjectionGradient:
        wants, held = self.wants, self.given.in_one.get(name, name)
        if base is None:
            dtype = sum_dtype(getattr(self.given, name), self.sums)
            base = WeightGradient(getattr(wants, name), getattr(wants, f"{name}_bias"), dtype=dtype)
        a, b = (getattr(wants, f"{held}_{factor}") for factor in "ab")
        return ProjectionGradient(getattr(self.w, name), base, a=a, b=b)

    def inner(self) -> list[ProjectionGradient]:
        """Returns the sums of gate's and up's gradients; of up's alone if there is no gate."""
        if not self.given.gate_up_in_one:
            return [self.projection(name) for name in self.w.inner]
        halves = [WeightGradient(False), WeightGradient(False)]
        if self.wants.gate:
            assert self.given.gate is not None
            dtype = sum_dtype(self.given.gate, self.sums)
            self._gate_up = torch.empty_like(self.given.gate, dtype=dtype)
            halves = [WeightGradient(True, into=half) for half in self._gate_up.chunk(2)]
        return [self.projection("gate", halves[0]), self.projection("up", halves[1])]

    def norm(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Returns the sums of the gradients of a norm's weight and bias, in fp32."""
        return self._sum(name), self._sum(f"{name}_bias")

    def _sum(self, name: str) -> Tensor | None:
        wanted = getattr(self.wants, name, False)
        return torch.zeros_like(getattr(self.w, name), dtype=torch.float32) if wanted else None

    def finish_norm(self, name: str, sums: tuple[Tensor | None, Tensor | None]) -> None:
        for suffix, grad in zip(("", "_bias"), sums, strict=True):
            self._put(f"{name}{suffix}", grad)

    def finish(self, name: str, grad: ProjectionGradient, scale: float = 1.0) -> None:
        """Rounds the gradients of projection `name`, which are `scale` times `grad`."""
        dtype = self.given.q.dtype
        self.done[name], self.done[f"{name}_bias"] = grad.base.round(dtype, scale)
        self._finish_adapters({name: grad}, scale)

    def finish_inner(self, grads: list[ProjectionGradient]) -> None:
        named = dict(zip(self.w.inner, grads, strict=True))
        if self.given.gate_up_in_one:
            self._put("gate", self._gate_up)
            self._gate_up = None
            self._finish_adapters(named)
        else:
            for name, grad in named.items():
                self.finish(name, grad)

    def finish_qkv(self, base: WeightGradient, grads: list[ProjectionGradient]) -> None:
        for suffix, whole in zip(("", "_bias"), base.round(self.given.q.dtype), strict=True):
            parts: list[Tensor | None] | Any = [whole, None, None]
            if whole is not None and not self.given.qkv_in_one:
                parts = whole.split([len(p.weight) for p in self.w.qkv])
            self.done |= {f"{n}{suffix}": part for n, part in zip("qkv", parts, strict=True)}
        named = dict(zip("qkv", grads, strict=True))
        for group in [named] if self.given.qkv_in_one else [{n: g} for n, g in named.items()]:
            self._finish_adapters(group)

    def _finish_adapters(self, grads: dict[str, ProjectionGradient], scale: float = 1.0) -> None:
        """Adapter gradients of one parameter: A is shared and summed, B's parts are stacked."""
        found = [grad.adapters(scale) for grad in grads.values()]
        name = next(iter(grads))
        self._put(f"{name}_a", added_up(a for a, _ in found))
        parts = [b for _, b in found if b is not None]
        self._put(f"{name}_b", torch.cat(parts) if parts else None)

    def _put(self, name: str, grad: Tensor | None) -> None:
        dtype = self.given.q.dtype
        if name[-2:] in ("_a", "_b") and grad is not None:
            dtype = getattr(self.given, name).dtype
        self.done[name] = None if grad is None else grad.to(dtype)
