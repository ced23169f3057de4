"""A user's script under accelerate's FSDP2: a model, longctx.patch, transformers' Trainer. It runs
on CPUs, which tests/train/engines/fsdp_on_cpu.py makes pass for GPUs: import it in processes that
do nothing else. The script trains Hugging Face's model, a patched one, and one that computes
prompts once, and writes what the first process saw of each. All rows begin with the same words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsdp_on_cpu  # noqa: F401
import torch
from accelerate import init_empty_weights
from both import arguments, sentence, sentences
from datasets import Dataset
from paths import ROOT
from small_tokenizer import small_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import longctx
from longctx.calls import shared_prefixes
from longctx.forwards import modules

ran: list[int] = []
run = modules.scheduled_layer
modules.scheduled_layer = lambda x, *more: ran.append(len(x)) or run(x, *more)
shared_prefixes.LEAST_TOKENS = 2


def train_all(source: Path, folder: Path) -> None:
    config = str(ROOT / "fsdp_configs/fsdp2.json")
    settings = dict(fsdp=True, fsdp_config=config, per_device_train_batch_size=2)
    args = TrainingArguments(**arguments(folder, **settings))
    assert args.device.type == "cpu"  # asking starts the process group
    rows = sentences(12).map(
        lambda row: dict(small_tokenizer()(f"{sentence(3)} {row['text']}")), remove_columns="text"
    )
    kinds = ("vanilla", "patched", "shared")
    found = {class_type: trained(class_type, source, args, rows) for class_type in kinds}
    if args.process_index == 0:
        (folder / "found.json").write_text(json.dumps(found))


def trained(
    class_type: str, source: Path, args: TrainingArguments, rows: Dataset
) -> dict[str, list[float]]:
    """The numbers that the first process logged, and what both say of themselves."""
    if args.process_index == 0:
        model = AutoModelForCausalLM.from_pretrained(source)
    else:  # as from_pretrained of some transformers; others load in every process
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    without = sum(p.is_meta for p in model.parameters())
    ran.clear()
    if class_type != "vanilla":
        model = longctx.patch(model, strict=True, share_prefixes=class_type == "shared")
    collator = DataCollatorForLanguageModeling(small_tokenizer(), mlm=False)
    callbacks: list[Any] = [longctx.EfficiencyCallback()]
    trainer = Trainer(
        model, args=args, train_dataset=rows, data_collator=collator, callbacks=callbacks
    )
    trainer.train()
    counts = [torch.zeros(3, dtype=torch.long) for _ in range(args.world_size)]
    torch.distributed.all_gather(counts, torch.tensor([without, len(ran), sum(ran)]))
    lines = trainer.state.log_history
    found = {name: [line[name] for line in lines if name in line] for name in ("loss", "grad_norm")}
    found["tokens of steps"] = [
        line["tokens_per_s"] * line["step_s"] for line in lines if "tokens_per_s" in line
    ]
    of_each = zip(*(count.tolist() for count in counts), strict=True)
    return found | dict(zip(("meta", "ran", "tokens"), of_each, strict=True))
