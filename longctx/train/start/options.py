"""From the words of a command line to a run's options and the engine they ask for.

transformers opens the process group while it makes its TrainingArguments, so the engine is chosen
and prepares the environment in between: flags -> engine -> dataclasses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from longctx.any_model.declined import is_dropout, why_declined
from longctx.errors import UserError, many, print_rank0
from longctx.families.classes import class_of, takes_images
from longctx.families.families import family_of, not_known
from longctx.families.vision import PREFIXES
from longctx.train.engines import Engine, choose_engine
from longctx.train.options.config import (
    DataArguments,
    ModelArguments,
    TrainArguments,
    make_arguments,
    parse_flags,
)
from longctx.train.options.exact_states import uses_exact_states
from longctx.train.options.limits import given, idle_options
from longctx.train.safety.processes import make_room_for_workers
from longctx.train.start.loading import compute_dtype


def parse_args(
    argv: Sequence[str] | None = None, *, default_recipe: Path | None = None
) -> tuple[ModelArguments, DataArguments, TrainArguments, Engine]:
    """Flags, and the recipe they name with `--config`, as dataclasses and an engine.

    Raises UserError for anything unknown, of the wrong type or impossible.
    """
    flags = parse_flags(argv, default_recipe=default_recipe)
    engine = choose_engine(flags)
    engine.prepare(flags)
    engine.check_device(use_cpu=flags.use_cpu)
    model_args, data_args, args = make_arguments(flags)
    for line in idle_options(model_args, data_args, args):
        print_rank0(line)
    if (data_args.eval_file or data_args.eval_share) and args.eval_strategy == "no":
        print_rank0(
            "evaluation runs once, when training is over; `--eval_strategy steps --eval_steps N` "
            "evaluates on the way"
        )
    if args.task in _COMPARES and "learning_rate" not in given(args):
        print_rank0(
            f"--learning_rate {args.learning_rate:g} is transformers' default; that of TRL's "
            f"trainer for {args.task} is 1e-06"
        )
    rehearse(args, args.max_steps)
    make_room_for_workers(args.dataloader_num_workers, args.dataloader_prefetch_factor)
    model_args = _with_dtype(model_args, args, engine)
    _check_engine(model_args, args, engine)
    if engine.exact_states:
        uses_exact_states(args, compute_dtype(model_args, args.device))
    return model_args, data_args, args, engine


_COMPARES = ("dpo", "kto", "orpo", "cpo", "simpo")


def parse_planned(
    argv: Sequence[str],
) -> tuple[ModelArguments, DataArguments, TrainArguments, Engine]:
    """The same for a run that is not started here, nor its engine: options are made as without one,
    so that no process group is opened. Raises UserError."""
    flags = parse_flags(argv)
    engine = choose_engine(flags)
    engine.read(flags)
    alone = copy.copy(flags)
    if engine.shards_states:
        if flags.bf16 is False or flags.fp16:
            raise UserError(
                "longctx plan knows engines in bfloat16: leave out --fp16, --bf16 false"
            )
        alone.deepspeed = alone.fsdp = alone.fsdp_config = alone.bf16 = None
    plain = choose_engine(alone)
    plain.prepare(alone)
    model_args, data_args, args = make_arguments(alone)
    rehearse(args, args.max_steps)
    model_args = _with_dtype(model_args, args, plain)
    _check_engine(model_args, args, engine)
    engine.check_options(args)
    if engine.exact_states:
        uses_exact_states(args, compute_dtype(model_args, args.device))
    return model_args, data_args, args, engine


def _check_engine(model_args: ModelArguments, args: TrainArguments, engine: Engine) -> None:
    """Raises UserError for a model that the engine cannot train, before anything is read."""
    if model_args.lora_r is not None:
        whole = model_args.lora_modules_to_save or args.task == "reward"
        engine.check_adapters(args, quantised=model_args.quantize != "none", whole=bool(whole))
    shares = args.sequence_parallel_size > 1
    engine.check_shares_rows(shares, patched=model_args.schedules)


def check_towers(
    model_args: ModelArguments, config: PretrainedConfig, engine: Engine, processes: int
) -> None:
    """Raises UserError where several processes or an engine would train the vision tower: a batch
    without any has no gradient of it, and no process waits for the others. That of a model which
    the schedule does not know cannot be told from the rest."""
    if not takes_images(config) or not (engine.shards_states or processes > 1):
        return
    alone = "leave out --deepspeed and --fsdp, and start one process"
    if config.model_type not in PREFIXES:
        raise UserError(
            f"models of type {config.model_type!r} train in one process without an engine: {alone}"
        )
    if model_args.train_vision:
        raise UserError(
            "--train_vision is for one process without an engine, since not every batch has images "
            f"for each process: leave it out, or {alone}"
        )


def check_layers(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig
) -> None:
    """Raises UserError for a run that needs the schedule, of a model whose configuration sends it
    to Hugging Face's layers, and for a task that scores answers with a model of no family."""
    text = config.get_text_config()
    if args.task != "sft" and class_of(config) and family_of(text) is None:
        raise UserError(f"--task {args.task}: {not_known(repr(config.model_type), scored=True)}")
    needs = "" if args.task in ("sft", "distill") else f"--task {args.task}"
    if args.sequence_parallel_size > 1:
        needs = f"--sequence_parallel_size {args.sequence_parallel_size}"
    if not needs or not model_args.schedules:
        return
    if reason := why_declined(config):
        also = "--dropout 0, or " if is_dropout(config, reason) else ""
        raise UserError(
            f"{needs} needs layers of --class_type custom, which do not run this model "
            f"({reason}): use {also}--class_type vanilla"
        )


def check_rows(args: TrainArguments, train_rows: Any, eval_rows: Any) -> None:
    """Raises UserError for rows that give no batch, and where the run's number of steps gives no
    learning rate."""
    steps = args.max_steps
    if isinstance(train_rows, Sized):
        batches = _batches(args, "train", train_rows)
        per_epoch = math.ceil(batches / args.gradient_accumulation_steps)
        steps = steps if steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    if isinstance(eval_rows, Sized):
        _batches(args, "eval", eval_rows)
    rehearse(args, steps)


def _batches(args: TrainArguments, kind: str, rows: Sized) -> int:
    """Batches of a pass over the rows."""
    option = f"per_device_{kind}_batch_size"
    together = getattr(args, option) * args.world_size // args.sequence_parallel_size
    whole, rest = divmod(len(rows), together)
    if not len(rows) or (not whole and args.dataloader_drop_last):
        raise UserError(
            f"no batch of {together} can be made of {many(len(rows), 'row')}, and "
            f"--dataloader_drop_last leaves out the rest: lower --{option}, or leave "
            "--dataloader_drop_last out"
        )
    return whole + (rest > 0 and not args.dataloader_drop_last)


_REHEARSED = ("optim", "adam_", "learning_rate", "weight_decay", "lr_scheduler", "warmup")
"""How the names begin of options that optimizer and schedule are made by. With their defaults any
number of steps has both."""


def rehearse(args: TrainArguments, steps: int) -> None:
    """Makes optimizer and schedule on trial where options ask for others than the defaults, whose
    `transformers.Trainer` nobody has to import then. Raises UserError for what would end the run
    when Trainer makes them."""
    if any(name.startswith(_REHEARSED) and name != "optimizer_states" for name in given(args)):
        from longctx.train.start.optimization import try_optimization

        try_optimization(args, steps)


def _with_dtype(model_args: ModelArguments, args: TrainArguments, engine: Engine) -> ModelArguments:
    """Mixed precision decides the weights' dtype; a --dtype that contradicts it is refused."""
    if model_args.dtype == "float16" and not engine.shards_states:
        raise UserError(
            "--dtype float16 would train in float16, where AdamW's eps of 1e-8 is 0 and a run "
            "diverges by itself: use --dtype bfloat16, or --fp16 for fp32 weights"
        )
    if not engine.shards_states and (args.bf16 or args.fp16):
        if model_args.dtype not in ("auto", "float32"):
            raise UserError(
                f"--dtype {model_args.dtype} with --bf16 or --fp16, which compute in 16 bits over "
                "fp32 weights: drop one of the two"
            )
        return replace(model_args, dtype="float32")
    if args.bf16 and model_args.dtype not in ("auto", "bfloat16"):
        raise UserError(
            f"--dtype {model_args.dtype} with bf16 compute: add --bf16 false, or drop --dtype"
        )
    return model_args
