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

from collections.abc import Callable
from typing import Any

from longctx.cost.dims import MixerMemory
from longctx.families.family import (
    ONE_PLUS,
    ROUNDED_ONCE,
    DeclareLayer,
    Family,
    NormClass,
    attention,
    either,
    layer_of,
    mixer,
    mlp,
)
from longctx.families.mixtures import (
    GRANITE,
    RESIDUAL,
    SCALED,
    granite_experts,
    is_dense,
    named,
    normed_if_asked,
    softmax_router,
    with_weighed_expert,
)
from longctx.layer.specs.attention_spec import NORM1, OUT, QK_NORMS, QKV
from longctx.layer.specs.part_spec import Declare


def _is_mixed(config: Any, layer: int) -> bool:
    kind: str = config.layer_types[layer]
    return kind == "linear_attention"


# --- mixers -------------------------------------------------------------------------------------


def _delta_state(config: Any, layer: int) -> tuple[int, int]:
    """Returns the elements of the state of a Gated DeltaNet."""
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    values = config.linear_num_value_heads * d_v
    channels = 2 * config.linear_num_key_heads * d_k + values
    return values * d_k, channels * (config.linear_conv_kernel_dim - 1)


def _mamba_state(config: Any, layer: int) -> tuple[int, int]:
    """Returns the elements of the state of a Mamba 2."""
    values, size = config.mamba_n_heads * config.mamba_d_head, config.mamba_d_state
    channels = values + 2 * config.mamba_n_groups * size
    return values * size, channels * (config.mamba_d_conv - 1)


def _nemotron_state(config: Any, layer: int) -> tuple[int, int]:
    """Returns the elements of the state of a Mamba 2, whose sizes have names of their own here."""
    values = config.mamba_num_heads * config.mamba_head_dim
    channels = values + 2 * config.n_groups * config.ssm_state_size
    return values * config.ssm_state_size, channels * (config.conv_kernel - 1)


def _convolution_state(config: Any, layer: int) -> tuple[int, int]:
    """Returns the elements of the state of a short convolution, which has no recurrence."""
    return 0, config.hidden_size * (config.conv_L_cache - 1)


def delta_net(**fields: Any) -> Declare:
    """Declares a Gated DeltaNet, as in Qwen3.5."""
    usual: dict[str, Any] = dict(
        path="linear_attn",
        module="GatedDeltaNet",
        kind="delta rule",
        package="fla",
        inner_linears={name: f"in_proj_{name}" for name in ("qkv", "z", "b", "a")}
        | {"out": "out_proj"},
        gated_norm="norm",
        state=_delta_state,
    )
    return mixer(**usual | fields)


def mamba(**fields: Any) -> Declare:
    """Declares a Mamba 2, as in Granite 4."""
    usual: dict[str, Any] = dict(
        path="mamba",
        module="MambaLayer",
        kind="mamba",
        memory=MixerMemory(2.1, 3.0, 4.6),
        gated_norm="norm",
        gate_first=True,
        state=_mamba_state,
    )
    return mixer(**usual | fields)


# --- Qwen3-Next, Qwen3.5, OLMo ------------------------------------------------------------------

_GATED = attention(norms=NORM1 | QK_NORMS, output_gate=True)


def _mixed_or_gated(part: Declare, **fields: Any) -> DeclareLayer:
    """Declares layers with a Gated DeltaNet or with gated attention, and a part over tiles."""
    return layer_of(either(_is_mixed, delta_net(**fields), _GATED), part)


_QWEN3_5: dict[str, Any] = dict(
    base="TextModel", rotary="TextRotaryEmbedding", position_rows=4, norm=ONE_PLUS
)


def _olmo_rope(config: Any, layer: int) -> str | None:
    """Released models have no RoPE at all."""
    rope = config.rope_parameters
    return "all" if rope is not None and rope.get("rope_theta") is not None else None


_OLMO_MIXES = delta_net(
    decoder="LinearAttentionDecoderLayer",
    inner_linears={name: f"{name}_proj" for name in (*QKV, "b", "a")}
    | {"z": "g_proj", "out": "o_proj"},
    gated_norm="o_norm",
)
_OLMO_ATTENDS = layer_of(
    attention(
        decoder="AttentionDecoderLayer",
        norms={"post1": "post_attention_layernorm"} | QK_NORMS,
        wide_norms=True,
        rope=_olmo_rope,
    ),
    mlp(norms={"post2": "post_feedforward_layernorm"}),
)

# --- LFM2 ---------------------------------------------------------------------------------------


def _lfm2_width(config: Any, layer: int) -> int:
    """Returns the width of LFM2's MLPs: two thirds of the configuration's, times a factor, and
    rounded up, if the configuration asks for that."""
    width: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return width
    factor, step = config.block_ffn_dim_multiplier, config.block_multiple_of
    width = int(2 * width / 3)
    return width if factor is None else step * -(-int(factor * width) // step)


_OPERATOR_NORM = {"norm1": "operator_norm"}
_LFM2_ATTENDS = attention(
    linears=QKV | {"o": "self_attn.out_proj"},
    norms=_OPERATOR_NORM | {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"},
    drops=False,
)
_LFM2_CONVOLVES = mixer(
    path="conv",
    module="ShortConv",
    kind="convolution",
    cache="past_key_values",
    norms=_OPERATOR_NORM,
    state=_convolution_state,
)
_LFM2_MLP = mlp(
    modules={"feed_forward": "MLP"},
    linears={name: f"feed_forward.{w}" for name, w in dict(gate="w1", up="w3", down="w2").items()},
    norms={"norm2": "ffn_norm"},
    activations={},
    width=_lfm2_width,
)

# --- Nemotron-H ---------------------------------------------------------------------------------

_IN_NEMOTRON: dict[str, DeclareLayer] = {
    "linear_attention": layer_of(
        mamba(path="mixer", module="Mamba2Mixer", state=_nemotron_state, norms={"norm1": "norm"})
    ),
    "full_attention": layer_of(
        attention(
            path="mixer",
            modules={"mixer": "Attention"},
            linears={name: f"mixer.{name}_proj" for name in (*QKV, *OUT)},
            norms={"norm1": "norm"},
            rope=None,
        )
    ),
}
"""The layers of Nemotron-H by their types; all others have an MLP."""
_NEMOTRON_MLP = layer_of(
    mlp(
        modules={"mixer": "MLP"},
        linears={"up": "mixer.up_proj", "down": "mixer.down_proj"},
        norms={"norm2": "norm"},
        activation="relu2",
        activations={"mixer.act_fn": "relu2"},
    )
)


def _of_nemotron(config: Any, layer: int) -> Any:
    return _IN_NEMOTRON.get(config.layer_types[layer], _NEMOTRON_MLP)(config, layer)


# --- Granite 4 ----------------------------------------------------------------------------------


def _granite_rope(config: Any, layer: int) -> str | None:
    """RoPE is a setting."""
    return "all" if config.position_embedding_type == "rope" else None


_GRANITE_MLP = mlp(
    modules={"shared_mlp": "MLP"},
    linears={"gate": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    activations={"shared_mlp.activation": "silu"},
    width=named("shared_intermediate_size"),
    **RESIDUAL,
)


def _has_experts(config: Any, layer: int) -> bool:
    """Models without experts have the shared one alone, as their MLP."""
    return bool(config.num_local_experts)


# --- Falcon-H1 ----------------------------------------------------------------------------------


def _attention_out(config: Any, layer: int) -> float:
    return float(config.attention_in_multiplier * config.attention_out_multiplier)


def _score_factor(config: Any, layer: int) -> float:
    """Attention multiplies what it reads by a, and its keys by b: scores of what q and k's
    projections give without either have the factor a^2 b, and its output a. The mixer multiplies
    what it reads itself."""
    return float(config.attention_in_multiplier**2 * config.key_multiplier)


def _factors_of(**names: str) -> Callable[[Any, int], dict[str, float]]:
    """Returns what reads factors of modules, by their paths, from the configuration."""
    return lambda config, i: {path: getattr(config, name) for path, name in names.items()}


def _attention_factors(config: Any, layer: int) -> dict[str, float]:
    """Biases of q, k and v would not have the factor a, so that models with both are declined."""
    return {
        "attention_in_multiplier": 1.0 if config.attention_bias else config.attention_in_multiplier,
        "attn_out_multiplier": config.attention_out_multiplier,
        "self_attn.key_multiplier": config.key_multiplier,
    }


def _mlp_factors(config: Any, layer: int) -> dict[str, float]:
    gate, down = config.mlp_multipliers
    return {"feed_forward.gate_multiplier": gate, "feed_forward.down_multiplier": down}


_FALCON = layer_of(
    attention(factor=_attention_out, score_factor=_score_factor, factors=_attention_factors),
    mamba(
        module="Mixer",
        memory=MixerMemory(2.6, 3.4, 6.5),  # states are twice as large as Granite's
        gated_norm="",
        gate_first=False,
        factor=named("ssm_out_multiplier"),
        factors=_factors_of(ssm_out_multiplier="ssm_out_multiplier"),
    ),
    mlp(
        modules={"feed_forward": "MLP"},
        linears={name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        norms={"norm2": "pre_ff_layernorm"},
        activations={"feed_forward.act_fn": "silu"},
        factor=lambda config, i: config.mlp_multipliers[1],
        gate_scale=lambda config, i: config.mlp_multipliers[0],
        factors=_mlp_factors,
    ),
)

HYBRIDS: tuple[Family, ...] = (
    Family(
        kind="qwen3_5_text",
        module="qwen3_5",
        prefix="Qwen3_5",
        layer=_mixed_or_gated(mlp()),
        **_QWEN3_5,
    ),
    Family(
        kind="qwen3_next",
        prefix="Qwen3Next",
        layer=_mixed_or_gated(
            either(is_dense, mlp(), with_weighed_expert(normed_if_asked)),
            inner_linears={"qkvz": "in_proj_qkvz", "ba": "in_proj_ba", "out": "out_proj"},
        ),
        norm=ONE_PLUS,
        balances=True,
    ),
    Family(
        kind="qwen3_5_moe_text",
        module="qwen3_5_moe",
        prefix="Qwen3_5Moe",
        layer=_mixed_or_gated(with_weighed_expert(softmax_router)),
        balances=True,
        **_QWEN3_5,
    ),
    Family(
        kind="olmo_hybrid",
        prefix="OlmoHybrid",
        decoders=("AttentionDecoderLayer", "LinearAttentionDecoderLayer"),
        layer=either(_is_mixed, layer_of(_OLMO_MIXES, mlp()), _OLMO_ATTENDS),
        norm=NormClass(spec=ROUNDED_ONCE),
    ),
    Family(
        kind="lfm2",
        prefix="Lfm2",
        layer=layer_of(
            either(
                lambda config, i: config.layer_types[i] == "conv", _LFM2_CONVOLVES, _LFM2_ATTENDS
            ),
            _LFM2_MLP,
        ),
        last_norm="embedding_norm",
        norm=NormClass(configured="norm_eps"),
    ),
    Family(
        kind="nemotron_h",
        prefix="NemotronH",
        decoders=("Block",),
        layer=_of_nemotron,
        embedding="embeddings",
        last_norm="norm_f",
        rotary="",
        norm=NormClass(configured="layer_norm_epsilon", spec=ROUNDED_ONCE),
    ),
    Family(
        kind="granitemoehybrid",
        prefix="GraniteMoeHybrid",
        layer=layer_of(
            either(_is_mixed, mamba(**RESIDUAL), attention(**SCALED, rope=_granite_rope)),
            either(_has_experts, granite_experts, _GRANITE_MLP),
        ),
        output="MoeModelOutputWithPast",
        masks_by_position=False,
        balances=True,
        **GRANITE,
    ),
    Family(
        kind="falcon_h1",
        prefix="FalconH1",
        layer=_FALCON,
        last_norm="final_layernorm",
        embedding_multiplier=lambda base: base.embedding_multiplier,
        logits_scaling=lambda model: 1 / model.model.lm_head_multiplier,
    ),
)
