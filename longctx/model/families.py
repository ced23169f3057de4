"""What the schedule must know of a transformers model: where a layer's weights are, what it does
besides, and that the modules around them do nothing else.

A `Family` says so for the models of one kind; docs/add_a_family.md shows how to write one.

    llama  mistral  ministral  qwen2       sliding windows, biases
    qwen3                                  norms of q and k
    granite                                four scalars
    smollm3                                layers without RoPE
    seed_oss                               a head size of its own, dropout
    phi3                                   q, k, v in one parameter, gate and up in one

The schedule reads weights, and PEFT's LoRA adapters (adapters.py), and stands in for the forward of
every module of the base model but the embedding. So a module there with a forward of its own
(another kind of adapter, a quantised weight, another activation), with hooks, of another dtype, or
with another epsilon or scale than the configuration says, would be passed by without a word:
`why_not_scheduled` finds it, and Hugging Face's layers run instead. `why_not_chunked` does the same
for lm_head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longctx.model.adapters import (
    ADAPTED,
    QUANTISED,
    Applied,
    applied,
    inner_linears,
    is_adapted,
    unwrapped,
    why_not_applied,
    why_not_dense,
)
from longctx.model.layer import PROJECTIONS, Traits, Weights

Names = tuple[str, ...]
_LINEAR: Names = ("torch.nn.modules.linear.Linear",)
_ACTIVATION: Names = (
    "transformers.activations.SiLUActivation",
    "torch.nn.modules.activation.SiLU",
)


# --- what the families differ in -------------------------------------------------------------


def _linear(**modules: nn.Module) -> dict[str, Any]:
    """Fields of Weights: weights and biases."""
    weights = {name: module.weight for name, module in modules.items()}
    return weights | {f"{name}_bias": module.bias for name, module in modules.items()}


def _norms(layer: Any) -> dict[str, Any]:
    norms = dict(norm1=layer.input_layernorm, norm2=layer.post_attention_layernorm)
    norms |= {n: getattr(layer.self_attn, n, None) for n in ("q_norm", "k_norm")}
    return {name: norm and norm.weight for name, norm in norms.items()}


def _separate(layer: Any) -> Weights:
    attn, mlp = layer.self_attn, layer.mlp
    qkvo = dict(q=attn.q_proj, k=attn.k_proj, v=attn.v_proj, o=attn.o_proj)
    return Weights(
        **_norms(layer),
        **_linear(**qkvo, gate=mlp.gate_proj, up=mlp.up_proj, down=mlp.down_proj),
    )


def _fused(layer: Any) -> Weights:
    """As Phi3: one parameter for q, k, v and one for gate and up."""
    attn, mlp = layer.self_attn, layer.mlp
    linear = _linear(q=attn.qkv_proj, o=attn.o_proj, gate=mlp.gate_up_proj, down=mlp.down_proj)
    inside: dict[str, Any] = dict.fromkeys(("k", "v", "up"))
    return Weights(**_norms(layer), **linear, **inside)


def _no_window(config: Any, layer: int) -> int | None:
    return None


def _one_window(config: Any, layer: int) -> int | None:
    """As Mistral: the same for all layers."""
    window: int | None = config.sliding_window
    return window


def _window_by_type(config: Any, layer: int) -> int | None:
    """As Qwen2: some layers have it. `use_sliding_window` and `max_window_layers` have become
    `layer_types` by the time a configuration is made."""
    sliding = config.layer_types[layer] == "sliding_attention"
    window: int | None = config.sliding_window if sliding else None
    return window


def head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of models whose layers the schedule computes."""

    kind: str
    """transformers' `model_type`, which is also the name of its module."""
    prefix: str
    """Of the names of its classes."""
    weights: Callable[[Any], Weights] = _separate
    """Where a layer's parameters are."""
    linears: Names = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    """Its linear maps; q, k and v first."""
    fused: Names = ()
    """Those of several in one, which have no bias."""
    norms: Names = ("input_layernorm", "post_attention_layernorm")
    activation: str = "mlp.act_fn"
    dropouts: Names = ()
    """Modules that do nothing, unless they drop."""
    window: Callable[[Any, int], int | None] = _no_window
    """Of a configuration and the number of a layer."""
    traits: Callable[[Any, int], dict[str, Any]] = field(default=lambda config, layer: {})
    """What else of Traits is not Llama's."""
    embedding_multiplier: Callable[[Any], float] = field(default=lambda base: 1.0)
    logits_scaling: Callable[[Any], float] = field(default=lambda model: 1.0)
    """Of a model: what logits are divided by."""

    def known(self, suffix: str) -> Names:
        return (f"transformers.models.{self.kind}.modeling_{self.kind}.{self.prefix}{suffix}",)

    @cached_property
    def projections(self) -> dict[str, str]:
        """Names in Weights -> linear maps."""
        names = ("q", "o", "gate", "down") if self.fused else PROJECTIONS
        return dict(zip(names, self.linears, strict=True))

    @cached_property
    def in_layer(self) -> dict[str, Names]:
        """Module -> whose forward it may have. By name, so that a class whose forward was exchanged
        for the whole process (as Liger-Kernel does) is another one."""
        return {
            "self_attn": self.known("Attention"),
            "mlp": self.known("MLP"),
            self.activation: _ACTIVATION,
            **dict.fromkeys(self.linears, _LINEAR + QUANTISED + ADAPTED),
            **dict.fromkeys(self.norms, self.known("RMSNorm")),
            **dict.fromkeys(self.dropouts, ("torch.nn.modules.dropout.Dropout",)),
        }

    def layer_traits(self, config: Any) -> tuple[Traits, ...]:
        scale = head_dim(config) ** -0.5
        return tuple(
            Traits(**{"scale": scale, "window": self.window(config, i)} | self.traits(config, i))
            for i in range(config.num_hidden_layers)
        )


_QK_NORMS = (*Family.norms, "self_attn.q_norm", "self_attn.k_norm")

FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        Family(kind="llama", prefix="Llama"),
        Family(kind="mistral", prefix="Mistral", window=_one_window),
        Family(kind="ministral", prefix="Ministral", window=_window_by_type),
        Family(kind="qwen2", prefix="Qwen2", window=_window_by_type),
        Family(kind="qwen3", prefix="Qwen3", window=_window_by_type, norms=_QK_NORMS),
        Family(
            kind="smollm3",
            prefix="SmolLM3",
            window=_window_by_type,
            traits=lambda config, i: {"rope": bool(config.no_rope_layers[i])},
        ),
        Family(
            kind="granite",
            prefix="Granite",
            traits=lambda config, i: {
                "scale": config.attention_multiplier,
                "residual": config.residual_multiplier,
            },
            embedding_multiplier=lambda base: base.embedding_multiplier,
            logits_scaling=lambda model: model.config.logits_scaling,
        ),
        Family(kind="seed_oss", prefix="SeedOss"),
        Family(
            kind="phi3",
            prefix="Phi3",
            weights=_fused,
            linears=(
                *("self_attn.qkv_proj", "self_attn.o_proj"),
                *("mlp.gate_up_proj", "mlp.down_proj"),
            ),
            fused=("self_attn.qkv_proj", "mlp.gate_up_proj"),
            activation="mlp.activation_fn",
            dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
            window=_one_window,
        ),
    )
}


def family_of(owner: Any) -> Family | None:
    """Of a model, a layer or any other module of one; None for what is in no family."""
    return _family_of(owner.__class__)


@cache
def _family_of(kind: Any) -> Family | None:
    modules = (base.__module__ for base in kind.__mro__)
    parts = [m.split(".") for m in modules if m.startswith("transformers.models.")]
    return next((FAMILIES[part[2]] for part in parts if part[2] in FAMILIES), None)


def layer_weights(layer: Any) -> Weights:
    """The parameters of a decoder layer, as the schedule takes them, without its adapters."""
    return _known_family(layer).weights(layer)


def layer_adapters(layer: Any) -> dict[str, Applied]:
    """Those that a forward of the layer applies, by the names that `Weights` has for what they
    adapt."""
    family = _known_family(layer)
    return applied({n: _part(layer, path) for n, path in family.projections.items()})


def model_traits(model: PreTrainedModel) -> tuple[Traits, ...]:
    return _known_family(model).layer_traits(model.config)


def embedding_multiplier(base: PreTrainedModel) -> float:
    return _known_family(base).embedding_multiplier(base)


def logits_scaling(model: PreTrainedModel) -> float:
    return _known_family(model).logits_scaling(model)


def windows(config: PretrainedConfig) -> list[int | None]:
    """Of each layer; none where the family is not known."""
    family = FAMILIES.get(config.model_type)
    window = _no_window if family is None else family.window
    return [window(config, i) for i in range(config.num_hidden_layers)]


def has_windows(config: PretrainedConfig) -> bool:
    """That are shorter than what the model can see."""
    positions = getattr(config, "max_position_embeddings", None)
    return any(w is not None and (positions is None or w < positions) for w in windows(config))


def _known_family(owner: Any) -> Family:
    family = family_of(owner)
    assert family is not None
    return family


# --- that nothing else is there --------------------------------------------------------------

_AFTER = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_forward_pre_hooks", *_AFTER)
_HARMLESS = (
    "deepspeed.",  # engines gather weights
    "torch.distributed.",
    "torch.utils.",  # counters of FLOPs and memory
    "transformers.utils.output_capturing",  # left behind by output_hidden_states=True
    "trl.models.activation_offloading",  # what lm_head keeps stays on the GPU
    "longctx.",
)
"""Whose hooks change no value."""


def base_of(model: Any) -> Any | None:
    """The base model that the schedule knows: the model itself, or what it is made of."""
    parts = (model, getattr(model, getattr(model, "base_model_prefix", ""), None))
    return next((part for part in parts if _is_a(part, "Model")), None)


def head_of(model: Any) -> Any:
    """lm_head of a causal model, also where `modules_to_save` trains a copy of it; else None."""
    return unwrapped(model.lm_head) if _is_a(model, "ForCausalLM") else None


def _is_a(model: Any, suffix: str) -> bool:
    family = family_of(model)
    names = [kind.__name__ for kind in type(model).__mro__]
    return family is not None and f"{family.prefix}{suffix}" in names


def replaceable(module: nn.Module) -> bool:
    """Whether the module is a model, layer, norm or lm_head whose forward may be exchanged for
    ours."""
    if _is_a(module, "Model") or _is_a(module, "ForCausalLM"):
        return True
    family, known = family_of(module), _LINEAR
    if family is not None:
        known = family.known("DecoderLayer") + family.known("RMSNorm")
    return _forward_name(type(module).forward) in known


def is_ours(module: nn.Module) -> bool:
    """Whether the module runs a forward that `patch` put there."""
    return type(vars(module).get("forward")).__module__ == "longctx.model.forwards"


def why_not_scheduled(base: PreTrainedModel) -> str | None:
    """The first thing that the schedule would pass by, in a few words; None if there is none.

    Looked for on every forward, in 2 ms for 32 layers: adapters and hooks come and go.
    """
    return next(_strangers(base), None)


def why_not_chunked(model: PreTrainedModel) -> str | None:
    """The same for lm_head and the loss, which need all logits then."""
    found = _problems(head_of(model), _LINEAR, "lm_head", patched=True, hooks=_AFTER)
    kind = type(model)
    if _forward_name(kind.forward) not in _known_family(model).known("ForCausalLM"):
        return f"{kind.__module__}.{kind.__qualname__}, a model with a forward of its own"
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        return "a loss of its own"
    if any(changing_hooks(model.lm_head)):
        return "hooks on lm_head"
    return next(found, None)


def _strangers(base: Any) -> Iterator[str]:
    config, family, dtype = base.config, _known_family(base), base.dtype
    yield from _problems(base, family.known("Model"), "model", patched=True)
    yield from _problems(base.rotary_emb, family.known("RotaryEmbedding"), "model.rotary_emb")
    yield from _problems(base.norm, family.known("RMSNorm"), "model.norm", patched=True)
    yield from _other_dtypes([base.norm], dtype, "model.norm")
    if len(base.layers) != config.num_hidden_layers:
        yield f"{len(base.layers)} layers where the configuration has {config.num_hidden_layers}"
    attention = config._attn_implementation
    if attention != "eager" and not _is_transformers(ALL_ATTENTION_FUNCTIONS.get(attention)):
        yield f"the attention implementation {attention!r}, which transformers does not ship"
    if not getattr(config, "is_causal", True):
        yield "attention to later tokens"
    if any(changing_hooks(torch_module, (f"_global{hooks}" for hooks in _HOOKS))):
        yield "hooks on all modules"
    traits, layer_class = family.layer_traits(config), family.known("DecoderLayer")
    for i, layer in enumerate(base.layers):
        where = f"model.layers.{i}"
        yield from _problems(layer, layer_class, where, patched=True)
        parts = {name: _part(layer, name) for name in family.in_layer}
        for name, known in family.in_layer.items():
            yield from _problems(parts[name], known, f"{where}.{name}")
        adapted = {name: parts[name] for name in family.linears if is_adapted(parts[name])}
        for name, module in adapted.items():
            for inner in inner_linears(module):
                known = _LINEAR + QUANTISED
                yield from _problems(inner, known, f"{where}.{name}, inside its adapter")
            yield from why_not_applied(module, dtype, f"{where}.{name}")
            parts[name] = module.base_layer
        for name in family.linears:
            yield from why_not_dense(parts[name], dtype, f"{where}.{name}")
        yield from _other_dtypes(parts.values(), dtype, where)
        yield from _other_settings(family, layer, parts, config, traits[i], where)


def _part(layer: Any, name: str) -> Any:
    for step in name.split("."):
        layer = layer._modules[step]
    return layer


def _problems(
    module: nn.Module,
    known: tuple[str, ...],
    where: str,
    *,
    patched: bool = False,  # it must have our forward
    hooks: tuple[str, ...] = _HOOKS,  # that matter
) -> Iterator[str]:
    state = vars(module)  # as nn.Module's own look-up of what is not there is slow
    own = "forward" in state
    if _forward_name(type(module).forward) not in known or own != patched or own != is_ours(module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        yield f"{where}, a {kind} with a forward that the schedule does not know"
    if any(map(state.get, hooks)) and any(changing_hooks(module, hooks)):
        yield f"hooks on {where}"


def _other_dtypes(modules: Iterable[nn.Module], dtype: torch.dtype, where: str) -> Iterator[str]:
    """Parameters that do not have the embedding's dtype. What FSDP has sharded (DTensors) takes it
    on before it is used."""
    for module in modules:
        for parameter in module._parameters.values():
            if type(parameter) is nn.Parameter and parameter.dtype != dtype:
                yield f"weights in {parameter.dtype} in {where} where others are in {dtype}"


def _other_settings(
    family: Family, layer: Any, parts: dict[str, Any], config: Any, traits: Traits, where: str
) -> Iterator[str]:
    attention = parts["self_attn"]
    state = vars(attention)
    for name in family.norms:
        if parts[name].variance_epsilon != config.rms_norm_eps:
            yield f"another epsilon than the configuration's in {where}"
    if not attention.is_causal:
        yield f"attention to later tokens in {where}"
    if attention.scaling != traits.scale:
        yield f"an attention scale of its own in {where}"
    if state.get("sliding_window", traits.window) != traits.window:
        yield f"another window than the configuration's in {where}"
    if bool(state.get("use_rope", True)) != traits.rope:
        yield f"RoPE where the configuration has none, or none where it has, in {where}"
    if vars(layer).get("residual_multiplier", 1.0) != traits.residual:
        yield f"a residual multiplier of its own in {where}"
    if layer.training:
        if attention.attention_dropout:
            yield "attention dropout"
        dropouts = [parts[name].p for name in family.dropouts]
        dropouts += [vars(parts[n]).get("residual_dropout", 0.0) for n in ("self_attn", "mlp")]
        if any(dropouts):
            yield "residual dropout"
    biases = {parts[name].bias is None for name in family.fused or family.linears[:3]}
    if family.fused and biases != {True}:
        yield f"a bias of {' or '.join(family.fused)} in {where}"
    if len(biases) > 1:
        yield f"biases on some of q, k, v only in {where}"


def changing_hooks(owner: Any, names: Iterable[str] = _AFTER) -> Iterator[Any]:
    """The hooks that may change something, or hold on to it."""
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
