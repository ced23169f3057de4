"""The gradients of a layer's parameters in backward, by the names of `Weights`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from longctx.layer.linear import WeightGradient, sum_dtype
from longctx.layer.projection import ProjectionGradient, added_up
from longctx.layer.stack import ExpertLayout, StackGradient
from longctx.layer.weights import Weights


class Gradients:
    """The gradients of the parameters that `wanted` names. Each is rounded to its parameter's own
    dtype when it is complete."""

    def __init__(self, w: Weights, wanted: Collection[str], sums: int) -> None:
        """`sums` is the number of tiles that a gradient is summed over; a final scaling adds 1."""
        self.w, self._wanted, self.sums = w, frozenset(wanted), sums
        self._owned: dict[str, list[str]] = {}
        """The linear layers and norms with wanted parameters, each with those of its adapter."""
        for name in wanted:
            owner, _, rest = name.partition(".")
            own = self._owned.setdefault(owner, [])
            if rest not in ("", "bias"):
                own.append(rest)
        self.done: dict[str, Tensor | None] = {}
        self._stacked: dict[str, Tensor] = {}

    def wanted(self, *names: str) -> bool:
        """Whether any parameter of these linear layers or norms is trained."""
        return not self._owned.keys().isdisjoint(names)

    def wants(self, *names: str) -> bool:
        """Whether any of these parameters is trained."""
        return not self._wanted.isdisjoint(names)

    def projection(self, name: str, base: WeightGradient | None = None) -> ProjectionGradient:
        """Returns the sums of a linear layer's gradients; `base` has those of weight and bias."""
        held = self.w.holders.get(name, name)
        if base is None:
            dtype = sum_dtype(self.w.given[name], self.sums)
            base = WeightGradient(self.wants(name), self.wants(f"{name}.bias"), dtype=dtype)
        return ProjectionGradient(self.w[name], base, self._owned.get(held, ()))

    def projections(self, names: Sequence[str]) -> dict[str, ProjectionGradient]:
        """Returns `projection` of several linear layers. If they lie in one parameter, so do their
        sums."""
        held = self.w.holders.get(names[0])
        if held is None:
            return {name: self.projection(name) for name in names}
        bases = [WeightGradient(False) for _ in names]
        if self.wants(held):
            given = self.w.given[held]
            whole = torch.empty_like(given, dtype=sum_dtype(given, self.sums))
            parts = whole.split([len(self.w[name].weight) for name in names])
            bases = [WeightGradient(True, into=part) for part in parts]
            self._stacked[held] = whole
        return {n: self.projection(n, base) for n, base in zip(names, bases, strict=True)}

    def stack(self, name: str, layout: ExpertLayout) -> StackGradient:
        """Returns the sums of the gradients of experts' weights, and of their adapters."""
        dtype = sum_dtype(self.w.given[name], self.sums)
        stack = self.w.stacks[name]
        return StackGradient(stack, lambda end: self.wants(f"{name}{end}"), dtype, layout)

    def norm(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Returns the sums of the gradients of a norm's weight and bias, in fp32."""
        return self.zeros(name), self.zeros(f"{name}.bias")

    def zeros(self, name: str) -> Tensor | None:
        """Returns zeros in fp32 to which a parameter's gradient is added; None if it is frozen."""
        wanted = self.wants(name)
        return torch.zeros_like(self.w.given[name], dtype=torch.float32) if wanted else None

    def finish_norm(self, name: str, sums: tuple[Tensor | None, Tensor | None]) -> None:
        for suffix, grad in zip(("", ".bias"), sums, strict=True):
            self.put(f"{name}{suffix}", grad)

    def finish(self, name: str, grad: ProjectionGradient, scale: float = 1.0) -> None:
        """Rounds the gradients of linear layer `name`, which are `scale` times `grad`."""
        weight, bias = grad.base.round(self.w.given[name].dtype, scale)
        self.done[name] = weight
        self.put(f"{name}.bias", bias)
        self._finish_adapters({name: grad}, scale)

    def finish_all(self, grads: dict[str, ProjectionGradient]) -> None:
        """Rounds the gradients of linear layers that `projections` returned."""
        held = self.w.holders.get(next(iter(grads)))
        if held is None:
            for name, grad in grads.items():
                self.finish(name, grad)
        else:
            self.put(held, self._stacked.pop(held, None))
            self._finish_adapters(grads)

    def finish_stacked(self, base: WeightGradient, grads: dict[str, ProjectionGradient]) -> None:
        """Rounds the gradients of several weights, which `base` has summed as one matrix."""
        names = list(grads)
        held = self.w.holders.get(names[0])
        for suffix, whole in zip(("", ".bias"), base.round(self._dtype(names[0])), strict=True):
            if held is not None:
                self.put(f"{held}{suffix}", whole)
            elif whole is not None:
                parts = whole.split([len(self.w[name].weight) for name in names])
                for name, part in zip(names, parts, strict=True):
                    self.put(f"{name}{suffix}", part)
        for group in [grads] if held is not None else [{n: g} for n, g in grads.items()]:
            self._finish_adapters(group)

    def _dtype(self, name: str) -> torch.dtype:
        return self.w.given[name].dtype

    def _finish_adapters(self, grads: dict[str, ProjectionGradient], scale: float = 1.0) -> None:
        """Adapter gradients of one parameter: those by rows are stacked, those shared summed."""
        found = [(g.adapter, g.of_adapter(scale)) for g in grads.values() if g.adapter is not None]
        first = next(iter(grads))
        held = self.w.holders.get(first, first)
        for name in found[0][1] if found else ():
            adapter, parts = found[0][0], [x for _, of in found if (x := of[name]) is not None]
            if parts and name in adapter.by_rows:
                # One part is the sum itself, made for this gradient alone: torch.cat would copy it.
                self.put(f"{held}.{name}", parts[0] if len(parts) == 1 else torch.cat(parts))
            elif parts:
                self.put(f"{held}.{name}", added_up(parts))

    def put(self, name: str, grad: Tensor | None) -> None:
        """Rounds the gradient of a parameter, which is complete."""
        if grad is not None:
            self.done[name] = grad.to(self._dtype(name))
