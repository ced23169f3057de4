"""A thin `transformers.Trainer`: what a step cost is logged, and checkpoints are atomic."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, ProgressCallback, Trainer
from transformers.trainer_callback import PrinterCallback

from longctx.callbacks import Clock, Console, MetricsFile, Reserve
from longctx.checkpoint import publish, staging_path
from longctx.config import TrainArguments
from longctx.engine import clip_shards, configure
from longctx.interrupts import Interrupts
from longctx.metrics import Throughput, device_peak_tflops, matmul_parameters, peak_memory
from longctx.model import Custom
from longctx.nonfinite import Names, NonFinite
from longctx.resume import mapped_files, reading
from longctx.saving import attempt, place, report, require_space, rotate


class LongTrainer(Trainer):
    """Trainer whose logged lines carry tokens/s, MFU and peak memory (`longctx/metrics.py`)."""

    args: TrainArguments

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainArguments,
        seq_len: int,
        document_names: Names | None = None,
        **kwargs: Any,
    ) -> None:
        """`document_names` names the records that rows carry as `documents`, for errors."""
        super().__init__(model=model, args=args, **kwargs)
        self._dtype = model.dtype  # FSDP2 makes fp32 of it
        configure(self, args)
        names = document_names or (lambda numbers: [f"record {number}" for number in numbers])
        self.nonfinite = NonFinite(action=args.on_nonfinite, names=names)
        self.interrupts = Interrupts()
        self._checkpoint_bytes = 0
        self._skipped_steps = 0
        self.throughput = Throughput(
            model.config,
            matmul_parameters(model),
            self.args.world_size,
            self.args.peak_tflops or device_peak_tflops(self.args.device),
        )
        if isinstance(custom := getattr(model, "longctx", None), Custom):
            custom.engine = args.engine
            # Trainer's own smoothing would ask the model for all logits.
            custom.label_smoothing, self.label_smoother = args.label_smoothing_factor, None
            self.add_callback(Reserve(custom, args.per_device_train_batch_size * seq_len))
        for default in (PrinterCallback, ProgressCallback):
            self.remove_callback(default)
        self.add_callback(Clock(self.throughput))
        self.add_callback(MetricsFile())
        self.add_callback(self.interrupts)
        if not self.args.disable_tqdm:
            self.add_callback(Console())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.interrupts:
            result = super().train(*args, **kwargs)
            self.interrupts.agree(self.args.device)  # one that came after the last step
        last = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        self.interrupts.exit_if_stopped(saved=last.is_dir())
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Of a run that was resumed when all its steps were done, Trainer would train one more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        self.throughput.count(inputs["position_ids"])
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.nonfinite.saw(inputs, loss)
        return loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with: the batch without its documents' numbers."""
        return super()._prepare_inputs({k: v for k, v in inputs.items() if k != "documents"})

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.args.engine == "fsdp":
            return self._clip_shards(model, self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called once a step, before the optimizer: the place to keep a broken step out of it."""
        if grad_norm is None and self.args.engine == "fsdp":
            grad_norm = self._clip_shards(model, math.inf)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        norm = 0.0 if self.args.fp16 else grad_norm  # fp16: the scaler skips overflows by itself
        if self.nonfinite.check(model, norm, self.state.global_step + 1):
            model.zero_grad()  # an optimizer without gradients changes nothing
            self._skipped_steps += 1
        return grad_norm

    def _clip_shards(self, model: Any, max_norm: float) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_shards(model.parameters(), max_norm)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, but the loss is the mean over all tokens, on any number of processes.

        Trainer takes the mean of the rows' means, which weights a token of a short row more, and
        differs with the number of processes.
        """
        self.evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, **kwargs)
        loss_sum, tokens = self.accelerator.reduce(self.evaluated, "sum").tolist()
        prefix = kwargs.get("metric_key_prefix", "eval")
        assert output.metrics is not None
        output.metrics[f"{prefix}_loss"] = loss_sum / max(tokens, 1)
        return output

    @torch.no_grad()
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]  # (B, S)
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:  # rows repeated to fill up processes
            first = self.args.process_index * len(labels)
            labels = inputs["labels"] = labels.clone()
            labels[max(0, state.remainder - first) :] = -100
        loss_sum = model(**inputs, num_items_in_batch=1).loss
        tokens = (labels[:, 1:] != -100).sum()
        self.evaluated += torch.stack([loss_sum.double(), tokens.double()])
        return loss_sum / tokens.clamp(min=1), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.throughput.read() | peak_memory(self.args.device)
            self._log_skipped(logs)
        super().log(logs, start_time)

    def _log_skipped(self, logs: dict[str, float]) -> None:
        """Skipped steps are counted; a line of nothing else has no loss (Trainer would say 0)."""
        if self._skipped_steps:
            logs["skipped_steps"] = self._skipped_steps
            if self._skipped_steps >= self.state.logging_steps:
                del logs["loss"], logs["grad_norm"]
        self._skipped_steps = 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves whole or not at all; see `longctx/saving.py`."""
        run_dir = Path(self._get_output_dir(trial))
        checkpoint = run_dir / f"checkpoint-{self.state.global_step}"
        staging = staging_path(checkpoint)
        best = self.state.best_model_checkpoint
        self.accelerator.wait_for_everyone()

        def prepare() -> None:
            require_space(run_dir, self._checkpoint_bytes)
            # Every process looks for it, to note the best checkpoint, before FSDP2 writes.
            (staging / checkpoint.name).mkdir(parents=True, exist_ok=True)

        def write() -> None:
            self._get_output_dir = lambda trial: str(staging)  # type: ignore[method-assign]
            try:
                super(LongTrainer, self)._save_checkpoint(model, trial)
            finally:
                del self._get_output_dir

        def publish_it() -> None:
            self._forget_staging(staging / checkpoint.name, checkpoint)
            if self.args.should_save:
                self._checkpoint_bytes = place(staging / checkpoint.name, checkpoint)
                newest = {checkpoint, Path(self.state.best_model_checkpoint or checkpoint)}
                rotate(run_dir, self.args.save_total_limit, newest)

        problem = attempt(prepare) or attempt(write) or attempt(publish_it)
        if problem:
            self.state.best_model_checkpoint = best
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
            report(problem, checkpoint, stop=self.args.on_save_error == "stop")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Within a checkpoint all processes fail together, before the collectives that follow."""
        if not _internal_call:
            super().save_model(output_dir)
        elif problem := attempt(lambda: super(LongTrainer, self).save_model(output_dir, True)):
            raise OSError(problem)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        ours = self.args.engine == "plain"  # FSDP2 reads parts of its files by itself
        with reading(checkpoint), mapped_files() if ours else nullcontext():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _forget_staging(self, staged: Path, checkpoint: Path) -> None:
        """The best checkpoint's path was recorded while it lay in the staging folder."""
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(checkpoint)
            if self.args.should_save:
                self.state.save_to_json(str(staged / "trainer_state.json"))

    def save_final(self, path: Path) -> None:
        """Writes the model and tokenizer that `from_pretrained` loads, whole or not at all."""
        staging = staging_path(path)
        self.accelerator.wait_for_everyone()

        def write() -> None:
            if self.args.engine == "fsdp":
                self._save_whole(staging)
            else:
                self.save_model(str(staging))

        def publish_it() -> None:
            if self.args.should_save:
                publish(staging, path)

        problem = attempt(write) or attempt(publish_it)
        if problem:
            shutil.rmtree(staging, ignore_errors=True)
            report(problem, path, stop=True)

    def _save_whole(self, path: Path) -> None:
        """Gathers FSDP2's fp32 shards (Trainer would write nothing) and saves the model's dtype."""
        model: Any = self.model
        weights = self.accelerator.get_state_dict(model)
        if self.args.should_save:
            model.config.dtype = self._dtype
            self._save(str(path), {k: v.to(self._dtype) for k, v in weights.items()})
