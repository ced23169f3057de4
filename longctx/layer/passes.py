"""The state of the work: a batch's `Schedule`, and a `Pass` through one of its layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.protocol import Attention
from longctx.cost.dims import LayerSpec
from longctx.kernels.rope import rope_
from longctx.layer import segments as cutting
from longctx.layer.adapters.protocol import ALL
from longctx.layer.balance import Balance, RouterLogits
from longctx.layer.gradients import Gradients
from longctx.layer.norm_spec import NormSpec
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.weights import Weights
from longctx.memory.store import ActivationStore, Saved


class Added(NamedTuple):
    """Features of images that are added to what a layer returns, as in Qwen3-VL's deepstack."""

    where: Tensor  # (n,) int64: their tokens, each once
    features: Tensor  # (n, D)


class Rope(NamedTuple):
    """A rotary position embedding."""

    inv_freq: Tensor  # (d/2,) fp32; if it is shorter, only the first elements of a head are rotated
    scaling: float
    """Multiplies cosine and sine (YaRN's factor; 1 for plain RoPE)."""
    rows: Tensor | None = None  # (d/2,) int32
    """The row of (3, T) positions that each frequency reads, if the batch has such."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What all layers of a batch share: its documents, its positions, and how the work is cut."""

    layers: tuple[LayerSpec, ...]
    """What each layer is."""

    documents: Documents
    position_ids: Tensor  # (T,), or (3, T) with images: of time, height and width
    ropes: Mapping[str, Rope]
    query_scale: Tensor | None  # (T,) fp32: multiplies q after RoPE
    head_dim: int
    norm: NormSpec
    attention: Attention
    store: ActivationStore
    tile_tokens: int
    head_groups: int
    dtype: torch.dtype
    """The dtype of matmuls and attention. In autocast it has 16 bits while x and h are fp32."""
    balance: Balance | None = None
    """The auxiliary loss of layers with experts, if it is wanted."""
    router_logits: RouterLogits | None = None
    """The logits of their routers, if they are."""
    expert_ids: tuple[Tensor | None, ...] = ()
    """The experts (T, k) of each layer that has some, if a caller chose them."""
    given_segments: tuple[cutting.Segment, ...] = ()
    """The segments of mixers, if they were made before: a CUDA graph cannot record how they are."""
    packs: bool = False
    """Whether mixers read where documents begin, so that several lie in one row of theirs."""

    @cached_property
    def seed(self) -> int:
        """Seeds the dropout masks. It is drawn from torch's CPU generator at the first use."""
        return int(torch.randint(2**63 - 1, ()))

    @cached_property
    def segments(self) -> tuple[cutting.Segment, ...]:
        """How mixers run over the documents."""
        most = cutting.SEGMENT_TOKENS
        return self.given_segments or cutting.segments(self.documents, most, packs=self.packs)

    def window(self, t: AttentionSpec) -> int | None:
        """Returns the window of a layer's attention; None where no document, after its parent, is
        longer than it."""
        longer = t.window is not None and t.window < self.documents.longest
        return t.window if longer else None

    def rotate_(
        self, q: Tensor, k: Tensor, t: AttentionSpec, tile: slice = ALL, inverse: bool = False
    ) -> None:
        """Applies RoPE and the scale of q in place to a tile's q (T, h, d) and k (T, k, d)."""
        if self.query_scale is not None:  # of a whole token, so it may come before or after
            q.mul_(self.query_scale[tile, None, None])
        if t.rope is not None:
            rope = self.ropes[t.rope]
            q, k = (x[..., : 2 * len(rope.inv_freq)] for x in (q, k))
            how: dict[str, Any] = dict(inverse=inverse, interleaved=t.interleaved)
            at = self.position_ids[..., tile]
            rope_(q, k, at, rope.inv_freq, rope.scaling, rows=rope.rows, **how)

    def tiles(self, tokens: int) -> list[slice]:
        return [
            slice(start, min(start + self.tile_tokens, tokens))
            for start in range(0, tokens, self.tile_tokens)
        ]


@dataclass(eq=False, kw_only=True)
class Pass:
    """One layer's forward or backward: the state that its parts share."""

    schedule: Schedule
    layer: int
    """The layer's number, which is the index of its spec in `Schedule.layers`."""
    weights: Weights
    saved: Saved | None = None
    """The tensors that forward keeps for backward; None where no backward follows."""
    gradients: Gradients | None = None
    """The gradients of the weights; None in forward."""
    mixes: Any = None
    """The layer's mixer, as `Mixes` in parts/mixer.py; None in a layer without one."""

    @property
    def spec(self) -> LayerSpec:
        return self.schedule.layers[self.layer]

    def keeps(self, name: str) -> bool:
        """Whether forward keeps the keepable that has this name in cost/kept.py."""
        return self.saved is not None and self.saved.keeps(name)

    def keep(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        of_tiles: bool = False,
        whole: Collection[str] = (),
    ) -> None:
        """Keeps the tensors of one keepable, by the names under which backward gets them. If they
        wait on the host, their copies begin now, unless they are still to be written tile by tile
        (`of_tiles`): then `send` copies each tile. The tensors that `whole` names are not (T, ...),
        and come back in one piece."""
        if self.saved is not None:
            store = self.schedule.store
            store.add(self.saved, name, tensors, of_tiles=of_tiles, whole=whole)
            if not of_tiles:
                store.send(self.saved, *tensors)

    def send(self, tile: slice) -> None:
        """Starts to copy a tile of all that is kept tile by tile to the host."""
        if self.saved is not None:
            self.schedule.store.send(self.saved, *self.saved.of_tiles, tile=tile)

    def retire_tile(self, tile: slice) -> None:
        """Tells the store that backward no longer needs a tile of what was kept tile by tile."""
        if self.saved is not None:
            self.retire(tile, *self.saved.of_tiles)

    def retire_all(self, tile: slice) -> None:
        """Tells the store that backward no longer needs anything of a tile."""
        if self.saved is not None:
            self.retire(tile, *self.saved.entries)

    def retire(self, tile: slice, *names: str) -> None:
        """Tells the store that backward no longer needs a tile of the tensors of these names."""
        if self.saved is not None:
            self.schedule.store.retire(self.saved, tile, *names)

    @property
    def grads(self) -> Gradients:
        assert self.gradients is not None, "only in backward"
        return self.gradients
