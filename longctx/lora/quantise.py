"""`--quantize nf4`: the decoder layers' linear maps in 4 bits, by bitsandbytes, under adapters.

Each weight is the nearest of 16 values of a normal distribution, times a scale of its block of 64,
which has 8 bits itself (double quantisation): 4.13 bits a weight. QLoRA: Dettmers et al. 2023,
arXiv 2305.14314. Pretrained weights are quantised as they are read, one after the other; a preset's
once the model is made. Embedding, norms and lm_head stay as they are.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from longctx.errors import UserError
from longctx.loading.weights import holds_nf4, quantization
from longctx.model.blocks import decoder_layers
from longctx.model.matrices import linears, stacks
from longctx.options.config import ModelArguments
from longctx.safety.system import installed


def check_quantize(args: ModelArguments) -> None:
    """Raises UserError where weights cannot be quantised."""
    if args.quantize == "none":
        return
    if not installed("bitsandbytes"):
        raise UserError("--quantize nf4 needs bitsandbytes: pip install 'longctx[lora]'")
    if str(args.model_name_or_path).endswith(".gguf"):
        raise UserError(
            "--quantize nf4 and a GGUF file: give the model that the file was made from"
        )


def check_all_linear(args: ModelArguments, model: Any) -> None:
    """Raises UserError if 4 bits would leave out weights that are no linear maps, most of a model
    with experts."""
    if args.quantize == "none":
        return
    layers: Any = decoder_layers(model)
    if stacked := stacks(layers):
        raise UserError(
            f"--quantize nf4: layers.{next(iter(stacked))} holds the weights of several experts in "
            "one parameter, which would stay in 16 bits: leave out --quantize"
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
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def compute_in_(model: Any, dtype: torch.dtype) -> None:
    """Gives a checkpoint that was in 4 bits the run's dtype, whatever it was quantised from: that
    of its other weights, and that in which 4 bits are made dense."""
    for weight in model.parameters():
        if (state := getattr(weight, "quant_state", None)) is not None:
            state.dtype = dtype
        elif weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def quantise_(model: Any, device: torch.device) -> None:
    """Quantises the layers of a model in memory, in place, on `device`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layers: Any = decoder_layers(model)
    for path, linear in linears(layers).items():
        made = Linear4bit(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            compute_dtype=linear.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        made.bias = linear.bias
        parent, _, name = path.rpartition(".")
        setattr(layers.get_submodule(parent), name, made.to(device))
    model.is_loaded_in_4bit = True  # PEFT looks for it


def round_to_nf4_(layers: nn.Module) -> None:
    """Linear maps keep their dtype and get the values of 4 bits that a run would compute with."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for linear in linears(layers).values():
        packed = quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True)
        linear.weight.data = dequantize_4bit(*packed)


BLOCK, SCALES = 64, 256
"""Weights that share a scale, and scales that share one."""


def quantise_shapes_(model: Any) -> None:
    """The same of a model without storage, for arithmetic: bytes, scales, and no bitsandbytes. A
    checkpoint that is in 4 bits says whether its scales are, too, and which maps are not."""
    found = quantization(model.config)
    double = not found or found.get("bnb_4bit_use_double_quant", False)
    skipped = [f".{name}." for name in found.get("llm_int8_skip_modules") or ()]

    def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    layers: Any = decoder_layers(model)
    for path, linear in linears(layers).items():
        if any(name in f".model.layers.{path}." for name in skipped):
            continue
        shape, numel = linear.weight.shape, linear.weight.numel()
        scales = -(-numel // BLOCK)
        packed: Any = nn.Parameter(empty(-(-numel // 2), torch.uint8)[:, None], False)
        packed.quant_state = SimpleNamespace(
            shape=shape,
            absmax=empty(scales, torch.uint8 if double else torch.float32),
        )
        if double:
            of_scales = empty(-(-scales // SCALES), torch.float32)
            packed.quant_state.state2 = SimpleNamespace(absmax=of_scales)
        linear.weight = packed
