"""The weights of all experts in one parameter, frozen or trained, with an optional adapter for each
expert, and the gradients of all of them. A row of x is a slot of expert e (kernels/grouped_mm.py):

    y  = x We' + be + u Be'      u = s x Ae',  v = s dy Be
    dx = dy We + v Ae
    dWe = dy' x,  dbe = sum dy,  dBe = dy' u,  dAe = v' x         only for what is trained

E experts, O features out, K features in, r ranks of an expert's adapter. A family may have the
weights transposed (`ExpertLayout`); here they are (E, O, K), as a view then, and their gradient is
made as the parameter lies. PEFT (ParamWrapper) has A as (E r, K), expert by expert, and B as
(O, r E), rank by rank, for either. A product with all of an adapter's dense deltas, as PEFT makes
them, is never there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.kernels.clamped_swiglu import Clamped
from longctx.kernels.grouped_mm import LowRank, grouped_mm, grouped_outer_
from longctx.kernels.grouped_sum import grouped_sum_
from longctx.layer.dense_experts import PackedExperts


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """How a family has the weights of experts in their parameters. The defaults are Mixtral's."""

    transposed: bool = False
    """They are (E, K, O), instead of (E, O, K)."""
    clamped: Clamped | None = None
    """The numbers of a clamped activation, whose gate and up are interleaved features; None: they
    are the two halves, under `ExpertsSpec.activation`."""


PLAIN = ExpertLayout()


@dataclass(frozen=True)
class Stack:
    """Experts' weights in one pass. `rows` says which row of its operand each slot reads."""

    weight: Tensor | PackedExperts  # (E, O, K), O or K at stride 1
    bias: Tensor | None = None  # (E, O)
    a: Tensor | None = None  # (E, r, K)
    b: Tensor | None = None  # (E, O, r)
    scale: float = 1.0

    def adapted(self, a: Tensor, b: Tensor, scale: float) -> Stack:
        """Returns the stack with an adapter, `a` (E r, K) and `b` (O, r E), as PEFT has them."""
        experts, dtype = len(self.weight), self.weight.dtype
        by_expert = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        a = a.to(dtype).unflatten(0, (experts, -1))
        return Stack(self.weight, self.bias, a, by_expert.to(dtype).contiguous(), scale)

    def __call__(
        self, x: Tensor, ends: Tensor, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:  # (n, O)
        u = self.inner(x, ends, rows)
        added = None if u is None or self.b is None else LowRank(u, self.b)
        return self._product(x, ends, rows, added, out=out)

    def inner(self, x: Tensor, ends: Tensor, rows: Tensor | None = None) -> Tensor | None:
        """Returns u (n, r); None without an adapter."""
        return None if self.a is None else grouped_mm(x, self.a, ends, rows=rows).mul_(self.scale)

    def inner_grad(self, dy: Tensor, ends: Tensor, rows: Tensor | None = None) -> Tensor | None:
        """Returns v (n, r); None without an adapter."""
        if self.b is None:
            return None
        return grouped_mm(dy, self.b.transpose(1, 2), ends, rows=rows).mul_(self.scale)

    def input_grad(
        self, dy: Tensor, v: Tensor | None, ends: Tensor, rows: Tensor | None = None
    ) -> Tensor:  # (n, K)
        added = None if v is None or self.a is None else LowRank(v, self.a.transpose(1, 2))
        return self._product(dy, ends, rows, added, back=True)

    def _product(
        self,
        x: Tensor,
        ends: Tensor,
        rows: Tensor | None,
        added: LowRank | None,
        *,
        back: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns x times the weights of each slot's expert, transposed ones on the way back."""
        if out is None:
            slots = x if rows is None else rows
            out = x.new_empty(len(slots), self.weight.shape[2 if back else 1])
        bias = None if back else self.bias
        for some in self._chunks():
            weight = self._dense(some)
            grouped_mm(
                x,
                weight.transpose(1, 2) if back else weight,
                ends,
                rows=rows,
                bias=None if bias is None else bias[some],
                low_rank=None if added is None else LowRank(added.u, added.b[some]),
                out=out,
                first=some.start,
            )
            del weight  # before the next ones are made dense
        return out

    def _chunks(self) -> Iterable[slice]:
        """Returns the experts that are dense at a time."""
        weight = self.weight
        return [slice(0, len(weight))] if isinstance(weight, Tensor) else weight.chunks()

    def _dense(self, some: slice) -> Tensor:
        weight = self.weight
        return weight[some] if isinstance(weight, Tensor) else weight.dense(some)


class _Sum:
    """A sum over tiles of tokens, (E, O, K), unless it is not wanted."""

    def __init__(self, wanted: bool, dtype: torch.dtype = torch.float32) -> None:
        self._wanted, self._dtype = wanted, dtype
        self.total: Tensor | None = None

    def add(
        self,
        a: Tensor,  # (n or t, O)
        b: Tensor,  # (n or t, K)
        ends: Tensor,  # (E,)
        rows_a: Tensor | None,  # (n,)
        rows_b: Tensor | None,  # (n,)
    ) -> None:
        """Adds a[rows_a]' b[rows_b] of each expert's slots."""
        if not self._wanted:
            return
        first = self.total is None
        if self.total is None:
            shape = len(ends), a.shape[1], b.shape[1]
            self.total = torch.empty(shape, dtype=self._dtype, device=a.device)
        grouped_outer_(self.total, a, b, ends, rows_a=rows_a, rows_b=rows_b, add=not first)


class StackGradient:
    """Sums the gradients of a stack's trained parameters over tiles of tokens."""

    def __init__(
        self,
        stack: Stack,
        wants: Callable[[str], bool],
        dtype: torch.dtype,
        layout: ExpertLayout = PLAIN,
    ) -> None:
        """`wants` says which of "", ".bias", ".a" and ".b" are trained; `dtype` is that of the
        weight's."""
        self._stack, self._layout, self._wants_b = stack, layout, wants(".b")
        self._wants_bias = wants(".bias")
        self._bias: Tensor | None = None  # (E, O) fp32
        self._weight, self._a, self._b = (
            _Sum(wants(""), dtype),
            _Sum(wants(".a")),
            _Sum(wants(".b")),
        )

    def add(
        self,
        dy: Tensor,  # (n or t, O)
        x: Tensor,  # (n or t, K)
        v: Tensor | None,  # inner_grad(dy)
        ends: Tensor,
        rows_dy: Tensor | None,
        rows_x: Tensor | None,
        weights: Tensor | None = None,  # (n,) fp32: those of the slots, if x is multiplied by them
    ) -> None:
        if self._layout.transposed:
            self._weight.add(x, dy, ends, rows_x, rows_dy)
        else:
            self._weight.add(dy, x, ends, rows_dy, rows_x)
        if self._wants_bias:
            self._add_bias(dy, ends, rows_dy, weights)
        if v is not None:
            self._a.add(v, x, ends, None, rows_x)
        if self._wants_b and (u := self._stack.inner(x, ends, rows_x)) is not None:
            self._b.add(dy, u, ends, rows_dy, None)

    def _add_bias(
        self, dy: Tensor, ends: Tensor, rows: Tensor | None, weights: Tensor | None
    ) -> None:
        first = self._bias is None
        if self._bias is None:
            wide = torch.promote_types(dy.dtype, torch.float32)
            self._bias = dy.new_empty(len(ends), dy.shape[1], dtype=wide)
        grouped_sum_(self._bias, dy, ends, rows=rows, weights=weights, add=not first)

    def finish(self) -> dict[str, Tensor | None]:
        """Returns the sums, by the ends of names, as their parameters lie."""
        a, b = self._a.total, self._b.total
        return {
            "": self._weight.total,
            ".bias": self._bias,
            ".a": None if a is None else a.flatten(0, 1),
            ".b": None if b is None else b.permute(1, 2, 0).flatten(1),
        }
