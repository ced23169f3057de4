"""What the schedule must know of a transformers model: where a layer's weights are, and that the
modules around them do nothing else.

The schedule reads weights and stands in for the forward of every module of the base model but the
embedding. So a module there with a forward of its own (a LoRA adapter, a quantised weight, another
activation), with hooks, or with another epsilon or scale than the configuration says, would be
passed by without a word: `why_not_scheduled` finds it, and Hugging Face's layers run instead.
`why_not_chunked` does the same for lm_head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch.nn.modules.module as torch_module
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longctx.model.layer import Weights

_LLAMA = "transformers.models.llama.modeling_llama"
_LINEAR: tuple[str, ...] = ("torch.nn.modules.linear.Linear",)
_NORM: tuple[str, ...] = (f"{_LLAMA}.LlamaRMSNorm",)
_LAYER: tuple[str, ...] = (f"{_LLAMA}.LlamaDecoderLayer",)
_IN_MODEL: dict[str, tuple[str, ...]] = {
    "": (f"{_LLAMA}.LlamaModel",),
    "rotary_emb": (f"{_LLAMA}.LlamaRotaryEmbedding",),
}
_IN_LAYER: dict[str, tuple[str, ...]] = {
    "self_attn": (f"{_LLAMA}.LlamaAttention",),
    "self_attn.q_proj": _LINEAR,
    "self_attn.k_proj": _LINEAR,
    "self_attn.v_proj": _LINEAR,
    "self_attn.o_proj": _LINEAR,
    "mlp": (f"{_LLAMA}.LlamaMLP",),
    "mlp.gate_proj": _LINEAR,
    "mlp.up_proj": _LINEAR,
    "mlp.down_proj": _LINEAR,
    "mlp.act_fn": ("transformers.activations.SiLUActivation", "torch.nn.modules.activation.SiLU"),
    "input_layernorm": _NORM,
    "post_attention_layernorm": _NORM,
}
"""Module -> whose forward it may have. By name, so that a class whose forward was exchanged for the
whole process (as Liger-Kernel does) is another one."""

_AFTER = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_forward_pre_hooks", *_AFTER)
_HARMLESS = (
    "deepspeed.",  # engines gather weights
    "torch.distributed.",
    "torch.utils.",  # counters of FLOPs and memory
    "transformers.utils.output_capturing",  # left behind by output_hidden_states=True
    "longctx.",
)
"""Whose hooks change no value."""


def layer_weights(layer: Any) -> Weights:
    """The parameters of a Llama layer, as the schedule takes them."""
    attn, mlp = layer.self_attn, layer.mlp
    return Weights(
        norm1=layer.input_layernorm.weight,
        q=attn.q_proj.weight,
        k=attn.k_proj.weight,
        v=attn.v_proj.weight,
        o=attn.o_proj.weight,
        norm2=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        q_bias=attn.q_proj.bias,
        k_bias=attn.k_proj.bias,
        v_bias=attn.v_proj.bias,
        o_bias=attn.o_proj.bias,
        gate_bias=mlp.gate_proj.bias,
        up_bias=mlp.up_proj.bias,
        down_bias=mlp.down_proj.bias,
    )


def base_of(model: nn.Module) -> Any | None:
    """The base model that the schedule knows: the model itself, or what it is made of."""
    parts = (model, getattr(model, getattr(model, "base_model_prefix", ""), None))
    return next((part for part in parts if isinstance(part, LlamaModel)), None)


def head_of(model: nn.Module) -> Any | None:
    """lm_head of a causal model."""
    return model.lm_head if isinstance(model, LlamaForCausalLM) else None


def replaceable(module: nn.Module) -> bool:
    """Whether the module is a model, layer, norm or lm_head whose forward may be exchanged for
    ours."""
    if isinstance(module, (LlamaForCausalLM, LlamaModel)):
        return True
    return _forward_name(type(module).forward) in _LAYER + _NORM + _LINEAR


def is_ours(module: nn.Module) -> bool:
    """Whether the module runs a forward that `patch` put there."""
    return type(vars(module).get("forward")).__module__ == "longctx.model.forwards"


def why_not_scheduled(base: LlamaModel) -> str | None:
    """The first thing that the schedule would pass by, in a few words; None if there is none.

    Looked for on every forward, in 0.9 ms for 32 layers: adapters and hooks come and go.
    """
    return next(_strangers(base), None)


def why_not_chunked(model: LlamaForCausalLM) -> str | None:
    """The same for lm_head and the loss, which need all logits then."""
    head: Any = model.lm_head
    found = _problems(head, _LINEAR, "lm_head", patched=True, hooks=_AFTER)
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        return "a loss of its own"
    return next(found, None)


def _strangers(base: LlamaModel) -> Iterator[str]:
    config = base.config
    for part, known in _IN_MODEL.items():
        where = f"model.{part}".rstrip(".")
        yield from _problems(base.get_submodule(part), known, where, patched=not part)
    yield from _problems(base.norm, _NORM, "model.norm", patched=True)
    if len(base.layers) != config.num_hidden_layers:
        yield f"{len(base.layers)} layers where the configuration has {config.num_hidden_layers}"
    attention = config._attn_implementation
    if attention != "eager" and not _is_transformers(ALL_ATTENTION_FUNCTIONS.get(attention)):
        yield f"the attention implementation {attention!r}, which transformers does not ship"
    if any(_hooks_of(torch_module, (f"_global{hooks}" for hooks in _HOOKS))):
        yield "hooks on all modules"
    for i, layer in enumerate(base.layers):
        where = f"model.layers.{i}"
        yield from _problems(layer, _LAYER, where, patched=True)
        for name, known in _IN_LAYER.items():
            module: Any = layer
            for step in name.split("."):
                module = module._modules[step]
            yield from _problems(module, known, f"{where}.{name}")
        yield from _other_settings(layer, config, where)


def _problems(
    module: nn.Module,
    known: tuple[str, ...],
    where: str,
    *,
    patched: bool = False,  # it must have our forward
    hooks: tuple[str, ...] = _HOOKS,  # that matter
) -> Iterator[str]:
    own = "forward" in vars(module)
    if _forward_name(type(module).forward) not in known or own != patched or own != is_ours(module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        yield f"{where}, a {kind} with a forward that the schedule does not know"
    if any(_hooks_of(module, hooks)):
        yield f"hooks on {where}"


def _other_settings(layer: Any, config: Any, where: str) -> Iterator[str]:
    attention = layer.self_attn
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        if norm.variance_epsilon != config.rms_norm_eps:
            yield f"another epsilon than the configuration's in {where}"
    if attention.scaling != attention.head_dim**-0.5:
        yield f"an attention scale of its own in {where}"
    if attention.attention_dropout and layer.training:
        yield "attention dropout"
    biases = [part.bias is None for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    if len(set(biases)) > 1:
        yield f"biases on some of q, k, v only in {where}"


def _hooks_of(owner: Any, names: Iterable[str]) -> Iterator[Any]:
    """The hooks that may change something."""
    for name in names:
        for hook in getattr(owner, name).values():
            while isinstance(hook, partial):
                hook = hook.func
            module = getattr(hook, "__module__", None) or type(hook).__module__
            if not module.startswith(_HARMLESS):
                yield hook


@cache
def _forward_name(forward: Callable[..., Any]) -> str:
    return f"{forward.__module__}.{forward.__qualname__}".removesuffix(".forward")


def _is_transformers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers.")
