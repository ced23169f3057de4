"""Layers of experts return their output, and their routers say one of two things beside it:

    Balance        the auxiliary loss that balances experts. Each layer adds what its tokens ask
                   for, (2, E) sums (router.py), and no logits are kept. The loss is
                   E <mean choices, mean probabilities> over all of these layers, so that its
                   gradient is one number for each expert, the same in all layers
    RouterLogits   the logits, (T, E) in fp32 of each layer, for callers that make such a loss

A function of autograd stands between the last layer and the final norm for either. It has the
gradient of what was said before backward comes to any layer, which then reads it here.
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

    def close(self) -> list[Tensor]:
        """Returns the loss () of all layers, in fp32. What is added later does not count."""
        self._closed = True
        assert self.sums is not None, "a layer has experts"
        if self._shards is not None:
            self.sums = self._shards.total(self.sums)
            tokens = torch.as_tensor(self.tokens, dtype=self.sums.dtype, device=self.sums.device)
            self.tokens = self._shards.total(tokens)
        return [balance_loss(self.sums[None], self.tokens, self.router)]

    def backward(self, d_loss: Tensor) -> None:  # ()
        """Has the gradient ready for the layers. Of ranks that share rows the loss is the mean."""
        assert self.sums is not None
        ranks = 1 if self._shards is None else self._shards.ranks
        self.gradient = d_loss * (ranks * self.router.experts) * self.sums[1] / self.tokens**2


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

    def backward(self, *gradients: Tensor) -> None:  # (T, E) each
        """Keeps the gradient of each layer's logits for that layer."""
        self._gradients = dict(zip(self._tiles, gradients, strict=True))

    def gradient(self, layer: int, tile: slice) -> Tensor:  # (t, E)
        return self._gradients[layer][tile]


class _Said(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, said: Balance | RouterLogits) -> tuple[Tensor, ...]:
        ctx.said = said
        return hidden.view_as(hidden), *said.close()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_hidden: Tensor, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.said.backward(*gradients)
        return d_hidden, None


def with_said(hidden: Tensor, said: Balance | RouterLogits) -> tuple[Tensor, list[Tensor]]:
    """Returns the last layer's output (T, D), and what the layers said: the auxiliary loss () of a
    Balance, or the logits (T, E) of each layer. Their backward gets the gradients of it."""
    first, *found = _Said.apply(hidden, said)
    return first, found
