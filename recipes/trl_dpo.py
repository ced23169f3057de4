"""TRL's DPOTrainer with longctx's schedule: the prompt of a pair is computed once.

    pip install "trl>=1.16" peft
    longctx recipes trl_dpo.py > trl_dpo.py
    python trl_dpo.py meta-llama/Llama-3.1-8B-Instruct pairs.jsonl runs/dpo

The data is JSONL as TRL takes it: `prompt`, `chosen` and `rejected`, as text or as messages. With
LoRA, the default, the reference is the same model without its adapters. With `--lora_rank 0` every
weight is trained, and the reference's log-probabilities are computed before the first step. No
second model is loaded.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import longctx


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("data", help="a JSONL file")
    parser.add_argument("output", help="a folder for the trained model or its adapters")
    parser.add_argument("--max_length", type=int, default=32768, help="tokens of prompt and answer")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--lora_rank", type=int, default=16, help="0: every weight is trained")
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    longctx.patch(model, strict=True, share_prefixes=True)
    lora, optimizer = None, None
    if args.lora_rank:
        lora = LoraConfig(r=args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    else:  # fp32 states, wherever there is room for them
        tokens = 2 * args.max_length  # of a pair whose answers share nothing
        optimizer = longctx.exact_adamw(model, lr=args.learning_rate, tokens=tokens)
    trainer = DPOTrainer(
        model,
        args=DPOConfig(
            output_dir=args.output,
            max_length=args.max_length,
            max_steps=args.max_steps,
            num_train_epochs=1,
            learning_rate=args.learning_rate,
            per_device_train_batch_size=1,  # pairs
            precompute_ref_log_probs=lora is None,
            bf16=False,  # the weights are
            gradient_checkpointing=False,  # the schedule recomputes
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[longctx.EfficiencyCallback()],  # logs tokens a second, MFU and peak memory
        peft_config=lora,
        optimizers=(optimizer, None),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
