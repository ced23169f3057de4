"""Folders with a small model that sees and its processor, and conversations about pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from small_tokenizer import small_tokenizer
from small_vision import vision_config
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    set_seed,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PLACES = {
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
_SPECIAL = {
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "llava": ("<image>",),
    "qwen": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
}
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 210)}


def template(place: str) -> str:
    """ChatML that takes contents as parts alone, as LLaVA's own does."""
    return (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}" + place + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer_of(kind: str) -> Any:
    tokenizer = small_tokenizer(template(PLACES[kind]))
    names = _SPECIAL["qwen" if kind.startswith("qwen") else kind]
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    if kind == "gemma3":
        roles = ("boi_token", "image_token", "eoi_token")
        tokenizer._set_model_specific_special_tokens(dict(zip(roles, names, strict=True)))
    return tokenizer


def seeing_model(folder: Path, kind: str) -> Path:
    """Writes a model, its tokenizer and what prepares its images."""
    tokenizer = tokenizer_of(kind)
    config = vision_config(kind, vocab_size=len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids
    if kind.startswith("qwen"):
        config.image_token_id, config.video_token_id = ids("<|image_pad|>"), ids("<|video_pad|>")
        config.vision_start_token_id = ids("<|vision_start|>")
        config.vision_end_token_id = ids("<|vision_end|>")
        sizes = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=4, size=sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    elif kind == "gemma3":
        config.image_token_index = config.image_token_id = ids("<image_soft_token>")
        images = Gemma3ImageProcessor(size={"height": 16, "width": 16})
        Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    else:
        config.image_token_index = config.image_token_id = ids("<image>")
        LlavaProcessor(
            CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token="<image>",
        ).save_pretrained(folder)
    set_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def asked(*names: str, question: str = "What colour is it?", answer: str = "red") -> dict[str, Any]:
    """A conversation that shows pictures before a question."""
    content = [{"type": "image", "image": name} for name in names]
    return {
        "messages": [
            {"role": "user", "content": [*content, {"type": "text", "text": question}]},
            {"role": "assistant", "content": f"It is {answer}."},
        ]
    }


def write(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Writes the records, and a picture of each colour beside them."""
    for colour, rgb in COLOURS.items():
        Image.new("RGB", (20 + len(colour), 16), rgb).save(folder / f"{colour}.png")
    file = folder / "pictures.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def about_colours(count: int = 12) -> list[dict[str, Any]]:
    """Conversations about one picture, several and none."""
    names = [*COLOURS]
    found = []
    for n in range(count):
        name, other = names[n % 3], names[(n + 1) % 3]
        shown = [(), (name,), (f"{name}.png", f"{other}.png")][n % 3]
        shown = tuple(x if x.endswith(".png") else f"{x}.png" for x in shown)
        found.append(asked(*shown, answer=name))
    return found
