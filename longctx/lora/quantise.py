"""`--quantize nf4`: the decoder layers' matrices in 4 bits, by bitsandbytes, under adapters.

These are linear maps and the weights of all experts (model/matrices.py). Pretrained weights are
quantised as they are read, one after the other (quantised_reading.py); a preset's once the model is
made. Embedding, norms, routers and lm_head stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from longctx.errors import UserError
from longctx.loading.weights import holds_nf4, quantization
from longctx.lora.nf4 import in_nf4, shape_in_nf4
from longctx.model.blocks import decoder_layers
from longctx.model.classes import without_storage
from longctx.model.matrices import linears, matrices, stack_names, stacks
from longctx.options.config import ModelArguments
from longctx.safety.packages import pip_install
from longctx.safety.system import installed


def check_quantize(args: ModelArguments) -> None:
    """Raises UserError where this machine cannot quantise weights."""
    if args.quantize != "none" and not installed("bitsandbytes"):
        raise UserError(f"--quantize nf4 needs bitsandbytes: {pip_install('bitsandbytes')}")


def check_experts(args: ModelArguments, config: PretrainedConfig) -> None:
    """Raises UserError for a model whose experts, most of its weights, would stay in 16 bits: in
    Hugging Face's layers, which know no others, and in a checkpoint that is in 4 bits already, by a
    program that quantises linear maps alone."""
    if args.quantize == "none" or (skeleton := without_storage(config)) is None:
        return
    layers: Any = decoder_layers(skeleton)
    if not (stacked := stacks(layers)):
        return
    where = f"layers.{next(iter(stacked))} holds the weights of several experts in one parameter"
    if not args.schedules:
        raise UserError(
            f"--quantize nf4: {where}, which only --class_type custom without --parts has in 4 "
            "bits: use that, or leave out --quantize"
        )
    if quantization(config):
        raise UserError(
            f"{args.model_name_or_path} is in 4 bits, but {where}, which bitsandbytes leaves as it "
            "is: give the model that it was made from"
        )


def quantised_loading(
    args: ModelArguments, dtype: torch.dtype, device: torch.device, checkpoint: Any = None
) -> dict[str, Any]:
    """Returns more arguments for `from_pretrained`. The configuration of a `checkpoint` in 4 bits
    already says how."""
    if args.quantize == "none":
        return {}
    if holds_nf4(checkpoint):
        checkpoint.quantization_config["bnb_4bit_compute_dtype"] = str(dtype).split(".")[1]
        return {"device_map": {"": device}}
    from longctx.lora.quantised_reading import reading_in_nf4

    return {"quantization_config": reading_in_nf4(dtype), "device_map": {"": device}}


def compute_in_(model: Any, dtype: torch.dtype) -> None:
    """Gives a checkpoint that was in 4 bits the run's dtype, whatever it was quantised from: that
    of its other weights, and that in which 4 bits are made dense."""
    for weight in model.parameters():
        if (state := getattr(weight, "quant_state", None)) is not None:
            state.dtype = dtype
        elif weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def quantise_(model: Any, device: torch.device) -> None:
    """Quantises the layers of a model in memory, in place, on `device`. Each weight in 16 bits is
    freed before the next is quantised."""
    from bitsandbytes.nn import Linear4bit

    layers: Any = decoder_layers(model)
    for path in [*linears(layers)]:
        linear = layers.get_submodule(path)
        made = Linear4bit(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            compute_dtype=linear.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        made.weight = in_nf4(linear.weight.data, device)
        made.bias = linear.bias
        parent, _, name = path.rpartition(".")
        setattr(layers.get_submodule(parent), name, made.to(device))
    for owner in stacks(layers).values():
        for name in stack_names(owner):
            setattr(owner, name, in_nf4(owner.get_parameter(name).data, device))
    model.is_loaded_in_4bit = True  # PEFT looks for it


def round_to_nf4_(layers: nn.Module) -> None:
    """Matrices keep their dtype and get the values of 4 bits that a run would compute with."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for weight in matrices(layers):
        packed = quantize_4bit(weight.data, quant_type="nf4", compress_statistics=True)
        weight.data = dequantize_4bit(*packed)


def quantise_shapes_(model: Any) -> None:
    """The same of a model without storage, for arithmetic: bytes, scales, and no bitsandbytes. A
    checkpoint that is in 4 bits says whether its scales are, too, and which maps are not."""
    found = quantization(model.config)
    double = not found or found.get("bnb_4bit_use_double_quant", False)
    skipped = [f".{name}." for name in found.get("llm_int8_skip_modules") or ()]
    layers: Any = decoder_layers(model)
    for path, linear in linears(layers).items():
        if not any(name in f".model.layers.{path}." for name in skipped):
            linear.weight = shape_in_nf4(linear.weight, double)
    for owner in stacks(layers).values():
        for name in stack_names(owner):
            setattr(owner, name, shape_in_nf4(owner.get_parameter(name), double))
