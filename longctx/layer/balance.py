"""The auxiliary loss that balances experts, beside a batch's layers.

Each layer of experts adds what its tokens ask for, (2, E) sums (router.py), and no logits are kept.
The loss is E <mean choices, mean probabilities> over all of these layers, so that its gradient is
one number for each expert, the same in all layers. `balanced` stands between the last layer and the
final norm: autograd has the loss's gradient there before it comes to any layer, whose backward then
reads it here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.attention.shards import Shards
from longctx.kernels.launch import once_differentiable
from longctx.layer.router import Router, balance_loss, balance_sums


class Balance:
    """The sums of a batch, and the loss's gradient. `times` (T,) says how often each token counts;
    None: once. Ranks that share rows add up their sums: means are of all of their tokens."""

    def __init__(
        self, router: Router, times: Tensor | None = None, shards: Shards | None = None
    ) -> None:
        self.router, self.times, self._shards = router, times, shards
        self.sums: Tensor | None = None  # (2, E) fp32
        self.tokens: Tensor | float = 0.0
        """How often tokens counted, in all layers together."""
        self.gradient: Tensor | None = None  # (E,): of the probabilities' sums
        self._closed = False

    def add(self, logits: Tensor, tile: slice) -> None:  # (t, E)
        """Counts a tile of a layer's tokens, unless the layer runs forward again in backward."""
        if self._closed:
            return
        times = self.of(tile)
        sums = balance_sums(logits, self.router, times)
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens = self.tokens + (float(len(logits)) if times is None else times.sum())

    def of(self, tile: slice) -> Tensor | None:
        """Returns how often the tokens of a tile count; None: once."""
        return None if self.times is None else self.times[tile]

    def close(self) -> Tensor:  # () fp32
        """Returns the loss of all layers. What is added later does not count."""
        self._closed = True
        assert self.sums is not None, "a layer has experts"
        if self._shards is not None:
            self.sums = self._shards.total(self.sums)
            self.tokens = self._shards.total(self.sums.new_tensor(self.tokens))
        return balance_loss(self.sums[None], self.tokens, self.router)

    def backward(self, d_loss: Tensor) -> None:  # ()
        """Has the gradient ready for the layers. Of ranks that share rows the loss is the mean."""
        assert self.sums is not None
        ranks = 1 if self._shards is None else self._shards.ranks
        self.gradient = d_loss * (ranks * self.router.experts) * self.sums[1] / self.tokens**2


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: Balance) -> tuple[Tensor, Tensor]:
        ctx.balance = balance
        return hidden.view_as(hidden), balance.close()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor, d_loss: Tensor) -> tuple[Tensor, None]:
        ctx.balance.backward(d_loss)
        return d_hidden, None


def balanced(hidden: Tensor, balance: Balance) -> tuple[Tensor, Tensor]:  # (T, D), () fp32
    """Returns the last layer's output, and the auxiliary loss of all layers, whose gradient their
    backward gets."""
    found: tuple[Tensor, Tensor] = _Balanced.apply(hidden, balance)
    return found
