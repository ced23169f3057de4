"""TRL's GRPOTrainer with longctx's schedule: a prompt is computed once for all of its answers.

    pip install "trl>=1.16" peft
    longctx recipes trl_grpo.py > trl_grpo.py
    python trl_grpo.py Qwen/Qwen3-8B questions.jsonl runs/grpo --num_generations 8

The data is JSONL: `prompt`, as text or as messages, and `answer`. The reward of a completion is 1
if it contains the answer, else 0: write your own. Generation is transformers' (for long answers see
TRL's `use_vllm`); longctx speeds up what comes after it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import longctx


def contains_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(right in text) for text, right in zip(texts, answer, strict=True)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("data", help="a JSONL file")
    parser.add_argument("output", help="a folder for the trained adapters")
    parser.add_argument("--num_generations", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--max_completion_length", type=int, default=4096, help="tokens of each")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--lora_rank", type=int, default=16)
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    longctx.patch(model, strict=True, share_prefixes=True)
    trainer = GRPOTrainer(
        model,
        reward_funcs=contains_answer,
        args=GRPOConfig(
            output_dir=args.output,
            num_generations=args.num_generations,
            # All answers to a prompt are in one batch, so that it is computed once.
            per_device_train_batch_size=args.num_generations,
            max_completion_length=args.max_completion_length,
            max_steps=args.max_steps,
            num_train_epochs=1,
            learning_rate=1e-5,
            bf16=False,  # the weights are
            gradient_checkpointing=False,  # the schedule recomputes
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[longctx.EfficiencyCallback()],  # logs tokens a second, MFU and peak memory
        peft_config=LoraConfig(
            r=args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
