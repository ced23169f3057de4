"""transformers' names of the attention that Hugging Face's layers run, where ours does not."""

from __future__ import annotations

from transformers import PretrainedConfig

from longctx.families.classes import class_of
from longctx.families.families import score_cap

HF_ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "fa2": "flash_attention_2",
    "fa4": "flash_attention_4",
}
"""By --attn_backend."""


def default_attention(config: PretrainedConfig | None) -> str | None:
    """Hugging Face's own choice (None) of sdpa or eager, mended: before 5.23 it took sdpa for Gemma
    2, which left the cap of scores out in silence."""
    return None if config is None or has_sdpa(config) else "eager"


def has_sdpa(config: PretrainedConfig) -> bool:
    return getattr(class_of(config), "_supports_sdpa", True) and score_cap(config) is None
