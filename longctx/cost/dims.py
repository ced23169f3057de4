"""The kinds of layers of a model: what a layer is, as the specs of its parts, and what is held,
trained and adapted of it. Each layer is of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from longctx.cost.table import Table

P = TypeVar("P")


class Part(Protocol):
    """The spec of a part of a layer (layer/specs/), as the count sees it."""

    over_tiles: ClassVar[bool]
    tile_launches: ClassVar[int]
    segment_launches: ClassVar[int]

    @property
    def factor(self) -> float: ...

    @property
    def beside(self) -> bool: ...

    @property
    def scores(self) -> tuple[int, bool] | None: ...

    @property
    def kv_heads_in_groups(self) -> int: ...

    @property
    def widest(self) -> int: ...

    @property
    def tile_columns(self) -> int: ...

    @property
    def post(self) -> bool: ...

    def cost(self, s: Any, kind: LayerKind, batch: Any) -> Table:
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
    """Parameters of adapters that a token is multiplied by."""
    rescaled: float = 0
    """Elements of the weights whose rows they rescale (DoRA)."""


class MixerMemory(NamedTuple):
    """The memory of a mixer's tensors: elements a token for each column of its linear layers
    (`Mixed.columns`)."""

    graph: float
    """Elements that autograd saves for backward."""
    forward: float
    """The most at a time in a forward without a graph, with the mixer's output."""
    backward: float
    """The most at a time in backward, with what is left of the graph and the gradient of the
    mixer's input, and without its input and the gradient of its output."""


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
    memory: MixerMemory
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


class MeasuredLayer(NamedTuple):
    """The measured cost of a layer of Hugging Face's (any_model/measured.py)."""

    forward: Spent = Spent()
    backward: Spent = Spent()
    """The cost of the layer's backward, with the second forward of its checkpoint."""


UNKNOWN = MeasuredLayer()
"""Stands for a layer whose cost was neither measured nor counted: a plan counts its input alone."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A decoder layer as the specs of its parts, in forward's order (layer/specs/)."""

    parts: tuple[Part, ...]

    def part(self, spec: type[P]) -> P | None:
        """Returns the part that has a spec of this class; None if the layer has none."""
        return next((part for part in self.parts if isinstance(part, spec)), None)

    def one(self, spec: type[P]) -> P:
        """Returns the part that has a spec of this class, in a layer that has one."""
        found = self.part(spec)
        assert found is not None, f"a layer without {spec.__name__}"
        return found

    @property
    def over_tiles(self) -> bool:
        """Whether the layer has a part over tiles of tokens, as an MLP."""
        return any(part.over_tiles for part in self.parts)

    @property
    def parallel(self) -> bool:
        """Whether the part over tiles stands beside the one over the row, and reads its norm."""
        return any(part.beside for part in self.parts)

    @property
    def between(self) -> bool:
        """Whether a second block reads h, what the first one gives."""
        over_row = any(not part.over_tiles for part in self.parts)
        return over_row and self.over_tiles and not self.parallel

    @property
    def scales(self) -> bool:
        """Whether the output of any part is multiplied before it is added."""
        return any(part.factor != 1.0 for part in self.parts)

    @property
    def post(self) -> bool:
        """Whether norms follow the parts."""
        return any(part.post for part in self.parts)

    @property
    def runs_modules(self) -> bool:
        """Whether a part runs a module of Hugging Face's, segment by segment, as a mixer does."""
        return any(part.segment_launches for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class LayerKind(LayerSpec):
    """A layer as the count sees it: the specs of its parts, and what of its weights is trained,
    quantised or adapted. Layers that agree in all of that are of one kind."""

    mixed: Mixed | None = None
    """The sizes of the layer's mixer, from its weights."""
    folded: int = 0
    """Elements of the experts' weights that PEFT folds adapters into, in Hugging Face's code."""
    trains_weights: bool = True
    """Whether any weight of the layer is trained and has a gradient."""
    dense_bytes: int = 0
    """Bytes of the dense weights while a layer computes, if its weights are quantised."""
    dense_stacks: tuple[int, ...] = ()
    """Bytes of the experts' dense weights beside these, of gate and up and of down, if they are
    dense by chunks (layer/dense_experts.py)."""
    rank: int = 0
    """The largest rank of the adapters."""
    drops: bool = False
    """Whether an adapter's input has dropout."""
    adapted: Adapted = Adapted()
    """The sizes of the layer's adapters."""
    measured: MeasuredLayer | None = None
    """The seconds and bytes that a layer of Hugging Face's was measured to take; None for a layer
    whose cost is counted."""

    @property
    def widest(self) -> int:
        """The most features that a linear layer of the layer reads or gives."""
        return max((part.widest for part in self.parts), default=1)

    @property
    def tile_columns(self) -> int:
        """The columns that a token has in a tile, as many as an MLP's gate has."""
        return max((part.tile_columns for part in self.parts), default=0)
