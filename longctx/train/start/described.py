"""What run.json says of a run: which model, data and options, started by which command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from longctx.families.adapters import adapts_experts, inside_peft
from longctx.layer.packed_weights import packed_names
from longctx.loop.collectives import whole_numel
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.options.limits import non_defaults
from longctx.train.output.definition import plain
from longctx.train.output.public import hub_id
from longctx.train.output.record import FORMAT, Record, machine, versions
from longctx.train.program import started_as

_NOT_CHOSEN = ("accelerator_config", "activation_checkpointing", "dataloader_pin_memory", "do_eval")
"""transformers and train/options/config.py set them, from other options and from the machine."""
_ALWAYS = (
    "seq_len class_type learning_rate lr_scheduler_type warmup_steps optim adam_beta1 adam_beta2 "
    "weight_decay max_grad_norm per_device_train_batch_size gradient_accumulation_steps seed"
).split()
"""Recorded with their defaults too."""


def describe_run(
    argv: Sequence[str] | None,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainArguments,
    *,
    model: Any,
    counted: Mapping[str, Mapping[str, int]],
    step: int,
) -> Record:
    """Returns the record of a run that begins after `step` steps. `argv` are the words after the
    program's name (None: the process's own), `model` is what trains, `counted` has the counts of
    train/data/row_report.py of "train" rows and, if there are any, of "eval" rows."""
    words = sys.argv[1:] if argv is None else argv
    start = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "command": f"{started_as()} {shlex.join(words)}".strip(),
        "machine": machine(args.device, args.world_size),
        "versions": versions(),
    }
    return {
        "format": FORMAT,
        "task": args.task,
        "model": _model(model_args, model),
        "data": _data(data_args, counted),
        "options": _options(model_args, data_args, args),
        "starts": [start],
    }


def _model(model_args: ModelArguments, model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"hub_id": hub_id(model_args.model_name_or_path)}
    if model_args.model_name_or_path:
        found["name"] = model_args.model_name_or_path
    else:
        found["preset"] = model_args.preset or "tiny"
    base, parameters = inside_peft(model), list(model.parameters())
    packed = packed_names(parameters)
    return found | {
        "class": type(base).__name__,
        "model_type": base.config.model_type,
        "parameters": sum(map(whole_numel, parameters)),
        "trained_parameters": sum(whole_numel(p) for p in parameters if p.requires_grad),
        "dtype": str(base.dtype).removeprefix("torch."),
        **({"adapts_experts": True} if adapts_experts(base) else {}),
        **({"packed": packed[0]} if packed else {}),
    }


def _data(
    data_args: DataArguments, counted: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, Any]]:
    """Describes the text of training and evaluation: where it comes from, how much there is."""
    found: dict[str, dict[str, Any]] = {}
    for name, counts in counted.items():
        share = data_args.eval_share if name == "eval" else None
        files = data_args.train_file if name == "train" or share else data_args.eval_file
        if files is None and data_args.dataset_name:
            split = [data_args.dataset_config, data_args.dataset_split]
            source: dict[str, Any] = {
                "dataset": data_args.dataset_name,
                "hub_id": hub_id(data_args.dataset_name),
                "split": " ".join(filter(None, split)),
            }
        else:
            source = {"files": files or ["Python's standard library"]}
        held_out = {"held_out": share} if share else {}
        found[name] = {**source, **held_out, "counts": dict(counts)}
    return found


def _options(*owners: Any) -> dict[str, Any]:
    """Returns the options that have other values than their defaults, and those of _ALWAYS. A
    default that means no may have become another word for it."""
    found = {
        name: getattr(owner, name) for owner in owners for name in _ALWAYS if name in vars(owner)
    }
    for owner in owners:
        defaults = vars(type(owner))
        found |= {name: x for name, x in non_defaults(owner).items() if x or defaults.get(name)}
    return {name: plain(value) for name, value in found.items() if name not in _NOT_CHOSEN}
