"""Patches a model of Hugging Face: this one instance gets longctx's training forward.

    model = longctx.patch(model, keep="auto")     and back: longctx.unpatch(model)

Its class, its parameters, their names and the files it saves stay Hugging Face's. In training the
base model runs the scheduled layers (longctx/layer), and with labels lm_head and cross-entropy run
chunk by chunk (head/loss.py), so that neither a layer's activations nor the (tokens, vocabulary)
logits ever exist as a whole: at 131072 tokens and a vocabulary of 128256 the logits are 31 GiB in
bf16, and vanilla holds them twice more in fp32. The forwards are in longctx/forwards.

`patch_as` is the switch of `longctx train --class_type`:

    vanilla   Hugging Face's model as it is
    liger     Liger-Kernel's full patch (Liger replaces functions of transformers for the process)
    custom    longctx's schedule, or single parts of it
    any       Hugging Face's layers as checkpoints of ours, our attention and loss (any_model)
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import is_fsdp_enabled

from longctx.any_model.auxiliary_models import calling_trainer, models_beside
from longctx.any_model.parts import attach_parts, check_family, detach_loss
from longctx.any_model.patch import OPTIONS as OF_ANY
from longctx.any_model.patch import patch_any, unpatch_any
from longctx.any_model.runtime import any_part
from longctx.errors import UserError, print_rank0
from longctx.families.adapters import inside_peft, keep_layout_
from longctx.families.families import base_of, head_of, mixes, not_known, score_cap
from longctx.families.stand_ins import has_packed_experts
from longctx.families.strangers import is_trls_head
from longctx.forwards.attach import attach, attach_around, detach
from longctx.forwards.said import foretell
from longctx.mixers.fla_kernels import prepare_fla, prepare_imported_fla
from longctx.runtime.runtime import Runtime, runtime_of
from longctx.settings import (
    FUSED,
    PARTS,
    SCHEDULE,
    WHOLE,
    Backend,
    ClassType,
    Keeping,
    Offload,
    PatchOptions,
    check_names,
    chosen_parts,
)
from longctx.system import installed

_NOT_ASKED = ("class_type", "seq_len")
OPTIONS = tuple(option.name for option in fields(PatchOptions) if option.name not in _NOT_ASKED)
"""The options of `patch`, which `longctx train` has by the same names."""
_DEFAULTS = {**vars(PatchOptions()), "parts": SCHEDULE}
Model = TypeVar("Model", bound=PreTrainedModel)


def patch(
    model: Model,
    *,
    parts: Literal["schedule"] | Collection[str] = SCHEDULE,
    any_model: bool = False,
    strict: bool = False,
    keep: Keeping = "auto",
    offload_activations: Offload = "auto",
    attn_backend: Backend = "auto",
    head_groups: int | None = None,
    tile_tokens: int | None = None,
    host_memory_gib: float | None = None,
    share_prefixes: bool = False,
    cuda_graphs: Literal["auto", "off"] = "auto",
    **unknown: NoReturn,
) -> Model:
    """Patches `model`, or the model in a PeftModel, in place, prints a line that says what runs,
    and returns it. Patch before you build a trainer around the model; with TRL's trainers the order
    does not matter.

    `model` is a causal language model of transformers, or its base model. Its class, parameters and
    files stay Hugging Face's, and so do the shapes of its arguments and outputs: input_ids (B, S),
    labels (B, S), a loss of shape (). Device and dtype are the model's.

    `parts` is "schedule", the scheduled layers and the loss in chunks, or a collection of single
    kernels to put into Hugging Face's layers, which keep their attention, their checkpoints and
    everything else: "rope", "rms_norm", "layer_norm", "swiglu", "geglu", as far as the family has
    them, and "cross_entropy" over whole logits or "fused_linear_cross_entropy" without them.

    `any_model=True` patches any causal language model of transformers, also of a family that
    longctx does not know: its layers stay Hugging Face's, and run as checkpoints whose inputs wait
    on the GPU or the host; attention and loss are ours if a test shows that they equal the model's
    (any_model/). Its options are `offload_activations`, `attn_backend` (also "sdpa" and "eager",
    the model's own) and `host_memory_gib`.

    Options of the schedule, with the names, values and defaults of `longctx train`; `strict` also
    applies to parts:

        strict               a call that the schedule does not cover is a UserError; without it
                             Hugging Face's layers run, and one line reports it once
        keep                 what each layer keeps for backward: "x" (its input alone), "o", "h",
                             "qkv", "all", or "auto", the fastest that fits
        offload_activations  where kept activations wait: "none" (GPU), "all" (host), or "auto"
        attn_backend         "auto", "fa4", "cudnn", "flash" or "math"
        head_groups          the parts in which attention runs; None: by free memory
        tile_tokens          the tokens that token-wise work takes at a time; None: by free memory
        host_memory_gib      GiB of host memory for activations; None: all that is available
        share_prefixes       whether a prompt with which several rows begin is computed once
        cuda_graphs          "auto": the layers of batches of at most 32768 tokens run as CUDA
                             graphs where batches are alike; "off"

    Under accelerate's FSDP all but the first process may have no weights yet, as from_pretrained
    leaves them. Raises UserError for a model that is none of the supported families, is patched
    already, has no weights or is quantised, and for an unknown option or value.

    Example:
        >>> import longctx, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
        >>> heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = longctx.patch(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), keep="x")
        longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + ...
        >>> ids = torch.randint(64, (1, 16))
        >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    options: dict[str, Any] = dict(
        parts=parts,
        keep=keep,
        offload_activations=offload_activations,
        attn_backend=attn_backend,
        head_groups=head_groups,
        tile_tokens=tile_tokens,
        host_memory_gib=host_memory_gib,
        share_prefixes=share_prefixes,
        cuda_graphs=cuda_graphs,
    )
    args = checked_options("patch", options | unknown, any_model=any_model)
    inner = inside_peft(model)
    if any_model:
        print_rank0(f"longctx patched: {patch_any(inner, args, inner.device)}")
        return model
    _refuse(inner)
    if any(p.is_meta for p in model.parameters()) and not is_fsdp_enabled():
        raise UserError(
            "this model has no weights yet (meta tensors): load them and patch then (after "
            "to_empty(), after fully_shard)"
        )
    base: Any = base_of(inner)
    patch_custom(inner, args, base.device)
    print_rank0(said_of(inner))
    base.longctx.surround(strict=strict)
    if args.schedules:
        foretell(inner)
    return model


def checked_options(
    who: str, options: Mapping[str, Any], *, any_model: bool = False
) -> PatchOptions:
    """Returns the options of a call of `who`. Raises UserError for an unknown name or value, and
    for an option that single parts, or any model, do not use."""
    _refuse_switches(who, options)
    for name, value in options.items():
        if name not in OPTIONS:
            raise UserError(f"{who} has no option {name!r}; did you mean {_nearest(name)}?")
        _check_choice(who, name, value)
    parts = chosen_parts(f"{who}: parts", options.get("parts"))
    given = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
    class_type: ClassType = "any" if any_model else "custom"
    args = PatchOptions(**{**options, "parts": parts, "class_type": class_type})
    if any_model:
        for name in given.keys() - {*OF_ANY}:
            raise UserError(f"{who}: {name} is of the schedule, and any_model runs without it")
        return args
    if parts is not None:
        check_names(f"{who}: parts", parts, PARTS)
        for name in given.keys() - {"parts"}:
            raise UserError(f"{who}: {name} is of the schedule, and parts run without it")
    return args


def _refuse_switches(who: str, options: Mapping[str, Any]) -> None:
    """Raises UserError for Liger-Kernel's switches, `rope=False`, with the parts that they mean."""
    switches = {n: on for n, on in options.items() if n in PARTS and isinstance(on, bool)}
    if not switches:
        return
    on = dict.fromkeys(("rope", "rms_norm", "swiglu", FUSED), True) | switches
    on[FUSED] &= not on.get(WHOLE, False)
    said = ", ".join(f"{name}={value}" for name, value in switches.items())
    kernels = [name for name, is_on in on.items() if is_on]
    raise UserError(
        f"{who}: {said} is a switch of Liger-Kernel's; here parts=[...] names the kernels to put "
        f"into Hugging Face's layers: parts={kernels} is what it would switch on; without parts "
        "the schedule has all of them"
    )


def _nearest(name: str) -> str:
    return difflib.get_close_matches(name, (*_CALLS, *OPTIONS), n=1, cutoff=0.0)[0]


_CALLS = ("strict", "any_model")
"""The arguments of `patch` that are not settings of the patched model."""


def said_of(model: PreTrainedModel) -> str:
    """Returns the line that says what runs in a patched model."""
    args = base_of(model).longctx.args  # type: ignore[union-attr]
    kept = f"; keep={args.keep}, offload_activations={args.offload_activations}"
    return f"longctx {_patched(model)}{kept if args.schedules else ''}"


def _patched(model: PreTrainedModel) -> str:
    base: Any = base_of(model)
    runtime = base.longctx
    if not runtime.args.schedules:
        return f"patched: {', '.join(runtime.args.parts)}, in Hugging Face's layers"
    said = f"{len(base.layers)} scheduled decoder layers, {runtime.backend} attention, RMSNorm"
    return f"patched: {said}" + ("" if head_of(model) is None else ", lm_head + cross-entropy")


class AutoLongctxModelForCausalLM:
    """AutoModelForCausalLM whose models are patched: `from_pretrained` and `from_config` take its
    arguments, and the options of `longctx.patch` by name, `strict` and `any_model` too. They raise
    the errors of both.

    Example:
        >>> import tempfile
        >>> from longctx import AutoLongctxModelForCausalLM
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, head_dim=8)
        >>> heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> folder = tempfile.mkdtemp()
        >>> Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
        >>> model = AutoLongctxModelForCausalLM.from_pretrained(folder, keep="auto", strict=True)
        longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + ...
        >>> type(model).__name__
        'Qwen3ForCausalLM'
    """

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> PreTrainedModel:
        return cls._made(AutoModelForCausalLM.from_pretrained, name_or_path, *args, **kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> PreTrainedModel:
        return cls._made(AutoModelForCausalLM.from_config, config, **kwargs)

    @classmethod
    def _made(cls, make: Callable[..., Any], *args: Any, **kwargs: Any) -> PreTrainedModel:
        _refuse_switches(cls.__name__, kwargs)
        options = {name: kwargs.pop(name) for name in (*_CALLS, *OPTIONS) if name in kwargs}
        kept = {name: value for name, value in options.items() if name not in _CALLS}
        checked_options(cls.__name__, kept, any_model=options.get("any_model", False))
        try:
            model = make(*args, **kwargs)
        except TypeError as error:
            # transformers passes unknown options on to the model's class, which refuses them.
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in kwargs:
                raise
            raise UserError(
                f"{make.__name__} has no option {found[1]!r}, neither transformers' nor longctx's; "
                f"did you mean {_nearest(found[1])}?"
            ) from error
        return patch(model, **options)


def _check_choice(who: str, name: str, value: Any) -> None:
    kind = get_type_hints(PatchOptions)[name]
    if get_origin(kind) is Literal and value not in get_args(kind):
        known = ", ".join(get_args(kind))
        raise UserError(f"{who}: {name}={value!r}: one of {known}")


def unpatch(model: Model) -> Model:
    """Removes the patch of `longctx.patch` from `model`, a causal language model, its base model or
    a PeftModel around one, and returns it. Weights and their gradients stay. Raises UserError for a
    model that is not patched, or whose experts are packed.

    Example:
        >>> import longctx
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
        >>> heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        >>> longctx.unpatch(longctx.patch(model)) is model
        longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + ...
        True
    """
    if patched := any_part(model):
        unpatch_any(patched)
        return model
    base = base_of(inside_peft(model))
    if base is None or runtime_of(base) is None:
        raise UserError(f"this {type(model).__name__} is not patched")
    if has_packed_experts(base):
        raise UserError(
            "the experts of this model are packed, which Hugging Face's layers cannot read: it "
            "stays patched"
        )
    whole = base.longctx.whole and base.longctx.whole()  # `model` may be its base model
    for module in (whole or model).modules():
        detach(module)
        detach_loss(module)
        for name in ("longctx", "_replicate_for_data_parallel"):
            vars(module).pop(name, None)
    return model


def patch_as(model: PreTrainedModel, args: PatchOptions, device: torch.device) -> str:
    """Patches `model` in place by `args.class_type`, and returns words for the patch."""
    if args.class_type in ("vanilla", "liger"):
        prepare_imported_fla(model)
    if args.class_type == "vanilla":
        return f"nothing patched; {model.config._attn_implementation} attention"
    if args.class_type == "liger":
        return _patch_liger(model, args.parts)
    if args.class_type == "any":
        return patch_any(model, args, device)
    return patch_custom(model, args, device)


# --- custom ----------------------------------------------------------------------------------


def patch_custom(model: PreTrainedModel, args: PatchOptions, device: torch.device) -> str:
    _refuse(model)
    keep_layout_(model)
    base: Any = base_of(model)
    if args.schedules and mixes(base.config):
        prepare_fla(base.config)
    if args.parts is not None:
        check_parts("parts", args, base.config)
        attach_parts(model, args.parts)
    runtime = Runtime.make(args, base.config, device, base.dtype)
    base.longctx = runtime
    runtime.at_next_pass(lambda: _patch_beside(args))
    if score_cap(base.config) is not None and base.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")  # sdpa would leave the cap of scores out
    if head_of(model) is not None:
        vars(model)["longctx"] = runtime
    if "forward" in vars(model) and args.fuses_loss:
        attach_around(model)
    attach(model)
    return _patched(model)


def check_parts(where: str, args: PatchOptions, config: Any) -> None:
    """Raises UserError for a part that a model of this configuration cannot take: one of ours, or
    one of Liger-Kernel's where it is installed."""
    if args.parts is None:
        return
    if args.class_type != "liger":
        check_family(where, args.parts, config.get_text_config())
    elif installed("liger_kernel"):
        takes = inspect.signature(_ligers_apply(config.model_type)).parameters
        switches = [n for n, x in takes.items() if n != "model" and x.kind is not x.VAR_KEYWORD]
        check_names(f"{where} of Liger-Kernel for {config.model_type!r}", args.parts, switches)


def _patch_beside(args: PatchOptions) -> bool:
    """Patches the reference or teacher of the calling trainer, inside the head and autocast that
    the trainer has put around it, and prints a line. Returns whether there is a trainer."""
    trainer = calling_trainer()
    for name, model in models_beside(trainer):
        base = base_of(model) if isinstance(model, PreTrainedModel) else None
        try:
            if base is None:  # or an engine's wrapper
                raise UserError(not_known(type(model).__name__))
            patch_custom(base, args, base.device)
            base.config.use_cache = False  # it scores rows: a cache would never be read
        except UserError as error:
            print_rank0(f"custom: Hugging Face's layers run in the {name}: {error}")
        else:
            print_rank0(f"custom: the {name} is patched, too")
    return trainer is not None


def _refuse(model: PreTrainedModel) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"patch takes a model of transformers; got {type(model).__name__}")
    base = base_of(model)
    if base is None:
        inside = getattr(getattr(model, "model", model), "language_model", None)
        language = "" if inside is None else f", whose language model is {type(inside).__name__}"
        raise UserError(not_known(type(model).__name__ + language))
    if runtime_of(base) is not None:
        raise UserError("this model is patched already: longctx.unpatch(model) first")
    for part in (model, base):
        own = vars(part).get("forward")
        if own is not None and not (part is not base and is_trls_head(own, part)):
            raise UserError(
                f"somebody has exchanged the forward of this {type(part).__name__}, which would be "
                "lost: patch before you build the trainer, and before accelerate prepares the model"
            )
    if getattr(model, "is_quantized", False) and not getattr(model, "is_loaded_in_4bit", False):
        method = getattr(model, "quantization_method", "unknown")
        raise UserError(f"this model is quantised ({method}), which the schedule cannot run")


# --- liger -----------------------------------------------------------------------------------


def _patch_liger(model: PreTrainedModel, parts: tuple[str, ...] | None) -> str:
    """Switches on these parts alone, or Liger-Kernel's own choice."""
    apply = _ligers_apply(model.config.model_type)
    said = "RMSNorm, RoPE, SwiGLU, fused linear cross-entropy"
    switches = {}
    if parts is not None:
        said = ", ".join(parts)
        takes = inspect.signature(apply).parameters
        switches = {name: name in parts for name, x in takes.items() if isinstance(x.default, bool)}
    apply(model=model, **switches)
    return f"patched by Liger-Kernel: {said}; {model.config._attn_implementation} attention"


def _ligers_apply(kind: str) -> Callable[..., None]:
    """Returns the function with which Liger-Kernel patches models of a type."""
    from liger_kernel.transformers import monkey_patch

    apply: Callable[..., None] | None = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise UserError(f"Liger-Kernel has no patch for {kind!r} models: use --class_type vanilla")
    return apply
