"""Loads what a run trains: configuration, weights and dtype, checked before heavy work.

A model comes from a folder, a GGUF file or the hub, or is one of train/options/presets.yaml with
random weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from longctx.any_model.attention import NAMES as OUR_ATTENTION
from longctx.any_model.declined import is_dropout, set_dropout_
from longctx.any_model.patch import why_not_any
from longctx.attention import flash4
from longctx.attention.backends import choose_attention, lacks
from longctx.calls.positions import keep_documents_apart
from longctx.errors import UserError, counted, print_rank0
from longctx.families.adapters import keep_layout_
from longctx.families.attention_names import HF_ATTENTION, default_attention, has_sdpa
from longctx.families.classes import (
    as_language_model,
    as_reward_model,
    auto_class,
    is_classifier,
    takes_images,
    without_storage,
)
from longctx.families.families import family_of, has_windows, not_known, score_cap
from longctx.families.family import head_dims
from longctx.families.vision import PREFIXES, rest_, towers
from longctx.forwards.said import foretell
from longctx.layer.specs.part_spec import kv_heads
from longctx.loop.collectives import whole_numel
from longctx.packages import pip_install
from longctx.patching.patch import check_parts, patch_as
from longctx.system import installed
from longctx.train.engines import Engine, Plain
from longctx.train.loading.packed_random import random_packed
from longctx.train.loading.pretrained import packed_files, read_config, read_model, unreadable
from longctx.train.loading.quantised import note_preset
from longctx.train.loading.weight_files import holds_nf4
from longctx.train.lora.peft_adapters import adapter_bytes, add_adapters, check_lora, check_peft
from longctx.train.lora.quantise import (
    check_experts,
    check_quantize,
    compute_in_,
    leave_waiting_,
    quantise_,
    quantise_experts_,
    quantised_loading,
    resting_place,
)
from longctx.train.options.config import ModelArguments
from longctx.train.options.source import PRESETS, ModelSource


def load_config(
    args: ModelArguments,
    *,
    vocab_size: int,
    special_ids: Mapping[str, int | None] | None = None,
    rewards: bool = False,
    flag: str = ModelSource.flag,
    frozen: bool = False,
    engine: Engine | None = None,
) -> PretrainedConfig:
    """Returns the model's configuration, checked against the run before any weight is touched; that
    of a model of `rewards` if asked for.

    `vocab_size` and `special_ids` (`bos_token_id`, ...) are the tokenizer's. A preset takes the
    latter and, if it has no vocabulary of its own (tiny), the former. `flag` named the model, which
    is not trained if it is `frozen`, under an `engine` or without one.
    Raises UserError for a model that cannot be read, does not fit `custom`, or is too short.
    """
    if args.model_name_or_path is None:
        preset = args.preset or "tiny"
        config = _preset_config(preset, vocab_size, special_ids or {})
        note_preset(preset, config, in_nf4=args.quantize != "none")
    else:
        engine = engine or Plain()
        source = replace(_source(args, engine, frozen=frozen), flag=flag)
        config = read_config(source, makes_dense=engine.makes_dense)
        if is_classifier(config) and not rewards:
            print_rank0(
                f"{args.model_name_or_path} is a classifier or a model of rewards: it is read as a "
                "language model, without its head"
            )
    (as_reward_model if rewards else as_language_model)(config)
    set_dropout_(config, args.dropout)
    text = config.get_text_config() if takes_images(config) else config
    _check_layers(args, config, text)
    check_parts("--parts", args.patch_options, config)
    _check_context(text, args, flag)
    check_experts(args, config)
    check_lora(args, config)
    return config


def _check_layers(args: ModelArguments, config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Raises UserError for a model whose layers, those of `text`, the class type cannot run."""
    known = text is config or config.model_type in PREFIXES
    if args.class_type == "custom" and not (known and family_of(text)):
        around = "" if text is config else f" around {text.model_type!r}"
        named = args.model_name_or_path or f"--preset {args.preset}"
        raise UserError(f"{named}: {not_known(f'{config.model_type!r}{around}')}")
    if args.class_type == "any" and (reason := why_not_any(config)):
        raise UserError(f"--class_type any: {config.model_type!r} {reason}")
    if args.schedules and (reason := _unfit(args.attn_backend, text)):
        raise UserError(reason)
    if args.schedules and kv_heads(text) % (args.head_groups or 1):
        raise UserError(
            f"--head_groups {args.head_groups} must divide the model's {kv_heads(text)} key/value "
            "heads"
        )


def _preset_config(
    name: str, vocab_size: int, special_ids: Mapping[str, int | None]
) -> PretrainedConfig:
    """Returns a preset's configuration. That of a vision-language model has the special tokens in
    its text's configuration, too, where its language model looks for them."""
    preset = copy.deepcopy(PRESETS[name])  # transformers writes into the nested ones
    if "text_config" in preset:
        preset["text_config"] |= special_ids
    else:
        preset = {"model_type": "llama", "vocab_size": vocab_size} | preset
    config: PretrainedConfig = AutoConfig.for_model(**preset | dict(special_ids))
    return config


def _unfit(backend: str, config: PretrainedConfig) -> str | None:
    """Says what the model needs that the backend has not; None if it has all. `flash` of CPUs has
    all."""
    softcap = score_cap(config) is not None and torch.cuda.is_available()
    return lacks(backend, windows=has_windows(config), softcap=softcap)


def check_request(args: ModelArguments, device: torch.device) -> None:
    """Raises UserError where the class type or the attention needs a package or GPU that is not
    there, or --quantize or --lora_r does. Cheap: call it before data is read."""
    check_peft(args)
    check_quantize(args)
    if args.schedules:
        choose_attention(args.attn_backend, device, _dtype(args.dtype, device))
    else:
        _check_liger(args, device)
        _hf_attention(args, device)


def compute_dtype(args: ModelArguments, device: torch.device) -> torch.dtype:
    """Returns the dtype that `--dtype` means on this device."""
    return _dtype(args.dtype, device)


def weights_bytes(args: ModelArguments, config: PretrainedConfig, device: torch.device) -> int:
    """Returns the size of the model's parameters, without making them; 0 for a class that is not
    transformers' own."""
    try:
        model = without_storage(config)
    except Exception as error:
        raise unreadable(args.source, error, "its config.json: ") from error
    if model is None:
        return 0
    return sum(p.numel() for p in model.parameters()) * _dtype(args.dtype, device).itemsize


def saved_bytes(args: ModelArguments, config: PretrainedConfig, device: torch.device) -> int:
    """Returns the size of the weights in a checkpoint: the model's, or its adapters'."""
    if args.lora_r is not None:
        return adapter_bytes(args, config)
    return weights_bytes(args, config, device)


def load_model(
    args: ModelArguments,
    config: PretrainedConfig,
    *,
    device: torch.device,
    engine: Engine | None = None,
    role: str = "",
    with_images: bool = False,
) -> PreTrainedModel:
    """Returns the model in `args.dtype`, patched as `args.class_type` says, in a PeftModel if it
    gets adapters. Prints what was patched, and the model's `role` if it is not the one that trains.
    With `with_images` batches will have images.

    Pretrained weights are read (under ZeRO-3 and FSDP2 the first process hands the others their
    parts); a preset's are random (seed them with `transformers.set_seed`).
    Raises UserError where a package, a GPU or a weight is missing.
    """
    check_request(args, device)
    dtype = _dtype(args.dtype, device)
    model = _with_weights(args, config, dtype, device, engine or Plain(), frozen=bool(role))
    keep_layout_(model)
    of_tower = _train_towers(model, args, with_images=with_images)
    if args.class_type != "any":  # whose patch does it
        keep_documents_apart(model)
    patched = patch_as(model, args.patch_options, device)
    if args.schedules and not role:
        foretell(model, lambda reason: is_dropout(config, reason))
    line = (
        f"{role and role + ', '}{args.class_type}: {type(model).__name__}, "
        f"{counted(sum(map(whole_numel, model.parameters())))} parameters in "
        f"{str(dtype).removeprefix('torch.')}; {patched}{of_tower}"
    )
    if args.lora_r is not None:
        model, adapters = add_adapters(model, args)
        line += f"; {adapters}"
    print_rank0(line)
    return model


def _source(args: ModelArguments, engine: Engine, *, frozen: bool) -> ModelSource:
    """Returns where a model comes from that trains, or that is `frozen`, as a reference is."""
    source = args.source
    if frozen:
        source = replace(source, frozen=True, keeps_packed=args.schedules)
    return source.under(shards=engine.shards_states)


def _with_weights(
    args: ModelArguments,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    engine: Engine,
    *,
    frozen: bool,
) -> Any:
    """Returns the model with its weights, random or read, in 4 bits if asked for."""
    attention = attention_name(args, config, device)
    rests = resting_place(args, config, dtype, device)
    quantises = args.quantize != "none"
    source = _source(args, engine, frozen=frozen)
    if source.name is None and (packed := packed_files(source, config)) and packed.form:
        print_rank0(f"--preset {source.preset}: random weights in {packed.name}, as its files are")
        return random_packed(config, packed.form, device, dtype=dtype, attention=attention)
    if args.model_name_or_path is None or engine.fills_weights:
        with engine.random_weights(device, weights_bytes(args, config, device)):
            model = auto_class(config).from_config(
                config,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=args.trust_remote_code,
            )
    else:
        # bitsandbytes would quantise towers as well, and read them to the GPU.
        quantises &= config.model_type in PREFIXES
        more = {} if quantises else quantised_loading(args, dtype, device, config, rests)
        model = read_model(source, config, dtype=dtype, attention=attention, **more)
        if config.model_type in PREFIXES and hasattr(next(model.parameters()), "ds_id"):
            # ZeRO-3's reading notes conversions that no name has gone through; saving would undo
            # them. Without any noted it takes those of the model's class.
            vars(model).pop("_weight_conversions", None)
        if holds_nf4(config):
            compute_in_(model, dtype)
            quantise_experts_(model, device, rests)
    if quantises:
        quantise_(model, device, rests)
    if rests != device:
        leave_waiting_(model, device)
    return model


def _train_towers(model: Any, args: ModelArguments, *, with_images: bool) -> str:
    """Trains the vision towers if asked for, or freezes them. Returns what is said of them."""
    if with_images:
        for _, tower in towers(model):
            tower.requires_grad_(args.train_vision)
        return f"; the vision tower is {'trained, too' if args.train_vision else 'frozen'}"
    if any(towers(model)):
        rest_(model)
        return "; the vision tower stays in host memory, frozen"
    return ""


def attention_name(
    args: ModelArguments, config: PretrainedConfig, device: torch.device
) -> str | None:
    """Returns Hugging Face's name of the attention in its own layers; None for its choice. Raises
    UserError for one that cannot run."""
    if args.schedules:
        return default_attention(config)
    return _hf_attention(args, device, config)


def _check_liger(args: ModelArguments, device: torch.device) -> None:
    if args.class_type != "liger":
        return
    if not installed("liger_kernel"):
        raise UserError(f"--class_type liger needs Liger-Kernel: {pip_install('liger-kernel')}")
    if device.type == "cpu":
        raise UserError(
            "--class_type liger needs a GPU (Liger-Kernel has Triton kernels only); "
            "on this machine use --class_type vanilla or custom"
        )


def _hf_attention(args: ModelArguments, device: torch.device, config: Any = None) -> str | None:
    """Returns Hugging Face's name of the attention behind `--attn_backend`, for vanilla and liger;
    None for Hugging Face's own choice."""
    backend: str = args.attn_backend
    if backend == "auto" or args.class_type == "any" and backend in OUR_ATTENTION:
        # Not fa4: transformers 5.17 hands flash-attn-4 a tensor as max_seqlen for packed rows,
        # which it refuses.
        return default_attention(config)
    if backend not in HF_ATTENTION:
        raise UserError(
            f"--attn_backend {backend} is for the schedule of --class_type custom; Hugging Face's "
            f"layers take {', '.join(HF_ATTENTION)} or auto"
        )
    if backend == "sdpa" and config and not has_sdpa(config):
        raise UserError(
            f"--attn_backend sdpa: transformers computes models of type {config.model_type!r} by "
            "eager alone, or by fa2; use auto"
        )
    if backend in ("fa2", "fa4") and device.type != "cuda":
        raise UserError(f"--attn_backend {backend} needs a GPU; use --attn_backend sdpa")
    if backend == "fa2" and not installed("flash_attn"):
        raise UserError("--attn_backend fa2 is not installed: pip install flash-attn")
    if backend == "fa4":
        size = max(head_dims(config)) if config else flash4.SMALLEST_HEAD
        if reason := flash4.why_not(device, size):
            raise UserError(f"--attn_backend fa4: flash-attn-4 {reason}; use sdpa")
    return HF_ATTENTION[backend]


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _check_context(config: PretrainedConfig, args: ModelArguments, flag: str) -> None:
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
        whose = "the model's" if flag == ModelSource.flag else f"{flag}'s"
        raise UserError(
            f"--seq_len {args.seq_len} is above {whose} max_position_embeddings {limit}: "
            "shorten it, scale its RoPE (--rope_scaling yarn), or add --extend_context to train "
            "beyond with RoPE as it is"
        )
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    says = {
        "default": "keeps its frequencies, so the new positions are extrapolated",
        "dynamic": f"raises its base for rows beyond {limit}",
    }.get(kind, f"keeps its factor {rope.get('factor')}, so the new positions are extrapolated")
    # yarn, dynamic and longrope compute their frequencies from max_position_embeddings.
    if kind in ("default", "linear", "llama3"):
        config.max_position_embeddings = args.seq_len
    print_rank0(f"context extended from {limit} to {args.seq_len} tokens: RoPE {kind!r} {says}")


_FULL = "full_attention"


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the parameters of the model's RoPE. If each type of layer has its own, as in Gemma 3,
    they are those of layers without a window: a window's tokens stay near, however long a row is.
    """
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found.get(_FULL, found))


def _scale_rope(config: PretrainedConfig, args: ModelArguments) -> None:
    """Stretches the model's RoPE by seq_len / its positions. The saved config says so too, and any
    transformers reads it. YaRN: Peng et al. 2023, arXiv 2309.00071."""
    rope = _rope(config)
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
    of_types = config.rope_parameters if _FULL in (config.rope_parameters or {}) else None
    config.rope_parameters = rope if of_types is None else {**of_types, _FULL: rope}
    config.max_position_embeddings = args.seq_len
    try:
        known = _rope(type(config).from_dict(config.to_dict()))
    except Exception:  # each of transformers' checks has a type of its own
        known = {}
    if known.get("rope_type") != args.rope_scaling:  # Phi3 knows LongRoPE alone
        raise UserError(
            f"--rope_scaling {args.rope_scaling} is impossible with models of type "
            f"{config.model_type!r}, whose configuration has no such RoPE: use --extend_context"
        )
    kind = f"{args.rope_scaling} by {factor:g}"
    print_rank0(f"context extended from {limit} to {args.seq_len} tokens: RoPE {kind}")
