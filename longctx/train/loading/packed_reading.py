"""Reads checkpoints that are published packed, and keeps them so: no GPU is needed, no kernel of
the hub is fetched, and nothing is made dense.

transformers maps the files, renames their tensors and puts experts together, each of the kind of
numbers that its skeleton of the model has. So the skeleton gets the parameters that the files hold,
bytes and scales, before it is filled. What was read is then the packed weight of the module that a
model in 16 bits has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.quantizers import register_quantizer
from transformers.quantizers.base import HfQuantizer

from longctx.train.loading.packed_formats import Format, Packable, empty, held_by, named, put_

_NAME = "longctx_packed"
"""The name under which transformers finds the quantizer."""


OF_ACTIVATIONS = r"\.(activation_scale|input_scale|[kv]_scale)$"
"""Scales by which inference rounds what layers multiply, which training does not: Ministral 3 has
some."""


@dataclass
class PackedReading:
    """The `quantization_config` of `from_pretrained` that reads weights packed in a format."""

    form: Format
    dtype: torch.dtype
    """In which they are made dense."""
    quant_method: str = _NAME

    def to_dict(self) -> dict[str, Any]:
        """Returns what the model's configuration says of quantisation while it is read."""
        return {"quant_method": self.quant_method}


@register_quantizer(_NAME)
class _PackedReader(HfQuantizer):
    requires_calibration = False
    quantization_config: Any  # a PackedReading
    held: list[Packable]
    """The weights that the model is to have packed, as it was before the skeleton changed."""
    shapes: dict[str, tuple[int, ...]]
    """Those of the skeleton's parameters, by name."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # One expert's tensors: transformers 5.23 puts scales together as it does weights.
        suffix = getattr(quantization_config.form, "suffix", "")
        self.serialized_names = {"weight": ["weight", f"weight{suffix}"]}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.held = list(held_by(self.quantization_config.form, model))
        for held in self.held:
            owner, shape = held.owner, held.weight.shape
            # transformers would start at random what files lack, which is refused by its name.
            vars(owner)["_is_hf_initialized"] = True
            delattr(owner, held.name)
            with named(held):
                found = self.quantization_config.form.stored(held.name, shape)
            for stored in found:
                room = nn.Parameter(empty(stored), requires_grad=False)
                owner.register_parameter(f"{held.name}{stored.suffix}", room)
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, OF_ACTIVATIONS}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def finish_(model: Any) -> None:
    """Gives a model that was read, and of which no tensor is missing, its packed weights. Raises
    ValueError, which names a weight whose scales are no numbers."""
    quantizer: _PackedReader = model.hf_quantizer
    reading: PackedReading = quantizer.quantization_config
    for held in quantizer.held:
        owner, shape = held.owner, held.weight.shape
        names = [f"{held.name}{stored.suffix}" for stored in reading.form.stored(held.name, shape)]
        data, scale = (owner.get_parameter(name).data for name in names)
        for name in names:
            delattr(owner, name)
        with named(held):
            state = reading.form.state(shape, reading.dtype, scale)
        put_(model, held, data.view(torch.uint8), state)
