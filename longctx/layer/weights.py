"""A layer's parameters, as the schedule takes them and as a pass computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.layer.linear import dense
from longctx.layer.lora import Adapter, Lora
from longctx.layer.projection import Projection

NORMS = ("norm1", "norm2", "norm1_bias", "norm2_bias", "post1", "post2", "q_norm", "k_norm")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class Weights(NamedTuple):
    """A layer's parameters, in the order in which the Function takes and returns them.

    One parameter may hold several weights, stacked along the rows: q holds q, k and v if k and v
    are None; gate holds gate and up if up is None. `apart` gives views of each. The adapter of a
    parameter that holds several weights has one A (r, I) for all of them. An MLP without a gate has
    up alone.
    """

    q: Tensor  # (H d, D)
    o: Tensor  # (D, H d)
    down: Tensor  # (D, F)
    gate: Tensor | None = None  # (F, D)
    k: Tensor | None = None  # (K d, D)
    v: Tensor | None = None  # (K d, D)
    up: Tensor | None = None  # (F, D)
    norm1: Tensor | None = None  # (D,), before attention
    norm2: Tensor | None = None  # (D,), before the MLP
    post1: Tensor | None = None  # (D,), after attention
    post2: Tensor | None = None  # (D,), after the MLP
    norm1_bias: Tensor | None = None  # (D,)
    norm2_bias: Tensor | None = None  # (D,)
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # (d,), or (H d,)
    k_norm: Tensor | None = None  # (d,), or (K d,)
    q_a: Tensor | None = None  # (r, D)
    q_b: Tensor | None = None  # (H d, r)
    k_a: Tensor | None = None
    k_b: Tensor | None = None
    v_a: Tensor | None = None
    v_b: Tensor | None = None
    o_a: Tensor | None = None
    o_b: Tensor | None = None
    gate_a: Tensor | None = None
    gate_b: Tensor | None = None
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None

    @property
    def qkv_in_one(self) -> bool:
        return self.k is None

    @property
    def gate_up_in_one(self) -> bool:
        return self.up is None

    @property
    def in_one(self) -> dict[str, str]:
        """Maps each weight that lies in another weight's parameter to that parameter's name."""
        found = {"k": "q", "v": "q"} if self.qkv_in_one else {}
        return found | ({"up": "gate"} if self.gate_up_in_one else {})

    def dense(self) -> Weights:
        """Returns the parameters with quantised weights made dense, for one pass."""
        return Weights(*map(dense, self))

    def apart(self) -> Weights:
        w = self
        if self.qkv_in_one:
            Hd = self.o.shape[1]
            Kd = (self.q.shape[0] - Hd) // 2
            w = w._divided("qkv", [Hd, Kd, Kd])
        if self.gate_up_in_one:
            F = self.down.shape[1]
            w = w._divided(("gate", "up"), [F, F])
        return w

    def _divided(self, names: Any, sizes: list[int]) -> Weights:
        """Splits the parameter of the first name, whose rows hold all names, into views."""
        of = f"{names[0]}%s"
        parts = dict(zip(names, getattr(self, of % "").split(sizes), strict=True))
        if (b := getattr(self, of % "_b")) is not None:
            parts |= {f"{n}_b": x for n, x in zip(names, b.split(sizes), strict=True)}
            parts |= {f"{n}_a": getattr(self, of % "_a") for n in names}
        return self._replace(**parts)

    def layer(self, loras: Mapping[str, Lora], dtype: torch.dtype) -> Layer:
        """Casts the projections to `dtype` for matmuls; norms keep their dtype, as in autocast.
        `loras` has the settings of the adapters, by the names of projections."""
        w, held = self.apart(), self.in_one

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(dtype)

        def projection(name: str) -> Projection:
            a, b = (getattr(w, f"{name}_{factor}") for factor in "ab")
            lora = loras[held.get(name, name)] if a is not None else None
            adapter = None if lora is None else Adapter.of(a, b, lora, dtype)
            return Projection(getattr(w, name).to(dtype), cast(getattr(w, f"{name}_bias")), adapter)

        names = [name for name in PROJECTIONS if getattr(w, name) is not None]
        parts: dict[str, Any] = {name: projection(name) for name in names}
        return Layer(**parts, **{name: getattr(w, name) for name in NORMS})


class Layer(NamedTuple):
    """A layer's weights in the form in which a pass computes with them."""

    q: Projection  # (H d, D)
    k: Projection  # (K d, D)
    v: Projection  # (K d, D)
    o: Projection  # (D, H d)
    up: Projection  # (F, D)
    down: Projection  # (D, F)
    norm1: Tensor | None  # (D,)
    norm2: Tensor | None  # (D,)
    norm1_bias: Tensor | None  # (D,)
    norm2_bias: Tensor | None  # (D,)
    post1: Tensor | None  # (D,)
    post2: Tensor | None  # (D,)
    q_norm: Tensor | None  # (d,), or (H d,)
    k_norm: Tensor | None  # (d,), or (K d,)
    gate: Projection | None = None  # (F, D)

    @property
    def inner(self) -> dict[str, Projection]:
        """What the MLP reads its input with: gate and up, or up alone."""
        return {"up": self.up} if self.gate is None else {"gate": self.gate, "up": self.up}

    @property
    def qkv(self) -> tuple[Projection, Projection, Projection]:
        return self.q, self.k, self.v
