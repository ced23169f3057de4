"""TRL's SFTTrainer with longctx's schedule, on conversations about images.

    pip install "trl>=1.16" pillow torchvision
    longctx recipes trl_images.py > trl_images.py
    python trl_images.py Qwen/Qwen3-VL-2B-Instruct pictures.jsonl runs/images

A line of the JSONL file is a conversation with images as TRL, LLaVA, LLaMA-Factory or OpenAI
write it. Paths are looked for beside the file. Without a place in a turn, images stand before the
first question:

    {"messages": [{"role": "user", "content": "What is this?"},
                  {"role": "assistant", "content": "A heron."}], "images": ["heron.jpg"]}

Processors of Qwen's models and of Mistral 3 need torchvision, the release that belongs to the torch
that is installed. Every image is opened before anything is loaded; one that is none is named with
its line. The vision tower, with what projects its features, is frozen without
--train_vision.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset, Image, List
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer

import longctx
from longctx.errors import UserError


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("data", type=Path, help="a JSONL file")
    parser.add_argument("output", help="a folder for the trained model")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--train_vision", action="store_true", help="train the vision tower, too")
    args = parser.parse_args(argv)
    try:
        rows = Dataset.from_list(longctx.conversations(args.data))
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
    for name, part in model.model.named_children():
        part.requires_grad_(args.train_vision or name == "language_model")
    longctx.patch(model, strict=True)  # before the trainer is built around the model
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            max_length=None,  # no row is cut within an image
            max_steps=args.max_steps,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            bf16=torch.cuda.is_available(),  # autocast: no update of fp32 weights is rounded away
            gradient_checkpointing=False,  # the schedule recomputes
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows.cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(args.model),
        callbacks=[longctx.EfficiencyCallback()],  # logs tokens a second, MFU and peak memory
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
