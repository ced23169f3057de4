"""Autograd's graphs of a mixer's segments (mixer.py): their leaves, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from longctx.layer.weights import MIXER


class SegmentGraph(NamedTuple):
    """Autograd's graph of one call of the module."""

    n1: Tensor  # (rows, t, D)
    begin: list[Tensor]
    """The state with which it began."""
    made: list[GradientEdge]
    """The nodes of z and of the state behind the last token, as far as they get a gradient. Without
    the tensors: z is kept elsewhere."""
    dtype: torch.dtype
    """The dtype of z."""


class Leaves:
    """The parameters of a pass's graphs. The trained ones are leaves of their own, so that hooks of
    the model's see no gradient before it is complete."""

    def __init__(self, parameters: Mapping[str, Tensor], wants: Callable[[str], bool]) -> None:
        own = {name: x.detach().requires_grad_() for name, x in parameters.items() if wants(name)}
        self.names, self.trained = [*own], [*own.values()]
        self.all = {**parameters, **own}


class KeptGraph(NamedTuple):
    """The graphs of a layer's segments, which forward keeps for backward."""

    leaves: Leaves
    segments: list[SegmentGraph]


class Sums:
    """The gradients of a mixer's trained parameters, summed over segments in fp32."""

    def __init__(self, names: Sequence[str], segments: int) -> None:
        self._names = names
        self._sums: dict[str, Tensor] = {}
        self._rounds_once = segments == 1

    def add(self, grads: Iterable[Tensor | None]) -> None:
        """Adds the gradients that one segment gives, in the order of their names."""
        for name, grad in zip(self._names, grads, strict=True):
            if grad is not None and name in self._sums:
                self._sums[name].add_(grad)
            elif grad is not None:
                self._sums[name] = grad if self._rounds_once else grad.float()

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the sums by the names of the layer's parameters, and lets each go."""
        for name in self._names:
            if name in self._sums:
                yield f"{MIXER}.{name}", self._sums.pop(name)


def add_to(
    d_ends: dict[int, list[Tensor]], i: int, begin: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    """Adds gradients of the state with which a segment begins to those of segment i's end."""
    found = [torch.zeros_like(s) if g is None else g for s, g in zip(begin, grads, strict=True)]
    before = d_ends.get(i)
    d_ends[i] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]
