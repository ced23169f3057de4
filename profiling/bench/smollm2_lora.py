"""Adapters on long documents: SmolLM2-135M at 32768 tokens with LoRA and QLoRA, before and after.

    python profiling/bench/smollm2_lora.py --model models/smollm2-135m --data data/long \\
        --output profiling/results/h200_smollm2_lora.json

runs these steps, or those of `--only`, and writes each row as soon as it is known:

    base            `longctx eval` of the model with YaRN's RoPE, before training
    train-NAME      recipes/smollm2_32k.yaml with adapters of rank 16 on all linear maps, for the
                    names lora, over bf16 weights, and qlora, over NF4
    NAME            `longctx merge` of the adapter, and `longctx eval` of the merged model
    generate-NAME   the adapter in plain PEFT, on the model in plain transformers (for qlora with
                    its 4 bits), continues 30000 tokens

The model that adapters are trained for is a copy in the runs' folder whose config.json has YaRN's
RoPE: an adapter holds no RoPE. Train rows are those of smollm2_32k.py, and how much the adapter
takes (`adapter_mib`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.config import ModelArguments
from longctx.errors import UserError
from longctx.lora.merge import merge
from longctx.run.loading import load_config
from profiling.bench.smollm2_32k import continued, evaluate, parse, train
from profiling.results import write_results

LEARNING_RATE = 1e-3
RUNS = {"lora": [], "qlora": ["--quantize", "nf4"]}
STEPS = ("base", *(f"{kind}{name}" for name in RUNS for kind in ("train-", "", "generate-")))
Row = dict[str, Any]


def scaled(args: argparse.Namespace) -> Path:
    """The model with RoPE for `--seq_len`, made once."""
    folder: Path = args.runs / "model"
    if not folder.exists():
        asked = ModelArguments(
            model_name_or_path=str(args.model), seq_len=args.seq_len, rope_scaling="yarn"
        )
        shutil.copytree(args.model, folder)
        load_config(asked, vocab_size=1).save_pretrained(folder)
    return folder


def train_adapter(name: str, args: argparse.Namespace) -> Row:
    flags = ["--rope_scaling", "none", "--learning_rate", str(LEARNING_RATE), "--lora_r", "16"]
    row = train(name, args, "custom", *flags, *RUNS[name])
    nbytes = (args.runs / name / "final" / "adapter_model.safetensors").stat().st_size
    return row | {"lora_r": 16, "adapter_mib": round(nbytes / 2**20, 2)}


def evaluate_merged(name: str, args: argparse.Namespace) -> Row:
    merged = args.runs / f"{name}-merged"
    if merged.exists():  # of an adapter that was trained before
        shutil.rmtree(merged)
    merge(args.runs / name / "final", merged)
    return evaluate(name, merged, args)


def generate(name: str, args: argparse.Namespace) -> Row:
    """Nothing of longctx: what anyone does with the saved adapter."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    adapter = args.runs / name / "final"
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": args.device}
    if RUNS[name]:
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(args.model, **how)
    network = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    return {"step": f"generate-{name}", **continued(network, tokenizer, args)}


def run_step(step: str, args: argparse.Namespace) -> Row:
    kind, _, name = step.rpartition("-")
    if kind == "train":
        return train_adapter(name, args)
    if kind == "generate":
        return generate(name, args)
    return evaluate("base", args.model, args) if step == "base" else evaluate_merged(step, args)


def main() -> None:
    args, command = parse(__doc__, "smollm2_lora", STEPS)
    try:
        args.model = scaled(args)
        for step in args.only:
            row = run_step(step, args)
            print(json.dumps(row), flush=True)
            write_results(args.output, [row], key=["step"], extra={"command": command})
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
