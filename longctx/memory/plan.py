"""Arithmetic of a step's memory: sizes in, decisions out. No tensor is made and no device asked.

T tokens of a batch, D hidden size, F intermediate size, H query heads of size d, V vocabulary. One
*unit* is T*D numbers of the activations' dtype: 1 GiB for Llama-3.1-8B at 131072 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor

GIB = 2**30
SPARE, SPARE_BYTES, MOST_SPARED = 0.015, 3 * 2**27, 1 / 32
"""Of GPU memory, for the allocator's rounding and gaps: this share, at least so many bytes, but not
more than the other share."""
Offload = Literal["none", "all", "auto"]


def usable_bytes(free: int) -> int:
    """Of free GPU memory, what a plan may fill."""
    return free - int(max(SPARE * free, min(SPARE_BYTES, MOST_SPARED * free)))


def default_head_groups(tokens: int, kv_heads: int, ranks: int = 1) -> int:
    """One group is fastest; from 64K tokens on its q, k, v (up to 3 units) are worth splitting.
    Where ranks share rows a group's exchange runs beside attention of another, and no key/value
    head should be read by several ranks."""
    groups = kv_heads if tokens * ranks >= 65536 else 1
    return math.gcd(groups, max(1, kv_heads // ranks)) if ranks > 1 else groups


def default_tile_tokens(intermediate: int) -> int:
    """About 2^27 elements of gate, by a power of two: 8192 tokens of Llama-3.1-8B, 16384 of
    Llama-3.2-1B. For 0.3 GiB of its MLP, layers of 8B are 6% faster than with 4096 at 8192 tokens
    and 1% at 131072: products into fp32 weight gradients read and write them half as often."""
    power: int = 2 ** round(math.log2(2**27 / intermediate))
    return power


def default_logits_bytes(vocab: int, hidden: int, trained: bool = True) -> int:
    """As much as lm_head's gradient has in fp32, which every product into it reads and writes, but
    1 GiB at least. For Llama-3.1-8B 2 GiB: 1.5% faster than 1 GiB at 131072 tokens, 4% at 4096. A
    frozen lm_head has no gradient, and 1 GiB."""
    return max(2**30, 4 * vocab * hidden * trained)


LEAST_LOGITS_BYTES = 2**28
"""Fewer are slower: 1000 rows of Llama-3.1-8B in the 16 bits of their gradients."""


class Cut(NamedTuple):
    """How the work on a batch is cut: fewer and larger pieces are faster and need more."""

    tile_tokens: int
    head_groups: int
    logits_bytes: int
    """At a time."""

    def __str__(self) -> str:
        groups = "1 head group" if self.head_groups == 1 else f"{self.head_groups} head groups"
        logits = f"{self.logits_bytes / GIB:.3g} GiB of logits"
        return f"{groups}, tiles of {self.tile_tokens} tokens, {logits}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions that decide how much memory a step takes."""

    layers: int
    hidden: int  # D
    intermediate: int  # F
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    vocab: int  # V
    itemsize: int
    """Bytes of one activation,"""
    stream_itemsize: int | None = None
    """and of one of the residual stream, if it is another: 4 in autocast."""
    windows: tuple[int | None, ...] = ()
    """Of each layer's attention; empty: none has any."""
    qk_norms: bool = False
    """q and k have norms, which take copies of them."""
    writes_gradients: bool = False
    """Attention's backward writes dq, dk and dv where they belong."""
    trains_weights: bool = True
    """Some layer's; else they have no gradients."""
    trains_head: bool = True
    """lm_head's too."""
    tied: bool = False
    """lm_head is the embedding."""
    dense_bytes: int = 0
    """Of a layer's weights while it computes, where they are quantised."""
    rank: int = 0
    """Of adapters, at most,"""
    drops: bool = False
    """whose input has dropout."""
    tile_tokens: int | None = None
    """None: by size."""
    head_groups: int | None = None
    """None: by length."""
    logits_bytes: int | None = None
    """None: by size."""
    ranks: int = 1
    """That share each row: tokens are those of one."""

    @property
    def stream_bytes(self) -> int:
        return self.stream_itemsize or self.itemsize

    def cut(self, tokens: int) -> Cut:
        """Of batches of so many tokens: as asked for, else with little memory."""
        return Cut(
            self.tile_tokens or default_tile_tokens(self.intermediate),
            self.head_groups or default_head_groups(tokens, self.kv_heads, self.ranks),
            self.logits_bytes or default_logits_bytes(self.vocab, self.hidden, self.trains_head),
        )

    def cuts(self, tokens: int) -> Iterator[Sizes]:
        """With every cut worth a look, from the least memory on: one head group, then tiles of
        twice the size up to a single one. What was asked for stays, and groups that take turns
        with their exchanges."""
        tile, groups, _ = self.cut(tokens)
        yield replace(self, tile_tokens=tile, head_groups=groups)
        if groups > 1 and not self.head_groups and self.ranks == 1:
            groups = 1
            yield replace(self, tile_tokens=tile, head_groups=groups)
        while tile < tokens and not self.tile_tokens:
            tile *= 2
            yield replace(self, tile_tokens=tile, head_groups=groups)

    def fewer_logits(self, tokens: int) -> Iterator[Sizes]:
        """Of the same cut: with half as many at a time, and half of those. Their room holds
        activations, and lm_head's gradient is read and written more often."""
        cut = self.cut(tokens)
        logits_bytes = cut.logits_bytes // 2
        while logits_bytes >= LEAST_LOGITS_BYTES:
            yield replace(self, **cut._replace(logits_bytes=logits_bytes)._asdict())
            logits_bytes //= 2

    def working_bytes(self, tokens: int) -> int:
        """What a step needs besides what layers keep, and weights and gradients of other layers."""
        return max(self.layer_bytes(tokens), self.loss_bytes(tokens))

    def early_bytes(self, tokens: int, accumulates: bool) -> int:
        """What is needed besides a layer's work while there are no layers' gradients yet: by the
        loss, or for lm_head's own, unless all gradients are there anyway."""
        head = 0 if accumulates else self.itemsize * self.hidden * self.vocab * self.trains_head
        return max(head, self.loss_bytes(tokens) - self.layer_bytes(tokens), 0)

    def last_gradients(self) -> int:
        """What is not there yet while the first layer's backward works: its own gradients, and the
        embedding's, unless it is lm_head."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 3 * self.intermediate + 2 * wide + 2 * narrow
        embedding = 0 if self.tied else self.vocab * self.trains_head
        return self.itemsize * self.hidden * (layer * self.trains_weights + embedding)

    def embedding_parts(self, tokens: int) -> dict[str, int]:
        """While the embedding's gradient, the last one, is made: torch sums the rows of each token
        in fp32, in segments of 10 (embedding_dense_backward)."""
        segments = tokens // 10 + min(tokens, self.vocab)
        return {"its sums, fp32": 4 * segments * self.hidden, "dx": self._unit(tokens)}

    def loss_bytes(self, tokens: int) -> int:
        return sum(self.loss_parts(tokens).values())

    def loss_parts(self, tokens: int) -> dict[str, int]:
        """While the loss is computed; the workspace of logits, which a short batch does not fill,
        goes before the gradient is rounded."""
        unit, head = self._unit(tokens), self.hidden * self.vocab * self.trains_head
        logits = min(self.cut(tokens).logits_bytes, 4 * tokens * self.vocab)
        rounded = self.itemsize * head
        return {
            "last layer's output": unit,
            "the same, normed": unit,
            "its gradient": unit,
            "lm_head's gradient, fp32": 4 * head,
            "logits" if logits >= rounded else "the same, rounded": max(logits, rounded),
        }

    def loss_rows(self, tokens: int) -> int:
        """Of a group of pieces (model/loss.py)."""
        lines = self.cut(tokens).logits_bytes // (2 * self.vocab)
        return max(1, lines * 7 // 8 if self.itemsize < 4 else lines // 2)

    def loss_sums_bytes(self, tokens: int) -> int:
        """What groups of pieces read and write of lm_head's gradient, which adds up in fp32."""
        groups = -(-tokens // self.loss_rows(tokens))
        return 8 * groups * self.vocab * self.hidden * self.trains_head

    def loss_rows_bytes(self, tokens: int) -> int:
        """Of them: hidden and its gradient, where labels that do not count are left out."""
        return 2 * min(tokens, self.loss_rows(tokens)) * self.hidden * self.itemsize

    def layer_bytes(self, tokens: int) -> int:
        return sum(self.layer_parts(tokens).values())

    def layer_parts(self, tokens: int, *, qkv: bool = False, mlp: bool = False) -> dict[str, int]:
        """While a layer's backward runs: dy, and the MLP's step or attention's. `qkv`, `mlp`:
        forward kept q, k, v, and gate and up."""
        mlp_parts, attention = self._mlp_parts(tokens, mlp), self._attention_parts(tokens, qkv)
        larger = max(mlp_parts, attention, key=lambda parts: sum(parts.values()))
        return {"dy": self._unit(tokens), **larger}

    def _mlp_parts(self, tokens: int, kept: bool) -> dict[str, int]:
        """Gradients of gate, up, down and o in fp32, one of them rounded; a tile's gate, up, their
        product, and h, n2 and their gradients. gate, up and h may be `kept`."""
        rows = min(tokens, self.cut(tokens).tile_tokens)
        gradients = (12 + self.itemsize) * self.intermediate + 4 * self.heads * self.head_dim
        wide, narrow = (1, 2) if kept else (3, 4)
        tile = (wide * self.intermediate + narrow * self.hidden) * self.itemsize
        tile += 2 * self.intermediate * self.itemsize if self.drops else 0  # masked, and the mask
        return {
            "the MLP's gradients, fp32": gradients * self.hidden * self.trains_weights,
            "a tile of the MLP": rows * (tile + self._rank_bytes()),
            **self._dense_parts(),
        }

    def _rank_bytes(self) -> int:
        """A token's numbers inside an adapter: in fp32 twice and once, and spread."""
        return self.rank * (12 + 3 * self.itemsize)

    def _dense_parts(self) -> dict[str, int]:
        return {"a layer's dense weights": self.dense_bytes} if self.dense_bytes else {}

    def _attention_parts(self, tokens: int, kept: bool) -> dict[str, int]:
        """The MLP's gradients, rounded; dk and dv; a group's q, k, v, unless they are `kept`, and
        do; their gradients, which flash-attention sums in fp32, and makes before they are copied,
        unless it writes them; q and k once more, if they are normed."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 3 * self.intermediate + wide
        groups = self.cut(tokens).head_groups
        group = (2 * wide + 2 * narrow) * self.itemsize
        group += (wide + 2 * narrow) * self.itemsize * (not self.writes_gradients)
        group += 4 * (wide + 2 * narrow) if self.itemsize < 4 else 0
        group -= (wide + 2 * narrow) * self.itemsize if kept else 0
        group += (wide + narrow) * self.itemsize if self.qk_norms else 0
        return {
            "the MLP's gradients": weights * self.hidden * self.itemsize * self.trains_weights,
            "dk, dv": tokens * 2 * narrow * self.itemsize,
            "a head group": tokens * (group // groups + self._rank_bytes()),
            **self._exchange_parts(tokens),
            **self._dense_parts(),
        }

    def _exchange_parts(self, tokens: int) -> dict[str, int]:
        """Of the group before and of the next, both ways (attention/sharded.py)."""
        if self.ranks == 1:
            return {}
        numbers = 8 * (self.heads + self.kv_heads) * self.head_dim
        return {"exchanges": tokens * (numbers // self.cut(tokens).head_groups) * self.itemsize}

    def _unit(self, tokens: int) -> int:
        return tokens * self.hidden * self.stream_bytes


def trained_bytes_on_gpu(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and p.is_cuda)


class Pending(NamedTuple):
    """Bytes that the first step adds on the GPU."""

    states: int = 0
    """What stays, and whatever cannot make room for activations."""
    gradients: int = 0
    """They come while activations go, unless a step has several batches."""


def pending_bytes(parameters: Iterable[Tensor]) -> Pending:
    """Adam's two moments and gradients, in the weights' dtype."""
    trained = trained_bytes_on_gpu(parameters)
    return Pending(2 * trained, trained)


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
        """Or there is nothing that could leave, of a frozen block."""
        stays = {
            "weight": not block.movable,
            "grad": keeps_gradients or not block.grad,
            "states": not block.states,
        }
        return block.fixed or stays[kind]

    left = free_bytes - (ring_bytes() if any(map(may_update_away, blocks)) else 0)
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


def may_update_away(block: BlockSizes) -> bool:
    """Whether states or gradients of it may wait on the host."""
    return not block.fixed and bool(block.states or block.grad)


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
    return moved_ring_bytes(places) + window_bytes(streamed)


def moved_ring_bytes(places: Iterable[Place]) -> int:
    """Weights need no ring."""
    return ring_bytes() if any(not (p.states and p.grad) for p in places) else 0
