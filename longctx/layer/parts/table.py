"""The parts by the names under which `Traits.blocks` has them."""

from __future__ import annotations

from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.beside import AttentionAndMixer
from longctx.layer.parts.experts import Experts
from longctx.layer.parts.mixer import Mixer
from longctx.layer.parts.mlp import MLP
from longctx.layer.parts.protocol import OverRow, OverTiles, Part
from longctx.layer.passes import Blocks

PARTS: dict[str, type[Part]] = {
    "attention": SelfAttention,
    "mixer": Mixer,
    "mlp": MLP,
    "experts": Experts,
}


BESIDE: dict[tuple[type[Part], type[Part]], type[OverRow]] = {
    (SelfAttention, Mixer): AttentionAndMixer
}
"""What computes two parts over a row that stand side by side in one block."""


def parts_of(blocks: Blocks) -> tuple[type[OverRow], type[OverTiles]]:
    """Returns the part of each role of a layer's blocks."""
    row, tiles = OverRow, OverTiles
    for kind in (PARTS[name] for block in blocks for name in block):
        if issubclass(kind, OverRow):
            assert tiles is OverTiles, f"{blocks}: a row's part is the first"
            row = kind if row is OverRow else BESIDE[row, kind]
        elif issubclass(kind, OverTiles):
            assert tiles is OverTiles, f"{blocks}: two parts over tiles"
            tiles = kind
    return row, tiles
