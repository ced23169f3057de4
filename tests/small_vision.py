"""A small vision-language model of every kind, and batches of text and of an image for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_families import SIZES, WINDOW
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from longctx.system import installed

IMAGE = 200
"""The token that stands for a part of an image."""
VIDEO = 201
_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO) | dict(
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


_HYBRID: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    rope_parameters=_rope(6, 5, 5) | {"partial_rotary_factor": 0.5, "mrope_interleaved": True},
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
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
    "qwen3_vl_moe": dict(
        text_config=dict(head_dim=64, rope_parameters=_rope(12, 10, 10))
        | dict(num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=96)
        | dict(mlp_only_layers=[1]),
        vision_config=_QWEN | dict(deepstack_visual_indexes=[0, 1]),
        **_TOKENS,
    ),
    "qwen3_5": dict(text_config=dict(head_dim=64, **_HYBRID), vision_config=_QWEN, **_TOKENS),
    "qwen3_5_moe": dict(
        text_config=dict(head_dim=64, num_experts=6, num_experts_per_tok=2, **_HYBRID)
        | dict(moe_intermediate_size=96, shared_expert_intermediate_size=80),
        vision_config=_QWEN,
        **_TOKENS,
    ),
}
DENSE = ["gemma3", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
"""Those without experts, some choices of which flip in 16 bits, and without mixers, whose errors
scatter most there."""
FEW = ["gemma3", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
"""One of each way to place an image: seen both ways, as plain tokens, by rows of positions in
sections, by rows in turns with features for the first layers, and beside mixers."""
IN_TURNS = ("qwen3_vl", "qwen3_5")
"""Those whose frequencies read the rows of positions in turns, and whose videos are frames with
text between."""


def vision_config(kind: str, **text: Any) -> PretrainedConfig:
    parts = KINDS[kind]
    text = {**SIZES, **parts["text_config"], **text}
    config = AutoConfig.for_model(kind, **parts | {"text_config": text})
    config._experts_implementation = "eager"  # transformers' grouped matmuls take no fp64
    return config


def mllama_config(**text: Any) -> PretrainedConfig:
    """Llama 3.2 Vision, of whose layers the second reads the image."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2)
    text = sizes | dict(vocab_size=64, num_key_value_heads=2, cross_attention_layers=[1]) | text
    text |= dict(pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    tower = sizes | dict(attention_heads=2, num_global_layers=1, image_size=16, patch_size=4)
    tower |= dict(intermediate_layers_indices=[0], vision_output_dim=64, max_num_tiles=1)
    tower["supported_aspect_ratios"] = [[1, 1]]
    return AutoConfig.for_model("mllama", text_config=text, vision_config=tower)


def skip_with_kernels(kind: str) -> None:
    """Skips a test whose mixers flash-linear-attention would compute."""
    if kind.startswith("qwen3_5") and installed("fla"):
        pytest.skip("flash-linear-attention takes neither CPU tensors nor fp32")


def vision_model(kind: str, **text: Any) -> Any:
    skip_with_kernels(kind)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(vision_config(kind, **text)).train()
    move_(model)
    return model


@torch.no_grad()
def move_(model: Any) -> None:
    """Moves a model a little from where it was initialised: some weights begin as zeros, so that no
    gradient passes them, and mixers forget at once."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(-3.0)  # so slow that a state which reaches another document shows
        else:
            parameter.add_(torch.randn_like(parameter) * 0.05)


def image_batch(
    kind: str, images: Sequence[Sequence[int]] = ((5,),), tokens: int = 48, seed: int = 3
) -> dict[str, Tensor]:
    """Rows of text around images of 16 x 16 pixels, which begin at the given tokens of each row."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(map(len, images))
    ids = torch.randint(190, (len(images), tokens), generator=generator)
    for row, starts in zip(ids, images, strict=True):
        for start in starts:
            row[start : start + (16 if kind == "llava" else 4)] = IMAGE
    seen = (ids == IMAGE).int()
    found = {"input_ids": ids, "labels": ids.masked_fill(seen == 1, -100)}
    if not count:
        return found
    if kind.startswith("qwen"):
        pixels = torch.randn(16 * count, 3 * 2 * 4 * 4, generator=generator)
        grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * count), "mm_token_type_ids": seen}
        return found | grid | {"pixel_values": pixels}
    found["pixel_values"] = torch.randn(count, 3, 16, 16, generator=generator)
    extra: dict[str, dict[str, Tensor]] = {
        "gemma3": {"token_type_ids": seen},
        "mistral3": {"image_sizes": torch.tensor([[16, 16]] * count)},
    }
    return found | extra.get(kind, {})


def video_batch(kind: str, seed: int = 3) -> dict[str, Tensor]:
    """A row of text around a video of three pairs of frames of 16 x 16 pixels. Qwen3-VL and
    Qwen3.5 have each pair by itself, with text between."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(190, (1, 48), generator=generator)
    starts = (5, 12, 19) if kind.startswith(IN_TURNS) else (5, 9, 13)
    for start in starts:
        ids[0, start : start + 4] = VIDEO
    seen = ids == VIDEO
    pixels = torch.randn(3 * 16, 3 * 2 * 4 * 4, generator=generator)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(seen, -100),
        "mm_token_type_ids": 2 * seen.int(),
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[3, 4, 4]]),
    }


def with_gradients_(model: Any, kind: str) -> Any:
    """Freezes what has no gradient: CLIP's last layer, whose output nobody reads, and biases of
    keys, whose gradient is 0 but for rounding. Returns the model."""
    batch = {name: x.to(model.device) for name, x in image_batch(kind).items()}
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        idle = parameter.grad is None or (name.endswith("k_proj.bias") and "tower" in name)
        parameter.requires_grad_(not idle).grad = None
    return model


def packed(model: Any, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row of several documents, from batches of one row each. Each has positions of its own, in
    four rows where the model has those of images."""
    by_place = {"input_ids", "labels", "token_type_ids", "mm_token_type_ids"}
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in by_place:  # a row of text alone has no token types
            parts = [row.get(name, torch.zeros_like(row["input_ids"])) for row in rows]
            found[name] = torch.cat(parts, dim=1)
        else:
            found[name] = torch.cat([row[name] for row in rows if name in row])
    positions = [torch.arange(row["input_ids"].shape[1])[None] for row in rows]
    if hasattr(model.model, "get_rope_index"):
        positions = [
            torch.cat([p[None], _of_images(model, row)])
            for p, row in zip(positions, rows, strict=True)
        ]
    found["labels"][:, [sum(p.shape[-1] for p in positions[:n]) for n in range(len(rows))]] = -100
    return found | {"position_ids": torch.cat(positions, dim=-1), "use_cache": False}


def _of_images(model: Any, row: dict[str, Tensor]) -> Tensor:  # (3, 1, S)
    if "image_grid_thw" not in row:
        return torch.arange(row["input_ids"].shape[1]).expand(3, 1, -1)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    return model.model.get_rope_index(**{name: row[name] for name in names})[0]
