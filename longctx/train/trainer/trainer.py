"""A thin `transformers.Trainer`: what a step cost is logged, checkpoints are whole or absent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, ProgressCallback, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, TrainerState

from longctx.any_model.runtime import any_part
from longctx.attention.shards import Shards
from longctx.constants import GIB, IGNORE_INDEX
from longctx.errors import UserError, print_rank0
from longctx.families.adapters import inside_peft
from longctx.families.vision import copy_processor, is_whole
from longctx.kernels.compiling import announce_compiling
from longctx.loop.collectives import any_rank
from longctx.loop.metrics import Throughput, device_peak_flops, figures, parameters_in_matmuls
from longctx.ranges import COUNT, check_argument
from longctx.runtime.runtime import patched_part
from longctx.train.engines import Engine, choose_engine
from longctx.train.engines.peers import end_with_peers
from longctx.train.lora.adapters import Reached, save_config
from longctx.train.lora.foreign import check_resumed
from longctx.train.options.config import TrainArguments, with_our_options
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
from longctx.train.output.states import state_files
from longctx.train.safety.processes import explained_workers
from longctx.train.tasks.protocol import Task
from longctx.train.trainer.callbacks import (
    Clock,
    MetricsFile,
    Reserve,
    ReserveInputs,
    console,
    flush_before_others,
    has_own,
    spare_reporters,
)
from longctx.train.trainer.exact import overrides
from longctx.train.trainer.interrupts import Interrupts
from longctx.train.trainer.nonfinite import Names, NonFinite
from longctx.train.trainer.settled import Settled
from longctx.train.trainer.stopping import name_trained_ends, trained_ends
from longctx.train.trainer.task_trainer import TaskTrainer
from longctx.train.trainer.towers import Towers
from longctx.train.trainer.under_way import UnderWay


class LongTrainer(TaskTrainer):
    """Trainer whose logged lines carry tokens/s, MFU and peak memory (`metrics.py`), with exact
    AdamW where its states fit, and checkpoints that are whole or absent.

    It takes what transformers' Trainer takes, by keyword, and `seq_len`, the longest row. Raises
    UserError for options that cannot be used.

    Example:
        >>> import longctx, tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
        >>> heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = longctx.patch(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))
        longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + ...
        >>> ids = list(range(16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, max_steps=1, save_strategy="no", use_cpu=True)
        ...     rows = [{"input_ids": ids, "labels": ids}]
        ...     trainer = longctx.LongTrainer(model, args, seq_len=16, train_dataset=rows)
        ...     print(trainer.train().global_step)
        kept for backward: ...
        1
    """

    args: TrainArguments

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        seq_len: int,
        engine: Engine | None = None,
        document_names: Names | None = None,
        run: RunDefinition | None = None,
        task: Task | None = None,
        **kwargs: Any,
    ) -> None:
        """`seq_len` is the longest row; `task` is what is trained for (default: the model's own
        loss); `document_names` names the records that rows carry as `documents`, for errors; `run`
        is what checkpoints record of what defines the run. `args` may be transformers' own:
        longctx's options have their defaults then. `host_memory_gib` limits states on the host for
        a model that is not patched; `longctx.patch` has it for those that are."""
        check_argument("LongTrainer", "seq_len", seq_len, COUNT, whole=True)
        if kwargs.get("compute_metrics"):
            raise UserError(
                "LongTrainer evaluates the loss alone, so compute_metrics would never be called: "
                "leave it out, or give the patched model to transformers' Trainer"
            )
        args = with_our_options(args)
        self._use_cache = getattr(model.config, "use_cache", None)  # Trainer switches it off
        self.engine = engine or choose_engine(args)
        theirs = None if patched_part(model) else model.config._attn_implementation
        self.engine.share_rows(args, theirs)
        self.engine.adapters = inside_peft(model) is not model
        super().__init__(
            model=model,
            task=task or Task(args),
            args=args,
            exact=self.engine.exact_states,
            row_tokens=args.per_device_train_batch_size * seq_len,
            **kwargs,
        )
        # Batches lie in pinned memory: nobody has to wait for their copies.
        self.accelerator.dataloader_config.non_blocking = True
        self._dtype = model.dtype  # FSDP2 makes fp32 of it
        self._staging: Path | None = None
        self._run = run
        shards = self.engine.shards_states
        self.towers = Towers(model if shards or args.world_size > 1 else None, stay_out=shards)
        self.towers.make_whole(self.engine, args.device)
        with self.towers.outside():
            self.engine.configure(self, args)
        names = document_names or (lambda numbers: [f"record {number}" for number in numbers])
        # Hugging Face says no, and its loss takes them: a token counts as much in every batch.
        self.model_accepts_loss_kwargs |= is_whole(inside_peft(model))
        self.nonfinite = NonFinite(
            action=args.on_nonfinite,
            names=names,
            steps_itself=self.engine.steps_itself,
            task=self.task,
        )
        self.interrupts = Interrupts()
        self._checkpoint_bytes = 0
        self._skipped_steps = 0
        self._filters_losses = False
        self._settled = Settled(self.callback_handler)
        self._logged: Tensor | None = None
        """The sum of the losses since the last line, where the host has it."""
        self._evaluations: dict[int, dict[str, float]] = {}
        group = self.engine.row_group(self.accelerator)
        self.shards = self.task.shards = None if group is None else Shards(group)
        ranks_a_row, peak_tflops = args.sequence_parallel_size, self.args.peak_tflops
        self.throughput = Throughput(
            model.config.get_text_config(),
            parameters_in_matmuls(model),
            self.args.world_size,
            peak_tflops * 1e12 if peak_tflops else device_peak_flops(self.args.device),
            ranks_a_row,
        )
        announce_compiling()
        self.runtime = None
        counted: dict[str, Any] = dict(
            passes=args.gradient_accumulation_steps,
            task=self.counted_task,
            pending_bytes=self.engine.pending_bytes,
        )
        if patched := patched_part(model):
            self.runtime = runtime = patched.longctx
            self.engine.gather_whole(patched, patched.get_decoder().layers)
            runtime.surround(
                **counted,
                shards=self.shards,
                label_smoothing=args.label_smoothing_factor,
                moves_weights=self.engine.hooks_layers,
                needs_input_gradient=self.engine.needs_input_gradient,
            )
            self.label_smoother = None  # Trainer's own would ask the model for all logits
            self.add_callback(Reserve(patched, -(-self.row_tokens // ranks_a_row)))
        elif inputs := any_part(model):
            inputs.longctx_any.surround(**counted)
            self.add_callback(ReserveInputs(inputs, self.row_tokens))
        if self.engine.adapters:
            self.add_callback(Reached(model))
        for default in (PrinterCallback, ProgressCallback):
            self.remove_callback(default)
        spare_reporters(self.callback_handler)
        flush_before_others(self.callback_handler, self.flush)
        self.add_callback(Clock(self.throughput))
        self.add_callback(MetricsFile())
        self.add_callback(self.interrupts)
        self.add_callback(console(args))

    @overrides
    def train(self, *args: Any, **kwargs: Any) -> Any:
        around = (self.interrupts, explained_workers(), end_with_peers(), self._filtered_losses())
        with ExitStack() as stack:
            for context in (*around, self._settled.training(self.model)):
                stack.enter_context(context)
            result = super().train(*args, **kwargs)
            self.interrupts.agree(self.args.device)  # one that came after the last step
        self._check_update()
        last = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        self.interrupts.exit_if_stopped(saved=last.is_dir())
        return result

    @contextmanager
    def _filtered_losses(self) -> Iterator[None]:
        """Trainer would wait for each batch's loss, and with it for the whole backward, to leave it
        out of the logged mean if it is no number: `training_step` does that on the GPU."""
        self._filters_losses = bool(self.args.logging_nan_inf_filter)
        self.args.logging_nan_inf_filter = False
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = self._filters_losses

    def _check_update(self) -> None:
        """The next step's loss would tell that an update broke the weights: a save, and the end of
        the run, come before it."""
        self.flush()
        self.nonfinite.check_update(self.model, self.state.global_step)

    @overrides
    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume: str | None, trial: Any
    ) -> Any:
        """How often to log, save and evaluate, with which callbacks, and where the best checkpoint
        lies, is this run's to say, not the checkpoint's."""
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
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """A run that is resumed after its last step is over; Trainer would train one step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    @overrides
    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        group = self.engine.cut_group(self.accelerator)
        self.throughput.count(
            _positions(inputs) if group is None else _joined(inputs, self.model, Shards(group))
        )
        with self._settled.step(model, self.runtime):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.nonfinite.record(inputs if group is None else None, loss)
        if self._filters_losses:
            mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            loss = torch.where(loss.isfinite(), loss, mean)
        return loss

    @overrides
    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """This process' part of the rows, which come whole. A task cuts them itself: its answers
        are those of whole rows."""
        if self.shards is None or self.task.scores:
            return nullcontext, inputs
        return nullcontext, self.shards.cut(inputs)

    @overrides
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the model's arguments: the batch without its documents' numbers."""
        return super()._prepare_inputs({k: v for k, v in inputs.items() if k != "documents"})

    @overrides
    def _clip_grad_norm(self, model: Any) -> Any:
        norm = self._clip_by_engine(model, self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    @overrides
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called once a step, before the optimizer: the place to keep a broken step out of it."""
        if grad_norm is None:
            grad_norm = self._clip_by_engine(model, math.inf)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        norm = 0.0 if self.args.fp16 else grad_norm  # fp16: the scaler skips overflows by itself
        losses = None
        if self._may_begin_update(norm):
            norm, losses = self._begin_update(norm)
            grad_norm = norm
        elif self.exact:  # before the host waits for the norm
            self.exact.prepare()
        broken = self.exact.broken_gradient if self.exact else None
        if self.nonfinite.check(model, norm, self.state.global_step + 1, broken, losses):
            model.zero_grad()
            if self.exact:
                self.exact.zero_grad()  # an optimizer without gradients changes nothing
            self._skipped_steps += 1
        return grad_norm

    def _may_begin_update(self, norm: Any) -> bool:
        """Whether nobody acts between a step's norm and its update, which may then be launched
        before the host has waited for the norm."""
        alone = self.exact is not None and self.args.world_size == 1 and self.exact.can_begin
        if not alone or not isinstance(norm, Tensor):
            return False
        if type(self)._get_grad_norm is not LongTrainer._get_grad_norm:
            return False
        callbacks = self.callback_handler.callbacks
        return not any(has_own(callback, "on_pre_optimizer_step") for callback in callbacks)

    def _begin_update(self, norm: Any) -> tuple[float, list[float]]:
        """Has the GPU go on with the update, which it leaves out if a number of the step is not
        finite, while the host waits for these. Returns the norm and the losses."""
        assert self.exact is not None
        numbers = UnderWay({"norm": norm, "losses": torch.stack(self.nonfinite.losses)})
        totals = {"logged": self._tr_loss}
        if (pending := self.throughput.pending) is not None:
            totals["pending"] = pending
        line = UnderWay(totals)
        self.exact.begin(numbers.guard)
        found = numbers.read() | line.read()
        if pending is not None:
            self.throughput.settle(found["pending"][0])
        self._logged = torch.tensor(found["logged"][0], dtype=self._tr_loss.dtype)
        return found["norm"][0], found["losses"]

    @overrides
    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """A line needs the sum of the losses: the host may have it already."""
        logged, self._logged = self._logged, None
        if logged is None or not self.control.should_log:
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            return
        super()._maybe_log_save_evaluate(logged, *args, **kwargs)
        tr_loss.zero_()

    def _clip_by_engine(self, model: Any, max_norm: float) -> Tensor | None:
        if self.exact:
            return self.exact.clip(max_norm)
        return self.engine.clip_grad_norm(self.accelerator, model.parameters(), max_norm)

    @overrides
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, but the loss is the mean over all tokens, on any number of processes.

        Trainer takes the mean of the rows' means, which weights a token of a short row more, and
        differs with the number of processes.
        """
        self._settled.unsettle()
        self.evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, **kwargs)
        loss_sum, tokens = self.accelerator.reduce(self.evaluated, "sum").tolist()
        prefix = kwargs.get("metric_key_prefix", "eval")
        assert output.metrics is not None
        output.metrics[f"{prefix}_loss"] = loss_sum / max(tokens, 1)
        found = self.eval_tally.read(self.accelerator)
        output.metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        self._evaluations[self.state.global_step] = output.metrics
        return output

    def evaluate_final(self) -> dict[str, float]:
        """Returns the evaluation of the weights that the run ends with, which is made unless the
        run has made it after the step that they are of."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        known = self._evaluations.get(self.state.global_step if best is None else best)
        return self.evaluate() if known is None else known

    @overrides
    @torch.no_grad()
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        rows = self._own_rows(len(inputs["input_ids"]))
        if self.task.scores:
            found = self.evaluated_values(model, inputs, rows)
            self.evaluated += found
            return found[0] / found[1].clamp(min=1), None, None
        labels = inputs["labels"]  # (B, S)
        if rows < len(labels):
            labels = inputs["labels"] = labels.clone()
            labels[rows:] = IGNORE_INDEX
        targets = labels[:, 1:]
        if self.shards:
            inputs["shift_labels"] = torch.nn.functional.pad(targets, (0, 1), value=IGNORE_INDEX)
            inputs = self.shards.cut(inputs)
            targets = inputs["shift_labels"]
        loss_sum = model(**inputs, num_items_in_batch=1).loss
        tokens = (targets != IGNORE_INDEX).sum()
        self.evaluated += torch.stack([loss_sum.double(), tokens.double()])
        return loss_sum / tokens.clamp(min=1), None, None

    def _own_rows(self, rows: int) -> int:
        """How many of a batch's rows were not repeated to fill up the processes."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return rows
        ranks_a_row = self.shards.ranks if self.shards else 1
        first = self.args.process_index // ranks_a_row * rows
        return max(0, min(rows, state.remainder - first))

    @overrides
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.tally.read(self.accelerator)
            logs |= figures(self.throughput, self.args.device, self.runtime)
            logs["tokens"] = self.state.num_input_tokens_seen
            self._log_skipped(logs)
        super().log(logs, start_time)

    def _log_skipped(self, logs: dict[str, float]) -> None:
        """Skipped steps are counted; a line of nothing else has no loss (Trainer would say 0)."""
        if self._skipped_steps:
            logs["skipped_steps"] = self._skipped_steps
            if self._skipped_steps >= self.state.logging_steps:
                del logs["loss"], logs["grad_norm"]
        self._skipped_steps = 0

    @overrides
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves whole or not at all, in the steps of `longctx/train/output/save.py`."""
        self._settled.unsettle()
        self._check_update()
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
                super(LongTrainer, self)._save_checkpoint(model, trial)
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
        """What is still there when a save is over, however it ended, was not published."""
        try:
            yield
        finally:
            if self.args.should_save:
                remove_staging(staging)

    @overrides
    def _get_output_dir(self, trial: Any) -> str:
        """While a checkpoint is written, the staging folder."""
        return str(self._staging or super()._get_output_dir(trial))

    @overrides
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint has the names that weights have in memory, by which Trainer reads it; the
        final model has those of the files that such models come from, which differ where
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
        """Within a checkpoint all processes fail together, before the collectives that follow. Of
        adapters under an engine these alone are gathered: Trainer would gather the whole model, or
        leave the file to FSDP2, which writes none that PEFT reads."""
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
        before; transformers only warns. A weight of two names needs one, and of the other nothing
        is said."""
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
        """The best checkpoint's path was recorded while it lay in the staging folder."""
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


def _positions(inputs: dict[str, Any]) -> Tensor:  # (B, S)
    """Makes positions where a collator made none: each row is one document, padding included."""
    tokens: Tensor = inputs["input_ids"]
    positions: Tensor | None = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return positions if positions.dim() == 2 else positions[0]  # those of images behind it


def _joined(inputs: dict[str, Any], model: Any, shards: Shards) -> Tensor:  # (B, S)
    """Positions of rows that accelerate has cut. Raises UserError for documents that would attend
    to each other: without flash attention Ulysses drops what keeps them apart."""
    device = model.device  # NCCL takes nothing on a CPU
    positions = shards.whole(inputs["position_ids"].to(device))
    labels = shards.whole(inputs["shift_labels"].to(device))
    later = (positions == 0).cumsum(1) > 1  # the first document's tokens see it alone
    several = bool((later & (labels != IGNORE_INDEX)).any())
    flash = "flash" in str(model.config._attn_implementation)
    if any_rank(several and not flash, device):
        raise UserError(
            "accelerate's sequence parallelism keeps documents of a row apart with "
            "--attn_backend fa2 only: give rows of one document, or use --class_type custom"
        )
    return positions
