"""A LoRA adapter inside a pass: s (m x) A' B' beside a linear layer, and its gradients.

s is the adapter's scale and m a dropout mask:

    y  += u B'            u = s (m x) A'
    dx += m (v A)         v = s dy B
    dB  = dy' u,          dA = v' (m x)

It costs 2 r (I + O) FLOPs per token in forward. Backward costs three times that for the equations
above, and 2 r I to recompute u. u and v are (T, r). These FLOPs are few; the cost is set by how
often x, y and their gradients, (T, I) and (T, O), are read and written. So u B' is written to y
before x W', and v A to dx before dy W: the larger matmul adds to what is there, and rounds once.

Adapters are fp32 where the rest has 16 bits (PEFT's default), and converting x to fp32 would cost
more than the matmul. So a factor of rank r is *spread*: high = bf16(A) and low = bf16(A - high)
hold 16 of its bits, x A' = x [high; low]' folded, and u B' is three matmuls in one,
[u_high u_low u_high] [B_high B_high B_low]'. The omitted term, u_low B_low', is 2^-16 of it.

T tokens, I features in, O features out, r ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longctx.cost.dims import LayerKind
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Table, Work
from longctx.kernels.spread import spread_factors, spread_sums
from longctx.layer.adapters.protocol import ALL, Rows
from longctx.layer.linear import WeightGradient, scaled_mm, wide_mm


def spread(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns an adapter's factors (r, I) and (O, r), which have fp32, in `dtype`. A 16-bit dtype
    gives three parts along r, and their matmuls with the parts of u or v (kernels/spread.py) add up
    to the whole matmul."""
    return (a.to(dtype), b.to(dtype)) if dtype.itemsize >= 4 else spread_factors(a, b, dtype)


def folded(x: Tensor, rank: int, dim: int) -> Tensor:
    """Returns the sum of the parts of rank r along `dim`."""
    parts = x.split(rank, dim)
    return x if len(parts) == 1 else parts[0].add(parts[1])


@dataclass(frozen=True, kw_only=True)
class Lora:
    """An adapter's settings, besides its tensors."""

    scale: float
    dropout: float = 0.0
    seed: int = 0
    """Seeds the dropout masks of this pass."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("a", "b")

    def adapter(self, own: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None) -> Low:
        return Low.of(own["a"], own["b"], self, weight.dtype)

    @property
    def factor(self) -> float:
        """The scale, times the factor by which dropout multiplies the elements it keeps."""
        return self.scale / (1.0 - self.dropout) if self.dropout < 1.0 else 0.0

    def mask(self, x: Tensor, tile: slice) -> Tensor:  # (T, I)
        """A mask of ones and zeros, the same whenever this pass recomputes the tile."""
        seed = hash((self.seed, tile.start)) % 2**63
        generator = torch.Generator(x.device).manual_seed(seed)
        return torch.empty_like(x).bernoulli_(1.0 - self.dropout, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Low:
    """The low-rank part of a projection, made once per pass with its factors spread."""

    a: Tensor  # (r, I), or (3 r, I) spread
    b: Tensor  # (O, r), or (O, 3 r) spread
    rank: int
    lora: Lora

    @classmethod
    def of(cls, a: Tensor, b: Tensor, lora: Lora, dtype: torch.dtype) -> Low:
        """Spreads a (r, I) and b (O, r) for matmuls in `dtype`."""
        wide_a, wide_b = spread(a.float(), b.float(), dtype)
        return cls(a=wide_a, b=wide_b, rank=len(a), lora=lora)

    @property
    def by_rows(self) -> frozenset[str]:
        return frozenset({"b"})

    def rows(self, rows: Rows) -> Low:
        return replace(self, b=self.b[rows])

    def masked(self, x: Tensor, tile: slice) -> Tensor:  # (T, I)
        return x * self.lora.mask(x, tile) if self.lora.dropout else x

    @property
    def output_factor(self) -> Tensor | None:  # (O, r) or (O, 3 r)
        return self.b

    def input_factor(self, columns: slice = ALL) -> Tensor | None:
        return None if self.lora.dropout else self.a[:, columns]

    @property
    def inner_factor(self) -> Tensor | None:  # (I, r) or (I, 2 r)
        return None if self.lora.dropout else self._two(self.a.t())

    def inner(self, x: Tensor, tile: slice) -> Tensor:  # (T, I) -> (T, r) or (T, 3 r)
        """Returns u = s (m x) A'."""
        return self.spread_out(wide_mm(self.masked(x, tile), self._two(self.a.t())))

    def inner_grad(self, dy: Tensor) -> Tensor:  # (T, O) -> (T, r) or (T, 3 r)
        """Returns v = s dy B."""
        return self.spread_out(wide_mm(dy, self._two(self.b)))

    def spread_out(self, u: Tensor) -> Tensor:  # (T, r) or (T, 2 r) -> (T, r) or (T, 3 r)
        """Returns u or v from the fp32 result of the matmul with x or dy."""
        if self.a.dtype.itemsize < 4:
            return spread_sums(u, self.lora.factor, self.a.dtype)
        return u.mul(self.lora.factor).to(self.a.dtype)

    def add_(self, y: Tensor, x: Tensor, u: Tensor, tile: slice, scale: float = 1.0) -> None:
        """Nothing is left to add."""

    def output_grad(self, dy: Tensor) -> Tensor:  # (T, O) -> (T, O)
        return dy

    def add_input_grad_(
        self,
        dx: Tensor,  # (T, columns)
        dy: Tensor,  # (T, O)
        v: Tensor,  # (T, r) or (T, 3 r)
        tile: slice,
        scale: float = 1.0,
        columns: slice = ALL,  # of I
    ) -> None:
        """Adds scale m (v A) to dx, where there is a mask."""
        if not self.lora.dropout:
            return
        mask = self.lora.mask(dx.new_empty(len(dx), self.a.shape[1]), tile)
        dx.add_(scaled_mm(v, self.a[:, columns], scale).mul_(mask[:, columns]))

    def gradient(self, wanted: Collection[str]) -> LowGradient:
        return LowGradient(self, wanted)

    def halves(self, u: Tensor) -> Tensor:
        """Returns the two parts of a spread u or v that add up to it, (T, 2 r)."""
        return u[:, : 2 * self.rank]

    def _two(self, factor: Tensor) -> Tensor:  # (I, 3 r) -> (I, 2 r)
        """Returns the high and low parts of a spread factor."""
        return factor[:, self.rank :] if factor.shape[1] > self.rank else factor


class LowGradient:
    """Sums the gradients of A and B over tiles of tokens."""

    def __init__(self, adapter: Low, wanted: Collection[str]) -> None:
        self._adapter = adapter
        self._a, self._b = (WeightGradient(name in wanted) for name in ("a", "b"))
        self._wants_b = "b" in wanted

    def add(self, dy: Tensor, x: Tensor, u: Tensor | None, v: Tensor, tile: slice) -> None:
        adapter = self._adapter
        self._a.add(adapter.halves(v), adapter.masked(x, tile))
        if self._wants_b:
            u = adapter.inner(x, tile) if u is None else u
            self._b.add(dy, adapter.halves(u))

    def finish(self, scale: float = 1.0) -> dict[str, Tensor | None]:
        """Returns `scale` times the gradients of A (r, I) and B (O, r), in fp32."""
        sums = (grad.round(torch.float32, scale)[0] for grad in (self._a, self._b))
        rank = self._adapter.rank
        a, b = (None if x is None else folded(x, rank, dim) for dim, x in enumerate(sums))
        return {"a": a, "b": b}


# --- what it costs ----------------------------------------------------------------------------


def adapter_bytes(s: Sizes, kind: LayerKind) -> int:
    """Bytes per token inside an adapter: 3 fp32 values per rank, and the spread ones."""
    return kind.rank * (12 + 3 * s.itemsize)


def adapters_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The cost of a layer's adapters. u = x A' reads x, which q, k and v share, as
    do gate and up; u B' is added to y. In backward v = dy B reads dy, v A is added to dx, dA reads
    x, dB reads dy, and u is recomputed."""
    adapted = kind.adapted
    flops = 2 * batch.tokens * adapted.parameters
    inputs, outputs = (batch.tokens * s.itemsize * n for n in (adapted.inputs, adapted.outputs))
    return Table(
        forward=(Work(name="adapters", flops=flops, nbytes=inputs + 2 * outputs),),
        backward=(Work(name="adapters", flops=3 * flops, nbytes=4 * inputs + 2 * outputs),),
    )
