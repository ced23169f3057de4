"""Options that cannot be together: a table of rules, each with the line that ends a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from longctx.errors import UserError
from longctx.settings import FUSED, WHOLE
from longctx.train.options.limits import EQUAL_ROWS, non_defaults

_CHECKPOINT_KEYS = (
    "debug determinism_check early_stop every_n_layers offload preserve_rng_state use_reentrant"
).split()
_ADAPTERS_OWN = (
    "lora_alpha lora_dropout lora_targets lora_modules_to_save use_dora loraplus_lr_ratio"
).split()


@dataclass(frozen=True)
class Conflict:
    """Values of options that cannot be together."""

    is_there: Callable[[Any, Any, Any], Any]
    """Whether options of model (m), data (d) and training (t) have such values."""
    message: str | Callable[[Any, Any, Any], str]
    """The line that ends the run, or what makes it of the options' values."""

    def line(self, m: Any, d: Any, t: Any) -> str:
        return self.message if isinstance(self.message, str) else self.message(m, d, t)


def _without_adapters(m: Any, d: Any, t: Any) -> str:
    named = _of_adapters(m, t)
    it = "it" if len(named) == 1 else "them"
    return (
        f"{', '.join(named)}: without --lora_r there are no adapters and the whole model is "
        f"trained: give --lora_r RANK, or leave {it} out"
    )


def _of_adapters(m: Any, t: Any) -> list[str]:
    """Returns the flags that were given and configure adapters alone."""
    found = non_defaults(m).keys() | non_defaults(t).keys()
    return [f"--{name}" for name in _ADAPTERS_OWN if name in found]


_ADAPTERS = (
    Conflict(
        lambda m, d, t: m.quantize != "none" and m.lora_r is None,
        "--quantize rounds weights, which cannot be trained then: give --lora_r, whose "
        "adapters can, or leave it out",
    ),
    Conflict(lambda m, d, t: m.lora_r is None and _of_adapters(m, t), _without_adapters),
    Conflict(
        lambda m, d, t: m.lora_r is not None and t.save_fp32,
        "--save_fp32 is of whole models: adapters are trained and saved in fp32 anyway",
    ),
    Conflict(
        lambda m, d, t: (
            t.loraplus_lr_ratio is not None and t.optim.startswith(("galore", "apollo"))
        ),
        "--loraplus_lr_ratio gives groups of weights rates of their own, and so does a GaLore "
        "or APOLLO as --optim: leave out one of them",
    ),
)

_LENGTH_AND_EVALUATION = (
    Conflict(
        lambda m, d, t: t.max_steps == 0 or t.max_steps < -1,
        "--max_steps must be at least 1, or -1 to train by --num_train_epochs",
    ),
    Conflict(
        lambda m, d, t: d.streaming and t.max_steps < 1,
        "--streaming has no known length: say how long to train with --max_steps",
    ),
    Conflict(
        lambda m, d, t: (
            (t.eval_strategy != "no" or t.eval_on_start or t.do_eval)
            and not (d.eval_file or d.eval_share)
        ),
        "--eval_strategy, --eval_on_start and --do_eval evaluate what --eval_file names or "
        "--eval_share holds out: give one of the two",
    ),
    Conflict(
        lambda m, d, t: (
            (t.load_best_model_at_end or t.save_strategy == "best") and t.eval_strategy == "no"
        ),
        "--load_best_model_at_end and --save_strategy best choose by evaluations: give "
        "--eval_strategy",
    ),
    Conflict(
        lambda m, d, t: t.metric_for_best_model not in (None, "loss", "eval_loss"),
        "--metric_for_best_model must be loss: evaluation measures nothing else",
    ),
)

_TRAINING = (
    Conflict(
        lambda m, d, t: 0 < t.max_grad_norm < 1e-8,
        "--max_grad_norm below 1e-8 clips gradients to nothing: 0 switches clipping off",
    ),
    Conflict(
        lambda m, d, t: (
            t.dataloader_num_workers == 0
            and (t.dataloader_persistent_workers or t.dataloader_multiprocessing_context)
        ),
        "--dataloader_persistent_workers and --dataloader_multiprocessing_context need "
        "workers: give --dataloader_num_workers",
    ),
    Conflict(
        lambda m, d, t: t.train_sampling_strategy in ("group_by_length", "batch_rebalance"),
        f"--train_sampling_strategy {EQUAL_ROWS}",
    ),
    Conflict(
        lambda m, d, t: t.optim.endswith("layerwise") or "lomo" in t.optim,
        "--optim steps layer by layer inside backward, where gradients cannot be checked, "
        "clipped or added up: choose another one",
    ),
)

_TASKS = (
    Conflict(
        lambda m, d, t: t.task not in ("sft", "distill") and d.streaming,
        "--streaming reads text for --task sft and distill: give the data as files, or without it",
    ),
    Conflict(
        lambda m, d, t: t.task != "sft" and t.label_smoothing_factor,
        "--label_smoothing_factor is of the loss of --task sft: leave it out",
    ),
    Conflict(
        lambda m, d, t: t.task == "dpo" and t.loss_weights and not any(t.loss_weights),
        "--loss_weights of 0 alone train nothing: give one that is not",
    ),
    Conflict(
        lambda m, d, t: t.task == "kto" and not t.desirable_weight and not t.undesirable_weight,
        "--desirable_weight 0 and --undesirable_weight 0 train nothing: give one that is not",
    ),
    Conflict(
        lambda m, d, t: (
            t.task != "sft" and t.sequence_parallel_size > 1 and m.class_type != "custom"
        ),
        "--sequence_parallel_size with another --task than sft needs --class_type custom",
    ),
    Conflict(
        lambda m, d, t: t.task == "distill" and t.sequence_parallel_size > 1,
        "--task distill runs without --sequence_parallel_size: a teacher shares no rows",
    ),
    Conflict(
        lambda m, d, t: t.task != "sft" and m.seq_len % t.sequence_parallel_size,
        "--seq_len must be a multiple of --sequence_parallel_size with another --task than sft",
    ),
)

_LAYERS_AND_PROCESSES = (
    Conflict(
        lambda m, d, t: "tpu_metrics_debug" in t.debug,
        "--debug tpu_metrics_debug needs a TPU: leave it out",
    ),
    Conflict(
        lambda m, d, t: not {*(t.gradient_checkpointing_kwargs or {})} <= {*_CHECKPOINT_KEYS},
        f"--gradient_checkpointing_kwargs takes {', '.join(_CHECKPOINT_KEYS)}",
    ),
    Conflict(
        lambda m, d, t: (
            not m.keeps_inputs and m.offload_activations == "all" and not t.gradient_checkpointing
        ),
        lambda m, d, t: (
            "--offload_activations all with "
            f"{'--parts' if m.class_type == 'custom' else m.class_type} is of checkpoints, which "
            "wait in host memory: leave out --gradient_checkpointing false"
        ),
    ),
    Conflict(
        lambda m, d, t: m.class_type == "any" and t.sequence_parallel_size > 1,
        "--class_type any has no --sequence_parallel_size: use custom, or vanilla or liger",
    ),
    Conflict(
        lambda m, d, t: m.class_type != "custom" and m.seq_len % t.sequence_parallel_size,
        "--seq_len must be a multiple of --sequence_parallel_size with vanilla and liger",
    ),
    Conflict(
        lambda m, d, t: t.world_size > 1 and t.accelerator_config.even_batches is False,
        "--accelerator_config: without even_batches one process would wait for ever for another",
    ),
    Conflict(
        lambda m, d, t: (
            t.accelerator_config.split_batches and t.per_device_train_batch_size % t.world_size
        ),
        "--accelerator_config: split_batches needs a --per_device_train_batch_size that the "
        "processes divide",
    ),
)


def _has_single_parts(m: Any) -> bool:
    """Whether single parts of ours run in Hugging Face's layers, by `--parts`."""
    return bool(m.class_type == "custom" and not m.schedules)


_PARTS = (
    Conflict(
        lambda m, d, t: _has_single_parts(m) and t.task != "sft",
        lambda m, d, t: (
            f"--task {t.task} needs the schedule of --class_type custom: leave out --parts"
        ),
    ),
    Conflict(
        lambda m, d, t: _has_single_parts(m) and t.sequence_parallel_size > 1,
        "--sequence_parallel_size needs the schedule of --class_type custom: leave out "
        "--parts, or use --class_type vanilla or liger",
    ),
    Conflict(
        lambda m, d, t: (
            _has_single_parts(m)
            and t.label_smoothing_factor
            and not {WHOLE, FUSED} & {*m.patch_options.parts}
        ),
        f"--label_smoothing_factor is of our loss, which is not among --parts: add {FUSED} or "
        f"{WHOLE}",
    ),
)

CONFLICTS = (
    *(*_ADAPTERS, *_LENGTH_AND_EVALUATION, *_TRAINING, *_TASKS, *_LAYERS_AND_PROCESSES),
    *_PARTS,
)
"""The rules, in the order in which they are tried: a run ends with the first line alone."""


def conflicts(m: Any, d: Any, t: Any) -> Iterator[str]:
    """Yields the error message of each conflict between options of model, data and training."""
    return (rule.line(m, d, t) for rule in CONFLICTS if rule.is_there(m, d, t))


def check_together(model: Any, data: Any, train: Any) -> None:
    """Raises UserError for options that contradict each other."""
    for line in conflicts(model, data, train):
        raise UserError(line)
