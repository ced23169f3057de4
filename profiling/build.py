"""A trainer, or a model alone, for measuring: train.py's building blocks, on rows without data.

Each row is one document of random tokens, so attention sees the whole row and no figure depends on
how text happens to be packed. With --train_file or --dataset_name among the flags, the rows are
those that train.py would train on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback, set_seed

from longctx.kernels.annotate import annotate
from longctx.patching.patch import patch_as
from longctx.train.data.origins import check_sources
from longctx.train.data.pack.batches import as_arrays
from longctx.train.data.pack.packing_groups import build_group_row
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.reading.groups import AnswerGroup
from longctx.train.data.text.tokenizer import load_tokenizer
from longctx.train.options.config import DataArguments, ModelArguments
from longctx.train.start.loading import _hf_attention, check_request, load_config, load_model
from longctx.train.start.options import parse_args
from longctx.train.tasks import make_task
from longctx.train.tasks.reference import REFERENCE
from longctx.train.trainer.oom import explained_oom_of_weights
from longctx.train.trainer.trainer import LongTrainer
from profiling.bench.peers import prepare_peer

VOCABULARY = 8192
"""Of presets that have none of their own (tiny takes its tokenizer's in train.py)."""
_QUIET = (
    "--save_strategy no --report_to none --disable_tqdm true --overwrite_output_dir "
    "--train_sampling_strategy sequential"
).split()


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """A row of random tokens for each length, the same ones in every run."""

    def __init__(self, lengths: Sequence[int], vocabulary: int) -> None:
        self.lengths, self.vocabulary = lengths, vocabulary

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        length = self.lengths[index]
        ids = torch.randint(self.vocabulary, (length,), generator=random)
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length)}


class RandomPairs(Dataset[dict[str, Any]]):
    """A prompt with two answers of random tokens for each length, the same ones in every run. The
    reference's log-probabilities are 0."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, answer_tokens: int) -> None:
        self.lengths, self.vocabulary, self.answer = lengths, vocabulary, answer_tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length, answer = self.lengths[index], self.answer
        ids = np.random.default_rng(index).integers(self.vocabulary, size=length, dtype=np.int32)
        prompt, *answers = np.split(ids, [length - 2 * answer, length - answer])
        row = build_group_row([AnswerGroup(prompt, (*answers,), (0, 1), index)], length, 0)
        return {**row, REFERENCE: np.zeros(2)}


def build_trainer(
    flags: list[str],
    *,
    steps: int,
    output_dir: Path,
    layers: int | None = None,
    lengths: Sequence[int] | None = None,
    answer_tokens: int | None = None,
    rows: Dataset[dict[str, torch.Tensor]] | None = None,
) -> tuple[LongTrainer, ModelArguments]:
    """A trainer of `steps` steps that saves nothing, from train.py's flags.

    `layers` replaces the model's number of layers (presets only); `lengths` are the tokens in a row
    of each step (default: --seq_len), of which the last `answer_tokens` twice are the answers of a
    task over pairs; `rows` are others to train on. Raises UserError.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    flags = [*flags, *_QUIET, "--max_steps", str(steps), "--output_dir", str(output_dir)]
    model_args, data_args, args, engine = parse_args(flags)
    engine.start(args)
    check_request(model_args, args.device)
    task = make_task(args)
    own_data = bool(data_args.train_file or data_args.dataset_name)
    tokenizer = load_tokenizer(model_args, data_args) if own_data else None
    config = load_config(model_args, vocab_size=len(tokenizer) if tokenizer else VOCABULARY)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):  # one each, or the configuration is not saved
            config.layer_types = config.layer_types[:layers]
    if tokenizer:
        rows = _rows(model_args, data_args, tokenizer, config.vocab_size, args.seed)
    elif rows is None:
        rows_a_step = args.gradient_accumulation_steps * args.world_size
        rows_a_step *= args.per_device_train_batch_size
        rows_a_step //= args.sequence_parallel_size
        by_step = lengths or [model_args.seq_len] * steps
        by_row = [n for n in by_step for _ in range(rows_a_step)]
        rows = RandomRows(by_row, config.vocab_size)
        if task.rows == "pairs":
            assert answer_tokens is not None
            rows = RandomPairs(by_row, config.vocab_size, answer_tokens)
    collator = default_collate
    if own_data or task.scores:
        collator = task.collator(model_args.class_type)
    set_seed(args.seed)
    with explained_oom_of_weights(engine, model_args):
        model = load_model(model_args, config, device=args.device, engine=engine)
        trainer = LongTrainer(
            model=model,
            args=args,
            engine=engine,
            seq_len=model_args.seq_len,
            train_dataset=rows,
            task=task,
            data_collator=collator,
        )
    return trainer, model_args


def build_model(
    case: dict[str, Any],
    *,
    device: torch.device,
    vocabulary: int | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """A model of random bf16 weights, for forward and backward alone: patched, or with the settings
    of a peer's case (peers.py). The case's `layers`, where it has any, and `vocabulary` replace the
    preset's; `settings` are more model options."""
    args = model_arguments(case, **settings)
    layers = case.get("layers")
    config = load_config(args, vocab_size=VOCABULARY)
    config.num_hidden_layers = layers or config.num_hidden_layers
    config.vocab_size = vocabulary or config.vocab_size
    attention = None if args.class_type == "custom" else _hf_attention(args, device)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    print(patch_as(model.train(), args.patch_options, device), file=sys.stderr)
    prepare_peer(model, case)
    return model


def model_arguments(case: dict[str, Any], **settings: Any) -> ModelArguments:
    """The model options of a case with preset, class_type, tokens and backend."""
    return ModelArguments(
        preset=case["preset"],
        class_type=case["class_type"],
        seq_len=case["tokens"],
        extend_context=True,
        attn_backend=case["backend"],
        **settings,
    )


def _rows(
    model_args: ModelArguments,
    data_args: DataArguments,
    tokenizer: Any,
    vocabulary: int,
    seed: int,
) -> Any:
    check_sources(data_args)
    rows = build_dataset(
        data_args,
        tokenizer,
        RowOptions(
            files=data_args.train_file,
            seq_len=model_args.seq_len,
            vocab_size=vocabulary,
            seed=seed,
        ),
    )
    return as_arrays(rows)


class PhaseMarks(TrainerCallback):
    """Calls `mark(name)` where a phase of a step begins: `forward` and `backward` (once a
    micro-batch), `optimizer` (clipping included), and `end` when the step is over.

    Under DeepSpeed the optimizer runs within accelerate's backward, so its engine is asked.
    """

    reads_weights = False

    def __init__(self, trainer: LongTrainer, mark: Callable[[str], None]) -> None:
        self.trainer, self.mark = trainer, mark

    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        accelerator = self.trainer.accelerator
        model.register_forward_pre_hook(lambda *_: self.mark("forward"))
        model.register_forward_hook(lambda *_: self.mark("backward"))
        deepspeed = getattr(accelerator, "deepspeed_engine_wrapped", None)
        if deepspeed is not None:
            engine_step = deepspeed.engine.step

            def step(*args: Any, **kwargs: Any) -> Any:
                self.mark("optimizer")
                with annotate("optimizer"):
                    return engine_step(*args, **kwargs)

            deepspeed.engine.step = step
            return
        accelerator_backward = accelerator.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            accelerator_backward(*args, **kwargs)
            if accelerator.sync_gradients:
                self.mark("optimizer")

        accelerator.backward = backward

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.mark("end")
