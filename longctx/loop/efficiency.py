"""Logs a Trainer's speed and memory: the figures of `longctx train`.

A callback sees steps, but no batches. So a hook on the base model counts the tokens of each forward
of training and of its documents. It is on the base model because TRL's trainers bypass the model's
own forward. The counts stay on the GPU until a line is logged, when Trainer reads the loss and
waits for the GPU anyway.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from longctx.any_model.auxiliary_models import calling_trainer
from longctx.errors import UserError, print_rank0
from longctx.loop.metrics import (
    Throughput,
    attended,
    device_peak_flops,
    figures,
    parameters_in_matmuls,
)
from longctx.ranges import POSITIVE, check_argument
from longctx.runtime.runtime import patched_part


class EfficiencyCallback(TrainerCallback):
    """Adds speed and memory to each line that transformers' Trainer, or one of TRL's, logs with a
    loss: what `longctx train` logs, of any model, patched or not.

        step_s              seconds of a step, from the end of the one before it; evaluations and
                            checkpoints are left out
        tokens_per_s        tokens of the forwards of training, over all processes; tokens that an
                            attention mask leaves out do not count, nor does evaluation
        mfu                 model FLOPs utilisation, if the GPU's peak is known: the FLOPs of these
                            tokens and of their documents' attention, over the peak of all GPUs
        peak_gpu_gib        peak memory allocated on this process' GPU since it started
        peak_reserved_gib   the most memory that torch's allocator has reserved
        peak_host_gib       peak resident memory of this process

    `peak_tflops` is a GPU's dense peak in bf16, for GPUs that longctx does not know. The process
    waits for the GPU only where a line is logged, at an evaluation and at a checkpoint, which wait
    for it anyway. `longctx.LongTrainer` logs these figures by itself.

    Raises UserError for a `peak_tflops` that is no positive number, and when training begins for a
    model that is not transformers'.

    Example:
        >>> import longctx, tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
        >>> heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)
        >>> trainer = Trainer(
        ...     LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
        ...     TrainingArguments(tempfile.mkdtemp(), max_steps=1, logging_steps=1, **quiet),
        ...     train_dataset=[{"input_ids": torch.arange(16), "labels": torch.arange(16)}],
        ...     callbacks=[longctx.EfficiencyCallback()],
        ... )
        >>> _ = trainer.train()
        {'loss': ...
        >>> {"step_s", "tokens_per_s", "peak_host_gib"} <= trainer.state.log_history[0].keys()
        True
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None:
            check_argument("EfficiencyCallback", "peak_tflops", peak_tflops, POSITIVE)
        self.peak_tflops = peak_tflops
        self.throughput: Throughput | None = None
        self._hook: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self._close()  # a run before this one may have ended in an error
        _log_before_reporters(self)
        peak = self.peak_tflops * 1e12 if self.peak_tflops else device_peak_flops(args.device)
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            kind = type(model).__name__
            raise UserError(f"EfficiencyCallback counts models of transformers; got {kind}")
        config = model.config.get_text_config()
        if peak and (reason := _why_no_mfu(config)):
            print_rank0(f"EfficiencyCallback: no MFU of this model: {reason}")
            peak = None
        # Rows of processes differ in length, so each counts its own rows, and these are summed.
        self.throughput = Throughput(
            config, parameters_in_matmuls(model), args.world_size, peak, args.world_size
        )
        self._patched = patched_part(model)
        self._hook = _trunk(model).register_forward_pre_hook(self._count, with_kwargs=True)
        self.throughput.start_clock()

    @torch.compiler.disable
    def _count(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if trunk.training and torch.is_grad_enabled() and self.throughput is not None:
            names = inspect.signature(trunk.forward).parameters if args else ()
            given = dict(zip(names, args, strict=False)) | kwargs
            if (found := _tokens(given)) is not None:
                self.throughput.count(*found)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        waits = control.should_log or control.should_evaluate or control.should_save
        if waits and args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        if self.throughput is not None:
            self.throughput.step_done()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.throughput is not None:
            self.throughput.start_clock()

    on_save = on_evaluate

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        if self.throughput is None or not logs or "loss" not in logs:
            return
        self.throughput.add_up(args.device)
        found = figures(self.throughput, args.device, self._patched and self._patched.longctx)
        logs |= found
        state.log_history[-1] |= found

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self.throughput = None


def _trunk(model: nn.Module) -> nn.Module:
    """Returns the base model of transformers' model, which may be inside PEFT's."""
    whole = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)
    return getattr(whole, "base_model", whole)


def _why_no_mfu(config: Any) -> str | None:
    """Returns why a model's FLOPs cannot be counted, such as a family without attention heads; None
    if they can."""
    try:
        attended(config, torch.zeros(1, 1, dtype=torch.int64))
    except (AttributeError, TypeError) as error:
        return str(error)
    return None


def _tokens(inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:  # (B, S), (B, S)
    """Returns the position of each token in its document, and which tokens are real; None: all.
    Without tokens, as in a call with images alone, returns None. As in Hugging Face's models, each
    row is one document if there is a mask."""
    embeds = inputs.get("inputs_embeds")
    tokens = inputs.get("input_ids") if embeds is None else embeds[..., 0]
    if tokens is None:
        return None
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        return mask.cumsum(1) - 1, mask != 0
    if positions is not None:
        rows = positions if positions.dim() < 3 else positions[0]
        return rows.expand(tokens.shape), None
    own = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    bounds = inputs.get("cu_seq_lens_q")
    if bounds is None:
        return own, None
    starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=tokens.numel())
    return (torch.arange(tokens.numel(), device=tokens.device) - starts).view(tokens.shape), None


def _log_before_reporters(callback: TrainerCallback) -> None:
    """Moves a callback of the calling trainer behind the first callback, which decides what follows
    a step, and before TensorBoard and others, so that they log its figures."""
    trainer = calling_trainer()
    if trainer is not None:
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(callback)
        callbacks.insert(1, callback)
