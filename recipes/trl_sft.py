"""TRL's SFTTrainer with longctx's schedule: packed documents at any length that fits.

    pip install "trl>=1.16"
    longctx recipes trl_sft.py > trl_sft.py
    python trl_sft.py meta-llama/Llama-3.2-1B chats.jsonl runs/trl --max_length 131072

The data is JSONL as TRL takes it: `text`, `messages`, or `prompt` and `completion`.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import longctx


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("data", help="a JSONL file")
    parser.add_argument("output", help="a folder for the trained model")
    parser.add_argument("--max_length", type=int, default=32768, help="tokens of a packed row")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    args = parser.parse_args(argv)

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    longctx.patch(model, strict=True)  # before the trainer is built around the model
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output_dir=args.output,
            packing=True,
            max_length=args.max_length,
            max_steps=args.max_steps,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            bf16=torch.cuda.is_available(),  # autocast: no update of fp32 weights is rounded away
            gradient_checkpointing=False,  # the schedule recomputes
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[longctx.EfficiencyCallback()],  # logs tokens a second, MFU and peak memory
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
