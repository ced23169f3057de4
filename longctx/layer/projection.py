"""A linear layer inside a pass: a weight, frozen or trained, an optional bias, an optional adapter,
and the gradients of all of them.

    y  = x W' + b + u B'            u, v, A, B: the adapter's (adapters/lora.py)
    dx = dy W + m (v A)
    dW = dy' x,  dB = dy' u,  dA = v' (m x),  db = sum dy          only for what is trained

Linear layers that read one x compute their u in one matmul (`inners`); q, k and v do so once for
all head groups.

T tokens, I features in, O features out, r ranks; weights are (O, I), as Hugging Face stores them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.layer.adapters.protocol import Adapter
from longctx.layer.linear import WeightGradient, linear, linear_add, scaled_mm, wide_mm


@dataclass(frozen=True)
class Projection:
    """A linear layer: its forward, and the gradient of its input.

    `tile` says which of the batch's tokens a method is given; dropout masks depend on it.
    """

    weight: Tensor  # (O, I)
    bias: Tensor | None = None  # (O,)
    adapter: Adapter | None = None

    def rows(self, rows: slice) -> Projection:
        """Returns the projection to these output features only."""
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
        y = linear(x, self.weight, self.bias, scale=scale, out=out)
        if self.adapter is not None:
            u = self.adapter.inner(x, tile) if u is None else u
            self.adapter.add_(y, x, u, tile, scale)
        return y

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
        onto: Tensor | None = None,  # (T, I): added to
        out: Tensor | None = None,  # (T, I)
    ) -> Tensor:  # (T, I)
        """Returns scale dx, or dx added to `onto`."""
        own = self.output_grad(dy)
        if onto is None:
            dx = scaled_mm(own, self.weight, scale, out)
        else:
            dx = torch.addmm(onto, own, self.weight, out=onto)
        if self.adapter is not None and v is not None:
            self.adapter.add_input_grad_(dx, dy, v, tile, scale)
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
