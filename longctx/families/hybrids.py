"""The families that have mixers in the place of attention in some layers, or beside it
(families.py has the others). A mixer runs as transformers has it (layer/parts/mixer.py).

    qwen3_5_text                           Gated DeltaNet; attention has a gate of its output
    qwen3_next  qwen3_5_moe_text           the same with experts, and one that is shared; the text
                                           models of Qwen3.5 get three rows of positions, which
                                           attention reads and mixers do not (positions.py)
    olmo_hybrid                            Gated DeltaNet with a norm before it and before the MLP;
                                           layers of attention have OLMo 3's norms, RoPE or none
    lfm2                                   short convolutions; norms of q and k, an MLP whose width
                                           is adjusted
    nemotron_h                             one block a layer: Mamba 2, attention or an MLP;
                                           models with experts run Hugging Face's layers
    granitemoehybrid                       Mamba 2 and Granite's four scalars, RoPE or none; an MLP,
                                           or experts and one that is shared
    falcon_h1                              Mamba 2 and attention side by side in each layer, and an
                                           MLP; a factor of nearly everything
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longctx.families.family import (
    NORMS,
    OF_Q_AND_K,
    ONE_PLUS,
    OUT,
    QKV,
    RELU2,
    ROUNDED_ONCE,
    Family,
    NormClass,
)
from longctx.families.mixtures import (
    DENSE,
    GRANITE,
    GRANITE_SHARED,
    WITH_SHARED_EXPERT,
    granite_factors,
    is_dense,
    normed_if_asked,
    softmax_router,
)
from longctx.layer.parts.mixer_spec import MixerSpec

_POST = {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"}
_OF_ATTENTION = (*QKV, "o")
_GRANITE_MLP = {"gate": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}


def _delta_state(config: Any) -> tuple[int, int]:
    """Returns the elements of the state of a Gated DeltaNet."""
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    values = config.linear_num_value_heads * d_v
    channels = 2 * config.linear_num_key_heads * d_k + values
    return values * d_k, channels * (config.linear_conv_kernel_dim - 1)


def _mamba_state(config: Any) -> tuple[int, int]:
    """Returns the elements of the state of a Mamba 2."""
    values, size = config.mamba_n_heads * config.mamba_d_head, config.mamba_d_state
    channels = values + 2 * config.mamba_n_groups * size
    return values * size, channels * (config.mamba_d_conv - 1)


DELTA_NET = MixerSpec(
    path="linear_attn",
    module="GatedDeltaNet",
    kind="delta rule",
    package="fla",
    norm="norm",
    state=_delta_state,
)
MAMBA = MixerSpec(
    path="mamba",
    module="MambaLayer",
    kind="mamba",
    graph=4.3,  # of which 1.5 are states before chunks and their gradients, which backward makes
    norm="norm",
    gate_first=True,
    state=_mamba_state,
)


def _without_attention(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns the modules and linear layers of a layer but for those of its attention."""
    modules, linears = layer["modules"].items(), layer["linears"].items()
    return dict(
        modules={path: name for path, name in modules if path != "self_attn"},
        linears={name: path for name, path in linears if name not in _OF_ATTENTION},
    )


def _nemotron_state(config: Any) -> tuple[int, int]:
    """Returns the elements of the state of a Mamba 2, whose sizes have names of their own here."""
    values = config.mamba_num_heads * config.mamba_head_dim
    channels = values + 2 * config.n_groups * config.ssm_state_size
    return values * config.ssm_state_size, channels * (config.conv_kernel - 1)


def _convolution_state(config: Any) -> tuple[int, int]:
    """Returns the elements of the state of a short convolution, which has no recurrence."""
    return 0, config.hidden_size * (config.conv_L_cache - 1)


def _with_delta_net(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns what describes a layer with a Gated DeltaNet in the place of its attention."""
    own: dict[str, Any] = dict(mixer=DELTA_NET, norms=NORMS, output_gate=False)
    return layer | _without_attention(layer) | own


def _with_mamba(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns what describes a layer with a Mamba 2 in the place of its attention."""
    return layer | _without_attention(layer) | dict(mixer=MAMBA)


_DELTA_NET = _with_delta_net(DENSE)
_DELTA_NET_AND_EXPERTS = _with_delta_net(WITH_SHARED_EXPERT)
_OLMO_MIXED = _DELTA_NET | dict(
    decoders=("LinearAttentionDecoderLayer",),
    mixer=replace(DELTA_NET, norm="o_norm"),
    wide_norms=False,
)
_OLMO_ATTENDS: dict[str, Any] = dict(decoders=("AttentionDecoderLayer",))
_GRANITE_DENSE: dict[str, Any] = dict(
    modules={"self_attn": "Attention", "shared_mlp": "MLP"},
    linears=QKV | {"o": OUT["o"]} | _GRANITE_MLP,
    stacks={},
    activation="shared_mlp.activation",
    width="shared_intermediate_size",
)
_LFM2: dict[str, Any] = dict(
    modules={"self_attn": "Attention", "feed_forward": "MLP"},
    linears=QKV
    | {"o": "self_attn.out_proj", "gate": "feed_forward.w1"}
    | {"up": "feed_forward.w3", "down": "feed_forward.w2"},
)
_LFM2_NORMS = {"norm1": "operator_norm", "norm2": "ffn_norm"}
_LFM2_MIXED: dict[str, Any] = _without_attention(_LFM2) | dict(
    norms=_LFM2_NORMS,
    mixer=MixerSpec(
        path="conv",
        module="ShortConv",
        kind="convolution",
        cache="past_key_values",
        state=_convolution_state,
    ),
)
_IN_NEMOTRON: dict[str, dict[str, Any]] = {
    "linear_attention": dict(
        modules={},
        linears={},
        norms={"norm1": "norm"},
        activation="",
        mixer=replace(MAMBA, path="mixer", module="Mamba2Mixer", state=_nemotron_state),
    ),
    "full_attention": dict(
        modules={"mixer": "Attention"},
        linears={name: f"mixer.{name}_proj" for name in _OF_ATTENTION},
        norms={"norm1": "norm"},
        activation="",
    ),
}
"""The layers of Nemotron-H by their types; all others have an MLP."""
_GRANITE_MIXED, _GRANITE_DENSE_MIXED = map(_with_mamba, (GRANITE_SHARED, _GRANITE_DENSE))


def _is_mixed(config: Any, layer: int) -> bool:
    return config.layer_types[layer] == "linear_attention"


def _of_qwen3_next(config: Any, layer: int) -> dict[str, Any]:
    """Layers may have an MLP among layers of experts."""
    if is_dense(config, layer):
        return _DELTA_NET if _is_mixed(config, layer) else DENSE
    return _DELTA_NET_AND_EXPERTS if _is_mixed(config, layer) else {}


def _olmo_traits(config: Any, layer: int) -> dict[str, Any]:
    """Released models have no RoPE at all."""
    rope = config.rope_parameters
    return {} if rope is not None and rope.get("rope_theta") is not None else {"rope": None}


def _lfm2_width(config: Any, width: int) -> int:
    """Returns the width of LFM2's MLPs: two thirds of the configuration's, times a factor, and
    rounded up, if the configuration asks for that."""
    if not config.block_auto_adjust_ff_dim:
        return width
    factor, step = config.block_ffn_dim_multiplier, config.block_multiple_of
    width = int(2 * width / 3)
    return width if factor is None else step * -(-int(factor * width) // step)


def _granite_traits(config: Any, layer: int) -> dict[str, Any]:
    """RoPE is a setting."""
    rope = "all" if config.position_embedding_type == "rope" else None
    return granite_factors(config) | {"rope": rope}


def _of_granite(config: Any, layer: int) -> dict[str, Any]:
    """Models without experts have the shared one alone, as their MLP."""
    if config.num_local_experts:
        return _GRANITE_MIXED if _is_mixed(config, layer) else {}
    return _GRANITE_DENSE_MIXED if _is_mixed(config, layer) else _GRANITE_DENSE


def _falcon_traits(config: Any, layer: int) -> dict[str, Any]:
    """Attention multiplies what it reads by a, and its keys by b: scores of what q and k's
    projections give without either have the factor a^2 b, and its output a. The mixer multiplies
    what it reads itself."""
    a, b = config.attention_in_multiplier, config.key_multiplier
    gate, down = config.mlp_multipliers
    return dict(
        score_factor=a**2 * b,
        gate_scale=gate,
        factors={
            "attention": a * config.attention_out_multiplier,
            "mixer": config.ssm_out_multiplier,
            "mlp": down,
        },
    )


def _falcon_factors(config: Any) -> dict[str, float]:
    """Biases of q, k and v would not have the factor a, so that models with both are declined."""
    gate, down = config.mlp_multipliers
    return {
        "attention_in_multiplier": 1.0 if config.attention_bias else config.attention_in_multiplier,
        "attn_out_multiplier": config.attention_out_multiplier,
        "ssm_out_multiplier": config.ssm_out_multiplier,
        "self_attn.key_multiplier": config.key_multiplier,
        "feed_forward.gate_multiplier": gate,
        "feed_forward.down_multiplier": down,
    }


_QWEN3_NEXT: dict[str, Any] = dict(norm=ONE_PLUS, norms=NORMS | OF_Q_AND_K, output_gate=True)
_QWEN3_5 = _QWEN3_NEXT | dict(base="TextModel", rotary="TextRotaryEmbedding", position_rows=4)

HYBRIDS: tuple[Family, ...] = (
    Family(
        kind="qwen3_5_text",
        module="qwen3_5",
        prefix="Qwen3_5",
        **_QWEN3_5,
        by_layer=lambda config, i: _DELTA_NET if _is_mixed(config, i) else {},
    ),
    Family(
        kind="qwen3_next",
        prefix="Qwen3Next",
        **WITH_SHARED_EXPERT,
        **_QWEN3_NEXT,
        router=normed_if_asked,
        by_layer=_of_qwen3_next,
    ),
    Family(
        kind="qwen3_5_moe_text",
        module="qwen3_5_moe",
        prefix="Qwen3_5Moe",
        **WITH_SHARED_EXPERT,
        **_QWEN3_5,
        router=softmax_router,
        by_layer=lambda config, i: _DELTA_NET_AND_EXPERTS if _is_mixed(config, i) else {},
    ),
    Family(
        kind="olmo_hybrid",
        prefix="OlmoHybrid",
        decoders=("AttentionDecoderLayer", "LinearAttentionDecoderLayer"),
        norms=_POST | OF_Q_AND_K,
        wide_norms=True,
        norm=NormClass(spec=ROUNDED_ONCE),
        traits=_olmo_traits,
        by_layer=lambda config, i: _OLMO_MIXED if _is_mixed(config, i) else _OLMO_ATTENDS,
    ),
    Family(
        kind="lfm2",
        prefix="Lfm2",
        **_LFM2,
        last_norm="embedding_norm",
        norm=NormClass(configured="norm_eps"),
        norms=_LFM2_NORMS | {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"},
        activation="",
        drops_attention=False,
        adjusted=_lfm2_width,
        by_layer=lambda config, i: _LFM2_MIXED if config.layer_types[i] == "conv" else {},
    ),
    Family(
        kind="nemotron_h",
        prefix="NemotronH",
        decoders=("Block",),
        embedding="embeddings",
        last_norm="norm_f",
        rotary="",
        attention="mixer",
        modules={"mixer": "MLP"},
        linears={"up": "mixer.up_proj", "down": "mixer.down_proj"},
        norms={"norm2": "norm"},
        norm=NormClass(configured="layer_norm_epsilon", spec=ROUNDED_ONCE),
        activation="mixer.act_fn",
        activations=RELU2,
        traits=lambda config, i: {"activation": "relu2", "rope": None},
        by_layer=lambda config, i: _IN_NEMOTRON.get(config.layer_types[i], {}),
    ),
    Family(
        kind="granitemoehybrid",
        prefix="GraniteMoeHybrid",
        **GRANITE_SHARED,
        **GRANITE | dict(traits=_granite_traits),
        output="MoeModelOutputWithPast",
        masks_by_position=False,
        by_layer=_of_granite,
    ),
    Family(
        kind="falcon_h1",
        prefix="FalconH1",
        last_norm="final_layernorm",
        modules={"self_attn": "Attention", "feed_forward": "MLP"},
        linears=QKV
        | {"o": OUT["o"]}
        | {name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        norms={"norm1": "input_layernorm", "norm2": "pre_ff_layernorm"},
        activation="feed_forward.act_fn",
        # States are twice as large as Granite's.
        mixer=replace(MAMBA, module="Mixer", graph=5.4, norm="", gate_first=False),
        embedding_multiplier=lambda base: base.embedding_multiplier,
        logits_scaling=lambda model: 1 / model.model.lm_head_multiplier,
        traits=_falcon_traits,
        factors=_falcon_factors,
    ),
)
