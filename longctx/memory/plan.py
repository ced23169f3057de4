"""Arithmetic of a step's memory: sizes in, decisions out. No tensor is made and no device asked.

T tokens of a batch, D hidden size, F intermediate size, H query heads of size d, V vocabulary. One
*unit* is T*D numbers of the activations' dtype: 1 GiB for Llama-3.1-8B at 131072 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

GIB = 2**30
Offload = Literal["none", "all", "auto"]


def default_head_groups(tokens: int, kv_heads: int) -> int:
    """One group is fastest; from 64K tokens on its q, k, v (up to 3 units) are worth splitting."""
    return kv_heads if tokens >= 65536 else 1


def default_tile_tokens(tokens: int) -> int:
    """8192 is 0.5% faster than 4096 at 131072 tokens of Llama-3.1-8B, for 0.3 GiB of the MLP's."""
    return 8192 if tokens >= 65536 else 4096


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions that decide how much memory a step takes."""

    layers: int
    hidden: int  # D
    intermediate: int  # F
    heads: int  # H
    head_dim: int  # d
    vocab: int  # V
    itemsize: int
    """Bytes of one activation."""
    keep_attention: bool
    tile_tokens: int | None = None
    """None: by length."""

    def kept_bytes(self, tokens: int) -> int:
        """What one layer keeps from forward to backward: x, and o with its log-sum-exp."""
        per_token = self.hidden * self.itemsize
        if self.keep_attention:
            per_token += self.heads * (self.head_dim * self.itemsize + 4)
        return tokens * per_token + 2048  # every tensor starts at a multiple of 512 bytes

    def working_bytes(self, tokens: int, logits_bytes: int) -> int:
        """What backward holds besides: five units, the loss's workspace, and the fp32 gradient of
        an MLP or, before it, of lm_head."""
        return max(self.layer_bytes(tokens), self.loss_bytes(tokens, logits_bytes))

    def loss_bytes(self, tokens: int, logits_bytes: int) -> int:
        """While the loss is computed: its workspace and lm_head's fp32 gradient."""
        return self._units(tokens) + 4 * self.hidden * self.vocab + logits_bytes

    def layer_bytes(self, tokens: int) -> int:
        """While a layer's backward runs: the fp32 gradients of its MLP, one of them rounded, and a
        tile's gate, up and product."""
        tile = min(tokens, self.tile_tokens or default_tile_tokens(tokens)) * self.itemsize
        return self._units(tokens) + (4 * 4 * self.hidden + 3 * tile) * self.intermediate

    def _units(self, tokens: int) -> int:
        return 5 * tokens * self.hidden * self.itemsize


def layers_on_gpu(offload: Offload, layers: int, layer_bytes: int, free_bytes: int) -> int:
    """How many of the last layers keep their activations on the GPU. `free_bytes` is what is left
    there for them; the layer whose backward runs is always there."""
    if offload == "none":
        return layers
    if offload == "all":
        return 1
    return min(layers, max(1, free_bytes // layer_bytes))


def trained_bytes_on_gpu(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and p.is_cuda)


def pending_bytes(parameters: Iterable[Tensor]) -> int:
    """What the first step adds on the GPU: gradients and Adam's two moments, in the weights'
    dtype."""
    return 3 * trained_bytes_on_gpu(parameters)


# --- model states ----------------------------------------------------------------------------

PIECE = 2**24
"""Elements that move at a time: 64 MB of a moment, 1.4 ms on the link, long against a launch."""
RING = 3
"""Pieces that are on the GPU at a time: one comes, one is updated, one goes."""
AHEAD = 2
"""Blocks whose weights are on their way while one computes."""
MOVING = 4
"""Blocks that may be on their way at all: what is launched waits in queues that are not endless."""
Placement = Literal["auto", "gpu", "host"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What of a block is on the GPU between its uses; the rest waits on the host."""

    weight: bool = True
    states: bool = True
    """The remainder and AdamW's two moments."""
    grad: bool = True

    @property
    def all_on_gpu(self) -> bool:
        return self.weight and self.states and self.grad


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Bytes of a block, and what may leave the GPU."""

    weight: int
    states: int
    grad: int
    movable: bool
    """Its weights may."""
    fixed: bool = False
    """Nothing may."""

    def on_gpu(self, place: Place) -> int:
        return sum(getattr(self, kind) for kind in KINDS if getattr(place, kind))

    def on_host(self, place: Place) -> int:
        return self.weight + self.states + self.grad - self.on_gpu(place)


KINDS = ("weight", "grad", "states")
"""What gets GPU memory first. A byte of weights on the host comes up twice and goes down once a
step, one of gradients comes and goes once, and so does one of states."""


def place_blocks(
    blocks: Sequence[BlockSizes],
    free_bytes: int,
    placement: Placement,
    *,
    keeps_gradients: bool = False,
    before_gradients: int = 0,
) -> list[Place]:
    """Where the tensors of each block live, if `free_bytes` of the GPU may hold them and the
    buffers they move through. The first blocks stay first: what streams does so behind them.

    `keeps_gradients`: none may leave (several processes average them). `before_gradients` is what
    a step needs, besides, only while it has no gradients yet: they take its place.
    """
    gradients = sum(block.grad for block in blocks)
    everything = sum(b.on_gpu(Place()) for b in blocks) - min(gradients, before_gradients)
    if placement == "gpu" or (placement == "auto" and everything <= free_bytes):
        return [Place() for _ in blocks]

    def must_stay(block: BlockSizes, kind: str) -> bool:
        stays = {"weight": not block.movable, "grad": keeps_gradients, "states": False}
        return block.fixed or stays[kind]

    left = free_bytes - ring_bytes()
    left -= sum(getattr(b, kind) for kind in KINDS for b in blocks if must_stay(b, kind))
    if sum(b.weight for b in blocks if b.movable) > left:
        left -= window_bytes(blocks)
    if placement == "host":
        left = before_gradients = 0
    kept: list[set[str]] = [{kind for kind in KINDS if must_stay(b, kind)} for b in blocks]
    for kind in KINDS:
        for block, on_gpu in zip(blocks, kept, strict=True):
            size = getattr(block, kind)
            if kind in on_gpu:
                continue
            free = min(size, before_gradients) if kind == "grad" else 0
            if size - free <= left:
                on_gpu.add(kind)
                left -= size - free
                before_gradients -= free
            elif kind == "weight":
                break  # the window is of blocks that follow each other
    return [Place(**{kind: kind in on_gpu for kind in KINDS}) for on_gpu in kept]


def ring_bytes() -> int:
    """Two moments, a remainder and a gradient, in words of four bytes."""
    return RING * PIECE * 4 * 4


def window_bytes(blocks: Sequence[BlockSizes]) -> int:
    """The weights of blocks that stream, at most, while one of them computes."""
    sizes = [block.weight for block in blocks if block.movable]
    return max((sum(sizes[i : i + AHEAD + 1]) for i in range(len(sizes))), default=0)


def buffer_bytes(blocks: Sequence[BlockSizes], places: Sequence[Place]) -> int:
    """GPU memory through which those blocks move that are not all on the GPU."""
    streamed = [b for b, place in zip(blocks, places, strict=True) if not place.weight]
    moves = any(not place.all_on_gpu for place in places)
    return moves * ring_bytes() + window_bytes(streamed)
