"""Reads pretrained weights straight into 4 bits, those of experts among them.

transformers quantises linear maps with bitsandbytes while it reads a model, and leaves the weights
of experts, (E, O, I), in 16 bits without a word. The quantizer here is transformers' own and takes
these, too. transformers then reads one parameter after the other: it puts a layer's experts of one
kind (gate and up, or down) together where the model is read to, and what is quantised here is freed
before the next are read. So a model needs room for its 4 bits, and for three of one such parameter
in 16. What is read to the host is packed on the GPU and comes back.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationMethod

from longctx.families.matrices import stack_names
from longctx.train.lora.nf4 import in_nf4, move_

_NAME = "longctx_nf4"
"""The name under which transformers finds the quantizer."""
_DEVICE = "longctx_device"
"""The key of the device on its way to the quantizer; no configuration is saved with it."""


def reading_in_nf4(dtype: torch.dtype, device: torch.device) -> BitsAndBytesConfig:
    """Returns the `quantization_config` of `from_pretrained` that reads matrices of decoder layers
    in 4 bits, packed on `device`, which are made dense in `dtype`. The model's own is bitsandbytes'
    afterwards."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    config.quant_method = cast(QuantizationMethod, _NAME)
    vars(config)[_DEVICE] = device
    return config


@register_quantizer(_NAME)
class _Quantizer(Bnb4BitHfQuantizer):
    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        quantization_config.quant_method = QuantizationMethod.BITS_AND_BYTES
        self.device: torch.device = vars(quantization_config).pop(_DEVICE)
        super().__init__(quantization_config, **kwargs)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return _is_stack(model, param_name) or super().param_needs_quantization(
            model, param_name, **kwargs
        )

    def get_quantize_ops(self) -> Any:
        return _Quantise(self)


class _Quantise(Bnb4bitQuantize):
    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the parameters of these names in 4 bits, where they were; each has a tensor or a
        list of one."""
        found = {}
        for name, given in input_dict.items():
            weight = given[0] if isinstance(given, list) else given
            rests, weight = weight.device, weight.to(self.hf_quantizer.device)
            if _is_stack(kwargs["model"], name):
                packed = in_nf4(weight, weight.device)
            else:
                packed = super().convert({name: weight}, *args, **kwargs)[name]
            found[name] = move_(packed, rests)
        return found


def _is_stack(model: Any, name: str) -> bool:
    owner, own = get_module_from_name(model, name)
    return own in stack_names(owner)
