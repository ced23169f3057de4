"""The dimensions of a model that decide what its step costs, and how the work on a batch is cut.

T tokens of a batch, D hidden size, V vocabulary; each kind of layers has its own (dims.py). One
*unit* is T*D elements of the activations' dtype: 1 GiB for Llama-3.1-8B at 131072 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from longctx.constants import GIB
from longctx.cost.dims import LayerKind


def default_head_groups(tokens: int, kv_heads: int, ranks: int = 1) -> int:
    """Returns how many head groups attention runs in. One group is fastest; from 64K tokens on, its
    q, k and v take up to 3 units and are worth splitting. Where ranks share rows, the exchange of
    one group runs beside the attention of another, and no key/value head should be read by several
    ranks."""
    groups = kv_heads if tokens * ranks >= 65536 else 1
    return math.gcd(groups, max(1, kv_heads // ranks)) if ranks > 1 else groups


def default_tile_tokens(intermediate: int, post_norms: bool = False) -> int:
    """Returns the tokens of a tile, a power of two: its gate has about 2^27 elements, or 3/4 of
    that where a norm follows, since a tile holds more of them then. That is 8192
    tokens of Llama-3.1-8B and 16384 of Llama-3.2-1B. Compared with tiles of 4096 tokens, layers of
    8B take 0.3 GiB more and are 6% faster at 8192 tokens and 1% at 131072, since the fp32 weight
    gradients are read and written half as often."""
    elements = 0.75 * 2**27 if post_norms else 2**27
    power: int = 2 ** round(math.log2(elements / intermediate))
    return power


def default_logits_bytes(vocab: int, hidden: int, trained: bool = True) -> int:
    """Returns the bytes of logits that the loss holds at a time: as many as lm_head's fp32
    gradient, which every matmul into it reads and writes, and at least 1 GiB. For Llama-3.1-8B this
    is 2 GiB, 1.5% faster than 1 GiB at 131072 tokens and 4% at 4096. A frozen lm_head has no
    gradient and gets 1 GiB."""
    return max(2**30, 4 * vocab * hidden * trained)


LEAST_LOGITS_BYTES = 2**28
"""The search tries no fewer bytes of logits: this is about 1000 rows of Llama-3.1-8B in 16 bits."""


class Cut(NamedTuple):
    """The pieces in which the work on a batch runs. Larger pieces are faster and need more
    memory."""

    tile_tokens: int
    """Tokens of a tile of the MLP."""
    head_groups: int
    """Parts of the heads that attention computes one after the other."""
    logits_bytes: int
    """Bytes of logits that the loss holds at a time."""

    def __str__(self) -> str:
        groups = "1 head group" if self.head_groups == 1 else f"{self.head_groups} head groups"
        logits = f"{self.logits_bytes / GIB:.3g} GiB"
        if self.logits_bytes < GIB:
            logits = f"{math.ceil(self.logits_bytes / 2**20)} MiB"
        return f"{groups}, tiles of {self.tile_tokens} tokens, {logits} of logits"

    def of(self, tokens: int, vocab: int) -> Cut:
        """Returns the cut that a batch of `tokens` tokens uses: no tile is longer than the batch,
        and no more logits are held than all of its own in fp32."""
        return Cut(
            min(self.tile_tokens, tokens),
            self.head_groups,
            min(self.logits_bytes, 4 * tokens * vocab),
        )


class Batch(NamedTuple):
    """A step's work: `passes` batches of `tokens` tokens, in documents of `document` tokens."""

    tokens: int
    document: int
    passes: int = 1
    scored: int | None = None
    """Tokens whose log-probabilities a task's loss needs; None: the loss is cross-entropy."""
    images: int = 0
    """Tokens of images, which have no labels."""

    @property
    def labelled(self) -> int:
        """The number of tokens with a label for cross-entropy."""
        return max(1, self.tokens - self.images)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions of a model, and of each kind of its layers, that decide the cost of a step."""

    kinds: tuple[LayerKind, ...]
    """The kinds of layers, in the order in which a forward meets them first."""
    of_layer: tuple[int, ...]
    """The kind of each layer, as an index into `kinds`."""
    hidden: int  # D
    vocab: int  # V
    itemsize: int
    """Bytes of an activation's element."""
    stream_itemsize: int | None = None
    """Bytes of an element of the residual stream if they differ: 4 in autocast."""
    fuses_sinks: bool = False
    """Whether attention's kernels add sinks in their softmax."""
    writes_gradients: bool = False
    """Whether attention's backward writes dq, dk and dv into tensors that it is given."""
    trains_head: bool = True
    """Whether lm_head is trained."""
    tied: bool = False
    """Whether lm_head and the embedding share their weight."""
    trained: int = 0
    """The number of trained parameters."""
    exact: bool = True
    """Whether exact AdamW updates the parameters, with fp32 states; otherwise torch's does, with
    states in the weights' dtype."""
    class_type: str = "custom"
    """The layers that run: those of longctx (custom), of Hugging Face (vanilla, or any if they were
    measured) or of Liger-Kernel (liger)."""
    chunks_loss: bool = True
    """Whether longctx's loss runs, which computes logits in chunks."""
    tile_tokens: int | None = None
    """Tokens of a tile; None: `default_tile_tokens`."""
    head_groups: int | None = None
    """Head groups of attention; None: `default_head_groups`."""
    logits_bytes: int | None = None
    """Bytes of logits at a time; None: `default_logits_bytes`."""
    ranks: int = 1
    """The number of ranks that share each row. Token counts are those of one rank."""

    @property
    def layers(self) -> int:
        return len(self.of_layer)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of layers of each kind."""
        return tuple(map(self.of_layer.count, range(len(self.kinds))))

    @property
    def scores(self) -> tuple[int, bool]:
        """Returns the size of the largest heads of any layer and whether their scores are capped,
        for attention's rates."""
        found = (part.scores for kind in self.kinds for part in kind.parts)
        return max((scores for scores in found if scores is not None), default=(1, False))

    @property
    def kv_heads(self) -> int:
        """The most head groups into which the key/value heads of every kind can be divided."""
        # Parts without attention have 0 heads, and gcd(0, 8) is 8.
        return math.gcd(*(p.kv_heads_in_groups for kind in self.kinds for p in kind.parts)) or 1

    @property
    def stream_bytes(self) -> int:
        """Bytes of an element of the residual stream."""
        return self.stream_itemsize or self.itemsize

    def cut(self, tokens: int) -> Cut:
        """Returns the cut for batches of so many tokens: what was asked for, else what needs little
        memory. All layers share it: tiles have room for the widest MLP, and head groups divide the
        key/value heads of each kind."""
        widest, post = max((kind.tile_columns, kind.post) for kind in self.kinds)
        return Cut(
            self.tile_tokens or default_tile_tokens(widest or self.hidden, post),
            self.head_groups or default_head_groups(tokens, self.kv_heads, self.ranks),
            self.logits_bytes or default_logits_bytes(self.vocab, self.hidden, self.trains_head),
        )

    def cuts(self, tokens: int) -> Iterator[Sizes]:
        """Yields every cut that the search tries: a single head group, tiles of twice the size up
        to the whole batch, half as many logits, a quarter, and so on. Asked sizes stay, and so do
        head groups whose exchanges with other ranks overlap."""
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
        """Returns the bytes of one (T, D) tensor of the residual stream."""
        return tokens * self.hidden * self.stream_bytes


def kinds_of(layers: Iterable[LayerKind]) -> dict[str, Any]:
    """Returns the fields of `Sizes` that describe these layers, by name."""
    ids: dict[LayerKind, int] = {}
    order = tuple(ids.setdefault(layer, len(ids)) for layer in layers)
    return {"kinds": tuple(ids), "of_layer": order}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of a model, for an engine's layout. Either its layers are trained, or adapters
    in fp32 over frozen weights."""

    numels: Sequence[int]
    """Elements of each trained parameter, in the model's order."""
    layers: Sequence[int]
    """Trained parameters of each decoder layer."""
    embedding: int
    head: int
    """Parameters of lm_head; 0 if it is tied to the embedding."""
    hidden: int
    frozen: Sequence[int] = ()
    """Elements of each frozen parameter, in the model's order."""
    frozen_layers: Sequence[int] = ()
    """Frozen parameters of each decoder layer; empty if all are trained."""

    @property
    def total(self) -> int:
        """The number of trained parameters."""
        return sum(self.numels)

    @property
    def adapters(self) -> bool:
        """Whether adapters alone are trained, over frozen layers."""
        return any(self.frozen_layers)

    @property
    def words(self) -> int:
        """16-bit words of all weights as they compute: two per parameter of an adapter, one per
        other parameter."""
        return sum(self.frozen) + (1 + self.adapters) * self.total

    @property
    def layer_words(self) -> list[int]:
        """16-bit words of each decoder layer as it computes."""
        if not self.adapters:
            return [*self.layers]
        return [f + 2 * a for f, a in zip(self.frozen_layers, self.layers, strict=True)]

    @property
    def layer(self) -> int:
        """16-bit words of the largest decoder layer as it computes."""
        return max(self.layer_words)

    @property
    def trained_embedding(self) -> int:
        return 0 if self.adapters else self.embedding

    @property
    def trained_head(self) -> int:
        return 0 if self.adapters else self.head

    @property
    def output(self) -> int:
        """Parameters of the tensor that makes the logits."""
        return self.head or self.embedding
