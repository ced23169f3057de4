"""The dimensions in which layers of one model may differ. Each layer is of one kind.

H query heads and K key/value heads of size d, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from longctx.cost.table import Table


class Block(Protocol):
    """A part of a layer, as the count sees it."""

    @staticmethod
    def cost(s: Any, kind: LayerKind, batch: Any) -> Table:
        """Returns the rows of this part in one layer of that kind, in a model of the `Sizes` s and
        in a step of this `Batch` (sizes.py, which imports this file)."""


class Adapted(NamedTuple):
    """The sizes of a layer's adapters, as a token meets them: an adapter that k of E tokens are
    given counts k / E times."""

    inputs: float = 0
    """Elements per token that they read."""
    outputs: float = 0
    """Elements per token that they add to."""
    parameters: float = 0
    """The parameters of all linear layers of the mixer, frozen ones too."""
    rescaled: float = 0
    """Elements of the weights whose rows they rescale (DoRA)."""


class Mixed(NamedTuple):
    """The sizes of a mixer, a module that a layer runs as it is (layer/parts/mixer.py)."""

    columns: int
    """The output features of all linear layers of the mixer together."""
    parameters: int
    """Parameters that a token is multiplied by."""
    trained: int
    """The number of trained parameters of the mixer."""
    state_bytes: int
    """Bytes of the mixer's state at the end of a segment."""
    graph: float
    """Elements that autograd holds of a token for backward, for each one of `columns`."""
    besides: tuple[float, float]
    """FLOPs of matmuls that take as long as what the mixer computes besides its own, for a token
    and each one of `columns`: forward, and backward."""


class Spent(NamedTuple):
    """What one direction of a layer was measured to take, of T tokens in documents of L tokens."""

    seconds: tuple[float, float] = (0.0, 0.0)
    """a and b of T (a + b L) seconds."""
    nbytes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """a, b and c of a + T (b + c L) bytes of the GPU, the layer's input not among them."""

    def seconds_of(self, tokens: int, document: int) -> float:
        a, b = self.seconds
        return tokens * (a + b * document)

    def nbytes_of(self, tokens: int, document: int) -> int:
        a, b, c = self.nbytes
        return int(a + tokens * (b + c * document))


class Measured(NamedTuple):
    """What a layer of Hugging Face's was measured to take (any_model/measured.py)."""

    forward: Spent = Spent()
    backward: Spent = Spent()
    """The seconds and bytes that the layer's backward takes, those of its checkpoint's second
    forward among them."""


UNKNOWN = Measured()
"""Stands for a layer that nobody has measured or counted: its input alone is planned."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The dimensions of a layer that decide what it computes and how much memory it takes. Layers
    that agree in all of them are of one kind."""

    blocks: tuple[type[Block], ...]
    """The parts of a layer, in forward's order. The layers of other libraries have none."""
    intermediate: int  # F
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    mixer: Mixed | None = None
    """The mixer that stands in the place of attention, or beside it."""
    window: int | None = None
    """The window of attention; None: a token attends to all before it."""
    qk_norms: bool = False
    """Whether each head of q and k has a norm. Attention then takes copies."""
    wide_norms: bool = False
    """Whether q and k have norms over all heads."""
    output_gate: bool = False
    """Whether q's projection also gives a gate of attention's output."""
    sinks: bool = False
    """Whether each head has an attention sink."""
    caps_scores: bool = False
    """Whether attention's scores have a softcap."""
    post_norms: bool = False
    """Whether norms follow attention and the MLP."""
    gated: bool = True
    """Whether the MLP has a gate."""
    experts: int = 0
    """The experts of a layer that has some instead of an MLP, F features each."""
    chosen: int = 0
    """How many of them a token goes to."""
    shared: int = 0
    """The features of the expert that all tokens go to beside them."""
    weighs_shared: bool = False
    """Whether each token has a weight of it, the sigmoid of a matmul."""
    expert_biases: bool = False
    """Whether they have biases."""
    fp32_weights: bool = False
    """Whether Hugging Face's code has the weights of a token's experts in fp32."""
    folded: int = 0
    """Elements of the experts' weights that PEFT folds adapters into, in Hugging Face's code."""
    between: bool = True
    """Whether a second block reads h, what the first one gives."""
    parallel: bool = False
    """Whether the MLP stands beside attention and reads what attention reads."""
    trains_weights: bool = True
    """Whether any weights are trained; else they have no gradients."""
    dense_bytes: int = 0
    """Bytes of the dense weights while a layer computes, if its weights are quantised."""
    rank: int = 0
    """The largest rank of the adapters."""
    drops: bool = False
    """Whether an adapter's input has dropout."""
    adapted: Adapted = Adapted()
    measured: Measured | None = None
    """The seconds and bytes that a layer of Hugging Face's was measured to take; None for a layer
    whose cost is counted."""

    @property
    def scores(self) -> tuple[int, bool]:
        """Returns the size of a head and whether scores are capped, on which rates depend."""
        return self.head_dim, self.caps_scores

    @property
    def wide(self) -> int:
        """Columns of q and of attention's output, all query heads together."""
        return self.heads * self.head_dim

    def columns(self, hidden: int) -> int:
        """Returns the columns that a token has in a tile, as many as an MLP's gate has: for each
        chosen expert its features, and half of what its slot reads and gives. The shared
        expert comes before or after the others."""
        if not self.chosen:
            return self.intermediate
        return max(self.chosen * (self.intermediate + hidden // 2), self.shared)

    @property
    def narrow(self) -> int:
        """Columns of k, and of v, all key/value heads together."""
        return self.kv_heads * self.head_dim
