"""A thin `transformers.Trainer`: what a step cost is logged, and checkpoints are atomic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import rotate_checkpoints

from longctx.checkpoint import METRICS, publish, staging_path
from longctx.config import TrainArguments
from longctx.engine import configure
from longctx.metrics import Throughput, device_peak_tflops, matmul_parameters, peak_memory
from longctx.model import Custom


class LongTrainer(Trainer):
    """Trainer whose logged lines carry tokens/s, MFU and peak memory (`longctx/metrics.py`)."""

    args: TrainArguments

    def __init__(
        self, *, model: PreTrainedModel, args: TrainArguments, seq_len: int, **kwargs: Any
    ) -> None:
        super().__init__(model=model, args=args, **kwargs)
        configure(self, args)
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
            self.add_callback(_Reserve(custom, args.per_device_train_batch_size * seq_len))
        for default in (PrinterCallback, ProgressCallback):
            self.remove_callback(default)
        self.add_callback(_Clock(self.throughput))
        self.add_callback(_MetricsFile())
        if not self.args.disable_tqdm:
            self.add_callback(_Console())

    def training_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        self.throughput.count(inputs["position_ids"])
        return super().training_step(model, inputs, *args, **kwargs)

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
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves into a staging folder, then renames; see `longctx/checkpoint.py`."""
        run_dir = Path(self._get_output_dir(trial))
        checkpoint = run_dir / f"checkpoint-{self.state.global_step}"
        staging = staging_path(checkpoint)
        self.accelerator.wait_for_everyone()
        self._get_output_dir = lambda trial: str(staging)  # type: ignore[method-assign]
        try:
            super()._save_checkpoint(model, trial)
        finally:
            del self._get_output_dir
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._forget_staging(staging / checkpoint.name, checkpoint)
            publish(staging / checkpoint.name, checkpoint)
            staging.rmdir()
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()

    def _forget_staging(self, staged: Path, checkpoint: Path) -> None:
        """The best checkpoint's path was recorded while it lay in the staging folder."""
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(checkpoint)
            self.state.save_to_json(str(staged / "trainer_state.json"))

    def save_final(self, path: Path) -> None:
        """Writes the model and tokenizer that `from_pretrained` loads, whole or not at all."""
        staging = staging_path(path)
        self.accelerator.wait_for_everyone()
        if self.args.engine == "fsdp":
            self._save_whole(staging)
        else:
            self.save_model(str(staging))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish(staging, path)
        self.accelerator.wait_for_everyone()

    def _save_whole(self, path: Path) -> None:
        """Gathers FSDP2's fp32 shards (Trainer would write nothing) and saves the model's dtype."""
        model: Any = self.model
        weights = self.accelerator.get_state_dict(model)
        if self.args.should_save:
            self._save(str(path), {k: v.to(model.config.dtype) for k, v in weights.items()})


class _Reserve(TrainerCallback):
    """Makes room for the activations when everything else has its memory, before the first step:
    host memory that is short shows there."""

    def __init__(self, custom: Custom, tokens: int) -> None:
        self.custom, self.tokens = custom, tokens

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.custom.reserve(kwargs["model"], self.tokens)


class _Clock(TrainerCallback):
    """Times steps from the end of one to the end of the next, saves and evaluations left out."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.throughput.start_clock()

    on_save = on_evaluate = on_train_begin

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # once a step; the loss is read there anyway
        self.throughput.step_done()


class _MetricsFile(TrainerCallback):
    """Appends every logged line to `metrics.jsonl`; a resumed run drops the lines it repeats."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / METRICS
        if not state.is_world_process_zero or not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # a killed run may leave half a line
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        if state.is_world_process_zero:
            with (Path(args.output_dir) / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


class _Console(ProgressCallback):
    """The progress bar, with one readable line per logged step."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        if not logs or not {"loss", "eval_loss"} & logs.keys():
            return
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(format_line(state.global_step, state.max_steps, logs))


def format_line(step: int, steps: int, logs: dict[str, float]) -> str:
    """One logged step for people: `step 3/40  loss 8.71  lr 3.0e-04  grad 1.2  4.1k tok/s ...`."""
    formats = {
        "loss": "loss {:.4f}",
        "eval_loss": "eval loss {:.4f}",
        "learning_rate": "lr {:.2e}",
        "grad_norm": "grad {:.3g}",
        "step_s": "{:.2f} s/step",
        "tokens_per_s": "{:,.0f} tok/s",
        "mfu": "MFU {:.1%}",
        "peak_gpu_gib": "GPU {:.2f} GiB",
        "peak_host_gib": "host {:.2f} GiB",
    }
    figures = [form.format(float(logs[key])) for key, form in formats.items() if key in logs]
    return "  ".join([f"step {step}/{steps}", *figures])
