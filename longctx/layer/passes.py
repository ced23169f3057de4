"""What travels with the work: a batch's `Schedule`, a layer's `Traits`, and a `Pass` through it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.protocol import Attention
from longctx.kernels.rope import rope_
from longctx.layer.gradients import Gradients
from longctx.layer.lora import ALL
from longctx.layer.weights import Layer
from longctx.memory.store import ActivationStore, Saved


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a layer does besides matmuls with its weights. Defaults: as in Llama."""

    scale: float
    """Of attention's scores."""
    window: int | None = None
    """A token attends to itself and the window - 1 before it; None: to all before it."""
    rope: bool = True
    residual: float = 1.0
    """What attention's and the MLP's outputs are multiplied by before they are added."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a batch's layers share: its documents and positions, and how the work is cut."""

    traits: tuple[Traits, ...]
    """Of each layer."""

    documents: Documents
    position_ids: Tensor  # (T,)
    inv_freq: Tensor  # (d/2,) fp32, or less: then only the first numbers of a head are rotated
    attention_scaling: float
    """What RoPE multiplies cosine and sine by (YaRN's factor; 1 for plain RoPE)."""
    head_dim: int
    eps: float
    attention: Attention
    store: ActivationStore
    tile_tokens: int
    head_groups: int
    dtype: torch.dtype
    """Of matmuls and attention; x and h may be fp32 where it has 16 bits, as in autocast."""

    @cached_property
    def seed(self) -> int:
        """Of masks of dropout: drawn from torch's CPU generator by the first who asks."""
        return int(torch.randint(2**63 - 1, ()))

    def window(self, t: Traits) -> int | None:
        """None where no document is longer."""
        longer = t.window is not None and t.window < max(self.documents.lengths)
        return t.window if longer else None

    def rotate_(
        self, q: Tensor, k: Tensor, t: Traits, tile: slice = ALL, inverse: bool = False
    ) -> None:
        """(T, h, d), (T, k, d), in place; those of a tile"""
        if t.rope:
            q, k = (x[..., : 2 * len(self.inv_freq)] for x in (q, k))
            positions = self.position_ids[tile]
            rope_(q, k, positions, self.inv_freq, self.attention_scaling, inverse=inverse)

    def tiles(self, tokens: int) -> list[slice]:
        return [
            slice(start, min(start + self.tile_tokens, tokens))
            for start in range(0, tokens, self.tile_tokens)
        ]


@dataclass(eq=False, kw_only=True)
class Pass:
    """One layer's forward or backward: all that its parts share."""

    schedule: Schedule
    traits: Traits
    weights: Layer
    saved: Saved | None = None
    """What forward keeps and backward finds; None where no backward follows."""
    gradients: Gradients | None = None
    """In backward."""

    def keeps(self, name: str) -> bool:
        """Whether forward keeps what cost/kept.py calls so."""
        return self.saved is not None and self.saved.keeps(name)

    def keep(self, name: str, **tensors: Tensor) -> None:
        """The tensors of one keepable. What waits on the host is sent there later."""
        if self.saved is not None:
            self.schedule.store.add(self.saved, name, **tensors)

    def send(self, *names: str, tile: slice | None = None) -> None:
        """Starts the copies to the host of what is ready: tensors, or a tile of them."""
        if self.saved is not None:
            self.schedule.store.send(self.saved, *names, tile=tile)

    def retire(self, tile: slice, *names: str) -> None:
        """Tells the store that backward is done with a tile of what was kept under these names."""
        if self.saved is not None:
            self.schedule.store.retire(self.saved, tile, *names)

    @property
    def grads(self) -> Gradients:
        assert self.gradients is not None, "only in backward"
        return self.gradients
