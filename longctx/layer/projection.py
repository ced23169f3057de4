"""A linear layer inside a pass: a weight, frozen or trained, an optional bias, an optional adapter,
and the gradients of all of them.

    y  = x W' + b + u B'            u, v, A, B: the adapter's (lora.py)
    dx = dy W + m (v A)
    dW = dy' x,  dB = dy' u,  dA = v' (m x),  db = sum dy          only for what is trained

Linear layers that read one x compute their u in one matmul (`inners`); q, k and v do so once for
all head groups.

T tokens, I features in, O features out, r ranks; weights are (O, I), as Hugging Face stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.layer.linear import WeightGradient, linear, linear_add, scaled_mm, wide_mm
from longctx.layer.lora import Adapter, folded


@dataclass(frozen=True)
class Projection:
    """A linear layer: its forward, and the gradient of its input.

    `tile` says which of the batch's tokens a method is given; dropout masks depend on it.
    """

    weight: Tensor  # (O, I)
    bias: Tensor | None = None  # (O,)
    adapter: Adapter | None = None

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
            self.adapter.add_(y, self.adapter.inner(x, tile) if u is None else u, scale)
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
        if onto is None:
            dx = scaled_mm(dy, self.weight, scale, out)
        else:
            dx = torch.addmm(onto, dy, self.weight, out=onto)
        if self.adapter is not None and v is not None:
            self.adapter.add_input_grad_(dx, v, tile, scale)
        return dx


def inners(
    x: Tensor,  # (T, I)
    projections: Sequence[Projection],
    tile: slice,
) -> list[Tensor | None]:  # (T, r) or (T, 3 r); None without an adapter
    """Returns u of each projection. Adapters without dropout share one matmul that reads x once."""
    shared = [a for p in projections if (a := p.adapter) is not None and not a.lora.dropout]
    found: dict[int, Tensor] = {}
    if shared:
        factors = [a.inner_factor for a in shared]
        products = wide_mm(x, torch.cat(factors, 1)).split([f.shape[1] for f in factors], 1)
        found = {id(a): a.spread_out(u) for a, u in zip(shared, products, strict=True)}

    def inner(adapter: Adapter | None) -> Tensor | None:
        if adapter is None:
            return None
        return found[id(adapter)] if id(adapter) in found else adapter.inner(x, tile)

    return [inner(p.adapter) for p in projections]


class ProjectionGradient:
    """Sums the gradients of a projection's trained parameters over tiles of tokens."""

    def __init__(
        self, projection: Projection, base: WeightGradient, *, a: bool = False, b: bool = False
    ) -> None:
        self.adapter, self.base = projection.adapter, base
        self._wants_a, self._wants_b = a, b
        self._a, self._b = WeightGradient(a), WeightGradient(b)

    def add(
        self,
        dy: Tensor,  # (T, O)
        x: Tensor,  # (T, I)
        v: Tensor | None,  # the projection's inner_grad(dy)
        tile: slice,
        u: Tensor | None = None,  # inners(x), if it is known
    ) -> None:
        self.base.add(dy, x)
        if self.adapter is None or v is None or not (self._wants_a or self._wants_b):
            return
        self._a.add(self.adapter.halves(v), self.adapter.masked(x, tile))
        if self._wants_b:
            u = self.adapter.inner(x, tile) if u is None else u
            self._b.add(dy, self.adapter.halves(u))

    def adapters(self, scale: float = 1.0) -> tuple[Tensor | None, Tensor | None]:
        """Returns `scale` times the gradients of A (r, I) and B (O, r), in fp32."""
        if self.adapter is None:
            return None, None
        sums = (grad.round(torch.float32, scale)[0] for grad in (self._a, self._b))
        rank = self.adapter.rank
        a, b = (None if x is None else folded(x, rank, dim) for dim, x in enumerate(sums))
        return a, b


def added_up(grads: Iterable[Tensor | None]) -> Tensor | None:
    """Returns the sum of the gradients that are not None; None if there are none."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total.add_(grad)
    return total
