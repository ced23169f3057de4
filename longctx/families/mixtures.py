"""The families whose layers have experts instead of an MLP (families.py has the others).

    mixtral  qwen3_moe  olmoe              experts; layers of Qwen3-MoE may have an MLP instead, and
                                           OLMoE's norms of q and k are over all heads
    qwen2_moe                              experts, and one that is shared and weighed by token
    glm4_moe                               groups of experts, chosen by sigmoid and a bias, and one
                                           that is shared; the first layers have an MLP
    ernie4_5_moe                           the same by softmax, without groups, with a router in
                                           fp32; RoPE of neighbours
    granitemoe  granitemoeshared           Granite's four scalars; the latter's shared expert is an
                                           MLP with gate and up in one
    gpt_oss                                attention sinks; experts with biases, transposed weights
                                           and a clamped activation of interleaved gate and up
    qwen3_vl_moe_text                      the text model of a vision-language model (positions.py)

An entry may name a shared expert (layer/parts/shared.py), and layers with an MLP in between.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from longctx.families.family import (
    GATE_UP,
    MLP_WIDTH,
    NORMS,
    OF_Q_AND_K,
    OUT,
    QKV,
    ROUNDED_ONCE,
    Family,
    NormClass,
    one_window,
    window_by_type,
)
from longctx.kernels.clamped_swiglu import Clamped
from longctx.layer.router import Router
from longctx.layer.stack import ExpertLayout

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
_MOE: dict[str, Any] = dict(
    modules=_SPARSE,
    linears=QKV | {"o": OUT["o"]},
    stacks=_EXPERTS,
    activation="mlp.experts.act_fn",
)
_STATICS = "mlp.gate.moe_statics"
_ERNIE = _SPARSE | {_STATICS: "Statics"}
DENSE: dict[str, Any] = dict(
    modules={"self_attn": "Attention", "mlp": "MLP"},
    linears=QKV | OUT | GATE_UP,
    stacks={},
    parameters={},
    activation="mlp.act_fn",
    width=MLP_WIDTH,
)
GRANITE: dict[str, Any] = dict(
    traits=lambda config, layer: granite_factors(config),
    embedding_multiplier=lambda base: base.embedding_multiplier,
    multiplies_given=True,
    logits_scaling=lambda model: model.config.logits_scaling,
)
"""Granite's four scalars."""


def granite_factors(config: Any) -> dict[str, Any]:
    """Returns those of Granite's scalars that its layers have."""
    return {"scale": config.attention_multiplier, "residual": config.residual_multiplier}


def softmax_router(config: Any, **settings: Any) -> Router:
    """Returns a router that chooses by softmax, as in Mixtral."""
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    return Router(experts=experts, chosen=config.num_experts_per_tok, **settings)


def normed_if_asked(config: Any) -> Router:
    """Returns the same where the configuration says whether the weights are normalised."""
    return softmax_router(config, normalised=config.norm_topk_prob)


def _shared(path: str) -> dict[str, str]:
    """Returns the linear layers of a shared expert, which is at `path` in a layer."""
    return {f"shared_{name}": f"{path}.{name}_proj" for name in ("gate", "up", "down")}


WITH_SHARED_EXPERT: dict[str, Any] = _MOE | dict(
    modules=_SPARSE | {"mlp.shared_expert": "MLP"},
    linears=_MOE["linears"] | _shared("mlp.shared_expert") | {"share": "mlp.shared_expert_gate"},
    width="moe_intermediate_size",
    shared_width=lambda config: config.shared_expert_intermediate_size,
)
"""A layer with experts, and one that is shared and weighed by token, as in Qwen2-MoE."""

GRANITE_MOE: dict[str, Any] = dict(
    modules={
        "self_attn": "Attention",
        **{"block_sparse_moe": "MoE", "block_sparse_moe.router": "TopKRouter"},
        "block_sparse_moe.experts": "Experts",
    },
    linears=QKV | {"o": OUT["o"]},
    stacks={
        "router": "block_sparse_moe.router.weight",
        "experts_in": "block_sparse_moe.experts.gate_up_proj",
        "experts_out": "block_sparse_moe.experts.down_proj",
    },
    activation="block_sparse_moe.experts.act_fn",
    router=partial(softmax_router, over="logits"),
)
GRANITE_SHARED: dict[str, Any] = GRANITE_MOE | dict(
    modules=GRANITE_MOE["modules"] | {"shared_mlp": "MLP"},
    linears=GRANITE_MOE["linears"]
    | {"shared_gate": "shared_mlp.input_linear", "shared_down": "shared_mlp.output_linear"},
    shared_activation="activation",
    shared_width=lambda config: config.shared_intermediate_size,
)
"""A layer with experts, and one that is shared, as in Granite 4."""


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
    return softmax_router(config, floor=config.moe_norm_min, in_fp32=True)


def _gpt_oss_layout(config: Any) -> ExpertLayout:
    """Returns gpt-oss's layout. Before transformers 5.18 its code has these numbers itself."""
    alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    return ExpertLayout(transposed=True, clamped=Clamped(alpha, limit))


def is_dense(config: Any, layer: int) -> bool:
    """Whether a layer has an MLP among layers of experts, as in Qwen3-MoE."""
    sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return layer in config.mlp_only_layers or not sparse


def _of_glm4_moe(config: Any, layer: int) -> dict[str, Any]:
    """The first layers have an MLP, and norms of q and k are a setting."""
    own = DENSE if layer < config.first_k_dense_replace else {}
    return own if config.use_qk_norm else own | {"norms": NORMS}


def _of_granite(config: Any, layer: int) -> dict[str, Any]:
    """The shared expert is a setting."""
    own = GRANITE_SHARED if config.shared_intermediate_size else GRANITE_MOE
    return dict(modules=own["modules"], linears=own["linears"])


def _of_ernie(config: Any, layer: int) -> dict[str, Any]:
    """Layers between two, at intervals, have experts; the shared one is a setting."""
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    if not first <= layer <= last or (layer + 1) % config.moe_layer_interval:
        return DENSE
    return {} if config.moe_num_shared_experts else dict(modules=_ERNIE, linears=_MOE["linears"])


MIXTURES: tuple[Family, ...] = (
    Family(kind="mixtral", prefix="Mixtral", **_MOE, window=one_window, router=softmax_router),
    Family(
        kind="qwen3_moe",
        prefix="Qwen3Moe",
        **_MOE,
        norms=NORMS | OF_Q_AND_K,
        window=one_window,
        width="moe_intermediate_size",
        router=normed_if_asked,
        by_layer=lambda config, i: DENSE if is_dense(config, i) else {},
    ),
    Family(
        kind="qwen2_moe",
        prefix="Qwen2Moe",
        **WITH_SHARED_EXPERT,
        window=window_by_type,
        router=normed_if_asked,
        by_layer=lambda config, i: DENSE if is_dense(config, i) else {},
    ),
    Family(
        kind="glm4_moe",
        prefix="Glm4Moe",
        **_MOE
        | dict(
            modules=_SPARSE | {"mlp": "MoE", "mlp.gate": "TopkRouter", "mlp.shared_experts": "MLP"},
            linears=_MOE["linears"] | _shared("mlp.shared_experts"),
            parameters={"choice_bias": "mlp.gate.e_score_correction_bias"},
        ),
        norms=NORMS | OF_Q_AND_K,
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
        shared_width=lambda config: config.moe_intermediate_size * config.moe_num_shared_experts,
        router=_floored_router,
        by_layer=_of_ernie,
    ),
    Family(
        kind="olmoe",
        prefix="Olmoe",
        **_MOE,
        norms=NORMS | OF_Q_AND_K,
        wide_norms=True,
        router=normed_if_asked,
    ),
    Family(kind="granitemoe", prefix="GraniteMoe", **GRANITE_MOE, **GRANITE),
    Family(
        kind="granitemoeshared",
        prefix="GraniteMoeShared",
        **GRANITE_SHARED,
        **GRANITE,
        by_layer=_of_granite,
    ),
    Family(
        kind="gpt_oss",
        prefix="GptOss",
        modules={
            "self_attn": "Attention",
            **{"mlp": "MLP", "mlp.router": "TopKRouter", "mlp.experts": "Experts"},
        },
        linears=QKV | {"o": OUT["o"]},
        stacks=_EXPERTS | {"router": "mlp.router.weight"},
        parameters=_OF_GPT_OSS,
        activation="",
        norm=NormClass(spec=ROUNDED_ONCE),
        half_tables=True,
        masks_by_position=False,
        window=window_by_type,
        router=partial(softmax_router, over="logits"),
        experts=_gpt_oss_layout,
    ),
    Family(
        kind="qwen3_vl_moe_text",
        module="qwen3_vl_moe",
        prefix="Qwen3VLMoeText",
        **_MOE,
        norms=NORMS | OF_Q_AND_K,
        position_rows=4,
        width="moe_intermediate_size",
        router=softmax_router,
        by_layer=lambda config, i: DENSE if is_dense(config, i) else {},
    ),
)
