"""A small vision-language model of every kind, and batches of text and of an image for them."""

from __future__ import annotations

from typing import Any

import torch
from small_families import SIZES, WINDOW
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

IMAGE = 200
"""The token that stands for a part of an image."""
_TOKENS = dict(image_token_id=IMAGE, video_token_id=201) | dict(
    vision_start_token_id=202, vision_end_token_id=203
)
_QWEN = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=48) | dict(
    out_hidden_size=128, patch_size=4
)
_TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2) | dict(
    num_attention_heads=2, image_size=16, patch_size=4
)
_ENDS = dict(bos_token_id=None, eos_token_id=None)


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


KINDS: dict[str, dict[str, Any]] = {
    "gemma3": dict(
        text_config=dict(head_dim=64, sliding_window=WINDOW, query_pre_attn_scalar=24)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
        vision_config=_TOWER,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=202,
        eoi_token_index=203,
    ),
    "llava": dict(
        text_config=dict(model_type="llama"),
        vision_config=_TOWER | dict(model_type="clip_vision_model", num_hidden_layers=3),
        image_token_index=IMAGE,
    ),
    "mistral3": dict(
        text_config=dict(model_type="mistral", head_dim=64, sliding_window=WINDOW),
        vision_config=_TOWER | dict(model_type="pixtral"),
        image_token_index=IMAGE,
    ),
    "qwen2_vl": dict(
        text_config=dict(rope_parameters=_rope(2, 3, 3)) | _ENDS,
        vision_config=dict(depth=2, embed_dim=32, hidden_size=128, num_heads=2, patch_size=4),
        **_TOKENS,
    ),
    "qwen2_5_vl": dict(
        text_config=dict(rope_parameters=_rope(2, 3, 3), max_window_layers=1)
        | dict(use_sliding_window=True, sliding_window=WINDOW)
        | _ENDS,
        vision_config=_QWEN | dict(fullatt_block_indexes=[1], window_size=16),
        **_TOKENS,
    ),
    "qwen3_vl": dict(
        text_config=dict(head_dim=64, rope_parameters=_rope(12, 10, 10)),
        vision_config=_QWEN | dict(deepstack_visual_indexes=[0, 1]),
        **_TOKENS,
    ),
}


def vision_config(kind: str, **text: Any) -> PretrainedConfig:
    parts = KINDS[kind]
    text = {**SIZES, **parts["text_config"], **text}
    return AutoConfig.for_model(kind, **parts | {"text_config": text})


def vision_model(kind: str, **text: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(vision_config(kind, **text)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def image_batch(kind: str) -> dict[str, Tensor]:
    """A row of text around one image of 16 x 16 pixels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(190, (1, 48), generator=generator)
    ids[0, 5 : 5 + (16 if kind == "llava" else 4)] = IMAGE
    seen = (ids == IMAGE).int()
    found = {"input_ids": ids, "labels": ids.masked_fill(seen == 1, -100)}
    if kind.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        grid = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": seen}
        return found | grid | {"pixel_values": pixels}
    found["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator)
    extra: dict[str, dict[str, Tensor]] = {
        "gemma3": {"token_type_ids": seen},
        "mistral3": {"image_sizes": torch.tensor([[16, 16]])},
    }
    return found | extra.get(kind, {})
