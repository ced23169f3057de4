"""Published architectures with random weights, so that tests and benchmarks need no download."""

from __future__ import annotations

from typing import Any

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_GEMMA_3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}


def _gemma_3(D: int, F: int, layers: int, heads: tuple[int, int], **changes: Any) -> dict[str, Any]:
    """The language model of a Gemma 3 whose checkpoint sees images, too. `heads`: of q, of k."""
    common: dict[str, Any] = dict(
        model_type="gemma3_text",
        vocab_size=262208,
        head_dim=256,
        max_position_embeddings=131072,
        sliding_window=1024,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        rope_parameters=_GEMMA_3_ROPES,
        tie_word_embeddings=True,
    )
    sizes = dict(hidden_size=D, intermediate_size=F, num_hidden_layers=layers)
    return common | sizes | dict(zip(_HEADS, heads, strict=True)) | changes


_OLMO_3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


def _olmo(**changes: Any) -> dict[str, Any]:
    """OLMo 2 and 3 of 7B."""
    common: dict[str, Any] = dict(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        pad_token_id=None,
        eos_token_id=None,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    return common | changes


_HEADS = ("num_attention_heads", "num_key_value_heads")

PRESETS: dict[str, dict[str, Any]] = {
    # Llama's where they name no model_type.
    # 1.5M parameters over its embedding: a step of 4096 tokens takes about a second on two cores.
    "tiny": dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": dict(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={**_LLAMA_3_ROPE, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={**_LLAMA_3_ROPE, "factor": 8.0},
        tie_word_embeddings=False,
    ),
    "qwen3-8b": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
    "qwen2.5-7b": dict(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
    # v0.1, the one with a window.
    "mistral-7b": dict(
        model_type="mistral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
    "phi-4": dict(
        model_type="phi3",
        vocab_size=100352,
        hidden_size=5120,
        intermediate_size=17920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
        pad_token_id=None,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 250000.0},
        tie_word_embeddings=False,
    ),
    "gemma-3-1b": _gemma_3(
        *(1152, 6912, 26, (4, 1)),
        vocab_size=262144,
        max_position_embeddings=32768,
        sliding_window=512,
        rope_parameters={
            **_GEMMA_3_ROPES,
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "gemma-2-9b": dict(
        model_type="gemma2",
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        max_position_embeddings=8192,
        sliding_window=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    ),
    "gemma-3-4b": _gemma_3(2560, 10240, 34, (8, 4)),
    "gemma-3-12b": _gemma_3(3840, 15360, 48, (16, 8)),
    "gemma-3-27b": _gemma_3(5376, 21504, 62, (32, 16), head_dim=128, query_pre_attn_scalar=168),
    "exaone-4-32b": dict(
        model_type="exaone4",
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=27392,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        sliding_window=4096,
        sliding_window_pattern=4,
        rms_norm_eps=1e-5,
        rope_parameters={**_LLAMA_3_ROPE, "rope_theta": 1000000.0, "factor": 16.0},
        tie_word_embeddings=False,
    ),
    "olmo-2-7b": _olmo(
        model_type="olmo2",
        vocab_size=100352,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "olmo-3-7b": _olmo(
        model_type="olmo3",
        vocab_size=100278,
        max_position_embeddings=65536,
        sliding_window=4096,
        rope_parameters=_OLMO_3_ROPES,
    ),
    # All sizes are the configuration's defaults, RoPE among them.
    "ministral-3-8b": dict(model_type="ministral3", vocab_size=131072, hidden_size=4096),
    "glm-4-9b": dict(
        model_type="glm4",
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        attention_bias=True,
        max_position_embeddings=32768,
        pad_token_id=None,
        rms_norm_eps=1e-5,
        rope_parameters={
            **{"rope_type": "default", "rope_theta": 10000.0},
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=False,
    ),
}
