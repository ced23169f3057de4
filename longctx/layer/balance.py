"""What layers of experts say of their routers beside their output, and its gradient.

    Balance        the auxiliary loss that balances experts. Each layer adds what its tokens ask
                   for, (2, E) sums (router.py), and no logits are kept. The loss is
                   E <mean choices, mean probabilities> over all of these layers, so that its
                   gradient is one number for each expert, the same in all layers
    RouterLogits   the logits, (T, E) in fp32 of each layer, for callers that make such a loss

A function of autograd stands between the last layer and the final norm for either. It has the
gradient of what was said before backward comes to any layer, which then reads it here.
"""

from __future__ import annotations

from collections.abc import Iterable
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


class RouterLogits:
    """The logits of a batch's routers, and their gradients, by layer."""

    def __init__(self) -> None:
        self._tiles: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._closed = False

    def add(self, layer: int, logits: Tensor) -> None:  # (t, E)
        """Adds the next tile of a layer, unless it runs forward again in backward."""
        if not self._closed:
            self._tiles.setdefault(layer, []).append(logits)

    def close(self) -> list[Tensor]:
        """Returns the logits of each layer, (T, E). What is added later does not count."""
        self._closed = True
        found = [torch.cat(tiles) for tiles in self._tiles.values()]
        self._tiles = dict.fromkeys(self._tiles, [])
        return found

    def backward(self, gradients: Iterable[Tensor]) -> None:  # (T, E) each
        self._gradients = dict(zip(self._tiles, gradients, strict=True))

    def gradient(self, layer: int, tile: slice) -> Tensor:  # (t, E)
        return self._gradients[layer][tile]


class _WithLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: RouterLogits) -> tuple[Tensor, ...]:
        ctx.logits = logits
        return hidden.view_as(hidden), *logits.close()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.logits.backward(gradients)
        return d_hidden, None


def with_logits(hidden: Tensor, logits: RouterLogits) -> tuple[Tensor, list[Tensor]]:
    """Returns the last layer's output (T, D), and the logits (T, E) of each layer's router, whose
    gradients these layers' backward gets."""
    first, *found = _WithLogits.apply(hidden, logits)
    return first, found
