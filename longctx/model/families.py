"""What the schedule must know of a transformers model: where a layer's weights are, and that the
modules around them do nothing else.

The schedule reads weights and never calls the projections, norms, attention or MLP of a layer. So a
module there with a forward of its own (a LoRA adapter, a quantised weight) or with hooks would be
passed by without a word: `why_not_scheduled` finds it, and Hugging Face's layers run instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

from longctx.model.layer import Weights

_MODEL = {"": llama.LlamaModel, "rotary_emb": llama.LlamaRotaryEmbedding}
"""What the base model is made of, and whose forward the schedule stands in for."""
_LAYER: dict[str, type[nn.Module]] = {
    "self_attn": llama.LlamaAttention,
    "self_attn.q_proj": nn.Linear,
    "self_attn.k_proj": nn.Linear,
    "self_attn.v_proj": nn.Linear,
    "self_attn.o_proj": nn.Linear,
    "mlp": llama.LlamaMLP,
    "mlp.gate_proj": nn.Linear,
    "mlp.up_proj": nn.Linear,
    "mlp.down_proj": nn.Linear,
    "input_layernorm": llama.LlamaRMSNorm,
    "post_attention_layernorm": llama.LlamaRMSNorm,
}
"""The same for a layer."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ENGINES = ("deepspeed.", "torch.distributed.")
"""Whose hooks gather weights and change no value."""


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


def why_not_scheduled(model: LlamaForCausalLM) -> str | None:
    """The first module that the schedule would pass by, in a few words; None if none is.

    Looked for on every forward, in 0.3 ms for 32 layers: adapters and hooks come and go.
    """
    return next(_strangers(model), None)


def _strangers(model: LlamaForCausalLM) -> Iterator[str]:
    for name, expected in _MODEL.items():
        yield from _problems(model.model.get_submodule(name), expected, "model", name)
    for i, layer in enumerate(model.model.layers):
        for name, expected in _LAYER.items():
            module: Any = layer
            for step in name.split("."):
                module = module._modules[step]
            yield from _problems(module, expected, f"model.layers.{i}", name)


def _problems(module: nn.Module, expected: type[nn.Module], owner: str, name: str) -> Iterator[str]:
    if type(module).forward is not expected.forward or "forward" in module.__dict__:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        yield f"{owner}.{name}, a {kind} with a forward of its own".replace(".,", ",")
    for hooks in _HOOKS:
        for hook in getattr(module, hooks).values():
            if not str(getattr(hook, "__module__", "")).startswith(_ENGINES):
                yield f"hooks on {owner}.{name}".removesuffix(".")
