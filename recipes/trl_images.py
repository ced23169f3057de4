"""TRL's SFTTrainer with longctx's schedule, on conversations about pictures.

    pip install "trl>=1.16" pillow
    longctx recipes trl_images.py > trl_images.py
    python trl_images.py Qwen/Qwen3-VL-2B-Instruct pictures.jsonl runs/pictures

A line of the JSONL file is a conversation as TRL takes it, with paths of pictures, which are
looked for beside the file. TRL puts them before the first question:

    {"messages": [{"role": "user", "content": "What is this?"},
                  {"role": "assistant", "content": "A heron."}], "images": ["heron.jpg"]}

What sees the pictures, and what projects their features, is frozen without --train_vision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Image, List, load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer

import longctx


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("data", type=Path, help="a JSONL file")
    parser.add_argument("output", help="a folder for the trained model")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--train_vision", action="store_true", help="train what sees, too")
    args = parser.parse_args(argv)

    def beside(row: dict[str, Any]) -> dict[str, Any]:
        return {"images": [str(args.data.parent / name) for name in row["images"]]}

    rows = load_dataset("json", data_files=str(args.data), split="train").map(beside)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
    for name, part in model.model.named_children():
        part.requires_grad_(args.train_vision or name == "language_model")
    longctx.patch(model, strict=True)  # before the trainer is built around the model
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            max_length=None,  # no row is cut within a picture
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
