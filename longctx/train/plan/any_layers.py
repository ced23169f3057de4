"""What a plan knows of --class_type any: whose attention and loss a run has, and what layers take.

measured    on the GPU that trains: one layer of each kind is run (any_model/measured.py)
counted     elsewhere, of a family that longctx knows: as Llama's in Hugging Face's code
unknown     elsewhere, of any other: weights, states, gradients, inputs of layers and the loss
            are planned by count, and neither a layer's own memory nor its seconds are
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from longctx.any_model.attention import NAMES
from longctx.any_model.measured import measured_layers
from longctx.any_model.patch import any_attention
from longctx.any_model.probe import find_loss
from longctx.cost.dims import UNKNOWN
from longctx.cost.sizes import Sizes
from longctx.families.attention_names import HF_ATTENTION, default_attention
from longctx.runtime.peers import as_measured, trains_weights
from longctx.settings import Backend

ELSEWHERE = "only the GPU that trains can measure them (plan there, without --gpu)"


@dataclass(frozen=True, kw_only=True)
class AnyLayers:
    """The layers of a model in Hugging Face's code, inside our checkpoints."""

    config: Any
    kind: Any
    """The model's class."""
    backend: Backend
    device: torch.device | None
    """The GPU that trains, if it is here."""
    counts: bool
    """Whether its layers may be counted as Llama's."""
    dtype: torch.dtype

    @cached_property
    def attention(self) -> str:
        """transformers' name of the attention that layers run."""
        ours, _ = any_attention(self.config, self.kind, self.backend, self._tried_on)
        own = HF_ATTENTION.get(self.backend) or default_attention(self.config)
        return ours or own or self.config._attn_implementation

    def attention_line(self) -> str | None:
        """Returns whose attention runs, where it was tried; None elsewhere."""
        if self.device is None:
            return None
        own = f"{self.attention}, the model's own"
        return "ours" if self.attention in NAMES.values() else own

    @cached_property
    def chunks_loss(self) -> bool:
        """Whether our loss runs, in chunks; else the model's own holds all logits."""
        return find_loss(self.config, self.kind, self._tried_on)[0] is not None

    @property
    def _tried_on(self) -> torch.device:
        return self.device or torch.device("cpu")

    def why_unknown(self, sizes: Sizes) -> str | None:
        """Returns why the cost of a layer is unknown; None if it was measured or counted."""
        if self.device is None:
            return None if self.counts else ELSEWHERE
        found = self._measured(sizes)
        return found if isinstance(found, str) else None

    def _measured(self, sizes: Sizes) -> Any:
        how = self.attention, self.dtype, self.device, trains_weights(sizes)
        return measured_layers(self.config, self.kind, *how)

    def sizes(self, sizes: Sizes) -> Sizes:
        """Returns the sizes of a model with what its layers take."""
        if self.device is None and self.counts:
            return sizes
        if self.why_unknown(sizes):
            return as_measured(sizes, sizes.layers * [UNKNOWN])
        return as_measured(sizes, self._measured(sizes))
