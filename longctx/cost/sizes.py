"""The dimensions of a model that decide what its step costs, and how the work on a batch is cut.

T tokens of a batch, D hidden size, F intermediate size, H query heads of size d, V vocabulary. One
*unit* is T*D elements of the activations' dtype: 1 GiB for Llama-3.1-8B at 131072 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from longctx.constants import GIB


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


class Adapted(NamedTuple):
    """Adapters of all layers."""

    inputs: int = 0
    """Elements a token that they read,"""
    outputs: int = 0
    """and that they add to."""
    parameters: int = 0


class Batch(NamedTuple):
    """A step: `passes` batches of `tokens` tokens in documents of `document` tokens."""

    tokens: int
    document: int
    passes: int = 1


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
    post_norms: bool = False
    """Norms follow attention and the MLP."""
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
    adapted: Adapted = Adapted()
    trained: int = 0
    """Parameters that are updated,"""
    exact: bool = True
    """by exact AdamW, with fp32 states; else by torch's in the weights' dtype."""
    class_type: str = "custom"
    """Whose layers run: ours, Hugging Face's (vanilla) or Liger-Kernel's."""
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
        """Every cut worth a look: one head group, tiles of twice the size up to a single one, half
        as many logits at a time and half of those. What was asked for stays, and so do groups that
        take turns with their exchanges."""
        tile, groups, logits = self.cut(tokens)
        tiles = [tile]
        while tiles[-1] < tokens and not self.tile_tokens:
            tiles.append(2 * tiles[-1])
        pieces = [(tile, groups) for tile in tiles]
        if groups > 1 and not self.head_groups and self.ranks == 1:
            pieces = [(tile, groups), *((tile, 1) for tile in tiles)]
        fewer = [logits]
        while not self.logits_bytes and fewer[-1] // 2 >= LEAST_LOGITS_BYTES:
            fewer.append(fewer[-1] // 2)
        for (tile, groups), logits in product(pieces, fewer):
            yield replace(self, tile_tokens=tile, head_groups=groups, logits_bytes=logits)

    def unit(self, tokens: int) -> int:
        """Bytes of one (T, D) tensor of the residual stream."""
        return tokens * self.hidden * self.stream_bytes

    @property
    def wide(self) -> int:
        """Columns of q and of o, all query heads together."""
        return self.heads * self.head_dim

    @property
    def narrow(self) -> int:
        """Columns of k, and of v."""
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's seven matrices."""
        return self.hidden * (3 * self.intermediate + 2 * self.wide + 2 * self.narrow)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many parameters a model has, where an engine lays them out."""

    numels: Sequence[int]
    """Of each that is trained, in the model's order."""
    layer: int
    """Of the largest decoder layer."""
    embedding: int
    head: int
    """Of lm_head; 0: it is the embedding."""
    hidden: int

    @property
    def total(self) -> int:
        return sum(self.numels)

    @property
    def output(self) -> int:
        """Of what makes logits, whichever tensor it is."""
        return self.head or self.embedding
