"""Folders of small models in the formats that models are published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_families import family_config
from small_vision import vision_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from longctx.layer.packed_linear import PackedLinear
from longctx.layer.packed_weights import dense, packed_state
from profiling.packed_folder import in_fp8, in_mxfp4


def saved_in_mxfp4(folder: Path, **sizes: Any) -> dict[str, Tensor]:
    """Saves gpt-oss as it is published, and returns the dense weights of its experts."""
    _saved(folder, "gpt_oss", sizes)
    return in_mxfp4(folder)


def saved_in_fp8(
    folder: Path,
    family: str,
    block: tuple[int, int] | None = (32, 16),
    *,
    compressed: bool = False,
    **sizes: Any,
) -> dict[str, Tensor]:
    """Saves a model of a family in FP8, and returns the values of what its files have packed."""
    _saved(folder, family, sizes)
    return in_fp8(folder, block, compressed=compressed)


def vision_saved_in_fp8(folder: Path, kind: str, block: tuple[int, int] | None) -> None:
    """Saves a vision-language model whose language model is in FP8."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(vision_config(kind))
    model.to(torch.bfloat16).save_pretrained(folder)
    in_fp8(folder, block)


def made_dense(model: Any) -> Any:
    """Makes all weights of a model dense that are packed."""
    for module in list(model.modules()):
        if isinstance(module, PackedLinear):
            module.unpack_()
        for name, weight in [*module._parameters.items()]:
            if packed_state(weight) is not None:
                setattr(module, name, nn.Parameter(dense(weight), requires_grad=False))
    return model


def _saved(folder: Path, family: str, sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
