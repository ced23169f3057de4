"""Published architectures with random weights, so that tests and benchmarks need no download."""

from __future__ import annotations

from typing import Any


def _rope(theta: float, kind: str = "default", **rest: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **rest}


def _llama_3_rope(factor: float, theta: float = 5e5) -> dict[str, Any]:
    bands = dict(low_freq_factor=1.0, high_freq_factor=4.0)
    return _rope(theta, "llama3", factor=factor, original_max_position_embeddings=8192, **bands)


def _sized(
    V: int,
    D: int,
    F: int,
    layers: int,
    heads: tuple[int, int],  # of q, of k
    positions: int,
    rope: dict[str, Any],
    *,
    eps: float | None = 1e-5,
    tied: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """Vocabulary, hidden and intermediate size, ... as a configuration names them."""
    sizes = dict(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=positions,
        rope_parameters=rope,
        tie_word_embeddings=tied,
    )
    return sizes | ({} if eps is None else {"rms_norm_eps": eps}) | rest


def _gemma_3(D: int, F: int, layers: int, heads: tuple[int, int], **rest: Any) -> dict[str, Any]:
    """The language model of a Gemma 3 whose checkpoint sees images, too."""
    full = _rope(1e6, "linear", factor=8.0)
    rope = {"sliding_attention": _rope(1e4), "full_attention": full}
    model = _sized(262208, D, F, layers, heads, 131072, rope, eps=1e-6, tied=True)
    kind = dict(model_type="gemma3_text", sliding_window=1024)
    return model | kind | dict(head_dim=256, query_pre_attn_scalar=256) | rest


def _olmo(V: int, positions: int, rope: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """OLMo 2 and 3 of 7B."""
    ends = dict(pad_token_id=None, eos_token_id=None)
    return _sized(V, 4096, 11008, 32, (32, 32), positions, rope, eps=1e-6) | ends | rest


_OLMO_3_YARN = _rope(
    5e5,
    "yarn",
    factor=8.0,
    original_max_position_embeddings=8192,
    attention_factor=1.2079441541679836,
    beta_fast=32.0,
    beta_slow=1.0,
)

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
        rope_parameters=_rope(5e5),
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _sized(
        *(128256, 2048, 8192, 16, (32, 8), 131072, _llama_3_rope(32.0)), tied=True, head_dim=64
    ),
    "llama-3.1-8b": _sized(
        *(128256, 4096, 14336, 32, (32, 8), 131072, _llama_3_rope(8.0)), head_dim=128
    ),
    "qwen3-8b": _sized(
        *(151936, 4096, 12288, 36, (32, 8), 40960, _rope(1e6)),
        eps=1e-6,
        model_type="qwen3",
        head_dim=128,
    ),
    "qwen2.5-7b": _sized(
        *(152064, 3584, 18944, 28, (28, 4), 131072, _rope(1e6)), eps=1e-6, model_type="qwen2"
    ),
    # v0.1, the one with a window.
    "mistral-7b": _sized(
        *(32000, 4096, 14336, 32, (32, 8), 32768, _rope(1e4)),
        model_type="mistral",
        sliding_window=4096,
    ),
    "phi-4": _sized(
        *(100352, 5120, 17920, 40, (40, 10), 16384, _rope(250000.0)),
        model_type="phi3",
        original_max_position_embeddings=16384,
        pad_token_id=None,
    ),
    "gemma-3-1b": _gemma_3(
        *(1152, 6912, 26, (4, 1)),
        vocab_size=262144,
        max_position_embeddings=32768,
        sliding_window=512,
        rope_parameters={"sliding_attention": _rope(1e4), "full_attention": _rope(1e6)},
    ),
    "gemma-2-9b": _sized(
        *(256000, 3584, 14336, 42, (16, 8), 8192, _rope(1e4)),
        eps=1e-6,
        tied=True,
        model_type="gemma2",
        head_dim=256,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
    ),
    "gemma-3-4b": _gemma_3(2560, 10240, 34, (8, 4)),
    "gemma-3-12b": _gemma_3(3840, 15360, 48, (16, 8)),
    "gemma-3-27b": _gemma_3(5376, 21504, 62, (32, 16), head_dim=128, query_pre_attn_scalar=168),
    "exaone-4-32b": _sized(
        *(102400, 5120, 27392, 64, (40, 8), 131072, _llama_3_rope(16.0, 1e6)),
        model_type="exaone4",
        head_dim=128,
        sliding_window=4096,
        sliding_window_pattern=4,
    ),
    "olmo-2-7b": _olmo(100352, 4096, _rope(5e5), model_type="olmo2"),
    "olmo-3-7b": _olmo(
        100278,
        65536,
        {"sliding_attention": _rope(5e5), "full_attention": _OLMO_3_YARN},
        model_type="olmo3",
        sliding_window=4096,
    ),
    # All sizes are the configuration's defaults, RoPE among them.
    "ministral-3-8b": dict(model_type="ministral3", vocab_size=131072, hidden_size=4096),
    "glm-4-9b": _sized(
        *(151552, 4096, 13696, 40, (32, 2), 32768, _rope(1e4, partial_rotary_factor=0.5)),
        model_type="glm4",
        head_dim=128,
        attention_bias=True,
        pad_token_id=None,
    ),
    "command-r7b": _sized(
        *(256000, 4096, 14336, 32, (32, 8), 132096, _rope(5e4)),
        eps=None,
        tied=True,
        model_type="cohere2",
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_norm_eps=1e-5,
        logit_scale=0.25,
    ),
}
