"""Writes a small model that sees, and conversations about coloured squares, for the smoke.

    python profiling/pictures_to_read.py FOLDER

The model is LLaVA's, with random weights, in FOLDER/model; the pictures and pictures.jsonl, as
recipes/trl_images.py reads them, are beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 210)}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ '<image>' if part['type'] == 'image' else "
    "part['text'] }}{% endfor %}{% endif %}\n{% endfor %}"
)


def make(folder: Path, hidden: int = 1024, layers: int = 4, side: int = 56) -> None:
    from PIL import Image
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        CLIPImageProcessor,
        LlavaProcessor,
    )

    from longctx.data.text.tokenizer import as_pretrained, train_backend

    lines = [f"user: What colour is this?\nassistant: It is {name}." for name in COLOURS]
    tokenizer = as_pretrained(train_backend(lines * 4, 320))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    heads: dict[str, Any] = dict(num_attention_heads=hidden // 64, num_hidden_layers=layers)
    text = dict(model_type="llama", vocab_size=len(tokenizer), hidden_size=hidden)
    text |= dict(intermediate_size=2 * hidden, max_position_embeddings=4096, **heads)
    sees = dict(model_type="clip_vision_model", hidden_size=hidden, intermediate_size=2 * hidden)
    sees |= dict(image_size=side, patch_size=14, projection_dim=hidden, **heads)
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = AutoConfig.for_model(
        "llava", text_config=text, vision_config=sees, image_token_index=token
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder / "model")
    rows = []
    for n in range(12):
        name = [*COLOURS][n % len(COLOURS)]
        Image.new("RGB", (40 + n, 60), COLOURS[name]).save(folder / f"{n}.png")
        asked = {"role": "user", "content": "What colour is this?"}
        answer = {"role": "assistant", "content": f"It is {name}."}
        rows.append({"messages": [asked, answer], "images": [f"{n}.png"]})
    (folder / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make(folder)


if __name__ == "__main__":
    main()
