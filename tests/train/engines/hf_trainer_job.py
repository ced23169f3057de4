"""A user's script under DeepSpeed: a model, longctx.patch, transformers' Trainer. The first process
writes what it saw.

    hf_trainer_job.py MODEL FOLDER DS_CONFIG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
from both import arguments, sentences
from small_tokenizer import small_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import longctx
from longctx.forwards import modules
from longctx.train.engines.builds import build_one_at_a_time

# Operators that the runs of other tests have built. In torch's own folder DeepSpeed would compile
# them again, as it does whenever an environment has another path: 30 s.
build_one_at_a_time()
ran: list[int] = []
run = modules.scheduled_layer
modules.scheduled_layer = lambda x, *more: ran.append(len(x)) or run(x, *more)


def main(source: str, folder: str, config: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    settings = dict(deepspeed=config, per_device_train_batch_size=2)
    args = TrainingArguments(**arguments(folder, **settings))
    model = AutoModelForCausalLM.from_pretrained(source)
    sharded = [hasattr(p, "ds_id") for p in model.parameters()]
    longctx.patch(model, strict=True)
    rows = sentences(12).map(
        lambda row: dict(small_tokenizer()(row["text"])), remove_columns="text"
    )
    collator = DataCollatorForLanguageModeling(small_tokenizer(), mlm=False)
    trainer = Trainer(model, args=args, train_dataset=rows, data_collator=collator)
    trainer.train()
    lines = trainer.state.log_history
    found = {name: [line[name] for line in lines if name in line] for name in ("loss", "grad_norm")}
    found |= {"sharded": all(sharded), "ran": len(ran)}
    if args.process_index == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


main(*sys.argv[1:])
