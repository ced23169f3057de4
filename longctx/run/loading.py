"""Loads what a run trains: configuration, weights and dtype, checked before heavy work.

A model comes from a folder, a GGUF file or the hub, or is one of presets.py with random weights.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file

from longctx.attention import flash4
from longctx.attention.backends import NO_WINDOWS, choose_attention
from longctx.config import ModelArguments, expanded, installed
from longctx.engines import Engine, Plain
from longctx.engines.collectives import whole_numel
from longctx.errors import UserError, one_line, print_rank0, shortened
from longctx.lora.adapters import adapter_bytes, add_adapters, check_lora
from longctx.lora.quantise import check_quantize, quantise_, quantised_loading
from longctx.model.families import FAMILIES, has_windows, head_dim
from longctx.model.patch import patch_as
from longctx.presets import PRESETS

MOST_LAYERS = 512
"""Each takes 10 ms even on the meta device; the deepest language models have about 130."""
LARGEST_SIZE = 1 << 22
"""Of a config.json: products of three such numbers fit in 64 bits, and no model comes near it."""
LARGEST_CONFIG_BYTES = 1 << 24
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
)
"""What must be whole and positive, where a model has it."""

HF_ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "fa2": "flash_attention_2",
    "fa4": "flash_attention_4",
}


def load_config(
    args: ModelArguments, *, vocab_size: int, special_ids: Mapping[str, int | None] | None = None
) -> PretrainedConfig:
    """The model's configuration, checked against the run before any weight is touched.

    `vocab_size` and `special_ids` (`bos_token_id`, ...) are the tokenizer's. A preset takes the
    latter and, if it has no vocabulary of its own (tiny), the former.
    Raises UserError for a model that cannot be read, does not fit `custom`, or is too short.
    """
    if args.model_name_or_path is None:
        preset: dict[str, Any] = {"model_type": "llama", "vocab_size": vocab_size}
        preset |= PRESETS[args.preset or "tiny"]
        config: PretrainedConfig = AutoConfig.for_model(**preset | dict(special_ids or {}))
    else:
        config = read_config(args)
    if args.class_type == "custom" and config.model_type not in FAMILIES:
        raise UserError(
            f"--class_type custom patches models of type {', '.join(FAMILIES)}; "
            f"{args.model_name_or_path} is of type {config.model_type!r}: use --class_type vanilla "
            "or liger"
        )
    if args.class_type == "custom" and args.attn_backend == "cudnn" and has_windows(config):
        raise UserError(NO_WINDOWS)
    kv_heads = getattr(config, "num_key_value_heads", None) or 1
    if args.class_type == "custom" and kv_heads % (args.head_groups or 1):
        raise UserError(
            f"--head_groups {args.head_groups} must divide the model's {kv_heads} key/value heads"
        )
    _check_context(config, args)
    check_lora(args, config)
    return config


def read_config(args: ModelArguments) -> PretrainedConfig:
    """The configuration of a pretrained model, without what its author chose for other machines.
    Raises UserError for one that is unreadable, or of a model that cannot be trained."""
    name, where = _pretrained(args)
    try:
        adapter = find_adapter_config_file(name)
        if "gguf_file" not in where:
            _check_raw_sizes(args, PretrainedConfig.get_config_dict(name)[0])
        config = AutoConfig.from_pretrained(name, **where)
    except UserError:
        raise
    except Exception as error:  # a file's values raise as many types as there are checks
        raise _unreadable(args, error, "its config.json: ") from error
    if adapter:  # transformers would put it into the model, whoever's that is
        raise UserError(
            f"{args.model_name_or_path} holds an adapter ({Path(adapter).name}) and a run trains "
            "whole models, or new adapters: merge it into its model first (longctx merge)"
        )
    _check_sizes(args, config)
    if "gguf_file" not in where:
        _refuse_quantised(args, config)
    # A kernel of the hub, which would be downloaded and run; a layout over GPUs.
    config._attn_implementation = config._experts_implementation = None
    vars(config).pop("distributed_config", None)
    return config


def _check_raw_sizes(args: ModelArguments, found: Mapping[str, Any]) -> None:
    """Raises UserError for numbers in a config.json that are too large: some configurations make a
    list of so many layers while they are read."""
    for name, value in found.items():
        if isinstance(value, dict):  # the text part of a model
            _check_raw_sizes(args, value)
        elif name in SIZES and isinstance(value, (int, float)) and value > 1:
            _check_size(args, name, value)


def _check_sizes(args: ModelArguments, config: PretrainedConfig) -> None:
    """Raises UserError for numbers of which no model can be made, or none in any memory: not every
    configuration looks at its values."""
    for part in (config, config.get_text_config()):
        for name in SIZES:
            found = getattr(part, name, None)
            if found is not None and not isinstance(found, list):  # of numbers for each layer
                _check_size(args, name, found)
    dropout = getattr(config, "attention_dropout", None) or 0.0
    if not 0 <= dropout < 1:
        raise UserError(f"{args.model_name_or_path}: its config.json drops {dropout} of attention")


def _check_size(args: ModelArguments, name: str, found: Any) -> None:
    most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
    if type(found) is not int or not 1 <= found <= most:
        raise UserError(
            f"{args.model_name_or_path}: its config.json has {name} {shortened(repr(found), 40)}: "
            f"a whole number from 1 to {most} is needed"
        )


def _refuse_quantised(args: ModelArguments, config: PretrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            found = getattr(part, key, None)
            if found:
                method = found.get("quant_method") if isinstance(found, dict) else None
                raise UserError(
                    f"{args.model_name_or_path} is quantised ({method or 'by an unnamed method'}), "
                    "and rounded weights cannot be trained as a whole: give the model that it was "
                    "made from, in bfloat16 or float32"
                )


def check_request(args: ModelArguments, device: torch.device) -> None:
    """Raises UserError where the class type or the attention needs a package or GPU that is not
    there, or --quantize does. Cheap: call it before data is read."""
    check_quantize(args)
    if args.class_type == "custom":
        choose_attention(args.attn_backend, device, _dtype(args.dtype, device))
    else:
        _check_liger(args, device)
        _hf_attention(args, device)


def compute_dtype(args: ModelArguments, device: torch.device) -> torch.dtype:
    """What `--dtype` means on this device."""
    return _dtype(args.dtype, device)


def weights_bytes(args: ModelArguments, config: PretrainedConfig, device: torch.device) -> int:
    """The size of the model's parameters, without making them; 0 for a class that is not
    transformers' own."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        return 0
    try:
        with torch.device("meta"):  # not `from_config`, which under ZeRO-3 shards what it makes
            model = kind(config)
    except Exception as error:
        raise _unreadable(args, error, "its config.json: ") from error
    return sum(p.numel() for p in model.parameters()) * _dtype(args.dtype, device).itemsize


def saved_bytes(args: ModelArguments, config: PretrainedConfig, device: torch.device) -> int:
    """The size of the weights in a checkpoint: the model's, or its adapters'."""
    if args.lora_r is not None:
        return adapter_bytes(args, config)
    return weights_bytes(args, config, device)


def load_model(
    args: ModelArguments,
    config: PretrainedConfig,
    *,
    device: torch.device,
    engine: Engine | None = None,
) -> PreTrainedModel:
    """The model in `args.dtype`, patched as `args.class_type` says, in a PeftModel if it gets
    adapters; prints what was patched.

    Pretrained weights are read (under ZeRO-3 and FSDP2 the first process hands the others their
    parts); a preset's are random (seed them with `transformers.set_seed`).
    Raises UserError where a package, a GPU or a weight is missing.
    """
    engine = engine or Plain()
    check_request(args, device)
    dtype = _dtype(args.dtype, device)
    attention = "sdpa" if args.class_type == "custom" else _hf_attention(args, device, config)
    if args.model_name_or_path is None or engine.fills_weights:
        with engine.random_weights(device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=args.trust_remote_code,
            )
        if args.quantize != "none":
            quantise_(model, device)
    else:
        name, where = _pretrained(args)
        try:
            _refuse_integers(Path(name))
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
                generation_config=_generation(args, config),
                **where,
                **quantised_loading(args, dtype, device),
            )
        except torch.OutOfMemoryError:
            raise
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{args.model_name_or_path} holds a file that is damaged or would run code when "
                "read; nothing of it was run"
            ) from error
        except Exception as error:  # a file's values raise as many types as there are
            raise _unreadable(args, error) from error
        model, found = loaded
        _refuse_missing(args, found)
        if "gguf_file" in where:
            forget_gguf(model)
    patched = patch_as(model, args, device)
    line = (
        f"{args.class_type}: {type(model).__name__}, "
        f"{sum(map(whole_numel, model.parameters())) / 1e9:.3f}B parameters in {dtype}; {patched}"
    )
    if args.lora_r is not None:
        model, adapters = add_adapters(model, args)
        line += f"; {adapters}{'' if args.quantize == 'none' else ' over NF4'}"
    print_rank0(line)
    return model


def _refuse_integers(folder: Path) -> None:
    """transformers would cast them, and train what is left."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                dtype = file.get_slice(name).get_dtype()
                if not dtype.startswith(("F", "BF")):
                    raise ValueError(f"{name} in {path.name} holds {dtype}, no floating point")


def _generation(args: ModelArguments, config: PretrainedConfig) -> GenerationConfig | None:
    """None: transformers reads the model's own. Where it refuses to, training need not: a new one
    takes its place, and it is said."""
    name, where = _pretrained(args)
    if "gguf_file" in where:
        return None
    try:
        GenerationConfig.from_pretrained(name)
    except OSError:  # most base models have none
        return None
    except Exception as error:  # each of transformers' checks has a type of its own
        print_rank0(f"{name}: its generation_config.json is left out ({one_line(error, 200)})")
        return GenerationConfig.from_model_config(config)
    return None


def _refuse_missing(args: ModelArguments, found: Mapping[str, Any]) -> None:
    """transformers fills in what a file lacks with random weights, and only warns."""
    mismatched = [f"{name} {tuple(there)}" for name, there, _ in found["mismatched_keys"]]
    for names, what in (
        (sorted(found["missing_keys"]), "are not in"),
        (sorted(mismatched), "have another shape in"),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise UserError(
                f"{len(names)} of the model's weights {what} {args.model_name_or_path} ({shown}): "
                "they would be random; get the files again, or those of this config.json"
            )


def _unreadable(args: ModelArguments, error: Exception, where: str = "") -> UserError:
    reason = where + one_line(error)
    if "custom code" in reason:
        reason = "it ships code of its own; read it, and if you trust it add --trust_remote_code"
    return UserError(f"cannot load a model from {args.model_name_or_path}: {reason}")


def _check_liger(args: ModelArguments, device: torch.device) -> None:
    if args.class_type != "liger":
        return
    if not installed("liger_kernel"):
        raise UserError("--class_type liger needs Liger-Kernel: pip install 'longctx[liger]'")
    if device.type == "cpu":
        raise UserError(
            "--class_type liger needs a GPU (Liger-Kernel has Triton kernels only); "
            "on this machine use --class_type vanilla or custom"
        )


def _hf_attention(args: ModelArguments, device: torch.device, config: Any = None) -> str:
    """Hugging Face's name of the attention behind `--attn_backend`, for vanilla and liger."""
    backend: str = args.attn_backend
    if backend == "auto":
        # Not fa4: transformers 5.17 hands flash-attn-4 a tensor as max_seqlen for packed rows,
        # which it refuses.
        backend = "sdpa"
    if backend not in HF_ATTENTION:
        raise UserError(
            f"--attn_backend {backend} is for --class_type custom; {args.class_type} takes "
            f"{', '.join(HF_ATTENTION)} or auto"
        )
    if backend in ("fa2", "fa4") and device.type != "cuda":
        raise UserError(f"--attn_backend {backend} needs a GPU; use --attn_backend sdpa")
    if backend == "fa2" and not installed("flash_attn"):
        raise UserError("--attn_backend fa2 is not installed: pip install flash-attn")
    if backend == "fa4":
        size = head_dim(config) if config else flash4.SMALLEST_HEAD
        if reason := flash4.why_not(device, size):
            raise UserError(f"--attn_backend fa4: flash-attn-4 {reason}; use sdpa")
    return HF_ATTENTION[backend]


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _pretrained(args: ModelArguments) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` takes: a folder or hub id, and the keywords a GGUF file needs."""
    name = args.model_name_or_path
    assert name is not None
    where: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if name.endswith(".gguf"):
        path = expanded(name)
        if not os.path.isfile(path):
            raise UserError(f"no such GGUF file: {name}")
        if not installed("gguf"):
            raise UserError(f"{name} needs the gguf package: pip install gguf")
        return str(path.parent), {**where, "gguf_file": path.name}
    folder = expanded(name)
    if os.path.isdir(folder):
        config = folder / "config.json"
        if not os.path.isfile(config):
            raise UserError(f"--model_name_or_path {name} has no config.json: it holds no model")
        if (size_bytes := config.stat().st_size) > LARGEST_CONFIG_BYTES:
            raise UserError(f"{name}: its config.json has {size_bytes >> 20} MiB")
        return str(folder), where
    if os.path.exists(folder) or name.startswith((".", "/", "~")):
        raise UserError(
            f"--model_name_or_path {name} is no folder: give a model's folder or hub id"
        )
    return name, where


def forget_gguf(model: Any) -> None:
    """A GGUF's weights are dequantised on loading, but the model still says it is quantised, and
    then can be neither trained nor saved."""
    model.is_quantized = False
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)


def _check_context(config: PretrainedConfig, args: ModelArguments) -> None:
    """Refuses rows longer than the model's positions, or says what RoPE does with them."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or args.seq_len <= limit:  # vanilla also runs models without positions
        if args.rope_scaling != "none":
            print_rank0(f"--rope_scaling {args.rope_scaling} does nothing up to {limit} positions")
        return
    if args.rope_scaling != "none":
        _scale_rope(config, args)
        return
    if not args.extend_context:
        raise UserError(
            f"--seq_len {args.seq_len} is above the model's max_position_embeddings {limit}: "
            "shorten it, scale its RoPE (--rope_scaling yarn), or add --extend_context to train "
            "beyond with RoPE as it is"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    says = {
        "default": "keeps its frequencies, so the new positions are extrapolated",
        "dynamic": f"raises its base for rows beyond {limit}",
    }.get(kind, f"keeps its factor {rope.get('factor')}, so the new positions are extrapolated")
    # yarn, dynamic and longrope compute their frequencies from max_position_embeddings.
    if kind in ("default", "linear", "llama3"):
        config.max_position_embeddings = args.seq_len
    print_rank0(f"context extended from {limit} to {args.seq_len} tokens: RoPE {kind!r} {says}")


def _scale_rope(config: PretrainedConfig, args: ModelArguments) -> None:
    """Stretches the model's RoPE by seq_len / its positions. The saved config says so too, and any
    transformers reads it. YaRN: Peng et al. 2023, arXiv 2309.00071."""
    rope = dict(config.rope_parameters or {})
    limit = config.max_position_embeddings
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"--rope_scaling {args.rope_scaling} starts from plain RoPE, but this model's is "
            f"{rope['rope_type']!r} already: leave it out, or use --extend_context"
        )
    factor = args.seq_len / limit
    rope |= {"rope_type": args.rope_scaling, "factor": factor}
    if args.rope_scaling == "yarn":
        rope["original_max_position_embeddings"] = limit
    config.rope_parameters = rope
    config.max_position_embeddings = args.seq_len
    try:
        known = type(config).from_dict(config.to_dict()).rope_parameters
    except Exception:  # each of transformers' checks has a type of its own
        known = {}
    if known.get("rope_type") != args.rope_scaling:  # Phi3 knows LongRoPE alone
        raise UserError(
            f"--rope_scaling {args.rope_scaling} is impossible with models of type "
            f"{config.model_type!r}, whose configuration has no such RoPE: use --extend_context"
        )
    kind = f"{args.rope_scaling} by {factor:g}"
    print_rank0(f"context extended from {limit} to {args.seq_len} tokens: RoPE {kind}")
