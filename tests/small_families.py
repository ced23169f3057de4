"""A small model of every family, with what it adds to Llama at values that matter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, GptOssConfig, PretrainedConfig

from longctx.families.families import base_of, layers_of
from longctx.families.family import part_of
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.mixers.mixers import ModelsMixer
from longctx.system import installed

WINDOW = 23
"""Shorter than most documents of the tests, and no multiple of anything."""

SIZES: dict[str, Any] = dict(
    vocab_size=211,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=None,
)
_SOME = ["full_attention", "sliding_attention", "full_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}

_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
_SCALED = dict(original_max_position_embeddings=16, llama_4_scaling_beta=0.7)

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_CLAMPED = (
    {"swiglu_alpha": 2.0, "swiglu_limit": 0.8} if hasattr(GptOssConfig(), "swiglu_limit") else {}
)
"""Before transformers 5.18 these numbers are its own, 1.702 and 7."""

_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_a_log_min=0.04,
    linear_a_log_max=0.06,
)
"""Gated DeltaNets that forget slowly, so that a state which reaches another document shows."""
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25} | dict(
    mrope_section=[2, 1, 1], mrope_interleaved=True
)

_LOOP = dict(experts_implementation="eager")
"""Experts in a loop: transformers' grouped matmuls take no fp64."""
_DELTA_MOE: dict[str, Any] = _LOOP | dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=72,
)
_GRANITE: dict[str, Any] = dict(
    embedding_multiplier=6.0,
    attention_multiplier=0.15,
    residual_multiplier=0.22,
    logits_scaling=3.0,
)
_MAMBA: dict[str, Any] = _GRANITE | dict(
    layer_types=_MIXED,
    mamba_n_heads=8,
    mamba_d_state=16,
    mamba_chunk_size=16,
    eos_token_id=None,
)
_GRANITE_MOE = _GRANITE | _LOOP | dict(num_local_experts=6, num_experts_per_tok=3)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(head_dim=64)),
    "mistral": ("mistral", dict(head_dim=64, sliding_window=WINDOW)),
    "mistral-whole": ("mistral", dict(head_dim=64, sliding_window=None)),
    "ministral": ("ministral", dict(head_dim=32, sliding_window=WINDOW, layer_types=_SOME)),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3": ("qwen3", dict(head_dim=64)),
    "qwen3-windows": (
        "qwen3",
        dict(head_dim=64, attention_bias=True, use_sliding_window=True, sliding_window=WINDOW)
        | dict(max_window_layers=1),
    ),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2)),
    "smollm3-windows": (
        "smollm3",
        dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=WINDOW),
    ),
    "granite": ("granite", _GRANITE),
    "granite-biases": (
        "granite",
        dict(embedding_multiplier=0.7, attention_multiplier=0.3, residual_multiplier=1.7)
        | dict(logits_scaling=0.6, attention_bias=True, mlp_bias=True),
    ),
    "seed_oss": (
        "seed_oss",
        dict(head_dim=32, attention_bias=True, attention_out_bias=True)
        | dict(attention_dropout=0.0, residual_dropout=0.0),
    ),
    "exaone4": (
        "exaone4",
        dict(head_dim=32, sliding_window=WINDOW, sliding_window_pattern=2),
    ),
    "exaone4-whole": ("exaone4", dict(head_dim=64, sliding_window=None, layer_types=3 * _SOME[:1])),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        dict(sliding_window=WINDOW, layer_types=_SOME, rope_parameters=_TWO_ROPES, head_dim=64),
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", dict(head_dim=64)),
    "ministral3": (
        "ministral3",
        dict(head_dim=64, sliding_window=None)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | _SCALED),
    ),
    "glm": ("glm", dict(head_dim=64, attention_bias=True)),
    "glm4": ("glm4", dict(head_dim=32, attention_bias=True)),
    "gemma": ("gemma", dict(head_dim=64, tie_word_embeddings=True)),
    "gemma2": (
        "gemma2",
        dict(head_dim=64, sliding_window=WINDOW, layer_types=_SOME, query_pre_attn_scalar=24)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, tie_word_embeddings=True)
        | dict(attn_implementation="eager"),  # transformers 5.17 has sdpa leave the cap out
    ),
    "gemma3_text": (
        "gemma3_text",
        dict(head_dim=64, sliding_window=WINDOW, layer_types=_SOME, query_pre_attn_scalar=24)
        | dict(rope_parameters=_TWO_ROPES, tie_word_embeddings=True),
    ),
    "nemotron": ("nemotron", dict(head_dim=32, hidden_act="relu2")),
    "nemotron-biases": ("nemotron", dict(head_dim=32, attention_bias=True, mlp_bias=True)),
    "starcoder2": (
        "starcoder2",
        dict(hidden_size=256, sliding_window=WINDOW)
        | dict(residual_dropout=0.0, embedding_dropout=0.0),
    ),
    "cohere": ("cohere", dict(logit_scale=0.3)),
    "cohere2": (
        "cohere2",
        dict(head_dim=32, sliding_window=WINDOW, layer_types=_SOME, logit_scale=0.25),
    ),
    "mixtral": (
        "mixtral",
        dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=WINDOW, **_LOOP),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(head_dim=64, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=96)
        | dict(mlp_only_layers=[1], norm_topk_prob=True, **_LOOP),
    ),
    "qwen2_moe": (
        "qwen2_moe",
        dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96)
        | dict(shared_expert_intermediate_size=112, mlp_only_layers=[1], norm_topk_prob=True)
        | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, **_LOOP),
    ),
    "glm4_moe": (
        "glm4_moe",
        dict(head_dim=32, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=96)
        | dict(n_group=4, topk_group=2, routed_scaling_factor=1.7, first_k_dense_replace=1)
        | dict(attention_bias=True, use_qk_norm=True, **_LOOP),
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        dict(moe_num_experts=6, moe_k=3, moe_intermediate_size=48, moe_num_shared_experts=2)
        | dict(moe_layer_start_index=1, moe_layer_interval=3)
        | dict(moe_norm_min=0.6, use_bias=True, **_LOOP),
    ),
    "olmoe": (
        "olmoe",
        dict(
            num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, eos_token_id=None, **_LOOP
        ),
    ),
    "granitemoe": ("granitemoe", _GRANITE_MOE | dict(eos_token_id=None)),
    "granitemoeshared": (
        "granitemoeshared",
        _GRANITE_MOE | dict(intermediate_size=48, shared_intermediate_size=72, eos_token_id=None),
    ),
    "gpt_oss": (
        "gpt_oss",
        dict(head_dim=32, num_local_experts=6, num_experts_per_tok=3, sliding_window=WINDOW)
        | dict(rope_parameters=_YARN, layer_types=_SOME, attn_implementation="eager")
        | _CLAMPED
        | _LOOP,
    ),
    "qwen3_5_text-attention": (
        "qwen3_5_text",
        dict(head_dim=32, layer_types=3 * _SOME[:1], attention_bias=True)
        | dict(rope_parameters=_SECTIONS),
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        dict(head_dim=32, layer_types=_MIXED, rope_parameters=_SECTIONS)
        | dict(linear_num_key_heads=2, linear_num_value_heads=4)
        | dict(linear_key_head_dim=16, linear_value_head_dim=16),
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        dict(head_dim=32, layer_types=_MIXED, rope_parameters=_SECTIONS) | _DELTA_MOE,
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(head_dim=32, layer_types=_MIXED, mlp_only_layers=[2], norm_topk_prob=True)
        | _DELTA_MOE,
    ),
    "olmo_hybrid": ("olmo_hybrid", _DELTA | dict(layer_types=_MIXED, eos_token_id=None)),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        _DELTA
        | dict(layer_types=_MIXED[::-1], eos_token_id=None)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    ),
    "lfm2": (
        "lfm2",
        dict(
            layer_types=["conv", "full_attention", "conv"], intermediate_size=240, eos_token_id=None
        )
        | dict(block_multiple_of=16, block_ffn_dim_multiplier=1.1, tie_word_embeddings=False),
    ),
    "nemotron_h": (
        "nemotron_h",
        dict(layers_block_type=["linear_attention", "mlp", "full_attention"])
        | dict(mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=2, chunk_size=16)
        | dict(head_dim=32, eos_token_id=None),
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        _MAMBA
        | dict(num_local_experts=0, shared_intermediate_size=144, position_embedding_type="rope"),
    ),
    "granitemoehybrid-experts": (
        "granitemoehybrid",
        _MAMBA | _GRANITE_MOE | dict(intermediate_size=48, shared_intermediate_size=72),
    ),
    "falcon_h1": (
        "falcon_h1",
        dict(mamba_d_ssm=96, mamba_n_heads=6, mamba_d_state=16, mamba_chunk_size=16)
        | dict(mamba_n_groups=2, eos_token_id=None, head_dim=32)
        | dict(embedding_multiplier=5.0, lm_head_multiplier=0.4, key_multiplier=0.6)
        | dict(attention_in_multiplier=1.4, attention_out_multiplier=0.7)
        | dict(ssm_in_multiplier=1.3, ssm_out_multiplier=0.45, mlp_multipliers=[0.55, 1.7])
        | dict(ssm_multipliers=[0.8, 1.2, 0.6, 1.5, 0.9]),
    ),
    "falcon_h1-biases": (
        "falcon_h1",
        dict(mamba_d_ssm=None, mamba_expand=1, mamba_n_heads=8, mamba_d_state=8)
        | dict(mamba_chunk_size=16, mamba_rms_norm=True, mamba_norm_before_gate=False)
        | dict(attention_bias=True, mlp_bias=True, projectors_bias=True, eos_token_id=None)
        | dict(key_multiplier=1.6, attention_out_multiplier=0.7, ssm_out_multiplier=1.3)
        | dict(mlp_multipliers=[1.7, 0.6], lm_head_multiplier=2.5),
    ),
    "phi3": ("phi3", {}),
    "phi3-windows": ("phi3", dict(sliding_window=WINDOW)),
    "phi3-longrope": (
        "phi3",
        dict(rope_parameters=_LONGROPE, original_max_position_embeddings=64),
    ),
}


MIXERS = [
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "olmo_hybrid-rope",
    "lfm2",
    "nemotron_h",
    "granitemoehybrid",
    "granitemoehybrid-experts",
    "falcon_h1",
    "falcon_h1-biases",
]
"""Those with mixers, whose vanilla forward joins the documents of a packed row."""
DECAYS = ("A_log", "dt_bias", "in_proj_a.weight", "a_proj.weight")
"""The ends of the names of parameters whose gradients are sums in which most terms cancel. Where a
state is forgotten at once, as with transformers' initial values, fp32 leaves 2e-4 of them."""


@contextmanager
def delta_rule_in_fp64() -> Iterator[None]:
    """A context in which transformers' function of Gated DeltaNet computes in fp64 inside, where it
    has fp32 otherwise: what is left of a sum in which most terms cancel is then as exact as other
    gradients."""
    with pytest.MonkeyPatch.context() as changed:
        for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"):
            home = import_module(f"transformers.models.{kind}.modeling_{kind}")
            source = inspect.getsource(inspect.unwrap(home.torch_chunk_gated_delta_rule))
            _, source = source.split("def ", 1)  # without its decorator
            made: dict[str, Any] = {}
            exec("def " + source.replace("torch.float32", "torch.float64"), vars(home), made)
            changed.setattr(home, "torch_chunk_gated_delta_rule", made.popitem()[1])
        yield


IN_TORCH_ALONE = pytest.mark.skipif(
    installed("fla"), reason="flash-linear-attention takes neither CPU tensors nor fp32"
)
EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "qwen2_moe", "glm4_moe", "ernie4_5_moe"]
EXPERTS += ["granitemoe", "granitemoeshared"]
"""Those whose tokens go to experts. In 16 bits some choices flip: tests/families/test_experts.py
has the same choices on all sides. PEFT's word for all maps adapts routers, too."""
FIRST_OF_EACH = [*{kind: name for name, (kind, _) in reversed(FAMILIES.items())}.values()]
"""One variant of each family."""
KINDS_OF_LAYERS = ["llama", "qwen3", "granite", "olmo3", "gemma2", "starcoder2", "cohere", "phi3"]
KINDS_OF_LAYERS += ["qwen3_5_text-attention"]
"""One family of each kind of layer: plain, with norms of q and k by head, scalars, norms of all
heads, four norms and a cap, no gate, both parts in parallel, fused weights, a gate of attention's
output. In 16 bits, whose errors take many batches to compare, these stand for the others, which
have fp32."""


def family_config(name: str, **changes: Any) -> PretrainedConfig:
    kind, extra = FAMILIES[name]
    return AutoConfig.for_model(kind, **{**SIZES, **extra, **changes})


@torch.no_grad()
def choose_by_bias_(model: nn.Module) -> None:
    """Gives the biases by which routers choose, which begin as zeros, values that matter."""
    draw = torch.Generator().manual_seed(4)
    for name, bias in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.2 * torch.randn(bias.shape, generator=draw))


def mix_documents_apart_(model: nn.Module) -> None:
    """Has the mixers of a model in Hugging Face's code see one document at a time: by itself such a
    model joins the documents of a packed row."""
    rows: list[list[int]] = []

    def read(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found = kwargs.get("position_ids")
        if found is not None and found.dim() == 3:  # the first row tells documents apart
            found = found[0]
        begins = found is not None and bool((found[:, 0] == 0).all())
        rows[:] = [_lengths(row) for row in found] if begins else []  # else a token is generated

    model.register_forward_pre_hook(read, with_kwargs=True)
    for mixer in mixers_of(model):
        mixer.forward = _one_by_one(mixer.forward, rows)


def mixers_of(model: Any) -> list[Any]:
    """The mixers of a model's layers."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = layers_of(base_of(whole))
    return [part_of(layer, spec.path) for layer, own in layers if (spec := own.part(MixerSpec))]


@contextmanager
def every_mixer_runs(model: Any) -> Iterator[None]:
    """Fails unless the model has mixers, and the schedule calls each of them inside. A test of
    hybrids shows nothing of a model whose layers all attend, or whose mixers Hugging Face's code
    runs."""
    own, run = {id(mixer) for mixer in mixers_of(model)}, ModelsMixer.__call__
    called: set[int] = set()

    def noted(self: ModelsMixer, *args: Any, **how: Any) -> Any:
        called.add(id(self.module))
        return run(self, *args, **how)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(ModelsMixer, "__call__", noted)
        yield
    assert own and own <= called, f"{len(own & called)} of the model's {len(own)} mixers ran"


def _lengths(positions: Tensor) -> list[int]:  # (S,)
    starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    return [b - a for a, b in pairwise(starts)]


def _one_by_one(forward: Callable[..., Tensor], rows: list[list[int]]) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, **kwargs: Any) -> Tensor:  # (B, S, D)
        if not rows:
            return forward(hidden_states, **kwargs)
        parts = [
            # transformers 5.17's Falcon-H1 gives (1, D) for a document of one token.
            torch.cat([forward(x[None], **kwargs).view_as(x[None]) for x in row.split(lengths)], 1)
            for row, lengths in zip(hidden_states, rows, strict=True)
        ]
        return torch.cat(parts)

    return run
