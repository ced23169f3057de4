"""Models that hear where the documents of a packed row begin, and models that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hostile.cases import table, works
from hostile.files import Make, model, remove

ALONE = "does not keep the documents of a packed row apart.*: each row holds one document"
PACKED = r"rows? of [\d,]+ \([\d,]+ padding"
_GDN = dict(
    layer_types=["linear_attention", "full_attention"],
    **dict(linear_num_key_heads=2, linear_num_value_heads=4, head_dim=16),
    **dict(linear_key_head_dim=16, linear_value_head_dim=16),
)
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
_MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, head_dim=8)


def family(kind: str, *words: str, **sizes: Any) -> Make:
    """A model of another family in the place of the small run's, with Hugging Face's layers."""

    def change(folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        remove("model.safetensors")(folder)
        common = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        common |= dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=2)
        vocabulary = len(AutoTokenizer.from_pretrained(folder))
        config = AutoConfig.for_model(kind, vocab_size=vocabulary, **{**common, **sizes})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    return model(change, "--class_type", "vanilla", *words)


DOCUMENTS = {
    "Qwen3.5": (family("qwen3_5_text", **_GDN), works(ALONE)),
    "Qwen3.5 in bfloat16": (family("qwen3_5_text", "--dtype", "bfloat16", **_GDN), works(ALONE)),
    "LFM2": (family("lfm2", layer_types=["conv", "full_attention"]), works(ALONE)),
    "LFM2 in batches": (
        family(
            *("lfm2", "--per_device_train_batch_size", "3"),
            layer_types=["conv", "full_attention"],
        ),
        works(ALONE),
    ),
    "Granite 4": (
        family("granitemoehybrid", layers_block_type=["mamba", "attention"], **_MAMBA2),
        works(ALONE),
    ),
    "Jamba": (
        family("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8),
        works(ALONE),
    ),
    "Mamba": (family("mamba"), works(ALONE)),
    "gpt-oss": (family("gpt_oss", num_local_experts=4, head_dim=16), works(ALONE)),
    "OPT": (family("opt", word_embed_proj_dim=32, ffn_dim=64), works(ALONE)),
    "BLOOM": (family("bloom", n_head=4), works(ALONE)),
    "Llama": (family("llama"), works(PACKED)),
    "Gemma 3": (family("gemma3_text", head_dim=16, sliding_window=16), works(PACKED)),
    "GPT-2": (family("gpt2", n_head=4), works(PACKED)),
    "Qwen3 with experts": (family("qwen3_moe", **_EXPERTS), works(PACKED)),
    "DeepSeek-V3": (
        family(
            "deepseek_v3",
            **dict(_MLA, v_head_dim=8, num_key_value_heads=4, first_k_dense_replace=1),
            **dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1),
            **dict(moe_intermediate_size=32),
        ),
        works(PACKED),
    ),
}
CASES = table("documents", DOCUMENTS)
