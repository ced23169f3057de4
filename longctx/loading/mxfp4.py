"""Checkpoints whose experts are in MXFP4, as OpenAI publishes gpt-oss: read dense, and saved so.

Each number has 4 bits, and 32 of them share a power of two; transformers makes them dense while it
reads. Both are exact in 16 bits. A run trains dense weights: its configuration says nothing of
MXFP4, and files are looked at again when they are read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils.quantization_config import Mxfp4Config

from longctx.errors import UserError
from longctx.loading.weights import quantization

_TYPES = {"gpt_oss"}
"""The types of models for which transformers has names of blocks and scales."""


def is_held(config: Any) -> bool:
    """Whether a checkpoint of this configuration is in MXFP4, and can be read."""
    return quantization(config).get("quant_method") == "mxfp4" and config.model_type in _TYPES


def of_files(name: str, config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration with what the files of model `name` say of quantisation."""
    found = copy.copy(config)
    found.quantization_config = PretrainedConfig.get_config_dict(name)[0].get("quantization_config")
    return found


def loading(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an argument for `from_pretrained` beside the others, `more`. Raises UserError where
    experts cannot be made dense."""
    if "quantization_config" in more:
        raise UserError(
            f"{name} is in MXFP4, and --quantize would round it once more: leave it out, or give a "
            "copy in bfloat16"
        )
    if is_deepspeed_zero3_enabled():
        raise UserError(
            f"{name} is in MXFP4, which is not made dense under ZeRO-3: use FSDP2 or no engine, or "
            "give a copy in bfloat16"
        )
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def finish_(model: Any, dtype: Any) -> None:
    """Gives dense experts the dtype of the other weights, which transformers 5.17 does not, and
    forgets how they were read: they would be saved under the names of their blocks."""
    vars(model).pop("_weight_conversions", None)
    if isinstance(dtype, torch.dtype):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
