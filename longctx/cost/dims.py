"""The dimensions in which layers of one model may differ. Each layer is of one kind.

H query heads and K key/value heads of size d, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from longctx.cost.table import Table


class Block(Protocol):
    """A part of a layer, with the cost that it declares."""

    @staticmethod
    def cost(s: Any, kind: LayerKind, batch: Any) -> Table:
        """Returns the rows of this part in one layer of that kind, in a model of the `Sizes` s and
        in a step of this `Batch` (sizes.py, which imports this file)."""


class Adapted(NamedTuple):
    """The sizes of a layer's adapters per token. An adapter of an expert, which k of E tokens
    reach, counts k / E times."""

    inputs: float = 0
    """Elements per token that adapters read."""
    outputs: float = 0
    """Elements per token to which adapters add."""
    parameters: float = 0
    """Parameters of A and B by which a token is multiplied."""
    rescaled: float = 0
    """Elements of the weights whose rows they rescale (DoRA)."""


class Mixed(NamedTuple):
    """The sizes of a mixer, a module that a layer runs as it is (layer/parts/mixer.py)."""

    columns: int
    """The output features of all linear layers of the mixer together."""
    parameters: int
    """Parameters of the mixer's linear layers and of their adapters, frozen ones too."""
    trained: int
    """The number of trained parameters of the mixer."""
    state_bytes: int
    """Bytes of the mixer's state at the end of a segment."""
    graph: float
    """Elements per token that autograd saves for backward, as a multiple of `columns`."""
    besides: tuple[float, float]
    """The cost of what a mixer computes apart from its linear layers, in forward and in backward:
    FLOPs of matmuls that take as long, per token and per column of `columns`."""


class Spent(NamedTuple):
    """The measured cost of one direction of a layer, for T tokens in documents of L tokens."""

    seconds: tuple[float, float] = (0.0, 0.0)
    """a and b of the T (a + b L) seconds that it takes."""
    nbytes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """a, b and c of the a + T (b + c L) bytes of GPU memory that it needs, without the layer's
    input."""

    def seconds_of(self, tokens: int, document: int) -> float:
        a, b = self.seconds
        return tokens * (a + b * document)

    def nbytes_of(self, tokens: int, document: int) -> int:
        a, b, c = self.nbytes
        return int(a + tokens * (b + c * document))


class Measured(NamedTuple):
    """The measured cost of a layer of Hugging Face's (any_model/measured.py)."""

    forward: Spent = Spent()
    backward: Spent = Spent()
    """The cost of the layer's backward, with the second forward of its checkpoint."""


UNKNOWN = Measured()
"""Stands for a layer whose cost was neither measured nor counted: a plan counts its input alone."""


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
    """The mixer that runs instead of attention, or in parallel to it."""
    window: int | None = None
    """Tokens of attention's window; None: a token attends to all tokens before it."""
    qk_norms: bool = False
    """Whether each head of q and k has a norm. Attention then reads copies of q and k."""
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
    """The number of experts, of F features each; 0 for a layer with an MLP instead."""
    chosen: int = 0
    """The number of experts that a token goes to."""
    shared: int = 0
    """The features of the shared expert, which every token goes to; 0 without one."""
    weighs_shared: bool = False
    """Whether each token weighs the shared expert's output, by the sigmoid of a matmul."""
    expert_biases: bool = False
    """Whether experts have biases."""
    fp32_weights: bool = False
    """Whether Hugging Face's code holds the routing weights of a token's experts in fp32."""
    folded: int = 0
    """Elements of the experts' weights into which PEFT folds adapters, in Hugging Face's code."""
    between: bool = True
    """Whether the residual stream after the first block (h) is read by a second block."""
    parallel: bool = False
    """Whether the MLP runs in parallel to attention and reads attention's input."""
    trains_weights: bool = True
    """Whether any weight of the layer is trained and has a gradient."""
    dense_bytes: int = 0
    """Bytes of the dense weights while a layer computes, if its weights are quantised."""
    rank: int = 0
    """The largest rank of the adapters."""
    drops: bool = False
    """Whether an adapter's input has dropout."""
    adapted: Adapted = Adapted()
    """The sizes of the layer's adapters."""
    measured: Measured | None = None
    """The seconds and bytes that a layer of Hugging Face's was measured to take; None for a layer
    whose cost is counted."""

    @property
    def scores(self) -> tuple[int, bool]:
        """Returns the size of a head and whether scores are capped, on which rates depend."""
        return self.head_dim, self.caps_scores

    @property
    def wide(self) -> int:
        """Columns of q, which are those of attention's output: all query heads together."""
        return self.heads * self.head_dim

    def columns(self, hidden: int) -> int:
        """Returns the columns of a tile: as many as the gate of an MLP has. For each chosen expert
        they are its features and half of the D numbers that the expert's slot reads and writes. The
        shared expert runs before or after the others, so the wider of the two counts."""
        if not self.chosen:
            return self.intermediate
        # Qwen3-30B-A3B: 8 experts of 768 features and D = 2048 count as 8 * (768 + 1024) = 14336
        # columns, which are those of Llama-3.1-8B's MLP.
        return max(self.chosen * (self.intermediate + hidden // 2), self.shared)

    @property
    def narrow(self) -> int:
        """Columns of k, which are those of v: all key/value heads together."""
        return self.kv_heads * self.head_dim
