"""A user's script under accelerate's FSDP2: a model, longctx.patch, transformers' Trainer.
On CPUs as tests/engines/fsdp_on_cpu.py makes them pass for GPUs. Prints what the first process saw.
"""

from __future__ import annotations

import json
import os
import sys

import fsdp_on_cpu  # noqa: F401
import torch
from accelerate import init_empty_weights
from both import arguments, sentences
from small_tokenizer import small_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import longctx
from longctx.engines.collectives import destroy_process_group
from longctx.model import forwards

source, folder, class_type = sys.argv[1:]
settings = dict(fsdp=True, fsdp_config="fsdp_configs/fsdp2.json", per_device_train_batch_size=2)
args = TrainingArguments(**arguments(folder, **settings))
assert args.device.type == "cpu"  # asking starts the process group
if args.process_index == 0:
    model = AutoModelForCausalLM.from_pretrained(source)
else:  # as from_pretrained of some transformers; others load in every process
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
without = sum(p.is_meta for p in model.parameters())
ran: list[int] = []
if class_type == "patched":
    model = longctx.patch(model, strict=True)
    run = forwards.scheduled_layer
    forwards.scheduled_layer = lambda x, *more: ran.append(len(x)) or run(x, *more)
trainer = Trainer(
    model,
    args=args,
    train_dataset=sentences(12).map(
        lambda row: dict(small_tokenizer()(row["text"])), remove_columns="text"
    ),
    data_collator=DataCollatorForLanguageModeling(small_tokenizer(), mlm=False),
)
trainer.train()
counts = [torch.zeros(2, dtype=torch.long) for _ in range(args.world_size)]
torch.distributed.all_gather(counts, torch.tensor([without, len(ran)]))
if args.process_index == 0:
    lines = trainer.state.log_history
    found = {name: [line[name] for line in lines if name in line] for name in ("loss", "grad_norm")}
    print(
        json.dumps(
            found | {"meta": [int(c[0]) for c in counts], "ran": [int(c[1]) for c in counts]}
        ),
        flush=True,
    )
destroy_process_group()
os._exit(0)  # gloo's thread may abort a process that ends by itself
