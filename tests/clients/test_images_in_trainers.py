"""Images in TRL's trainers and in a plain Trainer, on patched vision-language models."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import pytest
import torch
from both import arguments, assert_same_run, sentence, trained
from small_tokenizer import small_tokenizer
from small_vision import image_batch, vision_model, with_gradients_
from transformers import CLIPImageProcessor, LlavaProcessor, Trainer, TrainingArguments

trl = pytest.importorskip("trl")
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("reference_kernels")
KINDS = ["gemma3", "llava", "qwen3_vl"]


def processor() -> Any:
    """LLaVA's, for images of 16 x 16 pixels, of which each has 16 tokens."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


def model(of: Any) -> Any:
    """LLaVA with the tokens of a processor."""
    made = vision_model("llava", vocab_size=len(of.tokenizer))
    made.config.image_token_id = of.tokenizer.convert_tokens_to_ids("<image>")
    _, *tower = made.model.vision_tower.parameters()
    for parameter in tower:
        parameter.requires_grad_(False)
    return made


def image(number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (16, 16 + number, 3), generator=generator)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def test_sft(scheduled, capsys, tmp_path) -> None:
    of = processor()
    rows = [{"text": "<image> " + sentence(n), "images": [image(n)]} for n in range(12)]

    def make(model: Any) -> Any:
        return trl.SFTTrainer(
            model,
            args=trl.SFTConfig(**arguments(tmp_path, max_length=None, remove_unused_columns=False)),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=of,
        )

    assert_same_run(trained(make), scheduled, capsys, passes=3, layers=3, model=model(of))


def test_dpo(scheduled, capsys, tmp_path) -> None:
    of = processor()
    rows = [
        {
            "prompt": "<image>",
            "chosen": sentence(n),
            "rejected": sentence(n + 4),
            "images": [image(n)],
        }
        for n in range(12)
    ]

    def make(model: Any) -> Any:
        return trl.DPOTrainer(
            model,
            ref_model=copy.deepcopy(model),
            args=trl.DPOConfig(**arguments(tmp_path, max_length=None)),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=of,
        )

    assert_same_run(trained(make), scheduled, capsys, passes=6, layers=3, model=model(of))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_trainer(kind, scheduled, capsys, tmp_path) -> None:
    rows = [image_batch(kind, [[5 + n, 30]], seed=n) for n in range(6)]

    def make(model: Any) -> Any:
        return Trainer(
            model,
            TrainingArguments(**arguments(tmp_path, per_device_train_batch_size=2)),
            train_dataset=rows,
            data_collator=lambda rows: {k: torch.cat([r[k] for r in rows]) for k in rows[0]},
        )

    made = with_gradients_(vision_model(kind), kind)
    assert_same_run(trained(make), scheduled, capsys, passes=3, layers=3, model=made)
