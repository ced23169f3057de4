"""What every part of a decoder layer declares in its spec, once.

A spec is read by all that know a layer: the schedule computes by its numbers, the plan counts its
`cost`, weights and adapters are found by its paths, and a model that `differs` from it runs in
Hugging Face's layers instead. A family makes the specs of a layer from the model's configuration
(families/family.py):

    attention(window=window_by_type)(config, 3) -> AttentionSpec(hidden=4096, heads=32, ...)

Specs that are equal cost equally, so that layers of equal specs are one kind of layer to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

from longctx.cost.dims import LayerKind
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import INPUT, Keepable, Table

Paths = Mapping[str, str]
Shape = tuple[int, ...]
Spec = TypeVar("Spec", bound="PartSpec")
Declare = Callable[[Any, int], "PartSpec"]
"""Makes the spec of a part from a model's configuration and the index of a layer."""


def paths() -> Any:
    """Returns a field that maps names to paths, empty unless it is given."""
    return field(default_factory=dict, hash=False)


def head_dim(config: Any) -> int:
    """Returns d, the size of a head of attention."""
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def kv_heads(config: Any) -> int:
    """Returns K, the key/value heads of attention."""
    count: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return count


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """A part of a decoder layer: attention, a mixer, an MLP or experts."""

    over_tiles: ClassVar[bool] = False
    """Whether the part works on tiles of tokens, as an MLP does; else on the whole row."""
    tile_launches: ClassVar[int] = 0
    """Kernels of a tile, forward and backward, where they are many and short."""
    segment_launches: ClassVar[int] = 0
    """Kernels of a segment, forward and backward, of a part that runs segment by segment."""

    hidden: int  # D
    modules: Paths = paths()
    """Maps the paths of the modules that the part stands in for to the rest of their classes'
    names, after the family's prefix; a name behind a dot is whole."""
    linears: Paths = paths()
    """Maps names of linear layers, as the part reads them, to their paths in the layer."""
    norms: Paths = paths()
    """Maps names of norms, as the part reads them, to their paths in the layer."""
    parameters: Paths = paths()
    """Maps names of parameters and buffers that modules hold themselves to their paths."""
    stacks: Paths = paths()
    """Maps names of the weights of routers (E, D) and of experts (E, O, I) to their paths."""
    activations: Mapping[str, str] = paths()
    """Maps the paths of activation modules to the names of their functions (ACTIVATIONS)."""
    dropouts: tuple[str, ...] = ()
    """The paths of dropout modules, which must not drop anything."""
    in_fp32: tuple[str, ...] = ()
    """The paths of modules whose parameters transformers keeps in fp32."""
    beside: bool = False
    """The part stands beside the one over the row, in one residual block, and reads its norm."""
    decoder: str = ""
    """The rest of the name of the class of layers with this part, where a family has several."""
    factor: float = 1.0
    """Multiplies the part's output before it is added to the residual stream."""
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Maps the paths of factors that modules of the layer hold to the values that the schedule
    has for them."""

    @classmethod
    def of(cls: type[Spec], config: Any, layer: int, **fields: Any) -> Spec:
        """Returns the spec of a layer. Values of `fields` that are functions are called with the
        configuration and the layer's index."""
        made = {k: v(config, layer) if callable(v) else v for k, v in fields.items()}
        return cls(**cls.usual(config) | made)

    @classmethod
    def usual(cls, config: Any) -> dict[str, Any]:
        """Returns the fields that follow from a configuration as they do in Llama."""
        return {"hidden": config.hidden_size}

    @classmethod
    def declared(cls, **fields: Any) -> Declare:
        """Returns what makes this spec for a layer of a configuration, as a family names it."""
        return partial(cls.of, **fields)

    @property
    def side_by_side(self) -> dict[tuple[str, ...], Shape]:
        """Maps the names of linear layers whose weights stand one under the other in a matmul to
        the rows of each."""
        return {}

    @property
    def in_one(self) -> dict[tuple[str, ...], Shape]:
        """Those of `side_by_side` that lie in one parameter, that of the first one, since the layer
        has no second one. Such a parameter has no bias, and its adapter one A for all of them."""
        names = self.side_by_side
        return {n: rows for n, rows in names.items() if {*n} & {*self.linears} == {n[0]}}

    def shapes(self) -> dict[str, Shape]:
        """Returns the shape of the weight of each linear layer and norm, by path."""
        return {path: (self.hidden,) for path in self.norms.values()}

    def held_shapes(self) -> dict[str, Shape]:
        """Returns the shape of each parameter in `stacks` and `parameters`, by path."""
        return {}

    def differs(self, modules: Mapping[str, Any], config: Any) -> Iterator[str]:
        """Yields what the modules of a layer, by path, do otherwise than this spec says."""
        return iter(())

    # --- what the count asks of any part -------------------------------------------------------

    @property
    def scores(self) -> tuple[int, bool] | None:
        """The size of a head and whether scores have a softcap, by which attention's rates differ;
        None for a part without attention."""
        return None

    @property
    def kv_heads_in_groups(self) -> int:
        """The key/value heads that head groups divide; 0 for a part without attention."""
        return 0

    @property
    def widest(self) -> int:
        """The most features that a linear layer of the part reads or gives."""
        return self.hidden

    @property
    def tile_columns(self) -> int:
        """The columns that a token has in a tile, as many as an MLP's gate has."""
        return 0

    @property
    def post(self) -> bool:
        """Whether a norm follows the part."""
        return any(name.startswith("post") for name in self.norms)

    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        """Returns the rows of this part in one layer of that kind."""
        raise NotImplementedError


def kept_input(s: Sizes, batch: Batch) -> Keepable:
    """Returns the row of a layer's input, which the part over the row declares."""
    nbytes = s.unit(batch.tokens)
    return Keepable(name=INPUT, nbytes=nbytes, word="x", always=True, read_first=True)
