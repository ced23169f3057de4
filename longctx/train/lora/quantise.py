"""`--quantize nf4`: the decoder layers' matrices in 4 bits, by bitsandbytes, under adapters.

These are linear maps and the weights of all experts (families/matrices.py). Pretrained weights are
quantised as they are read, one after the other (quantised_reading.py); a preset's once the model is
made. Embedding, norms, routers and lm_head stay as they are.

Each weight is packed on the GPU. A GPU that cannot hold them all at once, as 24 GiB cannot hold the
35 of 70B, hands each of them to host memory before the next is packed, from where blocks move to
their places (memory/settle.py). `waits_on_host` decides it, for a run and for its plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from longctx.constants import GIB
from longctx.errors import UserError, print_rank0
from longctx.families.blocks import decoder_layers, move_buffers, scales
from longctx.families.classes import without_storage
from longctx.families.matrices import linears, matrices, stack_names, stacks
from longctx.memory.store import free_gpu_bytes
from longctx.packages import pip_install
from longctx.system import installed
from longctx.train.loading.weight_files import holds_nf4, quantization
from longctx.train.lora.nf4 import in_nf4, move_, move_codes_, shape_in_nf4
from longctx.train.options.config import ModelArguments


def check_quantize(args: ModelArguments) -> None:
    """Raises UserError where this machine cannot quantise weights."""
    if args.quantize != "none" and not installed("bitsandbytes"):
        raise UserError(f"--quantize nf4 needs bitsandbytes: {pip_install('bitsandbytes')}")


def check_experts(args: ModelArguments, config: PretrainedConfig) -> None:
    """Raises UserError for a model whose experts, most of its weights, would stay in 16 bits, as
    Hugging Face's layers know no others."""
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


def leaves_experts(config: PretrainedConfig) -> bool:
    """Whether a checkpoint is in 4 bits already but for its experts, which bitsandbytes leaves in
    16: a run quantises them once they are read into host memory."""
    if not holds_nf4(config) or (skeleton := without_storage(config)) is None:
        return False
    layers: Any = decoder_layers(skeleton)
    return bool(stacks(layers))


class Packed(NamedTuple):
    """Bytes that a model in 4 bits takes while it is read."""

    nbytes: int
    """Bytes of all its weights and their scales."""
    largest: int
    """Bytes of the largest weight before it is packed."""


def packed_bytes(shapes: nn.Module) -> Packed:
    """Returns the bytes of a model without storage whose weights `quantise_shapes_` has packed."""
    nbytes, largest = 0, 0
    for weight in shapes.parameters():
        nbytes += weight.nbytes + sum(part.tensor.nbytes for part in scales(weight))
        if (state := getattr(weight, "quant_state", None)) is not None:
            largest = max(largest, state.shape.numel() * state.dtype.itemsize)
    return Packed(nbytes, largest)


def waits_on_host(packed: Packed, gpu_bytes: int) -> bool:
    """Whether weights wait on the host when they are packed: a GPU with `gpu_bytes` free does not
    hold all of them and, of the largest, three dense copies (quantised_reading.py)."""
    return packed.nbytes + 3 * packed.largest > gpu_bytes


def resting_place(
    args: ModelArguments, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> torch.device:
    """Returns where weights wait that were packed on `device`, until the run places them."""
    if args.quantize == "none" or device.type != "cuda":
        return device
    if (shapes := without_storage(config, dtype)) is None:
        return device
    quantise_shapes_(shapes)
    packed = packed_bytes(shapes)
    if not (leaves_experts(config) or waits_on_host(packed, free_gpu_bytes(device))):
        return device
    print_rank0(
        f"{packed.nbytes / GIB:.1f} GiB of weights in 4 bits are packed on the GPU one by one and "
        "wait in host memory until they are placed"
    )
    return torch.device("cpu")


def quantised_loading(
    args: ModelArguments,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Any = None,
    rests: torch.device | None = None,
) -> dict[str, Any]:
    """Returns more arguments for `from_pretrained`, which packs weights on `device` and leaves them
    where they are to wait (`rests`, by default there). The configuration of a `checkpoint` in 4
    bits already says how."""
    if args.quantize == "none":
        return {}
    place = {"device_map": {"": rests or device}}
    if holds_nf4(checkpoint):
        checkpoint.quantization_config["bnb_4bit_compute_dtype"] = str(dtype).split(".")[1]
        return place
    from longctx.train.lora.quantised_reading import reading_in_nf4

    return {"quantization_config": reading_in_nf4(dtype, device), **place}


def leave_waiting_(model: Any, device: torch.device) -> None:
    """Makes a model whose weights wait in host memory one that `device` computes."""
    for weight in model.parameters():
        if getattr(weight, "quant_state", None) is not None:
            move_codes_(weight, device)
    move_buffers(model, device)
    vars(model).pop("hf_device_map", None)  # by which Trainer takes it for placed


def compute_in_(model: Any, dtype: torch.dtype) -> None:
    """Gives a checkpoint that was in 4 bits the run's dtype, whatever it was quantised from: that
    of its other weights, and that in which 4 bits are made dense."""
    for weight in model.parameters():
        if (state := getattr(weight, "quant_state", None)) is not None:
            state.dtype = dtype
        elif weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def quantise_(model: Any, device: torch.device, rests: torch.device | None = None) -> None:
    """Quantises the layers of a model in memory, in place, on `device`; `rests` is where weights
    wait afterwards, by default there. Each weight in 16 bits is freed before the next is quantised.
    """
    from bitsandbytes.nn import Linear4bit

    layers: Any = decoder_layers(model)
    rests = rests or device
    for path in [*linears(layers)]:
        linear = layers.get_submodule(path)
        made = Linear4bit(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            compute_dtype=linear.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        made.weight = move_(in_nf4(linear.weight.data, device), rests)
        made.bias = linear.bias
        if made.bias is not None:
            made.bias.data = made.bias.data.to(rests)
        parent, _, name = path.rpartition(".")
        setattr(layers.get_submodule(parent), name, made)
    quantise_experts_(model, device, rests)
    model.is_loaded_in_4bit = True  # PEFT looks for it


def quantise_experts_(model: Any, device: torch.device, rests: torch.device) -> None:
    """Quantises the weights of experts, one after the other on `device`, from where they go to
    `rests`."""
    layers: Any = decoder_layers(model)
    for owner in stacks(layers).values():
        for name in stack_names(owner):
            packed = in_nf4(owner.get_parameter(name).data, device)
            setattr(owner, name, move_(packed, rests))


def round_to_nf4_(layers: nn.Module) -> None:
    """Matrices keep their dtype and get the values of 4 bits that a run would compute with."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for weight in matrices(layers):
        packed = quantize_4bit(weight.data, quant_type="nf4", compress_statistics=True)
        weight.data = dequantize_4bit(*packed)


def quantise_shapes_(model: Any) -> None:
    """Quantises a model without storage, for arithmetic: bytes, scales, and no bitsandbytes. A
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
            # Those of a checkpoint, too, are quantised by the run.
            setattr(owner, name, shape_in_nf4(owner.get_parameter(name), double=True))
