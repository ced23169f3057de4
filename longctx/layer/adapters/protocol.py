"""The methods by which a projection uses its adapter, whatever the adapter's parameters are.

`Settings` stands for an adapter between passes, and makes the `Adapter` of one pass. u is what the
adapter has computed of the input x, v of the output's gradient dy; forward and backward share them
with other adapters of the same x.

T tokens, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

ALL = slice(None)
Rows = slice | Tensor
"""Some output features: one after the other, or their numbers (int64)."""


class AdapterGradient(Protocol):
    """Sums the gradients of an adapter's trained parameters over tiles of tokens."""

    def add(self, dy: Tensor, x: Tensor, u: Tensor | None, v: Tensor, tile: slice) -> None:
        """Adds those of a tile; u is computed again where it is None."""

    def finish(self, scale: float = 1.0) -> dict[str, Tensor | None]:
        """Returns `scale` times the gradients in fp32, by the names of parameters."""


class Adapter(Protocol):
    """An adapter in one pass. `tile` says which of the batch's tokens a method is given."""

    @property
    def by_rows(self) -> frozenset[str]:
        """The parameters that have a row for each of O. Weights that lie in one parameter have
        rows of their own; they share an adapter's other parameters, whose gradients are summed."""

    @property
    def output_factor(self) -> Tensor | None:  # (O, n)
        """Returns the factor of u whose product is made before the linear layer's own, which the
        tensor cores then add to it, so that the sum is rounded once; None if there is none."""

    def input_factor(self, columns: slice = ALL) -> Tensor | None:  # (n, columns)
        """Returns the same factor of v for dx."""

    @property
    def inner_factor(self) -> Tensor | None:  # (I, n)
        """Returns the factor of x, so that adapters of the same x share one matmul; None where
        it is not x itself that is multiplied."""

    def rows(self, rows: Rows) -> Adapter:
        """Returns the adapter of these output features only."""

    def spread_out(self, u: Tensor) -> Tensor:  # (T, n) fp32
        """Returns u from the product of x and `inner_factor`."""

    def inner(self, x: Tensor, tile: slice) -> Tensor:  # (T, I)
        """Returns u."""

    def add_(self, y: Tensor, x: Tensor, u: Tensor, tile: slice, scale: float = 1.0) -> None:
        """Adds to y (T, O), `scale` times the linear layer's output and the product of u and
        `output_factor`, what else the adapter adds to it, times `scale`."""

    def inner_grad(self, dy: Tensor) -> Tensor:  # (T, O)
        """Returns v."""

    def output_grad(self, dy: Tensor) -> Tensor:  # (T, O) -> (T, O)
        """Returns the gradient of the linear layer's own product where dy is that of the sum."""

    def add_input_grad_(
        self,
        dx: Tensor,  # (T, columns)
        dy: Tensor,  # (T, O)
        v: Tensor,
        tile: slice,
        scale: float = 1.0,
        columns: slice = ALL,  # of I
    ) -> None:
        """Adds to dx, which has the products of `output_grad` and the weight and of v and
        `input_factor`, what else reaches x through the adapter, times `scale`."""

    def gradient(self, wanted: Collection[str]) -> AdapterGradient: ...


class Settings(Protocol):
    """An adapter's settings, besides its tensors."""

    @property
    def factor(self) -> float:
        """The factor of what it adds, while it drops nothing."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""

    def adapter(self, own: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None) -> Adapter:
        """Returns the adapter with its own parameters, beside a weight (O, I) in the dtype of
        matmuls."""
