"""Checkpoints in fewer than 16 bits: which of them a run takes, and which it reads dense.

    NF4 of bitsandbytes           stays as it is, frozen, under `--quantize nf4`
    MXFP4, as gpt-oss is public   stays so under adapters; made dense else: exact in 16 bits
    FP8 with scales of blocks     stays so under adapters, or is made dense, rounded to the dtype

Every other kind is refused, by training and by its plan, which ask `check` here. Weights stay
packed where our schedule computes all layers (`stays_packed`): Hugging Face's layers, and engines
that cut weights up, get dense ones, which transformers makes while it reads them. The model's
configuration says nothing of quantisation in either case: files are looked at again when they are
read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from longctx.errors import UserError, many, print_rank0
from longctx.families.vision import PREFIXES
from longctx.train.loading import packed_reading
from longctx.train.loading.packed_formats import (
    Format,
    Fp8Files,
    Mxfp4Files,
    format_of,
    is_compressed,
)
from longctx.train.loading.weight_files import holds_nf4, quantization
from longctx.train.options.source import PUBLISHED, ModelSource

_IN_MXFP4 = {"gpt_oss"}
"""The types of models for which transformers has names of blocks and scales."""
_SCALES = ".weight_scale_inv"
_EXPERTS = "experts"
"""transformers' name of the module that holds the weights of all experts."""
_NEEDED = "give the model that it was made from, in bfloat16 or float32"


def packed_as(config: Any) -> str | None:
    """Returns MXFP4 or FP8 for a checkpoint that can be read; None for any other."""
    form, of_experts = format_of(quantization(config)), config.model_type in _IN_MXFP4
    if isinstance(form, Mxfp4Files):
        return "MXFP4" if of_experts else None
    return None if form is None else "FP8"


def check(source: ModelSource, config: Any, *, makes_dense: bool = True) -> None:
    """Raises UserError for a checkpoint whose weights cannot be what the run asks of them; without
    `makes_dense` its engine has no way to make them dense."""
    packed = packed_as(config)
    if packed is None:
        _check_kept(source, config)
    elif source.in_nf4:
        raise UserError(
            f"{source.name} is in {packed}, and --quantize would round it once more: leave it out, "
            "or give a copy in bfloat16"
        )
    elif packed == "FP8" and not source.frozen:
        raise UserError(
            f"{source.name} is in FP8, and rounded weights cannot be trained as a whole: train "
            f"adapters over them with --lora_r, or {_NEEDED}"
        )
    elif is_compressed(quantization(config)) and not stays_packed(source, config):
        raise UserError(
            f"{source.name} is in FP8 of compressed-tensors, which stays packed and is not made "
            "dense: use --class_type custom with --lora_r and without an engine, merge with "
            f"--keep_packed, or {_NEEDED}"
        )
    elif not makes_dense:
        raise UserError(
            f"{source.name} is in {packed}, which is not made dense under ZeRO-3: use FSDP2 or no "
            "engine, or give a copy in bfloat16"
        )


def stays_packed(source: ModelSource, config: Any) -> bool:
    """Whether the weights of a checkpoint with this configuration stay as packed as its files have
    them, and are not made dense."""
    if not (source.keeps_packed and source.frozen) or source.in_nf4:
        return False
    packed = packed_as(config)
    return packed == "MXFP4" or (packed == "FP8" and config.model_type not in _IN_MXFP4)


class PackedFiles(NamedTuple):
    """The packed weights of a model's files, and what becomes of them."""

    name: str
    """MXFP4 or FP8."""
    form: Format | None
    """The format in which weights stay; None where they are made dense while they are read."""

    @classmethod
    def of(cls, source: ModelSource, config: Any) -> PackedFiles | None:
        """Returns those of the files whose configuration this is; None if they have none."""
        if (name := packed_as(config)) is None:
            return None
        form = format_of(quantization(config)) if stays_packed(source, config) else None
        return cls(name, form)


def _check_kept(source: ModelSource, config: Any) -> None:
    """Raises UserError for a checkpoint that is not made dense and that cannot be read or
    trained."""
    if holds_nf4(config) and config.model_type not in PREFIXES:
        if source.in_nf4:
            return
        raise UserError(
            f"{source.name} is in 4 bits (bitsandbytes): rounded weights cannot be trained as a "
            "whole, nor merged: train adapters over them with --lora_r and --quantize nf4, or "
            f"{_NEEDED}"
        )
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if found := getattr(part, key, None):
                method = found.get("quant_method") if isinstance(found, dict) else None
                why = "in a form that longctx does not read"
                if not source.frozen:
                    why = "and rounded weights cannot be trained as a whole"
                raise UserError(
                    f"{source.name} is quantised ({method or 'by an unnamed method'}), {why}: "
                    f"{_NEEDED}"
                )


def note_preset(preset: str, config: Any, *, in_nf4: bool) -> None:
    """Says that the files of a preset's public model would be refused where its random weights are
    not."""
    if in_nf4 and config.model_type in _IN_MXFP4:
        print_rank0(
            f"--preset {preset} has random weights: its public checkpoint is in MXFP4, stays so "
            "under adapters, and is as small without --quantize, which refuses it"
        )


def of_files(name: str, config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration with what the files of model `name` say of quantisation."""
    found = copy.copy(config)
    found.quantization_config = PretrainedConfig.get_config_dict(name)[0].get("quantization_config")
    return found


def of_preset(preset: str | None, config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration with what the public files of a preset say of quantisation."""
    found = copy.copy(config)
    found.quantization_config = PUBLISHED.get(preset or "")
    return found


def kept(files: Sequence[Path], config: Any, dtype: Any) -> dict[str, Any]:
    """Returns an argument for `from_pretrained` of a checkpoint with this configuration whose
    weights stay packed, and are dense in `dtype`, for "auto" in fp32. Raises ValueError for a
    weight in FP8 that has no scale: its numbers would be those of its bytes."""
    dtypes: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            dtypes |= {name: file.get_slice(name).get_dtype() for name in file.keys()}
    in_fp8 = {name for name, found in dtypes.items() if found == "F8_E4M3"}
    form = format_of(quantization(config))
    suffix = form.suffix if isinstance(form, Fp8Files) else ""
    for name in in_fp8:
        if f"{name}{suffix}" not in dtypes:
            raise ValueError(f"{name} is in FP8 and has no {name}{suffix}: get the files again")
    dense = dtypes.keys() - in_fp8
    if not any(f".{_EXPERTS}." in name for name in in_fp8):  # whatever their files call them
        dense.add(_EXPERTS)
    form = format_of(quantization(config), dense=dense, packed=in_fp8)
    assert form is not None
    made = dtype if isinstance(dtype, torch.dtype) else torch.float32
    return {"quantization_config": packed_reading.PackedReading(form, made)}


def refuse_outside(name: str, unread: Iterable[str]) -> None:
    """Raises UserError for weights in FP8 of model `name` where none may stay so, of which the
    scales are `unread`: in a vision tower, or lm_head."""
    ending = re.compile(r"\.weight_scale(_inv)?$")
    if found := sorted(tensor for tensor in unread if ending.search(tensor)):
        raise UserError(
            f"{name} has {many(len(found), 'weight')} in FP8 outside of its decoder layers "
            f"({ending.sub('.weight', found[0])}): {_NEEDED}"
        )


def made_dense(packed: str) -> dict[str, Any]:
    """Returns an argument for `from_pretrained` of a checkpoint in MXFP4 or FP8 that is made
    dense."""
    kind: Any = Mxfp4Config if packed == "MXFP4" else FineGrainedFP8Config
    return {"quantization_config": kind(dequantize=True)}


def check_blocks(files: Sequence[Path], config: Any) -> None:
    """Raises ValueError for a weight in FP8 whose last block is smaller than the others:
    transformers takes a weight's size over its number of scales as the size of a block."""
    block: Sequence[int] = quantization(config).get("weight_block_size") or ()
    shapes: dict[str, Sequence[int]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    for name in shapes:
        if not name.endswith(_SCALES):
            continue
        shape = shapes.get(name.removesuffix("_scale_inv"), ())[-2:]
        if any(size % of for size, of in zip(shape, block, strict=False)):
            raise ValueError(
                f"{name.removesuffix('_scale_inv')} has {shape[0]} x {shape[1]} numbers in FP8, no "
                f"multiple of its blocks of {block[0]} x {block[1]}, which transformers makes "
                f"dense with the wrong scales: {_NEEDED}"
            )


def keep_packed_(model: Any, name: str, packed: str) -> None:
    """Gives a model that was read its packed weights, and says so."""
    vars(model).pop("_weight_conversions", None)
    packed_reading.finish_(model)
    whose = "its experts stay" if packed == "MXFP4" else "its weights stay"
    print_rank0(f"{name} is in {packed}: {whose} so, frozen, and are dense layer by layer")


def made_dense_(model: Any, name: str, packed: str, dtype: Any) -> None:
    """Gives dense weights the dtype of the others, which transformers 5.17 does not, and forgets
    how they were read: they would be saved under the names of their blocks."""
    vars(model).pop("_weight_conversions", None)
    if isinstance(dtype, torch.dtype):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    whose = "its experts are" if packed == "MXFP4" else "its weights are"
    print_rank0(
        f"{name} is in {packed}: {whose} made dense, in "
        f"{str(model.dtype).removeprefix('torch.')}, and saved so"
    )
