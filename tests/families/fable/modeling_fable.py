"""A family that transformers does not have, as it would stand there (test_new_family.py): Llama
with a factor of both residual sums, an MLP without a gate in every second layer, and, if the
configuration says so, a mixer of its own in the last layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)

__all__ = ["FableConfig", "FableForCausalLM", "eager_attention_forward"]


class FableConfig(LlamaConfig):
    model_type = "fable"
    residual_factor = 0.25
    mixes = False


class FableRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


class FableRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids)


class FableAttention(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class FableMLP(nn.Module):
    def __init__(self, config: FableConfig, gated: bool) -> None:
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        if gated:
            self.gate_proj = nn.Linear(D, F, bias=False)
        self.up_proj = nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "gate_proj"):
            return self.down_proj(self.act_fn(self.up_proj(x)))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FableMixer(nn.Module):
    """Mixes each token with the one before it."""

    def __init__(self, config: FableConfig) -> None:
        super().__init__()
        self.in_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **_: Any) -> Tensor:
        x = self.in_proj(hidden_states)  # (rows, t, D)
        rows = x.mT
        if cache_params is not None:
            rows = cache_params.update_conv_state(rows, 0, conv_kernel_size=2)
        before = nn.functional.pad(rows, (1 + x.shape[1] - rows.shape[2], 0))
        return x + before[:, :, : x.shape[1]].mT.tanh()


class FableDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: FableConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = FableAttention(config, layer_idx)
        self.mlp = FableMLP(config, gated=layer_idx % 2 == 0)
        norm = dict(eps=config.rms_norm_eps)
        self.input_layernorm = FableRMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = FableRMSNorm(config.hidden_size, **norm)
        self.factor = config.residual_factor
        if config.mixes and layer_idx == config.num_hidden_layers - 1:
            del self.self_attn
            self.mix = FableMixer(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        mixes = hasattr(self, "mix")
        mixed = self.mix(normed) if mixes else self.self_attn(hidden_states=normed, **kwargs)[0]
        hidden_states = hidden_states + self.factor * mixed
        return hidden_states + self.factor * self.mlp(self.post_attention_layernorm(hidden_states))


class FableModel(LlamaModel):
    config_class = FableConfig

    def __init__(self, config: FableConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(FableDecoderLayer(config, i) for i in layers)
        self.norm = FableRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = FableRotaryEmbedding(config=config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class FableForCausalLM(LlamaForCausalLM):
    config_class = FableConfig

    def __init__(self, config: FableConfig) -> None:
        super().__init__(config)
        self.model = FableModel(config)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)
