"""What the schedule must know of a transformers model: where a layer's weights are, and how the
layer differs from Llama's. strangers.py finds anything else that a module holds.

A `Family` describes the models of one kind; docs/add_a_family.md shows how to write one.

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
    mixtral  qwen3_moe  olmoe              experts; layers of Qwen3-MoE may have an MLP instead, and
                                           OLMoE's norms of q and k are over all heads
    qwen2_moe                              experts, and one that is shared and weighed by token
    glm4_moe                               groups of experts, chosen by sigmoid and a bias, and one
                                           that is shared; the first layers have an MLP
    ernie4_5_moe                           the same by softmax, without groups, with a router in
                                           fp32; RoPE of neighbours
    gpt_oss                                attention sinks; experts with biases, transposed weights
                                           and a clamped activation of interleaved gate and up
    qwen2_vl_text  qwen2_5_vl_text         the text models of vision-language models: three rows of
    qwen3_vl_text                          positions, which text has equal (positions.py)
    qwen3_vl_moe_text                      the same with experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from longctx.kernels.clamped_swiglu import Clamped
from longctx.layer.norm_spec import NormSpec
from longctx.layer.passes import SIDE_BY_SIDE, WITH_EXPERTS, Traits
from longctx.layer.router import Router
from longctx.layer.stack import PLAIN, ExpertLayout
from longctx.model.adapters import (
    ADAPTED,
    QUANTISED,
    Applied,
    applied,
    unwrapped,
    within,
    wrappers,
)
from longctx.model.classes import class_of
from longctx.model.look import Read
from longctx.model.vision import PREFIXES, is_whole, joint_of

Names = tuple[str, ...]
LINEAR: Names = ("torch.nn.modules.linear.Linear",)
LAYER_NORM: Names = ("torch.nn.modules.normalization.LayerNorm",)
_SILU: Names = (
    "transformers.activations.SiLUActivation",
    "torch.nn.modules.activation.SiLU",
)
_GELU_TANH: Names = ("transformers.activations.GELUTanh",)
_RELU2: Names = ("transformers.activations.ReLUSquaredActivation",)
_QKV = {name: f"self_attn.{name}_proj" for name in "qkv"}
_OUT = {"o": "self_attn.o_proj", "down": "mlp.down_proj"}
_GATE_UP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}
_BOTH = {"gate": "mlp.gate_up_proj"}
_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_POST = {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"}
_EXPERTS = {
    "router": "mlp.gate.weight",
    "experts_in": "mlp.experts.gate_up_proj",
    "experts_out": "mlp.experts.down_proj",
}
_SPARSE = {
    "self_attn": "Attention",
    **{"mlp": "SparseMoeBlock", "mlp.gate": "TopKRouter", "mlp.experts": "Experts"},
}
_OF_GPT_OSS = {
    "sinks": "self_attn.sinks",
    "router.bias": "mlp.router.bias",
    "experts_in.bias": "mlp.experts.gate_up_proj_bias",
    "experts_out.bias": "mlp.experts.down_proj_bias",
}
_FOUR = {
    **{"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm"},
    **_POST,
}
_OF_Q_AND_K = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


# --- what the families differ in -------------------------------------------------------------


def _no_window(config: Any, layer: int) -> int | None:
    return None


def _one_window(config: Any, layer: int) -> int | None:
    """Returns the window that all layers share, as in Mistral."""
    window: int | None = config.sliding_window
    return window


def _window_by_type(config: Any, layer: int) -> int | None:
    """Returns a layer's window if the layer has one, as in Qwen2. transformers turns
    `use_sliding_window` and `max_window_layers` into `layer_types` in each configuration."""
    sliding = config.layer_types[layer] == "sliding_attention"
    window: int | None = config.sliding_window if sliding else None
    return window


def _no_rope_without_window(config: Any, layer: int) -> dict[str, Any]:
    """Layers without a window have no RoPE, where others have windows."""
    hybrid = config.sliding_window is not None
    return {"rope": None} if hybrid and _window_by_type(config, layer) is None else {}


def _scale_by_position(config: Any, positions: Tensor) -> Tensor:
    """Llama 4's factor of q, which grows with each multiple of the original context."""
    rope = config.rope_parameters
    passed = torch.floor(positions / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log1p(passed)


def _final_cap(model: Any) -> float | None:
    cap: float | None = model.config.final_logit_softcapping
    return cap


def head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def kv_heads(config: Any) -> int:
    count: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return count


def _softmax_router(config: Any, **settings: Any) -> Router:
    """Returns a router that chooses by softmax, as in Mixtral."""
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    return Router(experts=experts, chosen=config.num_experts_per_tok, **settings)


def _normed_if_asked(config: Any) -> Router:
    """Returns the same where the configuration says whether the weights are normalised."""
    return _softmax_router(config, normalised=config.norm_topk_prob)


def _shared(path: str) -> dict[str, str]:
    """Returns the linear layers of a shared expert, which is at `path` in a layer."""
    return {f"shared_{name}": f"{path}.{name}_proj" for name in ("gate", "up", "down")}


def _sigmoid_router(config: Any) -> Router:
    """Returns a router of groups of experts, which chooses by sigmoid and a bias, as in GLM-4.5."""
    return Router(
        experts=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        score="sigmoid",
        normalised=config.norm_topk_prob,
        floor=1e-20,
        scaling=config.routed_scaling_factor,
        groups=config.n_group,
        chosen_groups=config.topk_group,
    )


def _floored_router(config: Any) -> Router:
    """Returns a router that chooses by softmax and a bias, as in ERNIE 4.5."""
    return _softmax_router(config, floor=config.moe_norm_min, in_fp32=True)


def _gpt_oss_layout(config: Any) -> ExpertLayout:
    """Returns gpt-oss's layout. Before transformers 5.18 its code has these numbers itself."""
    alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    return ExpertLayout(transposed=True, clamped=Clamped(alpha, limit))


def _is_dense(config: Any, layer: int) -> bool:
    """Whether a layer has an MLP among layers of experts, as in Qwen3-MoE."""
    sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return layer in config.mlp_only_layers or not sparse


def is_stack(name: str) -> bool:
    """Whether a name in `Family.stacks` is of the experts' weights, not of the router's."""
    return name.startswith("experts")


MLP_WIDTH = "intermediate_size"


def mlp_width(config: Any) -> int:
    """Returns F, the features between the matmuls of a layer's MLP."""
    width: int = getattr(config, MLP_WIDTH)
    return width


@dataclass(frozen=True, kw_only=True)
class NormClass:
    """The class of a family's norms."""

    suffix: str = "RMSNorm"
    """The end of its name; empty for torch's LayerNorm."""
    epsilon: str = "variance_epsilon"
    """The name of epsilon in a module."""
    configured: str = "rms_norm_eps"
    """The name of epsilon in the configuration."""
    spec: Callable[..., NormSpec] = NormSpec
    """Returns how such a norm computes, from `eps`."""


_ROUNDED_ONCE = partial(NormSpec, llama_rounding=False)
_CENTRED = partial(_ROUNDED_ONCE, centred=True)
_GEMMA_NORM = NormClass(epsilon="eps", spec=partial(_ROUNDED_ONCE, offset=1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A kind of model whose layers the schedule computes."""

    kind: str
    """transformers' `model_type`."""
    module: str = ""
    """The name of transformers' module, if it is another."""
    prefix: str
    """The prefix of its classes' names."""
    base: str = "Model"
    """The rest of the base model's."""
    mlp: str = ""
    """The name of the MLP's class, if it has another prefix."""
    modules: Mapping[str, str] = field(
        default_factory=lambda: {"self_attn": "Attention", "mlp": "MLP"}
    )
    """Maps the paths of the modules whose place the parts take to the rest of their classes'
    names. A layer without one of them has no linear layer and no norm in it."""
    linears: Mapping[str, str] = field(default_factory=lambda: _QKV | _OUT | _GATE_UP)
    """Maps the names that the parts declare to the paths of a layer's linear layers. Without k and
    v, q holds all three in one parameter; without up, gate holds both. Such layers must have no
    bias. Without gate, the MLP has none. A shared expert's begin with "shared_", and the one that
    weighs it for each token is "share"."""
    stacks: dict[str, str] = field(default_factory=dict)
    """Maps the names of the router's weight (E, D) and of the experts' weights, (E, 2 I, D) and
    (E, D, I), to the paths of these parameters. A layer without experts has none."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Maps the names of other parameters and buffers that modules hold themselves to their paths:
    sinks (H,), the biases of what `stacks` names, and one that decides the choice alone (E,)."""
    router: Callable[[Any], Router] | None = None
    """Returns how experts are chosen, from the configuration."""
    experts: Callable[[Any], ExpertLayout] = field(default=lambda config: PLAIN)
    """Returns how the experts' weights lie, from the configuration."""
    in_fp32: Names = ()
    """The paths of modules whose parameters transformers keeps in fp32."""
    auxiliary: bool = True
    """transformers' causal model has an auxiliary loss, if there are experts."""
    half_tables: bool = False
    """RoPE's cosines and sines have a column for each pair, instead of each feature."""
    interleaved: bool = False
    """RoPE rotates pairs of neighbours, instead of halves."""
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    """Maps names of parameters to the paths of a layer's norms."""
    activation: str = "mlp.act_fn"
    """The path of the MLP's activation; empty where there is no MLP."""
    activations: Names = _SILU
    """The classes that it may be of."""
    wide_norms: bool = False
    """The norms of q and k are over all heads together."""
    norm: NormClass = NormClass()
    dropouts: Names = ()
    """The paths of dropout modules, which must not drop anything."""
    window: Callable[[Any, int], int | None] = _no_window
    """Returns the window of a layer, from the configuration and the layer's index."""
    traits: Callable[[Any, int], dict[str, Any]] = field(default=lambda config, layer: {})
    """Returns the other fields of `Traits` that differ from Llama's."""
    by_layer: Callable[[Any, int], dict[str, Any]] = field(default=lambda config, layer: {})
    """Returns those of these fields that differ in a layer: the paths of its modules, their
    classes, the width of its MLP."""
    width: str = MLP_WIDTH
    """The name of the width of the MLP, or of one expert, in the configuration."""
    shared_width: Callable[[Any], int] = field(default=lambda config: 0)
    """Returns the features of the shared expert, from the configuration."""
    position_rows: int = 1
    """The rows of positions to which the base model expands one, as in positions.py."""
    masks_by_position: bool = True
    """The base model makes masks that keep documents apart where positions restart."""
    query_scale: Callable[[Any, Tensor], Tensor | None] = field(default=lambda config, at: None)
    """Returns a factor (T,) of q from the configuration and the positions (T,)."""
    score_cap: Callable[[Any], float | None] = field(default=lambda config: None)
    """Returns the softcap of attention's scores, the same in all layers."""
    embedding_multiplier: Callable[[Any], float] = field(default=lambda base: 1.0)
    logits_scaling: Callable[[Any], float] = field(default=lambda model: 1.0)
    """Returns the number by which a model divides its logits."""
    logits_cap: Callable[[Any], float | None] = field(default=lambda model: None)
    """Returns the softcap of a model's logits."""

    @property
    def balances(self) -> bool:
        """Whether the causal model has an auxiliary loss that balances experts."""
        return self.router is not None and self.auxiliary

    def routes(self, config: Any) -> Router:
        """Returns how experts are chosen, in a family that has some."""
        assert self.router is not None
        return self.router(config)

    def shared(self, config: Any) -> int:
        """Returns the features of a layer's shared expert; 0 if the layer has none."""
        return self.shared_width(config) if "shared_up" in self.linears else 0

    def of_layer(self, config: Any, layer: int) -> Family:
        """Returns the family as one layer sees it."""
        own = self.by_layer(config, layer)
        return replace(self, **own) if own else self

    def known(self, suffix: str) -> Names:
        names = {"Model": self.prefix + self.base, "MLP": self.mlp or f"{self.prefix}MLP"}
        return (f"{self.home}.{names.get(suffix, self.prefix + suffix)}",)

    @property
    def norm_classes(self) -> Names:
        return self.known(self.norm.suffix) if self.norm.suffix else LAYER_NORM

    @cached_property
    def of_experts(self) -> Names:
        """The paths of the modules that hold experts' weights, around which PEFT puts wrappers."""
        owners = [path.rpartition(".")[0] for n, path in self.stacks.items() if is_stack(n)]
        return tuple(dict.fromkeys(owners))

    @property
    def home(self) -> str:
        """The name of the module that has its classes."""
        name = self.module or self.kind
        return f"transformers.models.{name}.modeling_{name}"

    @cached_property
    def fused(self) -> Names:
        """The paths of linear layers that hold several weights in one parameter."""
        inside = {"q": "k", "gate": "up"}
        names = [n for n in inside if n in self.linears and inside[n] not in self.linears]
        return tuple(self.linears[n] for n in names)

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shape of the weight of each linear layer and norm of a layer, by path."""
        D, F, d = config.hidden_size, getattr(config, self.width), head_dim(config)
        q, kv = d * config.num_attention_heads, d * kv_heads(config)
        S = self.shared(config)
        rows = dict(q=q, k=kv, v=kv, o=D, gate=F, up=F, down=D)
        rows |= dict(shared_gate=S, shared_up=S, shared_down=D, share=1)
        if "k" not in self.linears:
            rows["q"] += 2 * kv
        if "up" not in self.linears:
            rows["gate"] += F
        columns = dict.fromkeys(rows, D) | dict(o=q, down=F, shared_down=S)
        linears = {path: (rows[name], columns[name]) for name, path in self.linears.items()}
        own = dict(q_norm=q, k_norm=kv) if self.wide_norms else dict(q_norm=d, k_norm=d)
        return linears | {path: (own.get(name, D),) for name, path in self.norms.items()}

    def stack_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters in `stacks` and `parameters`, by path."""
        shapes: dict[str, tuple[int, ...]] = {"sinks": (config.num_attention_heads,)}
        if self.router is not None and self.stacks:
            E, D = self.router(config).experts, config.hidden_size
            width = getattr(config, self.width)
            shapes |= {"router": (E, D), "router.bias": (E,), "choice_bias": (E,)}
            for name, rows, columns in (("experts_in", 2 * width, D), ("experts_out", D, width)):
                lies = (columns, rows) if self.experts(config).transposed else (rows, columns)
                shapes |= {name: (E, *lies), f"{name}.bias": (E, rows)}
        return {path: shapes[name] for name, path in (self.stacks | self.parameters).items()}

    @property
    def of_activations(self) -> Names:
        """The paths of a layer's activations: of its MLP or its experts, and of a shared expert."""
        own = (self.activation,) if self.activation else ()
        shared, _, _ = self.linears.get("shared_up", "").rpartition(".")
        return (*own, f"{shared}.act_fn") if shared else own

    @cached_property
    def in_layer(self) -> dict[str, Names]:
        """Maps each module to the classes whose forward it may have, given by name, so that a class
        whose forward was replaced process-wide (as Liger-Kernel does) does not match."""
        return {
            **{path: self.known(suffix) for path, suffix in self.modules.items()},
            **dict.fromkeys(self.of_activations, self.activations),
            **dict.fromkeys(self.linears.values(), LINEAR + QUANTISED + ADAPTED),
            **dict.fromkeys(self.norms.values(), self.norm_classes),
            **dict.fromkeys(self.dropouts, ("torch.nn.modules.dropout.Dropout",)),
        }

    @cached_property
    def children(self) -> dict[str, frozenset[str]]:
        """Maps the path of each module of a layer that has submodules, or parameters of its own, ""
        for the layer itself, to the names of those that the schedule knows."""
        owned = (*self.in_layer, *self.stacks.values(), *self.parameters.values())
        parts = [path.rpartition(".") for path in owned]
        return {
            owner: frozenset(name for other, _, name in parts if other == owner)
            for owner in dict.fromkeys(owner for owner, _, _ in parts)
        }

    def weights(self, layer: Any, read: Read = getattr) -> dict[str, Tensor]:
        """Returns the parameters of a layer by name (layer/weights.py), without its adapters."""
        found = {}
        for name, path in (*self.linears.items(), *self.norms.items()):
            module = part_of(layer, path)
            found[name] = read(module, "weight")
            if (bias := read(module, "bias", None)) is not None:
                found[f"{name}.bias"] = bias
        for name, path in (*self.stacks.items(), *self.parameters.items()):
            owner, _, own = path.rpartition(".")
            found[name] = read(within(part_of(layer, owner)), own)
        return found

    def layer_traits(self, config: Any) -> tuple[Traits, ...]:
        return tuple(self._traits_of(config, i) for i in range(config.num_hidden_layers))

    def _traits_of(self, config: Any, layer: int) -> Traits:
        found = {"scale": head_dim(config) ** -0.5, "window": self.window(config, layer)}
        own = self.of_layer(config, layer)
        if own.stacks and own.router is not None:
            found |= {"blocks": WITH_EXPERTS, "router": own.router(config)}
            found["experts"] = own.experts(config)
        return Traits(**found | self.traits(config, layer))


# What the families of one maker share.
_OLMO: dict[str, Any] = dict(
    norms=_POST | _OF_Q_AND_K, wide_norms=True, norm=NormClass(spec=_ROUNDED_ONCE)
)
_GLM: dict[str, Any] = dict(
    linears=_QKV | _OUT | _BOTH, interleaved=True, activation="mlp.activation_fn"
)
_GEMMA: dict[str, Any] = dict(norm=_GEMMA_NORM, activations=_GELU_TANH)
_COHERE: dict[str, Any] = dict(
    norms={"norm1": "input_layernorm"},
    norm=NormClass(suffix="LayerNorm", configured="layer_norm_eps", spec=_CENTRED),
    interleaved=True,
    logits_scaling=lambda model: 1 / model.logit_scale,
)
_QWEN_VL: dict[str, Any] = dict(
    base="TextModel", mlp="Qwen2MLP", window=_window_by_type, position_rows=3
)
_MOE: dict[str, Any] = dict(
    modules=_SPARSE,
    linears=_QKV | {"o": _OUT["o"]},
    stacks=_EXPERTS,
    activation="mlp.experts.act_fn",
)
_STATICS = "mlp.gate.moe_statics"
_ERNIE = _SPARSE | {_STATICS: "Statics"}
_DENSE: dict[str, Any] = dict(
    modules={"self_attn": "Attention", "mlp": "MLP"},
    linears=_QKV | _OUT | _GATE_UP,
    stacks={},
    parameters={},
    activation="mlp.act_fn",
    width=MLP_WIDTH,
)


def _of_glm4_moe(config: Any, layer: int) -> dict[str, Any]:
    """The first layers have an MLP, and norms of q and k are a setting."""
    own = _DENSE if layer < config.first_k_dense_replace else {}
    return own if config.use_qk_norm else own | {"norms": _NORMS}


def _of_ernie(config: Any, layer: int) -> dict[str, Any]:
    """Layers between two, at intervals, have experts; the shared one is a setting."""
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    if not first <= layer <= last or (layer + 1) % config.moe_layer_interval:
        return _DENSE
    return {} if config.moe_num_shared_experts else dict(modules=_ERNIE, linears=_MOE["linears"])


FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        Family(kind="llama", prefix="Llama"),
        Family(kind="mistral", prefix="Mistral", window=_one_window),
        Family(kind="ministral", prefix="Ministral", window=_window_by_type),
        Family(kind="qwen2", prefix="Qwen2", window=_window_by_type),
        Family(kind="qwen3", prefix="Qwen3", window=_window_by_type, norms=_NORMS | _OF_Q_AND_K),
        Family(
            kind="smollm3",
            prefix="SmolLM3",
            window=_window_by_type,
            traits=lambda config, i: {} if config.no_rope_layers[i] else {"rope": None},
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
            kind="exaone4",
            prefix="Exaone4",
            norms=_POST | _OF_Q_AND_K,
            window=_window_by_type,
            traits=_no_rope_without_window,
        ),
        Family(kind="olmo2", prefix="Olmo2", **_OLMO),
        Family(
            kind="olmo3",
            prefix="Olmo3",
            **_OLMO,
            window=_window_by_type,
            traits=lambda config, i: {"rope": config.layer_types[i]},
        ),
        Family(
            kind="hunyuan_v1_dense",
            prefix="HunYuanDenseV1",
            norms=_NORMS
            | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
            traits=lambda config, i: {"norms_rotated": True},
        ),
        Family(
            kind="ministral3",
            prefix="Ministral3",
            window=_one_window,
            query_scale=_scale_by_position,
        ),
        Family(kind="glm", prefix="Glm", **_GLM),
        Family(
            kind="glm4",
            prefix="Glm4",
            **_GLM,
            norms=_NORMS | {"post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"},
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
            window=_window_by_type,
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
            norms=_FOUR | _OF_Q_AND_K,
            window=_window_by_type,
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
            linears=_QKV | _OUT | {"up": "mlp.up_proj"},
            norm=NormClass(
                suffix="LayerNorm1P",
                epsilon="eps",
                configured="norm_eps",
                spec=partial(_CENTRED, offset=1.0),
            ),
            activations=_RELU2,
            traits=lambda config, i: {"activation": "relu2"},
        ),
        Family(
            kind="starcoder2",
            prefix="Starcoder2",
            linears=_QKV | {"o": "self_attn.o_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
            norm=NormClass(suffix="", epsilon="eps", configured="norm_epsilon", spec=_CENTRED),
            activation="mlp.act",
            activations=_GELU_TANH,
            window=_one_window,
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
            window=_window_by_type,
            traits=lambda config, i: (
                {"blocks": SIDE_BY_SIDE} | ({} if _window_by_type(config, i) else {"rope": None})
            ),
        ),
        Family(
            kind="phi3",
            prefix="Phi3",
            linears={"q": "self_attn.qkv_proj"} | _OUT | _BOTH,
            activation="mlp.activation_fn",
            dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
            window=_one_window,
        ),
        Family(
            kind="mixtral", prefix="Mixtral", **_MOE, window=_one_window, router=_softmax_router
        ),
        Family(
            kind="qwen3_moe",
            prefix="Qwen3Moe",
            **_MOE,
            norms=_NORMS | _OF_Q_AND_K,
            window=_one_window,
            width="moe_intermediate_size",
            router=_normed_if_asked,
            by_layer=lambda config, i: _DENSE if _is_dense(config, i) else {},
        ),
        Family(
            kind="qwen2_moe",
            prefix="Qwen2Moe",
            **_MOE
            | dict(
                modules=_SPARSE | {"mlp.shared_expert": "MLP"},
                linears=_MOE["linears"]
                | _shared("mlp.shared_expert")
                | {"share": "mlp.shared_expert_gate"},
            ),
            window=_window_by_type,
            width="moe_intermediate_size",
            shared_width=lambda config: config.shared_expert_intermediate_size,
            router=_normed_if_asked,
            by_layer=lambda config, i: _DENSE if _is_dense(config, i) else {},
        ),
        Family(
            kind="glm4_moe",
            prefix="Glm4Moe",
            **_MOE
            | dict(
                modules=_SPARSE
                | {"mlp": "MoE", "mlp.gate": "TopkRouter", "mlp.shared_experts": "MLP"},
                linears=_MOE["linears"] | _shared("mlp.shared_experts"),
                parameters={"choice_bias": "mlp.gate.e_score_correction_bias"},
            ),
            norms=_NORMS | _OF_Q_AND_K,
            width="moe_intermediate_size",
            shared_width=lambda config: config.moe_intermediate_size * config.n_shared_experts,
            router=_sigmoid_router,
            auxiliary=False,
            by_layer=_of_glm4_moe,
        ),
        Family(
            kind="ernie4_5_moe",
            prefix="Ernie4_5_Moe",
            **_MOE
            | dict(
                modules=_ERNIE | {"mlp.shared_experts": "MLP"},
                linears=_MOE["linears"] | _shared("mlp.shared_experts"),
                parameters={"choice_bias": f"{_STATICS}.e_score_correction_bias"},
            ),
            interleaved=True,
            in_fp32=("mlp.gate", _STATICS),
            width="moe_intermediate_size",
            shared_width=lambda config: (
                config.moe_intermediate_size * config.moe_num_shared_experts
            ),
            router=_floored_router,
            by_layer=_of_ernie,
        ),
        Family(
            kind="olmoe",
            prefix="Olmoe",
            **_MOE,
            norms=_NORMS | _OF_Q_AND_K,
            wide_norms=True,
            router=_normed_if_asked,
        ),
        Family(
            kind="gpt_oss",
            prefix="GptOss",
            modules={
                "self_attn": "Attention",
                **{"mlp": "MLP", "mlp.router": "TopKRouter", "mlp.experts": "Experts"},
            },
            linears=_QKV | {"o": _OUT["o"]},
            stacks=_EXPERTS | {"router": "mlp.router.weight"},
            parameters=_OF_GPT_OSS,
            activation="",
            norm=NormClass(spec=_ROUNDED_ONCE),
            half_tables=True,
            masks_by_position=False,
            window=_window_by_type,
            router=partial(_softmax_router, over="logits"),
            experts=_gpt_oss_layout,
        ),
        Family(kind="qwen2_vl_text", module="qwen2_vl", prefix="Qwen2VL", **_QWEN_VL),
        Family(kind="qwen2_5_vl_text", module="qwen2_5_vl", prefix="Qwen2_5_VL", **_QWEN_VL),
        Family(
            kind="qwen3_vl_text",
            module="qwen3_vl",
            prefix="Qwen3VLText",
            norms=_NORMS | _OF_Q_AND_K,
            position_rows=4,
        ),
        Family(
            kind="qwen3_vl_moe_text",
            module="qwen3_vl_moe",
            prefix="Qwen3VLMoeText",
            **_MOE,
            norms=_NORMS | _OF_Q_AND_K,
            position_rows=4,
            width="moe_intermediate_size",
            router=_softmax_router,
            by_layer=lambda config, i: _DENSE if _is_dense(config, i) else {},
        ),
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


def embedding_multiplier(base: PreTrainedModel) -> float:
    return known_family(base).embedding_multiplier(base)


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


def final_norm_spec(base: Any) -> NormSpec:
    """Returns how the norm after the last layer computes, whose epsilon may be another."""
    norm = known_family(base).norm
    return norm.spec(eps=getattr(base.norm, norm.epsilon))


def query_scale(base: PreTrainedModel, positions: Tensor) -> Tensor | None:
    return known_family(base).query_scale(base.config, positions)


def rotary_embeddings(base: Any) -> dict[str, tuple[Tensor, float]]:
    """Returns the frequencies and factor of each RoPE, by the names in `Traits.rope`: one of all
    layers, or one of each type of layer."""
    rotary = base.rotary_emb
    types = getattr(rotary, "layer_types", None)
    if types is None:
        return {"all": (rotary.inv_freq, rotary.attention_scaling)}
    return {
        kind: (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
        for kind in types
    }


def windows(config: PretrainedConfig) -> list[int | None]:
    """Returns the window of each layer; None for each layer of an unknown family."""
    family = family_of(config)
    window = _no_window if family is None else family.window
    return [window(config, i) for i in range(config.num_hidden_layers)]


def has_post_norms(config: PretrainedConfig) -> bool:
    """Whether norms follow attention and the MLP."""
    return "post1" in known_family(config).norms


def score_cap(config: PretrainedConfig) -> float | None:
    """Returns the softcap of attention's scores; None without one and for an unknown family."""
    family = family_of(config)
    return None if family is None else family.score_cap(config)


def has_windows(config: PretrainedConfig) -> bool:
    """Whether any layer has a window that is shorter than the model's maximum positions."""
    positions = getattr(config, "max_position_embeddings", None)
    return any(w is not None and (positions is None or w < positions) for w in windows(config))


_NOT_YET = {"mllama": "its layers of cross-attention to images are not supported yet"}
"""Why a family is missing, by a part of its names in lower case."""


def not_known(what: str, scored: bool = False) -> str:
    """Returns the line that refuses a model of no family here. `what` names its class or type;
    `scored` says that a task asks it for more than the loss of labels."""
    why = next((f": {why}" for name, why in _NOT_YET.items() if name in what.lower()), "")
    remedy = "Any model trains unpatched (--class_type vanilla)"
    if scored:
        remedy = "Of any other model --class_type vanilla trains --task sft"
    return (
        f"longctx has no family for {what}{why}. It knows {', '.join(FAMILIES)}, and the "
        f"vision-language {', '.join(PREFIXES)} around these. {remedy}, with one document a row "
        "if it mixes those of packed rows; docs/add_a_family.md shows how a family is added"
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


def part_of(layer: Any, name: str) -> Any:
    """Returns the submodule of a layer at the dotted path `name`; None if there is none. Only the
    last one on the path may be a wrapper of parameters (model/adapters.py)."""
    for step in name.split("."):
        layer = within(layer)._modules.get(step) if isinstance(layer, nn.Module) else None
    return layer
