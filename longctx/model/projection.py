"""Products of the schedule: weights with adapters, 16-bit operands, sums in fp32.

Every product with a parameter goes through a `Projection`: a weight W, frozen or trained, with a
bias and a LoRA adapter A, B where there are, s its scale and m a mask of dropout:

    y  = x W' + b + u B'            u = s (m x) A'
    dx = dy W + m (v A)             v = s dy B
    dW = dy' x,  dB = dy' u,  dA = v' (m x),  db = sum dy          only for what is trained

An adapter costs 2 r (I + O) FLOPs a token in forward, three times that in backward for what is
above and 2 r I for u, which is computed again. u and v are (T, r). All that is little; what counts
is how often x, y and their gradients, (T, I) and (T, O), are read and written for it. So u of
projections of one x comes from one product (`inners`), and that of q, k, v from one for all head
groups.

A weight's gradient is a sum over tiles of tokens, dW = sum_t dy_t' x_t. Adding bf16 tiles loses a
bit with every doubling of their number; here the sum stays in an fp32 buffer that the matrix unit
adds into (`addmm` with an fp32 output), and is rounded to the weight's dtype at the end. A sum of
one tile is rounded by the matrix unit: 4 bytes a weight written and read less (3% of a step of
Llama-3.1-8B at 8192 tokens).

Adapters are fp32 where the rest has 16 bits (PEFT's default), and converting x to fp32 would cost
more than the product. So a factor of rank r is *spread*: high = bf16(A) and low = bf16(A - high)
hold 16 of its bits, x A' = x [high; low]' folded, and u B' takes three products in one,
[u_high u_low u_high] [B_high B_high B_low]'. What is left out, u_low B_low', is 2^-16 of it.

A quantised weight (NF4) is made dense once a pass, forward and backward: 0.4 ms a layer of 8B,
which is then 0.41 GiB of 16-bit weights while it computes.

T tokens, I features in, O features out, r ranks; weights as Hugging Face holds them, (O, I).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.spread import spread_sums

ALL = slice(None)


def linear(
    x: Tensor,  # (T, I)
    weight: Tensor,  # (O, I)
    bias: Tensor | None = None,  # (O,)
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (T, O)
) -> Tensor:  # (T, O)
    """scale (x weight' + bias), rounded once"""
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale, out=out)
    if out is not None:
        assert scale == 1.0
        return torch.mm(x, weight.t(), out=out)
    return scaled_mm(x, weight.t(), scale)


def linear_add(
    base: Tensor,  # (T, O)
    x: Tensor,  # (T, I)
    weight: Tensor,  # (O, I)
    bias: Tensor | None = None,  # (O,)
    *,
    scale: float = 1.0,
    out: Tensor | None = None,  # (T, O), may be base
) -> Tensor:  # (T, O)
    """base + scale (x weight' + bias), rounded once; with a bias twice, the first time without
    base, which is the larger part of a residual stream, and so it is into an fp32 stream."""
    if base.dtype != x.dtype:
        product = linear(x, weight, bias)
        return torch.add(base, product if scale == 1.0 else product.to(base.dtype) * scale, out=out)
    if bias is None:
        return torch.addmm(base, x, weight.t(), alpha=scale, out=out)
    # Not by torch.add's own factor, which is rounded to bf16 on CPUs: 1.7 becomes 1.703.
    return torch.add(base, linear(x, weight, bias, scale=scale), out=out)


def scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b, rounded once."""
    if scale == 1.0:
        return a @ b
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scale)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, with out in fp32 or in the operands' dtype."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def addmm_(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a b, with acc in fp32."""
    if a.is_cuda and a.dtype != acc.dtype:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        torch.addmm(acc, a.to(acc.dtype), b.to(acc.dtype), out=acc)


def dense(weight: Any) -> Any:
    """A weight (O, I) that bitsandbytes has quantised to 4 bits, as its own layers compute with it;
    any other as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.detach(), state)


LARGE = 2**23
"""Elements of a product whose sum cuBLAS does not split, to add the parts in 16 bits."""


def sum_dtype(weight: Tensor, tiles: int) -> torch.dtype:
    """Of the sum that becomes a weight's gradient."""
    rounds_once = tiles == 1 and weight.is_cuda and weight.numel() >= LARGE
    return weight.dtype if rounds_once else torch.float32


class WeightGradient:
    """The gradient of a linear map's weight and bias over tiles of tokens; nothing if frozen."""

    def __init__(
        self,
        weight: bool,
        bias: bool = False,
        into: Tensor | None = None,  # (O, I): where the weight's adds up
        dtype: torch.dtype = torch.float32,  # of this sum, without `into`
    ) -> None:
        self._wants_weight, self._wants_bias = weight, bias
        self._into, self._dtype = into, dtype
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, dy: Tensor, x: Tensor) -> None:  # (T, O), (T, I)
        if self._wants_weight:
            if self._weight is None:
                shape = (dy.shape[1], x.shape[1])
                if self._into is None:
                    self._into = torch.empty(shape, dtype=self._dtype, device=x.device)
                self._weight, self._into = self._into, None
                mm(dy.t(), x, out=self._weight)
            else:
                addmm_(self._weight, dy.t(), x)
        if self._wants_bias:
            total = dy.sum(0, dtype=torch.float32)
            self._bias = total if self._bias is None else self._bias.add_(total)

    def round(self, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor | None, Tensor | None]:
        """`scale` times the weight's (O, I) and the bias's (O,) gradient; frees the sums."""
        sums = (self._weight, self._bias)
        self._weight = self._bias = None
        if scale != 1.0:
            for x in sums:
                if x is not None:
                    x.mul_(scale)
        weight, bias = (None if x is None else x.to(dtype) for x in sums)
        return weight, bias


# --- adapters --------------------------------------------------------------------------------


def spread(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """A factor `x` of rank r along `dim`, in `dtype`: as it is where that is wide, else in three
    parts whose products with those of u or v (kernels/spread.py) add up to the product."""
    if dtype.itemsize >= 4:
        return x.to(dtype)
    high = x.to(dtype)
    low = (x - high).to(dtype)
    return torch.cat([high, high, low], dim)


def folded(x: Tensor, rank: int, dim: int) -> Tensor:
    """The sum of the parts of rank r along `dim`."""
    parts = x.split(rank, dim)
    return x if len(parts) == 1 else parts[0].add(parts[1])


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What an adapter has besides its tensors."""

    scale: float
    dropout: float = 0.0
    seed: int = 0
    """Of this pass's masks."""

    @property
    def factor(self) -> float:
        """The scale, and what dropout multiplies the numbers by that it keeps."""
        return self.scale / (1.0 - self.dropout) if self.dropout < 1.0 else 0.0

    def mask(self, x: Tensor, tile: slice) -> Tensor:  # (T, I)
        """Ones and zeros: the same whenever a tile of this pass is computed again."""
        seed = hash((self.seed, tile.start)) % 2**63
        generator = torch.Generator(x.device).manual_seed(seed)
        return torch.empty_like(x).bernoulli_(1.0 - self.dropout, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The low-rank part of a projection. Made once a pass, with its factors spread."""

    a: Tensor  # (r, I), or (3 r, I) spread
    b: Tensor  # (O, r), or (O, 3 r) spread
    rank: int
    lora: Lora

    @classmethod
    def of(cls, a: Tensor, b: Tensor, lora: Lora, dtype: torch.dtype) -> Adapter:
        """a (r, I), b (O, r), for products in `dtype`"""
        wide_a, wide_b = a.float(), b.float()
        return cls(
            a=spread(wide_a, dtype, 0),
            b=spread(wide_b, dtype, 1),
            rank=len(a),
            lora=lora,
        )

    def rows(self, rows: slice) -> Adapter:
        """That part of the outputs."""
        return replace(self, b=self.b[rows])

    def masked(self, x: Tensor, tile: slice) -> Tensor:  # (T, I)
        return x * self.lora.mask(x, tile) if self.lora.dropout else x

    @property
    def inner_factor(self) -> Tensor:  # (I, r) or (I, 2 r)
        return self._two(self.a.t())

    def inner(self, x: Tensor, tile: slice) -> Tensor:  # (T, I) -> (T, r) or (T, 3 r)
        """u"""
        return self.spread_out(wide_mm(self.masked(x, tile), self.inner_factor))

    def inner_grad(self, dy: Tensor) -> Tensor:  # (T, O) -> (T, r) or (T, 3 r)
        """v"""
        return self.spread_out(wide_mm(dy, self._two(self.b)))

    def spread_out(self, u: Tensor) -> Tensor:  # (T, r) or (T, 2 r) -> (T, r) or (T, 3 r)
        """u or v, of what a product with x or dy gave, in fp32."""
        if self.a.dtype.itemsize < 4:
            return spread_sums(u, self.lora.factor, self.a.dtype)
        return u.mul(self.lora.factor).to(self.a.dtype)

    def add_(self, y: Tensor, u: Tensor, scale: float = 1.0) -> None:
        """y (T, O) += scale u B'"""
        torch.addmm(y, u, self.b.t(), alpha=scale, out=y)

    def add_input_grad_(
        self,
        dx: Tensor,  # (T, columns)
        v: Tensor,  # (T, r) or (T, 3 r)
        tile: slice,
        scale: float = 1.0,
        columns: slice = ALL,  # of I
    ) -> None:
        """dx += scale m (v A)"""
        a = self.a[:, columns]
        if not self.lora.dropout:
            torch.addmm(dx, v, a, alpha=scale, out=dx)
            return
        mask = self.lora.mask(dx.new_empty(len(dx), self.a.shape[1]), tile)
        dx.add_(scaled_mm(v, a, scale).mul_(mask[:, columns]))

    def halves(self, u: Tensor) -> Tensor:
        """Of u or v, spread: the two parts that add up to it."""
        return u[:, : 2 * self.rank]

    def _two(self, factor: Tensor) -> Tensor:  # (I, 3 r) -> (I, 2 r)
        """High and low."""
        return factor[:, self.rank :] if factor.shape[1] > self.rank else factor


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a b, in fp32"""
    out = torch.empty(len(a), b.shape[1], dtype=torch.float32, device=a.device)
    mm(a, b, out=out)
    return out


# --- a projection ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Projection:
    """A linear map of the layer: what is computed with it in forward, and of its input backward.

    `tile` says which of the batch's tokens are given, for masks of dropout.
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
        """base + scale y. With an adapter as with a bias: the smaller parts are added first."""
        if self.adapter is None:
            return linear_add(base, x, self.weight, self.bias, scale=scale, out=out)
        return torch.add(base, self(x, tile, scale=scale), out=out)

    def inner_grad(self, dy: Tensor) -> Tensor | None:  # (T, O) -> (T, r) or (T, 3 r)
        """What the gradients of the input and of A need; None without an adapter."""
        return None if self.adapter is None else self.adapter.inner_grad(dy)

    def input_grad(
        self,
        dy: Tensor,  # (T, O)
        v: Tensor | None,  # inner_grad(dy)
        tile: slice,
        *,
        scale: float = 1.0,
        onto: Tensor | None = None,  # (T, I): added to
    ) -> Tensor:  # (T, I)
        """scale dx"""
        if onto is None:
            dx = scaled_mm(dy, self.weight, scale)
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
    """u of each. What no dropout masks is read once for all."""
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
    """The gradients of a projection over tiles of tokens; nothing for what is frozen."""

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
        """`scale` times the gradients of A (r, I) and B (O, r), in fp32."""
        if self.adapter is None:
            return None, None
        sums = (grad.round(torch.float32, scale)[0] for grad in (self._a, self._b))
        rank = self.adapter.rank
        a, b = (None if x is None else folded(x, rank, dim) for dim, x in enumerate(sums))
        return a, b


def added_up(grads: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of those that are there."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            total = grad if total is None else total.add_(grad)
    return total
