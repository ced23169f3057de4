"""The state of the work: a batch's `Schedule`, a layer's `Traits`, and a `Pass` through a layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.protocol import Attention
from longctx.kernels.rope import rope_
from longctx.layer import segments as cutting
from longctx.layer.adapters.protocol import ALL
from longctx.layer.balance import Balance, RouterLogits
from longctx.layer.gradients import Gradients
from longctx.layer.norm_spec import NormSpec
from longctx.layer.router import Router
from longctx.layer.stack import PLAIN, ExpertLayout
from longctx.layer.weights import Weights
from longctx.memory.store import ActivationStore, Saved

Blocks = tuple[tuple[str, ...], ...]
IN_TURN: Blocks = (("attention",), ("mlp",))
SIDE_BY_SIDE: Blocks = (("attention", "mlp"),)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a layer does besides matmuls with its weights. The defaults are Llama's."""

    scale: float
    """Multiplies attention's scores before the softmax."""
    score_factor: float = 1.0
    """Multiplies them, too: the factors of q and of k together."""
    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it; None: to all before it."""
    rope: str | None = "all"
    """The name of its RoPE in `Schedule.ropes`; None: the layer has none."""
    output_gate: bool = False
    """q's projection also gives a gate of o, head by head (parts/output_gate.py)."""
    norms_rotated: bool = False
    """The norms of q and k come after RoPE."""
    activation: str = "silu"
    """The activation of the MLP (kernels/swiglu.py): of its gate, or of `up` without a gate."""
    gate_scale: float = 1.0
    """Multiplies the MLP's gate before its activation."""
    blocks: Blocks = IN_TURN
    """The parts of its one or two residual blocks, by their names in parts/table.py. Parts of one
    block stand side by side: all read the norm of the first, and all are added to x."""
    residual: float = 1.0
    """Multiplies the outputs of all parts before they are added."""
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Multiply the outputs of single parts, by their names, where such factors differ."""
    router: Router | None = None
    """How experts are chosen, where a layer has some."""
    experts: ExpertLayout = PLAIN
    """How their weights lie."""

    def factor(self, part: str) -> float:
        """Returns what multiplies the output of a part before it is added."""
        return self.residual * self.factors.get(part, 1.0)

    @property
    def scales(self) -> bool:
        """Whether the output of any part is multiplied."""
        return any(self.factor(part) != 1.0 for block in self.blocks for part in block)

    @property
    def parallel(self) -> bool:
        """Whether the part over tiles stands beside the one over the row, and reads its norm."""
        return len(self.blocks) == 1 and len(self.blocks[0]) > 1

    @property
    def between(self) -> bool:
        """Whether a second block reads h, what the first one gives."""
        return len(self.blocks) > 1


class Added(NamedTuple):
    """Features of images that are added to what a layer returns, as in Qwen3-VL's deepstack."""

    where: Tensor  # (n,) int64: their tokens, each once
    features: Tensor  # (n, D)


class Rope(NamedTuple):
    """A rotary position embedding."""

    inv_freq: Tensor  # (d/2,) fp32; if it is shorter, only the first elements of a head are rotated
    scaling: float
    """Multiplies cosine and sine (YaRN's factor; 1 for plain RoPE)."""
    interleaved: bool = False
    """It rotates pairs of neighbours, instead of halves."""
    rows: Tensor | None = None  # (d/2,) int32
    """The row of (3, T) positions that each frequency reads, if the batch has such."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What all layers of a batch share: its documents, its positions, and how the work is cut."""

    traits: tuple[Traits, ...]
    """One `Traits` per layer."""

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

    @cached_property
    def seed(self) -> int:
        """Seeds the dropout masks. It is drawn from torch's CPU generator at the first use."""
        return int(torch.randint(2**63 - 1, ()))

    @cached_property
    def segments(self) -> tuple[cutting.Segment, ...]:
        """How mixers run over the documents."""
        return cutting.segments(self.documents, cutting.SEGMENT_TOKENS)

    def window(self, t: Traits) -> int | None:
        """The layer's window, or None where no document, after its parent, is longer than it."""
        longer = t.window is not None and t.window < self.documents.longest
        return t.window if longer else None

    def rotate_(
        self, q: Tensor, k: Tensor, t: Traits, tile: slice = ALL, inverse: bool = False
    ) -> None:
        """Applies RoPE and the scale of q in place to a tile's q (T, h, d) and k (T, k, d)."""
        if self.query_scale is not None:  # of a whole token, so it may come before or after
            q.mul_(self.query_scale[tile, None, None])
        if t.rope is not None:
            rope = self.ropes[t.rope]
            q, k = (x[..., : 2 * len(rope.inv_freq)] for x in (q, k))
            how: dict[str, Any] = dict(inverse=inverse, interleaved=rope.interleaved)
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
    """The layer's number, which is the index of its traits in `Schedule.traits`."""
    weights: Weights
    saved: Saved | None = None
    """The tensors that forward keeps for backward; None where no backward follows."""
    gradients: Gradients | None = None
    """The gradients of the weights; None in forward."""
    mixes: Any = None
    """The layer's mixer, as `Mixes` in parts/mixer.py; None in a layer without one."""

    @property
    def traits(self) -> Traits:
        return self.schedule.traits[self.layer]

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
