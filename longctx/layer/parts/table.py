"""The parts by their specs (layer/specs/): what computes a layer whose spec has these parts."""

from __future__ import annotations

from longctx.cost.dims import LayerSpec
from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.beside import AttentionAndMixer
from longctx.layer.parts.experts import Experts
from longctx.layer.parts.mixer import Mixer
from longctx.layer.parts.mlp import MLP
from longctx.layer.parts.protocol import OverRow, OverTiles, Part
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.layer.specs.mlp_spec import MlpSpec

PARTS: dict[type, type[Part]] = {
    AttentionSpec: SelfAttention,
    MixerSpec: Mixer,
    MlpSpec: MLP,
    ExpertsSpec: Experts,
}


BESIDE: dict[tuple[type[Part], type[Part]], type[OverRow]] = {
    (SelfAttention, Mixer): AttentionAndMixer
}
"""Maps two parts over a row that stand side by side in one block to the class that computes both.
"""


def parts_of(layer: LayerSpec) -> tuple[type[OverRow], type[OverTiles]]:
    """Returns the part of each role of a layer: a part over the row, or two side by side, and a
    part over tiles after it. The base class of a role computes a layer without such a part."""
    row, tiles = OverRow, OverTiles
    for kind in (PARTS[type(spec)] for spec in layer.parts):
        if issubclass(kind, OverRow):
            assert tiles is OverTiles, f"{layer}: a row's part is the first"
            row = kind if row is OverRow else BESIDE[row, kind]
        elif issubclass(kind, OverTiles):
            assert tiles is OverTiles, f"{layer}: two parts over tiles"
            tiles = kind
    return row, tiles
