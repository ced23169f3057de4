"""Trainer whose checkpoints and final model are whole or absent, in the steps of
longctx/train/output/save.py, and which resumes from them with this run's options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerState

from longctx.constants import GIB
from longctx.errors import UserError, print_rank0
from longctx.families.adapters import inside_peft
from longctx.families.vision import copy_processor
from longctx.train.engines import Engine
from longctx.train.lora.foreign import check_resumed
from longctx.train.lora.peft_adapters import save_config
from longctx.train.output import STATE
from longctx.train.output.card import write_card
from longctx.train.output.definition import RunDefinition
from longctx.train.output.rehearsal import rehearse_save
from longctx.train.output.resume import (
    apply_learning_rate,
    apply_options,
    best_checkpoint,
    check_states,
    explained_damage,
    group_options,
    mapped_files,
    require_whole_best,
)
from longctx.train.output.save import (
    common_staging,
    publish,
    remove_staging,
    report_unsaved,
    require_space,
    rotate,
    try_on_all_ranks,
)
from longctx.train.output.state_files import state_files
from longctx.train.trainer.exact import overrides
from longctx.train.trainer.stopping import name_trained_ends, trained_ends
from longctx.train.trainer.task_trainer import TaskTrainer


class CheckpointTrainer(TaskTrainer):
    """Saves and resumes a run."""

    engine: Engine

    def __init__(
        self,
        *,
        model: Any,
        use_cache: bool | None,
        dtype: torch.dtype,
        run: RunDefinition | None,
        **kwargs: Any,
    ) -> None:
        """`use_cache` and `dtype` are the model's before anything has changed them, for the final
        model; `run` is what checkpoints record of what defines the run."""
        self._use_cache, self._dtype, self._run = use_cache, dtype, run
        self._staging: Path | None = None
        self._checkpoint_bytes = 0
        super().__init__(model=model, **kwargs)

    @overrides
    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume: str | None, trial: Any
    ) -> Any:
        """Takes how often to log, save and evaluate, the callbacks, and the best checkpoint's place
        from this run instead of the checkpoint."""
        rehearse_save(self)  # Trainer has changed the configuration for the tokenizer by now
        best = None
        if resume is not None and Path(resume, STATE).exists():
            best = best_checkpoint(Path(resume), Path(str(self.args.output_dir)))
        if best is not None and self.args.load_best_model_at_end:
            require_whole_best(best)
        begin = super()._init_training_state(max_steps, per_epoch, epochs, resume, trial)
        self.state.compute_steps(self.args, max_steps)
        self.state.best_model_checkpoint = None if best is None else str(best)
        if best is None:
            self.state.best_metric = self.state.best_global_step = None
        own = [*self.callback_handler.callbacks, self.control]
        stateful: Any = [callback for callback in own if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        return begin

    @overrides
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves whole or not at all, in the steps of `longctx/train/output/save.py`."""
        run_dir = Path(self._get_output_dir(trial))
        checkpoint = run_dir / f"checkpoint-{self.state.global_step}"
        staging = common_staging(checkpoint)
        staged = staging / checkpoint.name
        best = self.state.best_model_checkpoint
        self.accelerator.wait_for_everyone()

        def prepare() -> None:
            require_space(run_dir, self._checkpoint_bytes)
            # Every process looks for it, to note the best checkpoint, before FSDP2 writes.
            staged.mkdir(parents=True, exist_ok=True)

        def write() -> None:
            self._staging = staging
            try:
                super(CheckpointTrainer, self)._save_checkpoint(model, trial)
            finally:
                self._staging = None

        def publish_it() -> None:
            self._forget_staging(staged, checkpoint)
            if self.args.should_save:
                self._checkpoint_bytes = publish(staged, checkpoint, self._run)

        with self._swept(staging):
            problem = (
                try_on_all_ranks(prepare) or try_on_all_ranks(write) or try_on_all_ranks(publish_it)
            )
        if problem:
            self.state.best_model_checkpoint = best
            report_unsaved(problem, checkpoint, stop=self.args.on_save_error == "stop")
        elif self.args.should_save:
            with tqdm.external_write_mode():  # or the line would break the progress bar's
                print_rank0(f"saved {checkpoint} ({self._checkpoint_bytes / GIB:.2f} GiB)")
            newest = {checkpoint, Path(self.state.best_model_checkpoint or checkpoint)}
            rotate(run_dir, self.args.save_total_limit, newest)

    @contextmanager
    def _swept(self, staging: Path) -> Iterator[None]:
        """Removes the staging folder when a save is over: what is still in it was not published."""
        try:
            yield
        finally:
            if self.args.should_save:
                remove_staging(staging)

    @overrides
    def _get_output_dir(self, trial: Any) -> str:
        """Returns the staging folder while a checkpoint is written, else the run's folder."""
        return str(self._staging or super()._get_output_dir(trial))

    @overrides
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes a checkpoint with the names that weights have in memory, by which Trainer reads
        it; the final model has those of the files that such models come from, which differ where
        transformers converts them (vision-language models, experts, OLMo Hybrid)."""
        model: Any = self.model
        if state_dict is not None and inside_peft(model) is model:  # an engine has gathered it
            state_dict = {**state_dict, **self.towers.weights()}
        with self.towers.inside():
            if self._staging is None or not isinstance(model, PreTrainedModel):
                return super()._save(output_dir, state_dict)
            save = partial(model.save_pretrained, save_original_format=False)
            vars(model)["save_pretrained"] = save
            try:
                super()._save(output_dir, state_dict)
            finally:
                vars(model).pop("save_pretrained", None)

    @overrides
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model. Within a checkpoint all processes fail together, before the collectives
        that follow. Of adapters under an engine these alone are gathered: Trainer would gather the
        whole model, or leave the file to FSDP2, which writes none that PEFT reads."""
        save: Callable[..., Any] = super().save_model
        if self.engine.adapters and self.engine.shards_states:
            save = self._save_adapters
        if not _internal_call:
            save(output_dir)
        elif problem := try_on_all_ranks(lambda: save(output_dir, True)):
            raise OSError(problem)

    def _save_adapters(self, output_dir: str | None, *args: Any) -> None:
        weights = self.engine.whole_adapters(self.accelerator.unwrap_model(self.model))
        self._save(output_dir, weights)

    @overrides
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with explained_damage(resume_from_checkpoint):
            if inside_peft(self.model) is not self.model:
                check_resumed(
                    Path(resume_from_checkpoint), self.accelerator.unwrap_model(self.model)
                )
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @overrides
    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises UserError for weights that a checkpoint lacks, which would stay what they were
        before; transformers only warns. A tied weight needs only one of its names in the
        checkpoint."""
        model: Any = self.model
        weights = dict(model.named_parameters(remove_duplicate=False))
        missing = {*load_result.missing_keys} & weights.keys()
        there = {id(weight) for name, weight in weights.items() if name not in missing}
        if lost := sorted(name for name in missing if id(weights[name]) not in there):
            shown = ", ".join(lost[:3])
            raise UserError(
                f"{len(lost)} of the model's weights are not in the checkpoint ({shown}): resume "
                "from another checkpoint"
            )
        rest = [name for name in load_result.missing_keys if name not in missing]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=rest))

    @overrides
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if state_files(Path(checkpoint)):
            self.load_exact(Path(checkpoint))
            return
        if self.exact:
            print_rank0(
                f"{checkpoint} holds states of torch's AdamW: they go on in fp32, and the weights "
                "as they are become the fp32 master"
            )
        asked = group_options(self.optimizer)
        base_lrs = list(getattr(self.lr_scheduler, "base_lrs", ()))
        mapped = mapped_files() if self.engine.maps_optimizer else nullcontext()
        with explained_damage(checkpoint), mapped:
            super()._load_optimizer_and_scheduler(checkpoint)
            if self.engine.maps_optimizer:
                check_states(self.exact or self.optimizer, self.lr_scheduler)
            if self.exact:
                self.check_taken(Path(checkpoint))
                for group, options in zip(self.exact.param_groups, asked, strict=True):
                    group.update({name: x for name, x in options.items() if name != "lr"})
            elif not self.engine.steps_itself:
                apply_options(self.optimizer, asked, Path(checkpoint))
            apply_learning_rate(self.lr_scheduler, base_lrs)
        self.engine.resumed(self)

    @overrides
    def _load_scaler(self, checkpoint: str | None) -> None:
        with explained_damage(checkpoint):
            super()._load_scaler(checkpoint)

    @overrides
    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not any(Path(checkpoint).glob("rng_state*")):
            print_rank0(f"{checkpoint} holds no random state: dropout will draw other numbers")
        with explained_damage(checkpoint):
            super()._load_rng_state(checkpoint)

    def _forget_staging(self, staged: Path, checkpoint: Path) -> None:
        """Corrects the best checkpoint's path, which was recorded while it lay in the staging
        folder."""
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(checkpoint)
            if self.args.should_save:
                self.state.save_to_json(str(staged / STATE))

    def save_final(self, path: Path, card: str | None = None) -> None:
        """Writes the model and tokenizer that `from_pretrained` loads, whole or not at all, with
        `card` as README.md."""
        staging = common_staging(path)
        self.accelerator.wait_for_everyone()
        model: Any = inside_peft(self.accelerator.unwrap_model(self.model))
        if self._use_cache is not None:
            model.config.use_cache = self._use_cache
        tokenizer: Any = self.processing_class
        if tokenizer is not None and self.args.task != "reward":
            ends = trained_ends(self.train_dataset, tokenizer)
            if line := name_trained_ends(model, tokenizer, ends):
                print_rank0(line)

        def publish_it() -> None:
            if self.args.should_save:
                save_config(self.model, staging)
                copy_processor(self.model, staging)
                if card is not None:
                    write_card(card, staging, path)
                publish(staging, path, self._run)

        with self._swept(staging):
            problem = try_on_all_ranks(
                lambda: self.engine.save_model(self, staging, self._dtype)
            ) or try_on_all_ranks(publish_it)
        if problem:
            report_unsaved(problem, path, stop=True)
