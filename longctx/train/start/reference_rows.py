"""Gives a run's rows the log-probabilities of its reference model
(longctx/train/tasks/reference.py)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from longctx.errors import UserError
from longctx.families.blocks import move_scales
from longctx.system import expanded
from longctx.train.data.pack.cache import digest
from longctx.train.engines import Engine
from longctx.train.engines.lost_ranks import end_with_peers
from longctx.train.loading.pretrained import computed_by, weights_identity
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.options.source import ModelSource
from longctx.train.start.image_batches import Batches
from longctx.train.start.loading import compute_dtype, load_config, load_model
from longctx.train.tasks.protocol import Batch, Task
from longctx.train.tasks.reference import ReferencePass
from longctx.train.trainer.trainer import LongTrainer

Rows = dict[str, Any]
"""The rows of a run by what they are for; None for those that it has not."""


def reference_identity(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig
) -> str:
    """Returns what tells the reference's log-probabilities of a row from those of another one.
    `config` is the trained model's."""
    source = model_args.source
    if args.reference:
        source = ModelSource(name=args.reference, trust_remote_code=model_args.trust_remote_code)
        config = check_reference(model_args, args, config)
    weights = weights_identity(source, config) or [
        *(model_args.preset, args.seed, args.device.type, source.name)
    ]
    dtype = [str(compute_dtype(model_args, args.device)), bool(args.bf16), bool(args.fp16)]
    return digest(weights, computed_by(config), *dtype, model_args.quantize, args.ld_alpha)


def check_reference(
    model_args: ModelArguments, args: TrainArguments, trained: PretrainedConfig
) -> PretrainedConfig:
    """Returns the configuration of `--reference`. Raises UserError for one that cannot be read, and
    for another vocabulary than the trained model's."""
    size = trained.get_text_config().vocab_size
    other = model_args.of_another(args.reference)
    config = load_config(other, vocab_size=size, flag="--reference", frozen=True)
    if (theirs := config.get_text_config().vocab_size) != size:
        raise UserError(
            f"--reference {args.reference}: its vocabulary has {theirs} entries, the trained "
            f"model's {size}"
        )
    return config


class References:
    """The reference of a run: its rows get a column of log-probabilities."""

    def __init__(
        self,
        task: Task,
        model_args: ModelArguments,
        data_args: DataArguments,
        args: TrainArguments,
        config: PretrainedConfig,
        names: Callable[[list[int]], list[str]],
        batches: Batches,
    ) -> None:
        self.task, self.model_args, self.args, self.config = task, model_args, args, config
        self.batches = batches
        self.identity = reference_identity(model_args, args, config)
        self._passes = ReferencePass(
            score=lambda batch: Tensor(),
            collate=batches.collate,
            read=batches.read,
            with_images=batches.with_images,
            identity=self.identity,
            cache_dir=expanded(data_args.cache_dir),
            device=args.device,
            rank=args.process_index // args.sequence_parallel_size,
            ranks=args.world_size // args.sequence_parallel_size,
            processes=args.world_size,
            writes=args.process_index == 0,
            names=names,
            **({"of": f"--reference {args.reference}"} if args.reference else {}),
        )

    def of_another_model(self, rows: Rows, engine: Engine) -> Rows:
        """Loads `--reference` alone, and frees it again."""
        if all(self._passes.is_cached(x) for x in rows.values() if x is not None):
            return self._added(rows, None, engine)
        if engine.shards_states:
            raise UserError(
                f"--reference {self.args.reference}: another model is not run under an engine: "
                "start this run once without --deepspeed and --fsdp, and its log-probabilities "
                "are in --cache_dir"
            )
        args, device = self.model_args.of_another(self.args.reference), self.args.device
        config = check_reference(self.model_args, self.args, self.config)
        with_images = self.batches.with_images
        model: Any = load_model(
            args, config, device=device, engine=engine, role="reference", with_images=with_images
        )
        model.to(self.args.device)
        move_scales(model)
        self.task.attach(model)
        found = self._added(rows, model, engine)
        del model
        gc.collect()
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def of_the_start(self, trainer: LongTrainer, rows: Rows, resumed: bool) -> None:
        """Runs the trainer's model, which no update and no checkpoint has changed yet; with an
        engine that shards weights, when it has wrapped the model. Raises UserError where a
        checkpoint would change it before."""
        given = [x for x in rows.values() if x is not None]
        late = trainer.engine.shards_states and not all(map(self._passes.is_cached, given))

        def add(model: Any) -> None:
            found = self._added(rows, model, trainer.engine)
            read = {what: x and self.batches.read(what, x) for what, x in found.items()}
            trainer.train_dataset, trainer.eval_dataset = read["train"], read["eval"]
            if late:
                trainer.engine.reshard(model)

        if late and resumed:
            raise UserError(
                "the reference's log-probabilities are no longer in --cache_dir, and the engine "
                "has the checkpoint's weights before it could compute them: give the model that "
                "the run began with as --reference"
            )
        if late:
            trainer.add_reference = add
        else:
            add(trainer.model)

    def _autocast(self, engine: Engine) -> AbstractContextManager[Any]:
        """Returns the autocast that Trainer trains in under --bf16 or --fp16 without an engine."""
        mixed = not engine.shards_states and (self.args.bf16 or self.args.fp16)
        dtype = torch.float16 if self.args.fp16 else torch.bfloat16
        return torch.autocast(self.args.device.type, dtype) if mixed else nullcontext()

    def _added(self, rows: Rows, model: Any, engine: Engine) -> Rows:
        def score(batch: Batch) -> Tensor:
            with self._autocast(engine):
                return self.task.log_probs(model, batch)

        passes = replace(self._passes, score=score)
        was_training = model is not None and model.training
        if model is not None:
            model.eval()
        with end_with_peers():
            found = {what: x and passes.run(x, what) for what, x in rows.items()}
        if was_training:
            model.train()
        return found
