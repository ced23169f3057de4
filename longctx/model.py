"""Builds the model a run trains, and patches it as `--class_type` says.

    vanilla   Hugging Face's model as it is
    liger     Liger-Kernel's full patch (Liger replaces functions of transformers for the process)
    custom    one *instance* of Hugging Face's LlamaForCausalLM gets longctx's training forward;
              its class, its parameters, their names and the files it saves stay Hugging Face's

With labels, the custom forward computes lm_head and cross-entropy together, chunk by chunk
(`longctx/loss.py`), so that the (tokens, vocabulary) logits never exist: at 131072 tokens and a
vocabulary of 128256 they are 31 GiB in bf16, and vanilla holds them twice more in fp32. Without
labels (generation, logits) the call goes to Hugging Face's own forward.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from longctx.config import ModelArguments, UserError
from longctx.loss import linear_cross_entropy

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: dict[str, dict[str, Any]] = {
    # 1.5M parameters over its embedding: a step of 4096 tokens takes about a second on two cores.
    "tiny": dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": dict(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={**_LLAMA_3_ROPE, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={**_LLAMA_3_ROPE, "factor": 8.0},
        tie_word_embeddings=False,
    ),
}

_ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "fa2": "flash_attention_2",
    "fa4": "flash_attention_4",
}


def load_config(args: ModelArguments, *, vocab_size: int) -> PretrainedConfig:
    """The model's configuration, checked against the run before any weight is touched.

    `vocab_size` is the tokenizer's; a preset without a vocabulary of its own (tiny) takes it.
    Raises UserError for a model that cannot be read, does not fit `custom`, or is too short.
    """
    if args.model_name_or_path is None:
        config = LlamaConfig(**{"vocab_size": vocab_size, **PRESETS[args.preset or "tiny"]})
    else:
        name, where = _pretrained(args)
        try:
            config = AutoConfig.from_pretrained(name, **where)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"cannot load a model from {args.model_name_or_path!r}: {reason}"
            ) from error
    if args.class_type == "custom" and config.model_type != "llama":
        raise UserError(
            f"--class_type custom patches models of the Llama family; {args.model_name_or_path} "
            f"is of type {config.model_type!r}: use --class_type vanilla or liger"
        )
    _check_context(config, args)
    return config


def load_model(
    args: ModelArguments, config: PretrainedConfig, *, device: torch.device
) -> PreTrainedModel:
    """The model in `args.dtype`, patched as `args.class_type` says; prints what was patched.

    Pretrained weights are read; a preset's are random (seed them with `transformers.set_seed`)
    and made on `device`. Raises UserError where a package or a GPU is missing.
    """
    attention = _attention(args.attn_backend, device)
    _check_liger(args, device)
    dtype = _dtype(args.dtype, device)
    if args.model_name_or_path is None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    else:
        name, where = _pretrained(args)
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, attn_implementation=attention, **where
        )
    patched = patch(model, args.class_type)
    print(
        f"{args.class_type}: {type(model).__name__}, {model.num_parameters() / 1e9:.3f}B parameters"
        f" in {dtype}, {attention} attention; {patched}"
    )
    return model


def patch(model: PreTrainedModel, class_type: str) -> str:
    """Patches `model` in place and says in a few words what was patched."""
    if class_type == "vanilla":
        return "nothing patched"
    if class_type == "liger":
        return _patch_liger(model)
    if not isinstance(model, LlamaForCausalLM):
        raise UserError(f"custom patches LlamaForCausalLM, got {type(model).__name__}")
    model.forward = MethodType(_custom_forward, model)
    return "patched: lm_head + cross-entropy in chunks (training and evaluation)"


@can_return_tuple
def _custom_forward(
    self: LlamaForCausalLM,
    input_ids: Tensor | None = None,  # (B, S)
    attention_mask: Tensor | None = None,  # (B, S)
    position_ids: Tensor | None = None,  # (B, S), restarting at every packed document
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,  # (B, S, D)
    labels: Tensor | None = None,  # (B, S), not shifted; -100 is ignored
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    num_items_in_batch: int | Tensor | None = None,
    shift_labels: Tensor | None = None,  # (B, S), already shifted; wins over labels, as in HF
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """LlamaForCausalLM.forward, except that with labels it returns the loss and no logits."""
    inputs = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    wants_all_of_hf = not isinstance(logits_to_keep, int) or logits_to_keep != 0
    if labels is None or wants_all_of_hf:
        loss_inputs = dict(num_items_in_batch=num_items_in_batch, shift_labels=shift_labels)
        given = {k: v for k, v in loss_inputs.items() if v is not None}
        return LlamaForCausalLM.forward(
            self, labels=labels, logits_to_keep=logits_to_keep, **inputs, **given
        )
    outputs = self.model(**inputs)
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
    hidden = outputs.last_hidden_state
    loss = linear_cross_entropy(
        hidden,
        self.lm_head.weight,
        shift_labels.to(hidden.device),
        bias=self.lm_head.bias,
        num_items=num_items_in_batch,
    )
    return CausalLMOutputWithPast(
        loss=loss,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


def _patch_liger(model: PreTrainedModel) -> str:
    from liger_kernel.transformers import monkey_patch

    kind = model.config.model_type
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise UserError(f"Liger-Kernel has no patch for {kind!r} models: use --class_type vanilla")
    apply(model=model)
    return "patched by Liger-Kernel: RMSNorm, RoPE, SwiGLU, fused linear cross-entropy"


def _check_liger(args: ModelArguments, device: torch.device) -> None:
    if args.class_type != "liger":
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError("--class_type liger needs Liger-Kernel: pip install 'longctx[liger]'")
    if device.type == "cpu":
        raise UserError(
            "--class_type liger needs a GPU (Liger-Kernel has Triton kernels only); "
            "on this machine use --class_type vanilla or custom"
        )


def _attention(backend: str, device: torch.device) -> str:
    """Hugging Face's name of the attention implementation behind `--attn_backend`."""
    modules = {"fa2": "flash_attn", "fa4": "flash_attn.cute"}
    if backend == "auto":
        backend = "fa4" if device.type == "cuda" and _installed(modules["fa4"]) else "sdpa"
    if backend in modules:
        if device.type != "cuda":
            raise UserError(f"--attn_backend {backend} needs a GPU; use --attn_backend sdpa")
        if not _installed(modules[backend]):
            package = {"fa2": "flash-attn", "fa4": "'longctx[fa4]'"}[backend]
            raise UserError(f"--attn_backend {backend} is not installed: pip install {package}")
    return _ATTENTION[backend]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


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
        path = Path(name)
        if not path.is_file():
            raise UserError(f"no such GGUF file: {name}")
        if not _installed("gguf"):
            raise UserError(f"{name} needs the gguf package: pip install gguf")
        return str(path.parent), {**where, "gguf_file": path.name}
    return name, where


def _check_context(config: PretrainedConfig, args: ModelArguments) -> None:
    """Refuses rows longer than the model's positions, or says what RoPE does with them."""
    limit = config.max_position_embeddings
    if args.seq_len <= limit:
        return
    if not args.extend_context:
        raise UserError(
            f"--seq_len {args.seq_len} is above the model's max_position_embeddings {limit}: "
            "shorten it, or add --extend_context to train beyond"
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
    print(f"context extended from {limit} to {args.seq_len} tokens: RoPE {kind!r} {says}")
