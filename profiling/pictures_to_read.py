"""Writes a small model that sees, with conversations and pairs about coloured squares: the smoke's.

    python profiling/pictures_to_read.py FOLDER
    python profiling/pictures_to_read.py FOLDER --model qwen3_vl      (or qwen3_5)

The model has random weights and is in FOLDER/model; the pictures and pictures.jsonl, as
`longctx train` and recipes/trl_images.py read them, are beside it, and so are pairs.jsonl and
prompts.jsonl, prompts and completions as TRL has them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

QUESTION = "What colour is this?"
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 210)}
PLACES = {
    "llava": "<image>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
}
"""Model -> what its chat template writes where a picture stands."""
TEMPLATE = (
    "{%% for m in messages %%}{{ m['role'] }}: {%% if m['content'] is string %%}{{ m['content'] }}"
    "{%% else %%}{%% for part in m['content'] %%}{{ '%s' if part['type'] == 'image' else "
    "part['text'] }}{%% endfor %%}{%% endif %%}\n{%% endfor %%}"
)


def make(
    folder: Path, kind: str = "llava", hidden: int = 1024, layers: int = 4, side: int = 56
) -> None:
    """Writes the model and the conversations. `side`: the pixels of a picture's side for LLaVA."""
    make_model(
        folder, [f"{QUESTION} It is {name}." for name in COLOURS], kind, hidden, layers, side
    )
    write_conversations(folder)


def make_model(
    folder: Path, lines: list[str], kind: str, hidden: int, layers: int, side: int = 56
) -> None:
    """Writes a model with random weights to FOLDER/model, and its tokenizer, made of `lines`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from longctx.train.data.text.tokenizer import as_pretrained, train_backend

    lines = ["user: assistant: ", *lines]
    tokenizer = as_pretrained(train_backend(lines * 4, 320))
    tokenizer.chat_template = TEMPLATE % PLACES[kind]
    tokens = re.findall(r"<[^>]+>", PLACES[kind])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    ids = dict(zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    heads: dict[str, Any] = dict(num_attention_heads=hidden // 64, num_hidden_layers=layers)
    text = dict(vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden)
    text |= dict(max_position_embeddings=4096, **heads)
    settings = SETTINGS[kind](folder, tokenizer, ids, heads, side)
    text |= settings.pop("text_config")
    config = AutoConfig.for_model(kind, text_config=text, **settings)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")


def _llava(folder: Path, tokenizer: Any, ids: Any, heads: Any, side: int) -> dict[str, Any]:
    """Writes the processor, and returns the model's settings."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    hidden = 64 * heads["num_attention_heads"]
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder / "model")
    sees = dict(model_type="clip_vision_model", hidden_size=hidden, intermediate_size=2 * hidden)
    sees |= dict(image_size=side, patch_size=14, projection_dim=hidden, **heads)
    text = dict(model_type="llama")
    return dict(text_config=text, vision_config=sees, image_token_index=ids["<image>"])


def _qwen(folder: Path, tokenizer: Any, ids: Any, heads: Any, side: int) -> dict[str, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    hidden = 64 * heads["num_attention_heads"]
    Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sees = dict(depth=4, hidden_size=hidden, intermediate_size=2 * hidden, num_heads=hidden // 64)
    sees |= dict(out_hidden_size=hidden, deepstack_visual_indexes=[0, 2])
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[12, 10, 10])
    text = dict(head_dim=64, num_key_value_heads=hidden // 128, rope_parameters=rope)
    return dict(
        text_config=text,
        vision_config=sees,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=len(ids) + 10**4,  # which no text has
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _qwen_with_mixers(*given: Any) -> dict[str, Any]:
    """Returns settings of Qwen3.5: Qwen3-VL's without features for the first layers, with mixers in
    three of four layers, and with RoPE of a quarter of each head in the others."""
    found = _qwen(*given)
    del found["vision_config"]["deepstack_visual_indexes"]
    text = found["text_config"]
    text["rope_parameters"] |= dict(partial_rotary_factor=0.25, mrope_section=[4, 2, 2])
    text |= dict(linear_num_key_heads=4, linear_num_value_heads=8)
    text |= dict(linear_key_head_dim=64, linear_value_head_dim=64)
    return found


SETTINGS = {"llava": _llava, "qwen3_vl": _qwen, "qwen3_5": _qwen_with_mixers}


def write_conversations(folder: Path) -> None:
    from PIL import Image

    shown, pairs, prompts = [], [], []
    for n in range(12):
        name = [*COLOURS][n % len(COLOURS)]
        Image.new("RGB", (40 + n, 60), COLOURS[name]).save(folder / f"{n}.png")
        shown.append((f"{n}.png", f"It is {name}."))
        asked, answer = turns(QUESTION, shown[-1][1])
        other = {"role": "assistant", "content": "It is brown or something else."}
        answers = {"chosen": [answer], "rejected": [other]}
        pairs.append({"prompt": [asked], **answers, "images": [f"{n}.png"]})
        prompts.append({"prompt": [asked], "completion": [answer], "images": [f"{n}.png"]})
    write_answers(folder / "pictures.jsonl", QUESTION, shown)
    write_records(folder / "pairs.jsonl", pairs)
    write_records(folder / "prompts.jsonl", prompts)


def turns(question: str, answer: str) -> list[dict[str, str]]:
    said = (("user", question), ("assistant", answer))
    return [{"role": role, "content": content} for role, content in said]


def write_answers(file: Path, question: str, shown: Iterable[tuple[str, str]]) -> None:
    """Writes a conversation for each picture, a file beside this one, and its answer."""
    asked = ((picture, turns(question, text)) for picture, text in shown)
    write_records(file, [{"messages": said, "images": [picture]} for picture, said in asked])


def write_records(file: Path, records: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--model", choices=[*PLACES], default="llava", help="default: llava")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make(args.folder, args.model)


if __name__ == "__main__":
    main()
