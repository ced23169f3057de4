"""DoRA: LoRA whose sum with the weight has a trained length in each row (Liu et al. 2024).

    y = g (x W' + u B') + b        g = magnitude / n,  n = |W + s B A| by rows, held constant

With dropout, as in PEFT, the linear layer sees all of x and DoRA's own product the masked one:

    y = x W' + b + (g - 1) (m x) W' + g u B'

    dx += m ((g - 1) dy W + v A)        v = s (g dy) B        without dropout dx = (g dy) W + v A
    dB  = g (dy' u),   dA = v' (m x),   d magnitude = (sum over tokens of dy (m x W' + u B')) / n

g is folded into B where it is spread, so that u, v, dA and dB cost what LoRA's do. The gradient of
the magnitude is the one that costs a matmul: m x W' again, of which the sum over tokens is kept.
n is computed from W + s B A itself, a few rows at a time, as PEFT does; expanding the square would
read W once less, and lose digits where B A nearly cancels a row of W.

The letters are those of lora.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longctx.cost.dims import LayerKind
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Table, Work
from longctx.layer.adapters.lora import Lora, Low, LowGradient, spread
from longctx.layer.adapters.protocol import ALL, Rows
from longctx.layer.linear import addmm_, wide_mm

CHUNK = 2**22
"""Elements of W + s B A that exist at a time, in fp32."""


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:  # (O,) fp32
    """Returns |W + s B A| of each row."""
    rows = max(1, CHUNK // weight.shape[1])
    pieces = zip(weight.split(rows), b.split(rows), strict=True)
    sums = (torch.addmm(w.float(), part, a, alpha=scale) for w, part in pieces)
    return torch.cat([torch.linalg.vector_norm(x, dim=1) for x in sums])


@dataclass(frozen=True, kw_only=True)
class Dora(Lora):
    """A DoRA adapter's settings."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("a", "b", "magnitude")

    def adapter(self, own: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None) -> Rescaled:
        a, b, magnitude = (own[name].float() for name in self.names)
        norm = row_norms(weight, a, b, self.scale)
        gain = magnitude / norm
        wide_a, wide_b = spread(a, b * gain[:, None], weight.dtype)
        return Rescaled(
            a=wide_a,
            b=wide_b,
            rank=len(a),
            lora=self,
            weight=weight,
            bias=bias,
            factor=b,
            gain=gain,
            norm=norm,
        )


@dataclass(frozen=True, kw_only=True)
class Rescaled(Low):
    """DoRA in one pass: the low-rank part, whose `b` is g B, and what rescales the rest."""

    weight: Tensor  # (O, I)
    bias: Tensor | None  # (O,)
    factor: Tensor  # (O, r) fp32: B
    gain: Tensor  # (O,) fp32: g
    norm: Tensor  # (O,) fp32: n

    @property
    def by_rows(self) -> frozenset[str]:
        return frozenset({"b", "magnitude"})

    def rows(self, rows: Rows) -> Rescaled:
        return replace(
            self,
            b=self.b[rows],
            weight=self.weight[rows],
            bias=None if self.bias is None else self.bias[rows],
            factor=self.factor[rows],
            gain=self.gain[rows],
            norm=self.norm[rows],
        )

    def product(self, x: Tensor, tile: slice) -> Tensor:  # (T, O) fp32
        """Returns (m x) W', as dropout scales it."""
        wide = wide_mm(self.masked(x, tile), self.weight.t())
        return wide.div_(1.0 - self.lora.dropout) if 0 < self.lora.dropout < 1 else wide

    @property
    def output_factor(self) -> Tensor | None:
        return None  # y is rescaled, and the sum rounded once, as in PEFT

    def add_(self, y: Tensor, x: Tensor, u: Tensor, tile: slice, scale: float = 1.0) -> None:
        more = wide_mm(u, self.b.t())
        if self.lora.dropout:
            base = self.product(x, tile)
        else:  # y is scale times x W' + b
            base = y.float() / scale if scale != 1.0 else y.float()
            base = base if self.bias is None else base - self.bias
        more.addcmul_(base, self.gain - 1.0)
        y.add_(more, alpha=scale)

    def output_grad(self, dy: Tensor) -> Tensor:
        return dy if self.lora.dropout else (dy * self.gain).to(dy.dtype)

    def add_input_grad_(
        self,
        dx: Tensor,
        dy: Tensor,
        v: Tensor,
        tile: slice,
        scale: float = 1.0,
        columns: slice = ALL,
    ) -> None:
        p = self.lora.dropout
        if not p:
            return
        rest = dy * ((self.gain - 1.0) / (1.0 - p if p < 1.0 else 1.0))
        more = wide_mm(v, self.a[:, columns])
        addmm_(more, rest.to(dy.dtype), self.weight[:, columns])
        mask = self.lora.mask(dx.new_empty(len(dx), self.a.shape[1]), tile)
        dx.add_(more.mul_(mask[:, columns]), alpha=scale)  # both rounded once, as in PEFT

    def gradient(self, wanted: Collection[str]) -> RescaledGradient:
        return RescaledGradient(self, wanted)


class RescaledGradient(LowGradient):
    """Sums the gradients of A, B and the magnitude over tiles of tokens."""

    def __init__(self, adapter: Rescaled, wanted: Collection[str]) -> None:
        self._scales = "magnitude" in wanted
        # The magnitude's gradient reads dy' u, which is B's but for g.
        super().__init__(adapter, {*wanted, "b"} if self._scales else wanted)
        self._rescaled, self._wanted = adapter, wanted
        self._sum: Tensor | None = None  # (O,) fp32: of dy ((m x) W')

    def add(self, dy: Tensor, x: Tensor, u: Tensor | None, v: Tensor, tile: slice) -> None:
        super().add(dy, x, u, v, tile)
        if self._scales:
            total = self._rescaled.product(x, tile).mul_(dy).sum(0)
            self._sum = total if self._sum is None else self._sum.add_(total)

    def finish(self, scale: float = 1.0) -> dict[str, Tensor | None]:
        found, own = super().finish(scale), self._rescaled
        raw, total, magnitude = found["b"], self._sum, None
        if total is not None and raw is not None:
            magnitude = (total * scale + (own.factor * raw).sum(1)) / own.norm
        b = raw * own.gain[:, None] if raw is not None and "b" in self._wanted else None
        return {"a": found["a"], "b": b, "magnitude": magnitude}


# --- what it costs besides LoRA -----------------------------------------------------------------


def dora_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The cost of lengths and magnitudes in a layer. The norms read each weight and make
    it in fp32, in both passes. A tile's output is made and read in fp32. In backward the matmul for
    the magnitude, and with dropout a second product in each direction."""
    elements, outputs = kind.adapted.rescaled, kind.adapted.outputs
    if not elements:
        return Table()
    product = 2 * batch.tokens * elements
    norms = Work(
        name="DoRA's norms", flops=2 * kind.rank * elements, nbytes=(s.itemsize + 12) * elements
    )
    rows = min(batch.tokens, s.cut(batch.tokens).tile_tokens)
    wide = kind.widest
    # Whenever linear layers compute.
    made = {"norms, fp32": 8 * min(CHUNK, s.hidden * wide), "a tile, fp32": 8 * rows * wide}
    of_o = batch.tokens * s.hidden * s.itemsize * (not kind.drops)
    moved = 16 * batch.tokens * outputs
    return Table(
        forward=(norms, Work(name="DoRA", flops=kind.drops * product, nbytes=moved)),
        backward=(norms, Work(name="DoRA", flops=(1 + kind.drops) * product, nbytes=2 * moved)),
        buffers=(
            *(
                Buffer(name=name, nbytes=nbytes, during=phase)
                for name, nbytes in made.items()
                for phase in ("forward", "backward")
            ),
            Buffer(name="o's gradient, rescaled", nbytes=of_o, during="attention backward"),
        ),
    )
