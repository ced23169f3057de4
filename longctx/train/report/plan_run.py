"""From a run's options to the `PlannedRun` that is planned: what no plan knows is refused or
reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from longctx.errors import UserError
from longctx.families.attention_names import HF_ATTENTION
from longctx.images.image_sizes import KINDS, image_of
from longctx.train.engines import Engine
from longctx.train.engines.row_sharing import groups_of, ulysses
from longctx.train.options.config import ModelArguments, TrainArguments
from longctx.train.options.exact_states import uses_exact_states
from longctx.train.options.written import pixels_of
from longctx.train.plan.subject import DTYPE, PlannedRun

MOST_GPUS = 1024
MOST_TOKENS, MOST_ROWS = 1 << 34, 1 << 20
"""The most tokens of a batch and rows of a GPU in a step: a plan of more would take minutes."""


def check_known(
    model_args: ModelArguments, args: TrainArguments, who: str = "longctx plan"
) -> None:
    """Raises UserError for runs that the plan does not know."""
    if model_args.keeps_inputs:
        return
    ours = model_args.class_type == "custom"
    layers = "--parts" if ours else f"--class_type {model_args.class_type}"
    if not args.gradient_checkpointing:
        raise UserError(
            f"{who} knows {layers} with checkpointing by layer: leave out "
            "--gradient_checkpointing false"
        )
    if model_args.offload_activations == "all":
        instead = "leave out --parts" if ours else "plan --class_type custom"
        raise UserError(
            f"{who} knows {layers} with checkpoints on the GPU: leave out --offload_activations "
            f"all, or {instead}"
        )


def check_dtype(model_args: ModelArguments) -> None:
    if model_args.dtype not in ("auto", "bfloat16"):
        raise UserError(
            f"longctx plan knows runs in bfloat16, and this one is in {model_args.dtype}: leave "
            "out --dtype, --bf16 and --fp16"
        )


def run_of(
    model_args: ModelArguments,
    args: TrainArguments,
    engine: Engine,
    gpus: int,
    document_tokens: int | None = None,
) -> PlannedRun:
    """Raises UserError for GPUs that cannot do it together, and what of them no plan knows."""
    ranks, exact = args.sequence_parallel_size, uses_exact_states(args, DTYPE)
    patched = model_args.schedules
    passes = args.gradient_accumulation_steps
    rows = args.per_device_train_batch_size
    if rows * model_args.seq_len > MOST_TOKENS or rows * passes > MOST_ROWS or gpus > MOST_GPUS:
        raise UserError(
            f"the plan knows batches of up to {MOST_TOKENS:.0e} tokens, {MOST_ROWS} rows a step "
            f"and {MOST_GPUS} GPUs: lower --per_device_train_batch_size, "
            "--gradient_accumulation_steps or --gpus"
        )
    engine.check_shares_rows(ranks > 1, patched)
    if ranks > 1 and not patched:
        ulysses(HF_ATTENTION.get(model_args.attn_backend, "sdpa"))
    groups_of(ranks, gpus)
    if not exact and engine.shards_states:
        raise UserError(f"the plan knows AdamW under engines, not --optim {args.optim}")
    if not exact and gpus > 1:
        raise UserError(
            "the plan knows several GPUs without an engine with exact states: leave out "
            "--optimizer_states as_weights and --optim"
        )
    return PlannedRun(
        model=model_args,
        place=args.place,
        gpu_memory_gib=args.gpu_memory_gib,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        exact=exact,
        document_tokens=document_tokens,
        task=args.task,
        gpus=gpus,
        sequence_parallel_size=ranks,
        engine=engine.layout(gpus, passes),
    )


def unplanned(args: Any, answer_tokens: int | None) -> Iterator[str]:
    """Yields a line for whatever of a task the plan leaves out or has to guess."""
    if args.task == "distill":
        yield "the plan is of the student: a teacher's memory and time are not in it"
    elif args.task != "sft" and answer_tokens is None:
        yield (
            "each row is planned as one document, all of whose tokens are of answers: say how long "
            "an answer is with --answer_tokens"
        )


def with_images(run: PlannedRun, config: Any, count: int | None, pixels: str | None) -> PlannedRun:
    """Returns the run of rows that have `count` images each, of the size in --image_pixels.
    `config` is the model's. Raises UserError for images that the model does not see, or that a row
    has no room for."""
    size = None if pixels is None else pixels_of(pixels)
    if count is None:
        if run.model.train_vision:
            raise UserError("--train_vision trains on images: say how many a row has with --images")
        return run
    if config.model_type not in KINDS:
        raise UserError(
            f"--images {count}: {run.model.preset or run.model.model_name_or_path} reads text "
            f"alone; models of these types see images: {', '.join(KINDS)}"
        )
    if not run.model.schedules:
        raise UserError(
            f"--images {count}: longctx plan knows images with --class_type custom without --parts"
        )
    run = replace(run, images=count, image=image_of(config, size))
    if run.image_tokens > run.model.seq_len:
        assert run.image is not None
        raise UserError(
            f"--images {count}: {count} of {run.image.width} x {run.image.height} pixels are "
            f"{run.image_tokens} tokens, {run.image.tokens} each, and --seq_len is "
            f"{run.model.seq_len}: raise it, or give fewer or smaller images"
        )
    return run


def with_answers(run: PlannedRun, answer_tokens: int | None) -> PlannedRun:
    """Returns the run of rows that are a prompt with two answers of so many tokens.

    Attention of a row costs P^2 + 2 ((P + A)^2 - P^2) in units of which a document of L tokens
    costs L^2, so that its tokens count as those of documents of (P^2 + 4 P A + 2 A^2) / (P + 2 A).
    Raises UserError for answers that a row has no room for, and for tasks without any.
    """
    if answer_tokens is None:
        return run
    row = run.model.seq_len
    prompt = row - 2 * answer_tokens
    if not run.scores or prompt < 1:
        raise UserError(
            f"--answer_tokens {answer_tokens}: of --task sft and distill there are none"
            if not run.scores
            else f"--answer_tokens {answer_tokens}: two of them leave no prompt in --seq_len {row}"
        )
    squared = prompt**2 + 4 * prompt * answer_tokens + 2 * answer_tokens**2
    return replace(run, answer_tokens=answer_tokens, document_tokens=squared // row)
