"""A layer's parameters by name, as the schedule takes them and as a pass computes with them.

The specs of a layer's parts declare the names of its linear layers (specs/). A parameter is named
after the linear layer or norm that it belongs to: "q" is its weight, "q.bias" its bias, and "q.a" a
parameter of its adapter, as the adapter calls it. The autograd Function takes them in the order of
the mapping that it is given, and returns their gradients in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.cost.dims import LayerSpec
from longctx.layer.adapters.protocol import Settings
from longctx.layer.dense_experts import STACKS, PackedExperts, by_chunks
from longctx.layer.packed_weights import dense, packed_state
from longctx.layer.projection import Projection
from longctx.layer.stack import ExpertLayout, Stack

Parameters = Mapping[str, Tensor]
MIXER = "mixer"
"""The owner of the parameters of a module that a layer runs as it is (parts/mixer.py):
"mixer.in_proj.weight"."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's parameters in one pass."""

    given: dict[str, Tensor]
    """The parameters, quantised ones made dense, but for those of a mixer, and of experts that are
    dense by chunks."""
    holders: dict[str, str]
    """Maps each weight that lies in one parameter with others to the name of that parameter."""
    projections: dict[str, Projection]
    stacks: dict[str, Stack]

    @classmethod
    def of(
        cls,
        parameters: Parameters,
        layer: LayerSpec,
        adapters: Mapping[str, Settings],
        dtype: torch.dtype,
    ) -> Weights:
        """Casts linear layers to `dtype` for matmuls; norms keep their dtype, as in autocast.
        `adapters` has the settings of adapters, by the names of parameters."""
        parts: Any = layer.parts
        apart = by_chunks(parameters)

        def stays(name: str) -> bool:
            return name in apart or name.startswith(f"{MIXER}.")

        rooms = _rooms(parameters, [names for part in parts for names in part.side_by_side])
        given = {
            name: x if stays(name) else dense(x, rooms.get(name)) for name, x in parameters.items()
        }
        made = cls(given, {}, {}, {})
        for part in parts:
            for names, rows in part.in_one.items():
                made._part_rows(names, rows, adapters, dtype)
            for name in part.linears:
                if name not in made.projections:
                    made.projections[name] = made._projection(name, adapters, dtype)
            for name in STACKS if part.stacks else ():
                made.stacks[name] = made._stack(name, adapters.get(name), dtype, part.layout)
        return made

    def __getitem__(self, name: str) -> Projection:
        return self.projections[name]

    @property
    def of_mixer(self) -> dict[str, Tensor]:
        """The parameters of the layer's mixer, by their names in it."""
        start = f"{MIXER}."
        return {n.removeprefix(start): x for n, x in self.given.items() if n.startswith(start)}

    def all_of(self, *names: str) -> dict[str, Projection]:
        """Returns those of these linear layers that the layer has."""
        return {name: self.projections[name] for name in names if name in self.projections}

    def _projection(
        self, name: str, adapters: Mapping[str, Settings], dtype: torch.dtype
    ) -> Projection:
        bias, settings = self.given.get(f"{name}.bias"), adapters.get(name)
        weight = self.given[name].to(dtype)
        bias = None if bias is None else bias.to(dtype)
        if settings is None:
            return Projection(weight, bias)
        own = {n: self.given[f"{name}.{n}"] for n in settings.names}
        return Projection(weight, bias, settings.adapter(own, weight, bias))

    def _stack(
        self, name: str, settings: Settings | None, dtype: torch.dtype, layout: ExpertLayout
    ) -> Stack:
        given, bias = self.given[name], self.given.get(f"{name}.bias")
        weight: Tensor | PackedExperts
        if packed_state(given) is not None:
            weight = PackedExperts(given, dtype, layout.transposed)
        else:
            weight = given.to(dtype)
            weight = weight.transpose(1, 2) if layout.transposed else weight
        stack = Stack(weight, None if bias is None else bias.to(dtype))
        if settings is None:
            return stack
        a, b = (self.given[f"{name}.{own}"] for own in settings.names)
        return stack.adapted(a, b, settings.factor)

    def _part_rows(
        self,
        names: tuple[str, ...],
        sizes: Sequence[int],
        adapters: Mapping[str, Settings],
        dtype: torch.dtype,
    ) -> None:
        whole, start = self._projection(names[0], adapters, dtype), 0
        for name, size in zip(names, sizes, strict=True):
            self.holders[name] = names[0]
            self.projections[name] = whole.rows(slice(start, start + size))
            start += size


def _rooms(parameters: Parameters, groups: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """Returns where packed weights are made dense: those of a group one under the other, so that
    a matmul with all of them needs no copy."""
    found: dict[str, Tensor] = {}
    for names in groups:
        states = [s for name in names if (s := packed_state(parameters.get(name))) is not None]
        if len(states) == len(names) and len({(s.shape[1:], s.dtype) for s in states}) == 1:
            rows, first = [s.shape[0] for s in states], states[0]
            device = parameters[names[0]].device
            whole = torch.empty(sum(rows), *first.shape[1:], dtype=first.dtype, device=device)
            found |= zip(names, whole.split(rows), strict=True)
    return found
