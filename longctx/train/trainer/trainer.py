"""A thin `transformers.Trainer`: what a step cost is logged, checkpoints are whole or absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, ProgressCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from longctx.any_model.runtime import any_part
from longctx.attention.shards import Shards
from longctx.constants import IGNORE_INDEX
from longctx.errors import UserError
from longctx.families.adapters import inside_peft
from longctx.families.vision import is_whole
from longctx.kernels.compiling import announce_compiling
from longctx.loop.collectives import any_rank
from longctx.loop.metrics import (
    Throughput,
    device_peak_flops,
    parameters_in_matmuls,
)
from longctx.ranges import COUNT, check_argument
from longctx.runtime.runtime import patched_part
from longctx.train.engines import Engine, choose_engine
from longctx.train.engines.lost_ranks import end_with_peers
from longctx.train.lora.peft_adapters import Reached
from longctx.train.options.config import TrainArguments, with_our_options
from longctx.train.output.definition import RunDefinition
from longctx.train.safety.processes import explained_workers
from longctx.train.tasks.protocol import Task
from longctx.train.trainer.callbacks import (
    Clock,
    MetricsFile,
    Reserve,
    ReserveInputs,
    console,
    flush_before_others,
    spare_reporters,
)
from longctx.train.trainer.exact import overrides
from longctx.train.trainer.interrupts import Interrupts
from longctx.train.trainer.nonfinite import Names, NonFinite
from longctx.train.trainer.on_host import BoundsOnHost, as_tensors
from longctx.train.trainer.settled import Settled
from longctx.train.trainer.step_end import StepEndTrainer
from longctx.train.trainer.towers import Towers


class LongTrainer(StepEndTrainer):
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
        self.engine = engine or choose_engine(args)
        theirs = None if patched_part(model) else model.config._attn_implementation
        self.engine.share_rows(args, theirs)
        self.engine.adapters = inside_peft(model) is not model
        super().__init__(
            model=model,
            use_cache=getattr(model.config, "use_cache", None),  # Trainer switches it off
            dtype=model.dtype,  # FSDP2 makes fp32 of it
            run=run,
            task=task or Task(args),
            args=args,
            exact=self.engine.exact_states,
            row_tokens=args.per_device_train_batch_size * seq_len,
            **kwargs,
        )
        self._start_engine(model)
        self._start_counting(model, document_names)
        announce_compiling()
        self.runtime = None
        self._tell_layers(model)
        self._add_callbacks(model)

    def _start_engine(self, model: PreTrainedModel) -> None:
        """Has the engine configure this trainer, without the towers that it does not wrap."""
        # Batches lie in pinned memory, so the host need not wait for their copies.
        self.accelerator.dataloader_config.non_blocking = True
        shards, args = self.engine.shards_states, self.args
        self.towers = Towers(model if shards or args.world_size > 1 else None, stay_out=shards)
        self.towers.make_whole(self.engine, args.device)
        with self.towers.outside():
            self.engine.configure(self, args)
        # transformers says that whole vision-language models take no loss arguments, and their
        # losses take them: a token counts as much in every batch.
        self.model_accepts_loss_kwargs |= is_whole(inside_peft(model))
        group = self.engine.row_group(self.accelerator)
        self.shards = self.task.shards = None if group is None else Shards(group)

    def _start_counting(self, model: PreTrainedModel, document_names: Names | None) -> None:
        """Makes what counts tokens, losses, skipped steps and evaluations."""
        args = self.args
        self.nonfinite = NonFinite(
            action=args.on_nonfinite,
            names=document_names or (lambda numbers: [f"record {number}" for number in numbers]),
            steps_itself=self.engine.steps_itself,
            task=self.task,
        )
        self.interrupts = Interrupts()
        self._filters_losses = False
        self._settled = Settled(self.callback_handler)
        peak_tflops = args.peak_tflops
        self.throughput = Throughput(
            model.config.get_text_config(),
            parameters_in_matmuls(model),
            args.world_size,
            peak_tflops * 1e12 if peak_tflops else device_peak_flops(args.device),
            args.sequence_parallel_size,
        )

    def _tell_layers(self, model: PreTrainedModel) -> None:
        """Tells the runtime of a patched model what the trainer and its engine do around it."""
        args = self.args
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
            if args.world_size == 1:  # engines move all tensors of a call to the GPU
                self.data_collator = BoundsOnHost(self.data_collator)
            ranks_a_row = args.sequence_parallel_size
            self.add_callback(Reserve(patched, -(-self.row_tokens // ranks_a_row)))
        elif inputs := any_part(model):
            inputs.longctx_any.surround(**counted)
            self.add_callback(ReserveInputs(inputs, self.row_tokens))

    def _add_callbacks(self, model: PreTrainedModel) -> None:
        """Adds longctx's callbacks, which replace transformers' progress bar and printer."""
        if self.engine.adapters:
            self.add_callback(Reached(model))
        for default in (PrinterCallback, ProgressCallback):
            self.remove_callback(default)
        spare_reporters(self.callback_handler)
        flush_before_others(self.callback_handler, self.flush)
        self.add_callback(Clock(self.throughput))
        self.add_callback(MetricsFile())
        self.add_callback(self.interrupts)
        self.add_callback(console(self.args))

    @overrides
    def train(self, *args: Any, **kwargs: Any) -> Any:
        around = (self.interrupts, explained_workers(), end_with_peers(), self._filtered_losses())
        with ExitStack() as stack:
            for context in (*around, self._settled.training(self.model)):
                stack.enter_context(context)
            stack.callback(self._drop_late)
            result = super().train(*args, **kwargs)
            self.interrupts.agree(self.args.device)  # one that came after the last step
        self._check_update()
        last = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        self.interrupts.exit_if_stopped(saved=last.is_dir())
        return result

    def _drop_late(self) -> None:
        """Writes the line of a step that was late where the next one failed: that error is the
        run's."""
        with suppress(Exception):
            self._end_step()

    @contextmanager
    def _filtered_losses(self) -> Iterator[None]:
        """Has `training_step` leave losses that are no numbers out of the logged mean, on the GPU.
        Trainer would wait for each batch's loss, and with it for the whole backward."""
        self._filters_losses = bool(self.args.logging_nan_inf_filter)
        self.args.logging_nan_inf_filter = False
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = self._filters_losses

    @overrides
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._settled.unsettle()
        self._end_step()
        self._check_update()
        super()._save_checkpoint(model, trial)

    def _check_update(self) -> None:
        """Raises UserError if an update broke the weights. The next step's loss would show it, but
        a save or the end of the run comes before that step."""
        self.flush()
        self.nonfinite.check_update(self.model, self.state.global_step)

    @overrides
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Ends a run that is resumed after its last step, where Trainer would train one step
        more."""
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
        self.nonfinite.record(as_tensors(inputs) if group is None else None, loss)
        if self._filters_losses:
            mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
            loss = torch.where(loss.isfinite(), loss, mean)
        return loss

    @overrides
    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Returns this process' part of the rows, which come whole. A task cuts them itself: its
        answers are those of whole rows."""
        if self.shards is None or self.task.scores:
            return nullcontext, inputs
        return nullcontext, self.shards.cut(inputs)

    @overrides
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the model's arguments: the batch without its documents' numbers."""
        given = {k: v for k, v in inputs.items() if k != "documents"}
        return as_tensors(super()._prepare_inputs(given))

    @overrides
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._settled.unsettle()
        self._end_step()
        return super().evaluation_loop(*args, **kwargs)


def _positions(inputs: dict[str, Any]) -> Tensor:  # (B, S)
    """Makes positions where a collator made none: each row is one document, padding included."""
    tokens: Tensor = inputs["input_ids"]
    positions: Tensor | None = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return positions if positions.dim() == 2 else positions[0]  # those of images behind it


def _joined(inputs: dict[str, Any], model: Any, shards: Shards) -> Tensor:  # (B, S)
    """Returns the positions of rows that accelerate has cut. Raises UserError for documents that
    would attend to each other: without flash attention Ulysses drops what keeps them apart."""
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
