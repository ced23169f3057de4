"""From the words of a command line to a run's options and the engine they ask for.

transformers opens the process group while it makes its TrainingArguments, so the engine is chosen
and prepares the environment in between: flags -> engine -> dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from longctx.config import (
    DataArguments,
    ModelArguments,
    TrainArguments,
    make_arguments,
    parse_flags,
)
from longctx.engines import Engine, choose_engine
from longctx.errors import UserError


def parse_args(
    argv: Sequence[str] | None = None, *, default_recipe: Path | None = None
) -> tuple[ModelArguments, DataArguments, TrainArguments, Engine]:
    """Flags, and the recipe they name with `--config`, as dataclasses and an engine.

    Raises UserError for anything unknown, of the wrong type or impossible.
    """
    flags = parse_flags(argv, default_recipe=default_recipe)
    engine = choose_engine(flags)
    engine.prepare(flags)
    model_args, data_args, args = make_arguments(flags)
    return _with_dtype(model_args, args, engine), data_args, args, engine


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
