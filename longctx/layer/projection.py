"""A linear layer inside a pass: a weight, frozen or trained, an optional bias, an optional adapter,
and the gradients of all of them.

    y  = x W' + b + u B'            u, v, A, B: the adapter's (adapters/lora.py)
    dx = dy W + m (v A)
    dW = dy' x,  dB = dy' u,  dA = v' (m x),  db = sum dy          only for what is trained

Linear layers that read one x compute their u in one matmul (`inners`), and what reaches x through
their adapters in another (`low_rank_grads`); q, k and v do the former once for all head groups.

T tokens, I features in, O features out, r ranks; weights are (O, I), as Hugging Face stores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.layer.adapters.protocol import ALL, Adapter, Rows
from longctx.layer.linear import (
    WeightGradient,
    linear,
    linear_add,
    scaled_mm,
    stacked,
    wide_mm,
)


@dataclass(frozen=True)
class Projection:
    """A linear layer: its forward, and the gradient of its input.

    `tile` says which of the batch's tokens a method is given; dropout masks depend on it.
    """

    weight: Tensor  # (O, I)
    bias: Tensor | None = None  # (O,)
    adapter: Adapter | None = None

    def rows(self, rows: Rows) -> Projection:
        """Returns the projection to these output features only: a view of the weight for a slice,
        a copy for numbers."""
        bias = None if self.bias is None else self.bias[rows]
        adapter = None if self.adapter is None else self.adapter.rows(rows)
        return Projection(self.weight[rows], bias, adapter)

    def __call__(
        self,
        x: Tensor,  # (T, I)
        tile: slice,
        *,
        scale: float = 1.0,
        out: Tensor | None = None,  # (T, O)
        u: Tensor | None = None,  # inners(x), if it is known
    ) -> Tensor:  # (T, O)
        if self.adapter is None:
            return linear(x, self.weight, self.bias, scale=scale, out=out)
        u = self.adapter.inner(x, tile) if u is None else u
        if (factor := self.adapter.output_factor) is None:
            y = linear(x, self.weight, self.bias, scale=scale, out=out)
        else:
            y = linear(u, factor, self.bias, scale=scale, out=out)
            y = linear_add(y, x, self.weight, scale=scale, out=y)
        self.adapter.add_(y, x, u, tile, scale)
        return y

    @property
    def begins(self) -> bool:
        """Whether its adapter's product is there before its own."""
        return self.adapter is not None and self.adapter.output_factor is not None

    def begin_(self, y: Tensor, u: Tensor | None) -> None:  # (T, O)
        """Writes to y what x W' is added to: the bias, and the product of the adapter's factor."""
        factor = None if self.adapter is None else self.adapter.output_factor
        if factor is not None and u is not None:
            linear(u, factor, self.bias, out=y)
        elif self.bias is not None:
            y.copy_(self.bias.expand_as(y))
        else:
            y.zero_()

    def added(
        self,
        base: Tensor,  # (T, O)
        x: Tensor,  # (T, I)
        tile: slice,
        *,
        scale: float = 1.0,
        out: Tensor | None = None,  # (T, O), may be base
    ) -> Tensor:  # (T, O)
        """Returns base + scale y. Bias and adapter are added to y first, then y to base."""
        if self.adapter is None:
            return linear_add(base, x, self.weight, self.bias, scale=scale, out=out)
        return torch.add(base, self(x, tile, scale=scale), out=out)

    def inner_grad(self, dy: Tensor) -> Tensor | None:  # (T, O) -> (T, r) or (T, 3 r)
        """Returns v, which the gradients of the input and of A need; None without an adapter."""
        return None if self.adapter is None else self.adapter.inner_grad(dy)

    def input_grad(
        self,
        dy: Tensor,  # (T, O)
        v: Tensor | None,  # inner_grad(dy)
        tile: slice,
        *,
        scale: float = 1.0,
        columns: slice = ALL,
        out: Tensor | None = None,  # (T, columns)
    ) -> Tensor:  # (T, columns)
        """Returns scale dx."""
        dx = low_rank_grads([self], [v], scale=scale, columns=columns, out=out)
        dx = plus_product(dx, self.output_grad(dy), self.weight[:, columns], scale=scale, out=out)
        if self.adapter is not None and v is not None:
            self.adapter.add_input_grad_(dx, dy, v, tile, scale, columns)
        return dx

    def output_grad(self, dy: Tensor) -> Tensor:  # (T, O) -> (T, O)
        """Returns the gradient of x W', without what the adapter adds to it."""
        return dy if self.adapter is None else self.adapter.output_grad(dy)


def inners(
    x: Tensor,  # (T, I)
    projections: Sequence[Projection],
    tile: slice,
) -> list[Tensor | None]:  # (T, r) or (T, 3 r); None without an adapter
    """Returns u of each projection. Adapters without dropout share one matmul that reads x once."""
    adapters = [p.adapter for p in projections if p.adapter is not None]
    shared = [(a, factor) for a in adapters if (factor := a.inner_factor) is not None]
    found: dict[int, Tensor] = {}
    if shared:
        factors = [factor for _, factor in shared]
        products = wide_mm(x, torch.cat(factors, 1)).split([f.shape[1] for f in factors], 1)
        found = {id(a): a.spread_out(u) for (a, _), u in zip(shared, products, strict=True)}

    def inner(adapter: Adapter | None) -> Tensor | None:
        if adapter is None:
            return None
        return found[id(adapter)] if id(adapter) in found else adapter.inner(x, tile)

    return [inner(p.adapter) for p in projections]


class Together:
    """Linear layers that read one x, in one matmul: x (T, I) is read once."""

    def __init__(self, projections: Sequence[Projection]) -> None:
        self._projections = projections
        self.weight = stacked([p.weight for p in projections])  # (sum of O, I)
        biases = [p.bias for p in projections if p.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(
        self,
        x: Tensor,  # (T, I)
        us: Sequence[Tensor | None],  # inners(x)
        tile: slice,
        *,
        out: Tensor,  # (T, sum of O)
    ) -> None:
        parts = out.split([len(p.weight) for p in self._projections], dim=1)
        found = [*zip(self._projections, us, parts, strict=True)]
        if any(p.begins for p in self._projections):
            for p, u, part in found:
                p.begin_(part, u)
            linear_add(out, x, self.weight, out=out)
        else:
            linear(x, self.weight, self._bias, out=out)
        for p, u, part in found:
            if p.adapter is not None and u is not None:
                p.adapter.add_(part, x, u, tile)


def low_rank_grads(
    projections: Sequence[Projection],
    vs: Sequence[Tensor | None],  # inner_grad(dy) of each
    *,
    scale: float = 1.0,
    columns: slice = ALL,
    onto: Tensor | None = None,  # (T, columns): added to
    out: Tensor | None = None,  # (T, columns)
) -> Tensor | None:  # (T, columns)
    """Returns what reaches the x of linear layers through their adapters' factors, `scale` times
    the sum of v A, in one matmul; `onto` where no adapter has such a factor."""
    found, factors = [], []
    for p, v in zip(projections, vs, strict=True):
        if p.adapter is not None and v is not None:
            if (factor := p.adapter.input_factor(columns)) is not None:
                found.append(v)
                factors.append(factor)
    if not found:
        return onto
    v, factor = found[0], factors[0]
    if len(found) > 1:
        v, factor = torch.cat(found, 1), torch.cat(factors)
    return plus_product(onto, v, factor, scale=scale, out=out)


def input_grads(
    projections: Sequence[Projection],
    dys: Sequence[Tensor],  # (T, O) each
    vs: Sequence[Tensor | None],  # inner_grad(dy) of each
    tile: slice,
    onto: Tensor | None = None,  # (T, I), overwritten
) -> Tensor:  # (T, I)
    """Returns the sum of dx of linear layers that read one x, and of `onto`. Each product is added
    to the ones before inside its matmul, which rounds the sum once."""
    dx = low_rank_grads(projections, vs, onto=onto)
    for p, dy in zip(projections, dys, strict=True):
        dx = plus_product(dx, p.output_grad(dy), p.weight, out=dx)
    assert dx is not None
    add_input_grads_(dx, projections, dys, vs, tile)
    return dx


def add_input_grads_(
    dx: Tensor,  # (T, I)
    projections: Sequence[Projection],
    dys: Sequence[Tensor],  # (T, O) each
    vs: Sequence[Tensor | None],
    tile: slice,
) -> None:
    """Adds what reaches x through adapters and is no product of factors."""
    for p, dy, v in zip(projections, dys, vs, strict=True):
        if p.adapter is not None and v is not None:
            p.adapter.add_input_grad_(dx, dy, v, tile)


def outputs_grad(projections: Sequence[Projection], dy: Tensor) -> Tensor:  # (T, sum of O)
    """Returns the gradients of the products x W' where dy has those of the outputs side by side."""
    dys = dy.split([len(p.weight) for p in projections], dim=1)
    owns = [p.output_grad(part) for p, part in zip(projections, dys, strict=True)]
    changed = any(own is not part for own, part in zip(owns, dys, strict=True))
    return torch.cat(owns, dim=1) if changed else dy


def plus_product(
    base: Tensor | None,  # (T, I)
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (T, I), may be base
) -> Tensor:  # (T, I)
    """Returns base + scale a b, rounded once."""
    if base is None:
        return scaled_mm(a, b, scale, out)
    return torch.addmm(base, a, b, alpha=scale, out=base if out is None else out)


class ProjectionGradient:
    """Sums the gradients of a projection's trained parameters over tiles of tokens."""

    def __init__(
        self, projection: Projection, base: WeightGradient, wanted: Collection[str] = ()
    ) -> None:
        """`wanted` names the adapter's parameters that are trained."""
        self.adapter, self.base = projection.adapter, base
        self._own = None if self.adapter is None or not wanted else self.adapter.gradient(wanted)

    def add(
        self,
        dy: Tensor,  # (T, O)
        x: Tensor,  # (T, I)
        v: Tensor | None,  # the projection's inner_grad(dy)
        tile: slice,
        u: Tensor | None = None,  # inners(x), if it is known
    ) -> None:
        self.base.add(dy, x)
        if self._own is not None and v is not None:
            self._own.add(dy, x, u, v, tile)

    def of_adapter(self, scale: float = 1.0) -> dict[str, Tensor | None]:
        """Returns `scale` times the gradients of the adapter's parameters by name, in fp32."""
        return {} if self._own is None else self._own.finish(scale)


def added_up(grads: Iterable[Tensor | None]) -> Tensor | None:
    """Returns the sum of the gradients that are not None; None if there are none."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total.add_(grad)
    return total
