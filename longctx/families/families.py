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

import copy
import weakref
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from longctx.families.adapters import Applied, applied, unwrapped, wrappers
from longctx.families.classes import class_of
from longctx.families.family import (
    ONE_PLUS,
    ROUNDED_ONCE,
    Family,
    Layer,
    NormClass,
    attention,
    layer_of,
    mlp,
    one_window,
    part_of,
    window_by_type,
)
from longctx.families.hybrids import HYBRIDS
from longctx.families.look import Read
from longctx.families.mixtures import GRANITE, MIXTURES, RESIDUAL, SCALED
from longctx.families.vision import is_whole, joint_of
from longctx.layer.dense_experts import STACKS
from longctx.layer.norm_spec import NormSpec
from longctx.layer.specs.attention_spec import NORM1, OUT, QK_NORMS, AttentionSpec
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.layer.specs.mlp_spec import ACT_FN, NORM2
from longctx.layer.specs.part_spec import Declare

_POST1 = {"post1": "post_attention_layernorm"}
_POST2 = {"post2": "post_feedforward_layernorm"}
_CENTRED = partial(ROUNDED_ONCE, centred=True)


def _rope_with_window(config: Any, layer: int) -> str | None:
    """Layers without a window have no RoPE, where others have windows."""
    hybrid = config.sliding_window is not None
    return None if hybrid and window_by_type(config, layer) is None else "all"


def _rope_by_type(config: Any, layer: int) -> str:
    """Each type of layer has a RoPE of its own."""
    kind: str = config.layer_types[layer]
    return kind


def _query_scalar(config: Any, layer: int) -> float:
    return float(config.query_pre_attn_scalar**-0.5)


def _scale_by_position(config: Any, positions: Tensor) -> Tensor:
    """Llama 4's factor of q, which grows with each multiple of the original context."""
    rope = config.rope_parameters
    passed = torch.floor(positions / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log1p(passed)


def _final_cap(model: Any) -> float | None:
    cap: float | None = model.config.final_logit_softcapping
    return cap


def gelu(at: str = ACT_FN, **fields: Any) -> Declare:
    """Declares an MLP of GELU, as in Gemma."""
    return mlp(activation="gelu_tanh", activations={at: "gelu_tanh"}, **fields)


def fused(act_fn: str = "mlp.activation_fn", **fields: Any) -> Declare:
    """Declares an MLP whose gate and up are one parameter, as in GLM."""
    linears = {"gate": "mlp.gate_up_proj", "down": "mlp.down_proj"}
    return mlp(linears=linears, activations={act_fn: "silu"}, **fields)


def normed(also: Any = NORM1, **fields: Any) -> Declare:
    """Declares attention with norms of q and k, as in Qwen3."""
    return attention(norms=also | QK_NORMS, **fields)


# What the families of one maker share.
_OLMO: dict[str, Any] = dict(norm=NormClass(spec=ROUNDED_ONCE))
_GEMMA_2 = dict(norms=NORM1 | _POST1, window=window_by_type, scale=_query_scalar)
_GEMMA_MLP = gelu(norms={"norm2": "pre_feedforward_layernorm"} | _POST2)
_COHERE: dict[str, Any] = dict(
    norm=NormClass(suffix="LayerNorm", configured="layer_norm_eps", spec=_CENTRED),
    logits_scaling=lambda model: 1 / model.logit_scale,
)
_BESIDE = mlp(norms={}, beside=True)
_QWEN_VL: dict[str, Any] = dict(
    base="TextModel",
    layer=layer_of(attention(window=window_by_type), mlp(modules={"mlp": ".Qwen2MLP"})),
    position_rows=3,
)
_BY_TYPE = layer_of(attention(window=window_by_type), mlp())
_OF_ONE_WINDOW = layer_of(attention(window=one_window), mlp())
FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        Family(kind="llama", prefix="Llama"),
        Family(kind="mistral", prefix="Mistral", layer=_OF_ONE_WINDOW),
        Family(kind="ministral", prefix="Ministral", layer=_BY_TYPE),
        Family(kind="qwen2", prefix="Qwen2", layer=_BY_TYPE),
        Family(kind="qwen3", prefix="Qwen3", layer=layer_of(normed(window=window_by_type), mlp())),
        Family(
            kind="smollm3",
            prefix="SmolLM3",
            layer=layer_of(
                attention(
                    window=window_by_type,
                    rope=lambda config, i: "all" if config.no_rope_layers[i] else None,
                ),
                mlp(),
            ),
        ),
        Family(
            kind="granite",
            prefix="Granite",
            layer=layer_of(attention(**SCALED), mlp(**RESIDUAL)),
            **GRANITE,
        ),
        Family(kind="seed_oss", prefix="SeedOss"),
        Family(
            kind="exaone4",
            prefix="Exaone4",
            layer=layer_of(
                normed(_POST1, window=window_by_type, rope=_rope_with_window), mlp(norms=_POST2)
            ),
        ),
        Family(
            kind="olmo2",
            prefix="Olmo2",
            layer=layer_of(normed(_POST1, wide_norms=True), mlp(norms=_POST2)),
            **_OLMO,
        ),
        Family(
            kind="olmo3",
            prefix="Olmo3",
            layer=layer_of(
                normed(_POST1, wide_norms=True, window=window_by_type, rope=_rope_by_type),
                mlp(norms=_POST2),
            ),
            **_OLMO,
        ),
        Family(
            kind="hunyuan_v1_dense",
            prefix="HunYuanDenseV1",
            layer=layer_of(
                attention(
                    norms=NORM1
                    | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
                    norms_rotated=True,
                ),
                mlp(),
            ),
        ),
        Family(
            kind="ministral3",
            prefix="Ministral3",
            layer=_OF_ONE_WINDOW,
            query_scale=_scale_by_position,
        ),
        Family(kind="glm", prefix="Glm", layer=layer_of(attention(interleaved=True), fused())),
        Family(
            kind="glm4",
            prefix="Glm4",
            layer=layer_of(
                attention(norms=NORM1 | {"post1": "post_self_attn_layernorm"}, interleaved=True),
                fused(norms=NORM2 | {"post2": "post_mlp_layernorm"}),
            ),
        ),
        Family(kind="gemma", prefix="Gemma", layer=layer_of(attention(), gelu()), norm=ONE_PLUS),
        Family(
            kind="gemma2",
            prefix="Gemma2",
            layer=layer_of(
                attention(**_GEMMA_2, score_cap=lambda config, i: config.attn_logit_softcapping),
                _GEMMA_MLP,
            ),
            norm=ONE_PLUS,
            logits_cap=_final_cap,
        ),
        Family(
            kind="gemma3_text",
            module="gemma3",
            prefix="Gemma3",
            base="TextModel",
            layer=layer_of(
                attention(**_GEMMA_2 | dict(norms=NORM1 | _POST1 | QK_NORMS), rope=_rope_by_type),
                _GEMMA_MLP,
            ),
            norm=ONE_PLUS,
            logits_cap=_final_cap,
        ),
        Family(
            kind="nemotron",
            prefix="Nemotron",
            layer=layer_of(
                attention(),
                mlp(
                    linears={"up": "mlp.up_proj", "down": "mlp.down_proj"},
                    activation="relu2",
                    activations={ACT_FN: "relu2"},
                ),
            ),
            norm=NormClass(
                suffix="LayerNorm1P",
                epsilon="eps",
                configured="norm_eps",
                spec=partial(_CENTRED, offset=1.0),
            ),
        ),
        Family(
            kind="starcoder2",
            prefix="Starcoder2",
            layer=layer_of(
                attention(window=one_window),
                gelu("mlp.act", linears={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
            ),
            norm=NormClass(suffix="", epsilon="eps", configured="norm_epsilon", spec=_CENTRED),
        ),
        Family(
            kind="cohere",
            prefix="Cohere",
            layer=layer_of(attention(interleaved=True), _BESIDE),
            **_COHERE,
        ),
        Family(
            kind="cohere2",
            prefix="Cohere2",
            layer=layer_of(
                attention(
                    interleaved=True,
                    window=window_by_type,
                    rope=lambda config, i: "all" if window_by_type(config, i) else None,
                ),
                _BESIDE,
            ),
            **_COHERE,
        ),
        Family(
            kind="phi3",
            prefix="Phi3",
            layer=layer_of(
                attention(
                    linears={"q": "self_attn.qkv_proj"} | OUT,
                    dropouts=("resid_attn_dropout",),
                    window=one_window,
                ),
                fused(dropouts=("resid_mlp_dropout",)),
            ),
        ),
        Family(kind="qwen2_vl_text", module="qwen2_vl", prefix="Qwen2VL", **_QWEN_VL),
        Family(kind="qwen2_5_vl_text", module="qwen2_5_vl", prefix="Qwen2_5_VL", **_QWEN_VL),
        Family(
            kind="qwen3_vl_text",
            module="qwen3_vl",
            prefix="Qwen3VLText",
            layer=layer_of(normed(), mlp()),
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


class _Declared(NamedTuple):
    """The layers of a configuration, as they were declared."""

    config: weakref.ref[Any]
    values: dict[str, Any]
    layers: tuple[Layer, ...]


_DECLARED: dict[int, _Declared] = {}


def layer_specs(config: PretrainedConfig) -> tuple[Layer, ...]:
    """Returns what each layer of a known family is, by the model's configuration; nothing for an
    unknown family. A forward asks for this several times, so it is made once, and again when a
    value of the configuration has changed. Of a vision-language model's configuration it is that
    of the text model."""
    config = config.get_text_config()
    made = _DECLARED.get(id(config))
    if made is not None and made.config() is config and made.values == vars(config):
        return made.layers
    family = family_of(config)
    if family is None:
        return ()
    held = vars(config).items()
    values = {k: copy.deepcopy(v) if isinstance(v, list | dict) else v for k, v in held}
    each = (family.layer(config, i) for i in range(config.num_hidden_layers))
    found = tuple(Layer(parts=parts, family=family) for parts in each)
    if made is not None and _equal(found, made.layers):
        found = made.layers
    key = id(config)
    _DECLARED[key] = _Declared(weakref.ref(config, lambda _: _gone(key)), values, found)
    return found


def _equal(found: tuple[Layer, ...], made: tuple[Layer, ...]) -> bool:
    """Whether layers are what they were, their RoPE among it."""

    def whole(layer: Layer) -> Any:
        spec = layer.part(AttentionSpec)
        return layer.family, layer.parts, spec and spec.rope

    return [*map(whole, found)] == [*map(whole, made)]


def _gone(key: int) -> None:
    """Forgets the layers of a configuration that is no more."""
    if (made := _DECLARED.get(key)) is not None and made.config() is None:
        del _DECLARED[key]


def layers_of(base: Any) -> list[tuple[Any, Layer]]:
    """Returns a base model's layers, each with what it is."""
    return [*zip(base.layers, layer_specs(base.config), strict=False)]


def experts_of(config: PretrainedConfig) -> ExpertsSpec | None:
    """Returns the experts of the first layer that has some; None for a model without experts."""
    specs = (layer.part(ExpertsSpec) for layer in layer_specs(config))
    return next((spec for spec in specs if spec is not None), None)


def layer_weights(layer: Any, spec: Layer, read: Read = getattr) -> dict[str, Tensor]:
    """Returns a decoder layer's parameters, as the schedule takes them, without its adapters. With
    `look` to read them, what parametrised ones are computed from stands in their places."""
    return spec.weights(layer, read)


def layer_adapters(layer: Any, spec: Layer, read: Read = getattr) -> dict[str, Applied]:
    """Returns the adapters that a forward of the layer applies, by the names of the linear layers
    that they adapt."""
    found = applied({n: part_of(layer, path) for n, path in spec.linears.items()}, read)
    for name in STACKS if spec.part(ExpertsSpec) else ():
        owner, _, own = spec.held[name].rpartition(".")
        module = part_of(layer, owner)
        wrapper = wrappers(module).get(own)
        if wrapper is not None:
            own_adapters = applied({name: wrapper}, read).items()
            found |= {n: x._replace(experts=wrapper.num_experts) for n, x in own_adapters}
    return found


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
    """Returns the frequencies and factor of each RoPE, by the names in `AttentionSpec.rope`: one of
    all layers, or one of each type of layer, or none."""
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
    return any(layer.part(MixerSpec) for layer in layer_specs(config))


def windows(config: PretrainedConfig) -> list[int | None]:
    """Returns the window of each layer; None for each layer of an unknown family."""
    if family_of(config) is None:
        return config.get_text_config().num_hidden_layers * [None]
    specs = (layer.part(AttentionSpec) for layer in layer_specs(config))
    return [None if spec is None else spec.window for spec in specs]


def has_post_norms(config: PretrainedConfig) -> bool:
    """Whether norms follow attention and the MLP in some layers."""
    return any(layer.post for layer in layer_specs(config))


def score_cap(config: PretrainedConfig) -> float | None:
    """Returns the softcap of attention's scores; None without one and for an unknown family."""
    specs = (layer.part(AttentionSpec) for layer in layer_specs(config))
    return next((spec.score_cap for spec in specs if spec is not None), None)


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
