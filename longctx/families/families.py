"""The families whose layers the schedule computes (family.py), and what it asks of their models.
strangers.py finds anything else that a module holds.

    llama  mistral  ministral  qwen2       sliding windows, biases; internlm3 and iquestcoder are
                                           configurations of Llama's classes
    qwen3                                  norms of q and k
    granite                                four scalars
    smollm3                                layers without RoPE
    seed_oss                               a head size of its own, dropout
    phi3                                   q, k, v in one parameter, gate and up in one
    gemma2                                 Gemma 3's norms, caps of scores and of logits
    cohere  cohere2                        attention and MLP side by side, one LayerNorm
    nemotron  starcoder2                   an MLP without a gate, LayerNorm
    exaone4                                norms after attention and MLP, none before; norms of q, k
    olmo2  olmo3                           the same; the norms of q and k are over all heads
    hunyuan_v1_dense                       norms of q and k after RoPE
    ministral3                             q scaled by position
    glm  glm4                              RoPE of neighbours, gate and up in one;
                                           GLM-4: norms before and after
    gemma  gemma3_text                     weights of norms less one, GELU, a scaled embedding;
                                           Gemma 3: norms before and after, a RoPE for each type
    qwen2_vl_text  qwen2_5_vl_text         the text models of vision-language models: three rows of
    qwen3_vl_text                          positions, which text has equal (positions.py)

Families with experts are in mixtures.py, and those with mixers beside attention in hybrids.py.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from longctx.families.adapters import Applied, applied, unwrapped, wrappers
from longctx.families.classes import class_of
from longctx.families.family import (
    NORMS,
    OF_Q_AND_K,
    ONE_PLUS,
    OUT,
    QKV,
    RELU2,
    ROUNDED_ONCE,
    Family,
    Names,
    NormClass,
    no_window,
    one_window,
    part_of,
    window_by_type,
)
from longctx.families.hybrids import HYBRIDS
from longctx.families.look import Read
from longctx.families.mixtures import GRANITE, MIXTURES
from longctx.families.vision import is_whole, joint_of
from longctx.layer.norm_spec import NormSpec
from longctx.layer.passes import SIDE_BY_SIDE, Traits

_GELU_TANH: Names = ("transformers.activations.GELUTanh",)
_BOTH = {"gate": "mlp.gate_up_proj"}
_POST = {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"}
_FOUR = {
    **{"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm"},
    **_POST,
}
_CENTRED = partial(ROUNDED_ONCE, centred=True)


def _no_rope_without_window(config: Any, layer: int) -> dict[str, Any]:
    """Layers without a window have no RoPE, where others have windows."""
    hybrid = config.sliding_window is not None
    return {"rope": None} if hybrid and window_by_type(config, layer) is None else {}


def _scale_by_position(config: Any, positions: Tensor) -> Tensor:
    """Llama 4's factor of q, which grows with each multiple of the original context."""
    rope = config.rope_parameters
    passed = torch.floor(positions / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log1p(passed)


def _final_cap(model: Any) -> float | None:
    cap: float | None = model.config.final_logit_softcapping
    return cap


# What the families of one maker share.
_OLMO: dict[str, Any] = dict(
    norms=_POST | OF_Q_AND_K, wide_norms=True, norm=NormClass(spec=ROUNDED_ONCE)
)
_GLM: dict[str, Any] = dict(
    linears=QKV | OUT | _BOTH, interleaved=True, activation="mlp.activation_fn"
)
_GEMMA: dict[str, Any] = dict(norm=ONE_PLUS, activations=_GELU_TANH)
_COHERE: dict[str, Any] = dict(
    norms={"norm1": "input_layernorm"},
    norm=NormClass(suffix="LayerNorm", configured="layer_norm_eps", spec=_CENTRED),
    interleaved=True,
    logits_scaling=lambda model: 1 / model.logit_scale,
)
_QWEN_VL: dict[str, Any] = dict(
    base="TextModel", mlp="Qwen2MLP", window=window_by_type, position_rows=3
)
FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        Family(kind="llama", prefix="Llama"),
        Family(kind="mistral", prefix="Mistral", window=one_window),
        Family(kind="ministral", prefix="Ministral", window=window_by_type),
        Family(kind="qwen2", prefix="Qwen2", window=window_by_type),
        Family(kind="qwen3", prefix="Qwen3", window=window_by_type, norms=NORMS | OF_Q_AND_K),
        Family(
            kind="smollm3",
            prefix="SmolLM3",
            window=window_by_type,
            traits=lambda config, i: {} if config.no_rope_layers[i] else {"rope": None},
        ),
        Family(
            kind="granite",
            prefix="Granite",
            **GRANITE,
        ),
        Family(kind="seed_oss", prefix="SeedOss"),
        Family(
            kind="exaone4",
            prefix="Exaone4",
            norms=_POST | OF_Q_AND_K,
            window=window_by_type,
            traits=_no_rope_without_window,
        ),
        Family(kind="olmo2", prefix="Olmo2", **_OLMO),
        Family(
            kind="olmo3",
            prefix="Olmo3",
            **_OLMO,
            window=window_by_type,
            traits=lambda config, i: {"rope": config.layer_types[i]},
        ),
        Family(
            kind="hunyuan_v1_dense",
            prefix="HunYuanDenseV1",
            norms=NORMS
            | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
            traits=lambda config, i: {"norms_rotated": True},
        ),
        Family(
            kind="ministral3",
            prefix="Ministral3",
            window=one_window,
            query_scale=_scale_by_position,
        ),
        Family(kind="glm", prefix="Glm", **_GLM),
        Family(
            kind="glm4",
            prefix="Glm4",
            **_GLM,
            norms=NORMS | {"post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"},
        ),
        Family(
            kind="gemma",
            prefix="Gemma",
            **_GEMMA,
            traits=lambda config, i: {"activation": "gelu_tanh"},
        ),
        Family(
            kind="gemma2",
            prefix="Gemma2",
            **_GEMMA,
            norms=_FOUR,
            window=window_by_type,
            score_cap=lambda config: config.attn_logit_softcapping,
            logits_cap=_final_cap,
            traits=lambda config, i: {
                "activation": "gelu_tanh",
                "scale": config.query_pre_attn_scalar**-0.5,
            },
        ),
        Family(
            kind="gemma3_text",
            module="gemma3",
            prefix="Gemma3",
            base="TextModel",
            **_GEMMA,
            norms=_FOUR | OF_Q_AND_K,
            window=window_by_type,
            logits_cap=_final_cap,
            traits=lambda config, i: {
                "activation": "gelu_tanh",
                "rope": config.layer_types[i],
                "scale": config.query_pre_attn_scalar**-0.5,
            },
        ),
        Family(
            kind="nemotron",
            prefix="Nemotron",
            linears=QKV | OUT | {"up": "mlp.up_proj"},
            norm=NormClass(
                suffix="LayerNorm1P",
                epsilon="eps",
                configured="norm_eps",
                spec=partial(_CENTRED, offset=1.0),
            ),
            activations=RELU2,
            traits=lambda config, i: {"activation": "relu2"},
        ),
        Family(
            kind="starcoder2",
            prefix="Starcoder2",
            linears=QKV | {"o": "self_attn.o_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
            norm=NormClass(suffix="", epsilon="eps", configured="norm_epsilon", spec=_CENTRED),
            activation="mlp.act",
            activations=_GELU_TANH,
            window=one_window,
            traits=lambda config, i: {"activation": "gelu_tanh"},
        ),
        Family(
            kind="cohere",
            prefix="Cohere",
            **_COHERE,
            traits=lambda config, i: {"blocks": SIDE_BY_SIDE},
        ),
        Family(
            kind="cohere2",
            prefix="Cohere2",
            **_COHERE,
            window=window_by_type,
            traits=lambda config, i: (
                {"blocks": SIDE_BY_SIDE} | ({} if window_by_type(config, i) else {"rope": None})
            ),
        ),
        Family(
            kind="phi3",
            prefix="Phi3",
            linears={"q": "self_attn.qkv_proj"} | OUT | _BOTH,
            activation="mlp.activation_fn",
            dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
            window=one_window,
        ),
        Family(kind="qwen2_vl_text", module="qwen2_vl", prefix="Qwen2VL", **_QWEN_VL),
        Family(kind="qwen2_5_vl_text", module="qwen2_5_vl", prefix="Qwen2_5_VL", **_QWEN_VL),
        Family(
            kind="qwen3_vl_text",
            module="qwen3_vl",
            prefix="Qwen3VLText",
            norms=NORMS | OF_Q_AND_K,
            position_rows=4,
        ),
        *MIXTURES,
        *HYBRIDS,
    )
}


def family_of(owner: Any) -> Family | None:
    """Returns the family of a configuration, of a model or of any module in one; None if it is in
    no family. A configuration is in that of the class which transformers makes of it: those of
    InternLM3 are Llama's."""
    kind = class_of(owner) if isinstance(owner, PretrainedConfig) else None
    return family_of_class(kind or owner.__class__)


@cache
def family_of_class(kind: Any) -> Family | None:
    """Returns the family of a class of modules; None if it is in no family."""
    modules = (base.__module__ for base in kind.__mro__)
    parts = [m.split(".") for m in modules if m.startswith("transformers.models.")]
    families = {family.module or family.kind: family for family in FAMILIES.values()}
    return next((families[part[2]] for part in parts if part[2] in families), None)


def layers_of(base: Any) -> list[tuple[Any, Family]]:
    """Returns a base model's layers, each with its family as this layer sees it."""
    family = known_family(base)
    return [(layer, family.of_layer(base.config, i)) for i, layer in enumerate(base.layers)]


def layer_weights(layer: Any, family: Family, read: Read = getattr) -> dict[str, Tensor]:
    """Returns a decoder layer's parameters, as the schedule takes them, without its adapters. With
    `look` to read them, what parametrised ones are computed from stands in their places."""
    return family.weights(layer, read)


def layer_adapters(layer: Any, family: Family, read: Read = getattr) -> dict[str, Applied]:
    """Returns the adapters that a forward of the layer applies, by the names of the linear layers
    that they adapt."""
    found = applied({n: part_of(layer, path) for n, path in family.linears.items()}, read)
    for name, path in family.stacks.items():
        owner, _, own = path.rpartition(".")
        module = part_of(layer, owner)
        wrapper = wrappers(module).get(own)
        if wrapper is not None:
            own_adapters = applied({name: wrapper}, read).items()
            found |= {n: x._replace(experts=wrapper.num_experts) for n, x in own_adapters}
    return found


def model_traits(model: PreTrainedModel) -> tuple[Traits, ...]:
    return known_family(model).layer_traits(model.config)


def embedding_multiplier(base: PreTrainedModel, *, given: bool) -> float:
    """Returns the factor of embedded tokens, or that of embeddings that a caller has given."""
    family = known_family(base)
    return 1.0 if given and not family.multiplies_given else family.embedding_multiplier(base)


def logits_scaling(model: PreTrainedModel) -> float:
    """Returns the number by which a model divides its logits; vision-language models do not, even
    if their language model would with an lm_head of its own."""
    return 1.0 if is_whole(model) else known_family(model).logits_scaling(model)


def logits_cap(model: PreTrainedModel) -> float | None:
    """Returns the softcap of a model's logits; those of vision-language models have none."""
    return None if is_whole(model) else known_family(model).logits_cap(model)


def layer_norm_spec(base: PreTrainedModel) -> NormSpec:
    """Returns how the norms of a model's layers compute."""
    norm = known_family(base).norm
    return norm.spec(eps=getattr(base.config, norm.configured))


def embedding_of(base: Any) -> Any:
    """Returns the embedding of tokens."""
    return getattr(base, known_family(base).embedding)


def final_norm_of(base: Any) -> Any:
    """Returns the norm after the last layer."""
    return getattr(base, known_family(base).last_norm)


def final_norm_spec(base: Any) -> NormSpec:
    """Returns how the norm after the last layer computes, whose epsilon may be another."""
    norm = known_family(base).norm
    return norm.spec(eps=getattr(final_norm_of(base), norm.epsilon))


def query_scale(base: PreTrainedModel, positions: Tensor) -> Tensor | None:
    return known_family(base).query_scale(base.config, positions)


def rotary_of(base: Any) -> Any:
    """Returns the module of RoPE; None if the model has none."""
    return base.rotary_emb if known_family(base).rotary else None


def rotary_embeddings(base: Any) -> dict[str, tuple[Tensor, float]]:
    """Returns the frequencies and factor of each RoPE, by the names in `Traits.rope`: one of all
    layers, or one of each type of layer, or none."""
    rotary = rotary_of(base)
    if rotary is None:
        return {}
    types = getattr(rotary, "layer_types", None)
    if types is None:
        return {"all": (rotary.inv_freq, rotary.attention_scaling)}
    return {
        kind: (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
        for kind in types
    }


def mixes(config: PretrainedConfig) -> bool:
    """Whether some layer of a known family has a mixer."""
    family = known_family(config)
    return any(family.of_layer(config, i).mixer for i in range(config.num_hidden_layers))


def windows(config: PretrainedConfig) -> list[int | None]:
    """Returns the window of each layer; None for each layer of an unknown family."""
    family = family_of(config)
    window = no_window if family is None else family.window
    return [window(config, i) for i in range(config.num_hidden_layers)]


def has_post_norms(config: PretrainedConfig) -> bool:
    """Whether norms follow attention and the MLP in some layers."""
    return "post1" in known_family(config).norms


def score_cap(config: PretrainedConfig) -> float | None:
    """Returns the softcap of attention's scores; None without one and for an unknown family."""
    family = family_of(config)
    return None if family is None else family.score_cap(config)


def has_windows(config: PretrainedConfig) -> bool:
    """Whether any layer has a window that is shorter than the model's maximum positions."""
    positions = getattr(config, "max_position_embeddings", None)
    return any(w is not None and (positions is None or w < positions) for w in windows(config))


_NOT_YET = {
    "mllama": "its layers of cross-attention to images are not supported yet",
}
"""Why a family is missing, by a part of its names in lower case."""


def not_known(what: str, scored: bool = False) -> str:
    """Returns the line that refuses a model of no family here. `what` names its class or type;
    `scored` says that a task asks it for more than the loss of labels."""
    why = next((f": {why}" for name, why in _NOT_YET.items() if name in what.lower()), "")
    remedy = "Any model trains in Hugging Face's layers (--class_type any, any_model=True)"
    if scored:
        remedy = "Of any other model --class_type any trains --task sft"
    return (
        f"longctx has no family for {what}{why}. {remedy}, with one document a row if it mixes "
        "those of packed rows; `longctx help flags` lists the families, and `longctx help "
        "add_a_family` shows how one is added"
    )


def known_family(owner: Any) -> Family:
    family = family_of(owner)
    assert family is not None
    return family


def base_of(model: Any) -> Any | None:
    """Returns the base model if the schedule knows it: the model itself or the one inside it, of a
    vision-language model its language model."""
    joint = joint_of(model)
    if joint is not None:
        model = getattr(joint, "language_model", None)
    parts = (model, getattr(model, getattr(model, "base_model_prefix", ""), None))
    return next((part for part in parts if is_a(part, "Model")), None)


def head_of(model: Any) -> Any:
    """Returns a causal model's lm_head, or the copy that `modules_to_save` trains; else None."""
    has_one = is_a(model, "ForCausalLM") or is_whole(model)
    return unwrapped(model.lm_head) if has_one else None


def is_a(model: Any, suffix: str) -> bool:
    family = family_of(model)
    names = [kind.__name__ for kind in type(model).__mro__]
    return family is not None and family.known(suffix)[0].rpartition(".")[2] in names
