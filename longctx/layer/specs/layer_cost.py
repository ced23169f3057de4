"""What the parts of a layer cost together."""

from __future__ import annotations

from longctx.cost.dims import LayerKind
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Table
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mixer_spec import MixerSpec, beside_attention
from longctx.layer.specs.part_spec import kept_input


def parts_cost(s: Sizes, kind: LayerKind, batch: Batch) -> list[Table]:
    """Returns the tables of a layer's parts: of attention and a mixer side by side one, and of a
    layer without a part over the row the one that keeps its input."""
    tables: dict[type, Table] = {type(part): part.cost(s, kind, batch) for part in kind.parts}
    if {AttentionSpec, MixerSpec} <= tables.keys():
        both = tables[AttentionSpec], tables.pop(MixerSpec)
        tables[AttentionSpec] = beside_attention(*both, s, kind, batch)
    tiled = {type(part) for part in kind.parts if part.over_tiles}
    found = [table.in_tiles() if part in tiled else table for part, table in tables.items()]
    if kind.parts and all(part.over_tiles for part in kind.parts):
        found.insert(0, Table(keepables=(kept_input(s, batch),)))
    return found
