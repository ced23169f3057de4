"""What the value of an option may be, so that a run that cannot work ends before it begins.

RANGES       numbers; all others are finite and fit in 32 bits too
NOT_OURS     options of transformers that would break what a run promises, or do nothing here
CONFLICTS    options that cannot be together
IDLE         options that do nothing without another one; that is said, not refused, because
             runs share recipes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import Any

from longctx.errors import UserError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless they are `open_low` or `open_high`."""

    low: float = -(2**31)
    high: float = 2**31 - 1
    open_low: bool = False
    open_high: bool = False

    def problem(self, value: float) -> str | None:
        """What a value outside must be instead; None for one inside."""
        if math.isnan(value):
            return "a number"
        if value < self.low or (self.open_low and value == self.low):
            return f"{'above' if self.open_low else 'at least'} {self.low}"
        if value > self.high or (self.open_high and value == self.high):
            return f"{'below' if self.open_high else 'at most'} {self.high}"
        return None


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1, open_high=True)
_SEED = Range(0, 2**32 - 1)  # NumPy's

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            "seq_len",
            "head_groups",
            "lora_r",
            "lora_alpha",
            "tile_tokens",
            "sequence_parallel_size",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "dataloader_prefetch_factor",
            "torch_empty_cache_steps",
            "ddp_bucket_cap_mb",
            "ddp_timeout",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            "warmup_steps",
            "max_grad_norm",
            "save_total_limit",
            "eval_delay",
            "host_memory_gib",
            "cpo_alpha",
            "desirable_weight",
            "undesirable_weight",
            "center_rewards_coefficient",
        ),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        (
            "num_train_epochs",
            "logging_steps",
            "save_steps",
            "eval_steps",
            "peak_tflops",
            "gpu_memory_gib",
            "beta",
            "discopop_tau",
            "temperature",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor", "lora_dropout"), SHARE),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    "learning_rate": Range(1e-12, 1e6),  # below, no weight of any dtype changes
    "weight_decay": Range(0, 100),
    "label_smoothing": Range(0, 0.5, open_high=True),  # at a half both answers are as good
    **dict.fromkeys(("ld_alpha", "distill_beta"), Range(0, 1)),
    "dropout": Range(0, 0),  # the schedule has none, and nobody asks for more of it
    "adam_epsilon": Range(0, 1, open_low=True),
    "neftune_noise_alpha": Range(0, 1000),
    "dataloader_num_workers": Range(0, 1024),
}
"""Field -> its numbers. NaN is in none, infinity neither."""

_LOSS_ONLY = (
    "does nothing: evaluation keeps the loss, logits of long rows fit nowhere; leave it out"
)
_NO_UPLOAD = "is not part of a run: when it is done, `hf upload REPO OUTPUT_DIR/final` uploads it"
_LIGER = "would replace the model's forward after it was patched: use --class_type liger"
_ROUNDS = "would round the weights that are trained and saved: leave it out"
_EQUAL_ROWS = "orders rows by length, but all have --seq_len tokens: leave it out"

NOT_OURS: dict[str, str] = {
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "enable_jit_checkpoint": "would handle SIGTERM a second time: leave it out, SIGTERM saves a "
    "checkpoint anyway",
    "auto_find_batch_size": "would change the batch when memory runs out: leave it out, the error "
    "says what needs less",
    "use_cache": "would let the documents of a row attend to each other: leave it out, final/ "
    "generates with a cache anyway",
    "push_to_hub": _NO_UPLOAD,
    "hub_model_id": _NO_UPLOAD,
    "hub_token": _NO_UPLOAD,
    "hub_private_repo": _NO_UPLOAD,
    "hub_strategy": _NO_UPLOAD,
    "hub_always_push": _NO_UPLOAD,
    "hub_revision": _NO_UPLOAD,
    "bf16_full_eval": _ROUNDS,
    "fp16_full_eval": _ROUNDS,
    "prediction_loss_only": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "eval_accumulation_steps": _LOSS_ONLY,
    "include_for_metrics": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "label_names": "would look for labels that rows do not have: leave it out",
    "do_predict": "has nothing to predict: leave it out, `longctx eval` examines a model",
    "length_column_name": _EQUAL_ROWS,
    "restore_callback_states_from_checkpoint": "does nothing: no callback of a run has a state; "
    "leave it out",
}
"""Option -> why it is refused unless it has its default, and what to do instead."""


Rule = Callable[[Any, Any, Any], bool]
"""Of the three dataclasses: model, data, training."""

_CHECKPOINT_KEYS = {
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
    "every_n_layers",
    "offload",
}
_SCHEDULES_ALONE = ("constant", "reduce_lr_on_plateau", "greedy")
_NO_KWARGS = ("constant", "constant_with_warmup")
_CUSTOM = "keep offload_activations head_groups tile_tokens host_memory_gib share_prefixes"
_DDP = "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"


def _chooses_best(m: Any, d: Any, t: Any) -> bool:
    follows = t.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    return t.load_best_model_at_end or t.save_strategy == "best" or follows


def _asks_to_evaluate(t: Any) -> bool:
    return t.eval_strategy != "no" or t.eval_on_start or t.do_eval


def _is_task(names: str) -> Rule:
    return lambda m, d, t: t.task in names.split()


_SMOOTHED = {"dpo": ("exo_pair", "robust", "aot", "aot_unpaired"), "cpo": ("sigmoid",)}
"""The losses of a task that read --label_smoothing, as in TRL."""


def _reads(t: Any, losses: Sequence[str] | None) -> bool:
    """Whether one of a run's losses is among these; None: whatever its task."""
    return losses is None or any(name in losses for name in t.loss_type or ["sigmoid"])


IDLE: tuple[tuple[str, str, Rule], ...] = (
    (_CUSTOM, "--class_type custom", lambda m, d, t: m.class_type == "custom"),
    (
        "gradient_checkpointing gradient_checkpointing_kwargs",
        "--class_type vanilla or liger; custom always computes again what it does not keep",
        lambda m, d, t: m.class_type != "custom",
    ),
    (
        "host_memory_gib",
        "--offload_activations auto or all, or --place auto or host",
        lambda m, d, t: (
            m.class_type != "custom" or m.offload_activations != "none" or t.place != "gpu"
        ),
    ),
    (
        "lora_alpha lora_dropout lora_targets lora_modules_to_save use_dora",
        "--lora_r",
        lambda m, d, t: m.lora_r is not None,
    ),
    ("dataset_config dataset_split", "--dataset_name", lambda m, d, t: d.dataset_name),
    ("eval_steps", "--eval_strategy steps", lambda m, d, t: t.eval_strategy == "steps"),
    ("eval_delay", "--eval_strategy steps or epoch", lambda m, d, t: t.eval_strategy != "no"),
    ("per_device_eval_batch_size", "--eval_file", lambda m, d, t: d.eval_file),
    ("save_steps", "--save_strategy steps", lambda m, d, t: t.save_strategy == "steps"),
    ("logging_steps", "--logging_strategy steps", lambda m, d, t: t.logging_strategy == "steps"),
    (
        "metric_for_best_model greater_is_better",
        "--load_best_model_at_end, --save_strategy best or a schedule that follows the loss",
        _chooses_best,
    ),
    ("run_name", "--report_to", lambda m, d, t: t.report_to),
    (
        "project trackio_space_id trackio_bucket_id trackio_static_space_id",
        "--report_to trackio",
        lambda m, d, t: "trackio" in t.report_to,
    ),
    (
        "warmup_steps",
        "a --lr_scheduler_type with a warmup, as constant_with_warmup",
        lambda m, d, t: t.lr_scheduler_type not in _SCHEDULES_ALONE,
    ),
    (
        "lr_scheduler_kwargs",
        "another --lr_scheduler_type than a constant one",
        lambda m, d, t: t.lr_scheduler_type not in _NO_KWARGS,
    ),
    (
        "adam_beta1 adam_beta2 adam_epsilon",
        "an Adam as --optim",
        lambda m, d, t: any(name in t.optim for name in ("adam", "ademamix", "lion", "lomo")),
    ),
    (
        "optim_target_modules",
        "a GaLore or APOLLO as --optim",
        lambda m, d, t: t.optim.startswith(("galore", "apollo")),
    ),
    ("gpu_memory_gib", "a GPU", lambda m, d, t: t.device.type == "cuda"),
    (_DDP, "several processes: accelerate launch", lambda m, d, t: t.world_size > 1),
    ("fsdp_config", "--fsdp true", lambda m, d, t: t.fsdp),
    *(
        (names, f"--task {tasks.replace(' ', ' or ')}", _is_task(tasks))
        for names, tasks in (
            ("loss_type", "dpo kto cpo"),
            (
                "loss_weights f_divergence_type f_alpha_divergence_coef discopop_tau ld_alpha",
                "dpo",
            ),
            ("beta", "dpo kto orpo cpo simpo"),
            ("label_smoothing", "dpo cpo"),
            ("cpo_alpha", "cpo simpo"),
            ("simpo_gamma", "simpo"),
            ("desirable_weight undesirable_weight", "kto"),
            ("center_rewards_coefficient", "reward"),
            ("reference", "dpo kto"),
            ("teacher teacher_quantize distill_beta temperature", "distill"),
        )
    ),
    (
        "label_smoothing",
        f"--loss_type {', '.join(_SMOOTHED['dpo'])}, or {_SMOOTHED['cpo'][0]} of cpo",
        lambda m, d, t: _reads(t, _SMOOTHED.get(t.task)),
    ),
    (
        "f_alpha_divergence_coef",
        "--f_divergence_type alpha_divergence",
        lambda m, d, t: t.task != "dpo" or t.f_divergence_type == "alpha_divergence",
    ),
    (
        "discopop_tau",
        "--loss_type discopop",
        lambda m, d, t: t.task != "dpo" or _reads(t, ("discopop",)),
    ),
)
"""Options, what they do nothing without, and whether that is there."""

CONFLICTS: tuple[tuple[Rule, str], ...] = (
    (
        lambda m, d, t: m.quantize != "none" and m.lora_r is None,
        "--quantize rounds weights, which cannot be trained then: give --lora_r, whose adapters "
        "can, or leave it out",
    ),
    (
        lambda m, d, t: m.lora_r is not None and t.save_fp32,
        "--save_fp32 is of whole models: adapters are trained and saved in fp32 anyway",
    ),
    (
        lambda m, d, t: t.max_steps == 0 or t.max_steps < -1,
        "--max_steps must be at least 1, or -1 to train by --num_train_epochs",
    ),
    (
        lambda m, d, t: d.streaming and t.max_steps < 1,
        "--streaming has no known length: say how long to train with --max_steps",
    ),
    (
        lambda m, d, t: _asks_to_evaluate(t) and not d.eval_file,
        "--eval_strategy, --eval_on_start and --do_eval evaluate what --eval_file names: give it",
    ),
    (
        lambda m, d, t: (
            (t.load_best_model_at_end or t.save_strategy == "best") and t.eval_strategy == "no"
        ),
        "--load_best_model_at_end and --save_strategy best choose by evaluations: give "
        "--eval_strategy",
    ),
    (
        lambda m, d, t: t.metric_for_best_model not in (None, "loss", "eval_loss"),
        "--metric_for_best_model must be loss: evaluation measures nothing else",
    ),
    (
        lambda m, d, t: 0 < t.max_grad_norm < 1e-8,
        "--max_grad_norm below 1e-8 clips gradients to nothing: 0 switches clipping off",
    ),
    (
        lambda m, d, t: (
            t.dataloader_num_workers == 0
            and (t.dataloader_persistent_workers or t.dataloader_multiprocessing_context)
        ),
        "--dataloader_persistent_workers and --dataloader_multiprocessing_context need workers: "
        "give --dataloader_num_workers",
    ),
    (
        lambda m, d, t: t.train_sampling_strategy in ("group_by_length", "batch_rebalance"),
        f"--train_sampling_strategy {_EQUAL_ROWS}",
    ),
    (
        lambda m, d, t: t.optim.endswith("layerwise") or "lomo" in t.optim,
        "--optim steps layer by layer inside backward, where gradients cannot be checked, clipped "
        "or added up: choose another one",
    ),
    (
        lambda m, d, t: t.task not in ("sft", "distill") and d.streaming,
        "--streaming reads text for --task sft and distill: give the data as files, or without it",
    ),
    (
        lambda m, d, t: t.task != "sft" and t.label_smoothing_factor,
        "--label_smoothing_factor is of the loss of --task sft: leave it out",
    ),
    (
        lambda m, d, t: t.task == "dpo" and t.loss_weights and not any(t.loss_weights),
        "--loss_weights of 0 alone train nothing: give one that is not",
    ),
    (
        lambda m, d, t: t.task == "kto" and not t.desirable_weight and not t.undesirable_weight,
        "--desirable_weight 0 and --undesirable_weight 0 train nothing: give one that is not",
    ),
    (
        lambda m, d, t: (
            t.task != "sft" and t.sequence_parallel_size > 1 and m.class_type != "custom"
        ),
        "--sequence_parallel_size with another --task than sft needs --class_type custom",
    ),
    (
        lambda m, d, t: t.task == "distill" and t.sequence_parallel_size > 1,
        "--task distill runs without --sequence_parallel_size: a teacher shares no rows",
    ),
    (
        lambda m, d, t: t.task != "sft" and m.seq_len % t.sequence_parallel_size,
        "--seq_len must be a multiple of --sequence_parallel_size with another --task than sft",
    ),
    (
        lambda m, d, t: "tpu_metrics_debug" in t.debug,
        "--debug tpu_metrics_debug needs a TPU: leave it out",
    ),
    (
        lambda m, d, t: not {*(t.gradient_checkpointing_kwargs or {})} <= _CHECKPOINT_KEYS,
        f"--gradient_checkpointing_kwargs takes {', '.join(sorted(_CHECKPOINT_KEYS))}",
    ),
    (
        lambda m, d, t: m.class_type != "custom" and m.seq_len % t.sequence_parallel_size,
        "--seq_len must be a multiple of --sequence_parallel_size with vanilla and liger",
    ),
    (
        lambda m, d, t: t.world_size > 1 and t.accelerator_config.even_batches is False,
        "--accelerator_config: without even_batches one process would wait for ever for another",
    ),
    (
        lambda m, d, t: (
            t.accelerator_config.split_batches and t.per_device_train_batch_size % t.world_size
        ),
        "--accelerator_config: split_batches needs a --per_device_train_batch_size that the "
        "processes divide",
    ),
)
"""What cannot be together, and the line that says so."""


def given(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their defaults."""
    found = {}
    for field in fields(options):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(options, field.name, default)
        if value != default:
            found[field.name] = value
    return found


def check_values(options: Any) -> None:
    """Raises UserError for a number out of its range, an empty word, or a word that no file can be
    called."""
    for field in fields(options):
        if not field.init:
            continue
        value = getattr(options, field.name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                if problem := RANGES.get(field.name, Range()).problem(number):
                    raise UserError(f"--{field.name} must be {problem}, got {number}")
        for word in words_of(value):
            if not word.strip() and value != field.default:
                raise UserError(f"--{field.name} is empty: give it a value, or leave it out")
            if "\0" in word or not _is_text(word):
                raise UserError(
                    f"--{field.name} {word!r} is not UTF-8 text: rename it, or link to it"
                )


def check_argument(call: str, name: str, value: Any, range_: Range, *, whole: bool = False) -> None:
    """Raises UserError for an argument of a function that is no number, or none in its range."""
    kind = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = "a whole number" if whole else "a number"
        raise UserError(f"{call}: {name} must be {expected}, got {value!r}")
    if problem := range_.problem(float(value)):
        raise UserError(f"{call}: {name} must be {problem}, got {value!r}")


def refuse_not_ours(options: Any) -> None:
    """Raises UserError for an option of transformers that cannot be used here."""
    for name in given(options).keys() & NOT_OURS.keys():
        raise UserError(f"--{name} {NOT_OURS[name]}")


def check_together(model: Any, data: Any, train: Any) -> None:
    """Raises UserError for options that contradict each other."""
    for conflict, line in CONFLICTS:
        if conflict(model, data, train):
            raise UserError(line)


def idle_options(model: Any, data: Any, train: Any) -> Iterator[str]:
    """A line for every option that was given and does nothing."""
    found = given(model) | given(data) | given(train)
    for names, needed, is_there in IDLE:
        idle = [f"--{name}" for name in names.split() if name in found]
        if idle and not is_there(model, data, train):
            yield f"{', '.join(idle)} needs {needed}; without it, the option has no effect"


def words_of(value: Any) -> Iterator[str]:
    """The words in an option's value, which may be a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from words_of(item)


def _is_text(word: str) -> bool:
    """Not for a name in bytes that are no UTF-8, which JSON, Arrow and safetensors cannot hold."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
