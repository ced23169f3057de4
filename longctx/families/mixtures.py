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

from collections.abc import Callable
from functools import partial
from typing import Any

from longctx.families.family import (
    ROUNDED_ONCE,
    Family,
    NormClass,
    attention,
    either,
    experts,
    layer_of,
    mlp,
    one_window,
    window_by_type,
)
from longctx.kernels.clamped_swiglu import Clamped
from longctx.layer.router import Router
from longctx.layer.specs.attention_spec import NORM1, QK_NORMS
from longctx.layer.specs.part_spec import Declare
from longctx.layer.stack import ExpertLayout


def softmax_router(config: Any, layer: int, **settings: Any) -> Router:
    """Returns a router that chooses by softmax, as in Mixtral."""
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return Router(experts=count, chosen=config.num_experts_per_tok, **settings)


def normed_if_asked(config: Any, layer: int) -> Router:
    """Returns a router by softmax whose weights are normalised if the configuration says so."""
    return softmax_router(config, layer, normalised=config.norm_topk_prob)


BY_LOGITS = partial(softmax_router, over="logits")


def _sigmoid_router(config: Any, layer: int) -> Router:
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


def _floored_router(config: Any, layer: int) -> Router:
    """Returns a router that chooses by softmax and a bias, as in ERNIE 4.5."""
    return softmax_router(config, layer, floor=config.moe_norm_min, in_fp32=True)


def named(*names: str) -> Callable[[Any, int], Any]:
    """Returns what reads the product of some numbers of the configuration, as of `width`."""

    def read(config: Any, layer: int) -> Any:
        found = 1
        for name in names:
            found *= getattr(config, name)
        return found

    return read


OF_EXPERTS = named("moe_intermediate_size")


def sparse(
    at: str = "mlp",
    block: str = "SparseMoeBlock",
    gate: str = "gate",
    router_class: str = "TopKRouter",
    *,
    also: dict[str, str] | None = None,
    **fields: Any,
) -> Declare:
    """Declares experts in the module `at` of a layer, of class `block`, as Mixtral has them: their
    router is in its module `gate`. `also` has the classes of further modules."""
    inside = f"{at}.experts"
    usual: dict[str, Any] = dict(
        modules={at: block, f"{at}.{gate}": router_class, inside: "Experts", **(also or {})},
        stacks={
            "router": f"{at}.{gate}.weight",
            "experts_in": f"{inside}.gate_up_proj",
            "experts_out": f"{inside}.down_proj",
        },
        activations={f"{inside}.act_fn": "silu"},
        width=named("intermediate_size"),
        router=softmax_router,
    )
    return experts(**usual | fields)


def shared(at: str, width: Callable[[Any, int], Any], **fields: Any) -> Declare:
    """Declares a shared expert in the module `at` of a layer, an MLP as Llama's."""
    usual: dict[str, Any] = dict(
        modules={at: "MLP"},
        linears={f"shared_{name}": f"{at}.{name}_proj" for name in ("gate", "up", "down")},
        norms={},
        activations={f"{at}.act_fn": "silu"},
        width=width,
    )
    return mlp(**usual | fields)


def with_weighed_expert(router: Callable[[Any, int], Router]) -> Declare:
    """Declares experts and one that is shared and weighed by token, as in Qwen2-MoE."""
    at = "mlp.shared_expert"
    linears = {f"shared_{name}": f"{at}.{name}_proj" for name in ("gate", "up", "down")}
    linears |= {"share": "mlp.shared_expert_gate"}
    one = shared(at, named("shared_expert_intermediate_size"), linears=linears)
    return sparse(router=router, width=OF_EXPERTS, shared=one)


def is_dense(config: Any, layer: int) -> bool:
    """Whether a layer has an MLP among layers of experts, as in Qwen3-MoE."""
    is_sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return layer in config.mlp_only_layers or not is_sparse


# --- Granite ------------------------------------------------------------------------------------

GRANITE: dict[str, Any] = dict(
    embedding_multiplier=lambda base: base.embedding_multiplier,
    multiplies_given=True,
    logits_scaling=lambda model: model.config.logits_scaling,
)
"""Granite's scalars of the embedding and of the logits."""
RESIDUAL: dict[str, Any] = dict(factor=lambda config, i: config.residual_multiplier)
SCALED: dict[str, Any] = RESIDUAL | dict(scale=lambda config, i: config.attention_multiplier)
"""Granite's scalars of a layer: of the sums of attention and the MLP, and of attention's scores."""
_GRANITE = dict(at="block_sparse_moe", block="MoE", gate="router", router=BY_LOGITS, **RESIDUAL)
GRANITE_EXPERTS = sparse(**_GRANITE)
GRANITE_SHARED = sparse(
    **_GRANITE,
    shared=shared(
        "shared_mlp",
        named("shared_intermediate_size"),
        linears={
            "shared_gate": "shared_mlp.input_linear",
            "shared_down": "shared_mlp.output_linear",
        },
        activations={"shared_mlp.activation": "silu"},
    ),
)
"""Experts, and one that is shared, as in Granite 4."""


def granite_experts(config: Any, layer: int) -> Any:
    """Returns the spec of Granite's experts. The shared expert is a setting."""
    declare = GRANITE_SHARED if config.shared_intermediate_size else GRANITE_EXPERTS
    return declare(config, layer)


# --- GLM, ERNIE, gpt-oss ------------------------------------------------------------------------


def _of_glm4_moe(config: Any, layer: int) -> Any:
    """The first layers have an MLP, and norms of q and k are a setting."""
    attends = attention(norms=NORM1 | (QK_NORMS if config.use_qk_norm else {}))
    part = mlp() if layer < config.first_k_dense_replace else _GLM4_EXPERTS
    return attends(config, layer), part(config, layer)


_GLM4_EXPERTS = sparse(
    block="MoE",
    router_class="TopkRouter",
    parameters={"choice_bias": "mlp.gate.e_score_correction_bias"},
    width=OF_EXPERTS,
    router=_sigmoid_router,
    fp32_weights=True,
    shared=shared("mlp.shared_experts", named("moe_intermediate_size", "n_shared_experts")),
)
_STATICS = "mlp.gate.moe_statics"
_ERNIE: dict[str, Any] = dict(
    also={_STATICS: "Statics"},
    parameters={"choice_bias": f"{_STATICS}.e_score_correction_bias"},
    in_fp32=("mlp.gate", _STATICS),
    width=OF_EXPERTS,
    router=_floored_router,
)
_ERNIE_EXPERTS = sparse(**_ERNIE)
_ERNIE_SHARED = sparse(
    **_ERNIE,
    shared=shared("mlp.shared_experts", named("moe_intermediate_size", "moe_num_shared_experts")),
)


def _ernie_part(config: Any, layer: int) -> Any:
    """Layers between two, at intervals, have experts; the shared one is a setting."""
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    if not first <= layer <= last or (layer + 1) % config.moe_layer_interval:
        return mlp()(config, layer)
    return (_ERNIE_SHARED if config.moe_num_shared_experts else _ERNIE_EXPERTS)(config, layer)


def _gpt_oss_layout(config: Any, layer: int) -> ExpertLayout:
    """Returns gpt-oss's layout. Before transformers 5.18 its code has these numbers itself."""
    alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    return ExpertLayout(transposed=True, clamped=Clamped(alpha, limit))


_GPT_OSS_EXPERTS = sparse(
    block="MLP",
    gate="router",
    parameters={
        "router.bias": "mlp.router.bias",
        "experts_in.bias": "mlp.experts.gate_up_proj_bias",
        "experts_out.bias": "mlp.experts.down_proj_bias",
    },
    activations={},
    router=BY_LOGITS,
    layout=_gpt_oss_layout,
)
_NORMED = dict(norms=NORM1 | QK_NORMS)

MIXTURES: tuple[Family, ...] = (
    Family(
        kind="mixtral",
        prefix="Mixtral",
        layer=layer_of(attention(window=one_window), sparse(fp32_weights=True)),
        balances=True,
    ),
    Family(
        kind="qwen3_moe",
        prefix="Qwen3Moe",
        layer=layer_of(
            attention(**_NORMED, window=one_window),
            either(is_dense, mlp(), sparse(width=OF_EXPERTS, router=normed_if_asked)),
        ),
        balances=True,
    ),
    Family(
        kind="qwen2_moe",
        prefix="Qwen2Moe",
        layer=layer_of(
            attention(window=window_by_type),
            either(is_dense, mlp(), with_weighed_expert(normed_if_asked)),
        ),
        balances=True,
    ),
    Family(kind="glm4_moe", prefix="Glm4Moe", layer=_of_glm4_moe),
    Family(
        kind="ernie4_5_moe",
        prefix="Ernie4_5_Moe",
        layer=layer_of(attention(interleaved=True), _ernie_part),
        balances=True,
    ),
    Family(
        kind="olmoe",
        prefix="Olmoe",
        layer=layer_of(attention(**_NORMED, wide_norms=True), sparse(router=normed_if_asked)),
        balances=True,
    ),
    Family(
        kind="granitemoe",
        prefix="GraniteMoe",
        layer=layer_of(attention(**SCALED), GRANITE_EXPERTS),
        balances=True,
        **GRANITE,
    ),
    Family(
        kind="granitemoeshared",
        prefix="GraniteMoeShared",
        layer=layer_of(attention(**SCALED), granite_experts),
        balances=True,
        **GRANITE,
    ),
    Family(
        kind="gpt_oss",
        prefix="GptOss",
        layer=layer_of(
            attention(
                parameters={"sinks": "self_attn.sinks"}, window=window_by_type, half_tables=True
            ),
            _GPT_OSS_EXPERTS,
        ),
        norm=NormClass(spec=ROUNDED_ONCE),
        masks_by_position=False,
        balances=True,
    ),
    Family(
        kind="qwen3_vl_moe_text",
        module="qwen3_vl_moe",
        prefix="Qwen3VLMoeText",
        layer=layer_of(attention(**_NORMED), either(is_dense, mlp(), sparse(width=OF_EXPERTS))),
        position_rows=4,
        balances=True,
    ),
)
