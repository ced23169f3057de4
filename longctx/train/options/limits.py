"""What the value of an option may be, so that a run that cannot work ends before it begins.

NOT_OURS     options of transformers that would break what a run promises, or do nothing here
conflicts    options that cannot be together

The range of a number, and what an option does nothing without, is known of each (about.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from longctx.errors import UserError
from longctx.settings import FUSED, WHOLE
from longctx.train.options.theirs import about

_LOSS_ONLY = (
    "does nothing: evaluation keeps the loss, logits of long rows fit nowhere; leave it out"
)
_NO_UPLOAD = "is not part of a run: when it is done, `hf upload REPO OUTPUT_DIR/final` uploads it"
_LIGER = "would replace the model's forward after it was patched: use --class_type liger"
_ROUNDS = "would round the weights that are trained and saved: leave it out"
_HUB = "model_id token private_repo strategy always_push revision"
_MEASURED = (
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "include_for_metrics batch_eval_metrics"
)
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
    **{f"hub_{name}": _NO_UPLOAD for name in _HUB.split()},
    "bf16_full_eval": _ROUNDS,
    "fp16_full_eval": _ROUNDS,
    **dict.fromkeys(_MEASURED.split(), _LOSS_ONLY),
    "label_names": "would look for labels that rows do not have: leave it out",
    "do_predict": "has nothing to predict: leave it out, `longctx eval` examines a model",
    "length_column_name": _EQUAL_ROWS,
    "restore_callback_states_from_checkpoint": "does nothing: no callback of a run has a state; "
    "leave it out",
}
"""Option -> why it is refused unless it has its default, and what to do instead."""


_CHECKPOINT_KEYS = (
    "debug determinism_check early_stop every_n_layers offload preserve_rng_state use_reentrant"
).split()


def conflicts(m: Any, d: Any, t: Any) -> Iterator[str]:
    """Yields the error message of each conflict between options of model, data and training."""
    if m.quantize != "none" and m.lora_r is None:
        yield (
            "--quantize rounds weights, which cannot be trained then: give --lora_r, whose "
            "adapters can, or leave it out"
        )
    if m.lora_r is None and (named := _of_adapters(m, t)):
        it = "it" if len(named) == 1 else "them"
        yield (
            f"{', '.join(named)}: without --lora_r there are no adapters and the whole model is "
            f"trained: give --lora_r RANK, or leave {it} out"
        )
    if m.lora_r is not None and t.save_fp32:
        yield "--save_fp32 is of whole models: adapters are trained and saved in fp32 anyway"
    if t.loraplus_lr_ratio is not None and t.optim.startswith(("galore", "apollo")):
        yield (
            "--loraplus_lr_ratio gives groups of weights rates of their own, and so does a GaLore "
            "or APOLLO as --optim: leave out one of them"
        )
    if t.max_steps == 0 or t.max_steps < -1:
        yield "--max_steps must be at least 1, or -1 to train by --num_train_epochs"
    if d.streaming and t.max_steps < 1:
        yield "--streaming has no known length: say how long to train with --max_steps"
    evaluates = t.eval_strategy != "no" or t.eval_on_start or t.do_eval
    if evaluates and not (d.eval_file or d.eval_share):
        yield (
            "--eval_strategy, --eval_on_start and --do_eval evaluate what --eval_file names or "
            "--eval_share holds out: give one of the two"
        )
    if (t.load_best_model_at_end or t.save_strategy == "best") and t.eval_strategy == "no":
        yield (
            "--load_best_model_at_end and --save_strategy best choose by evaluations: give "
            "--eval_strategy"
        )
    if t.metric_for_best_model not in (None, "loss", "eval_loss"):
        yield "--metric_for_best_model must be loss: evaluation measures nothing else"
    if 0 < t.max_grad_norm < 1e-8:
        yield "--max_grad_norm below 1e-8 clips gradients to nothing: 0 switches clipping off"
    if t.dataloader_num_workers == 0 and (
        t.dataloader_persistent_workers or t.dataloader_multiprocessing_context
    ):
        yield (
            "--dataloader_persistent_workers and --dataloader_multiprocessing_context need "
            "workers: give --dataloader_num_workers"
        )
    if t.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        yield f"--train_sampling_strategy {_EQUAL_ROWS}"
    if t.optim.endswith("layerwise") or "lomo" in t.optim:
        yield (
            "--optim steps layer by layer inside backward, where gradients cannot be checked, "
            "clipped or added up: choose another one"
        )
    if t.task not in ("sft", "distill") and d.streaming:
        yield (
            "--streaming reads text for --task sft and distill: give the data as files, or "
            "without it"
        )
    if t.task != "sft" and t.label_smoothing_factor:
        yield "--label_smoothing_factor is of the loss of --task sft: leave it out"
    if t.task == "dpo" and t.loss_weights and not any(t.loss_weights):
        yield "--loss_weights of 0 alone train nothing: give one that is not"
    if t.task == "kto" and not t.desirable_weight and not t.undesirable_weight:
        yield (
            "--desirable_weight 0 and --undesirable_weight 0 train nothing: give one that is not"
        )
    if t.task != "sft" and t.sequence_parallel_size > 1 and m.class_type != "custom":
        yield "--sequence_parallel_size with another --task than sft needs --class_type custom"
    if t.task == "distill" and t.sequence_parallel_size > 1:
        yield "--task distill runs without --sequence_parallel_size: a teacher shares no rows"
    if t.task != "sft" and m.seq_len % t.sequence_parallel_size:
        yield (
            "--seq_len must be a multiple of --sequence_parallel_size with another --task than sft"
        )
    if "tpu_metrics_debug" in t.debug:
        yield "--debug tpu_metrics_debug needs a TPU: leave it out"
    if not {*(t.gradient_checkpointing_kwargs or {})} <= {*_CHECKPOINT_KEYS}:
        yield f"--gradient_checkpointing_kwargs takes {', '.join(_CHECKPOINT_KEYS)}"
    offloads = not m.keeps_inputs and m.offload_activations == "all"
    if offloads and not t.gradient_checkpointing:
        layers = "--parts" if m.class_type == "custom" else m.class_type
        yield (
            f"--offload_activations all with {layers} is of checkpoints, which wait in host "
            "memory: leave out --gradient_checkpointing false"
        )
    if m.class_type == "any" and t.sequence_parallel_size > 1:
        yield "--class_type any has no --sequence_parallel_size: use custom, or vanilla or liger"
    if m.class_type != "custom" and m.seq_len % t.sequence_parallel_size:
        yield "--seq_len must be a multiple of --sequence_parallel_size with vanilla and liger"
    if t.world_size > 1 and t.accelerator_config.even_batches is False:
        yield (
            "--accelerator_config: without even_batches one process would wait for ever for another"
        )
    if t.accelerator_config.split_batches and t.per_device_train_batch_size % t.world_size:
        yield (
            "--accelerator_config: split_batches needs a --per_device_train_batch_size that the "
            "processes divide"
        )
    if m.class_type == "custom" and not m.schedules:
        yield from _parts_conflicts(m, t)


def _of_adapters(m: Any, t: Any) -> list[str]:
    """The flags that were given and are of adapters alone."""
    found = given(m).keys() | given(t).keys()
    return [f"--{name}" for name in _ADAPTERS_OWN.split() if name in found]


_ADAPTERS_OWN = (
    "lora_alpha lora_dropout lora_targets lora_modules_to_save use_dora loraplus_lr_ratio"
)


def _parts_conflicts(m: Any, t: Any) -> Iterator[str]:
    """Yields what single parts of ours in Hugging Face's layers cannot be together with."""
    if t.task != "sft":
        yield f"--task {t.task} needs the schedule of --class_type custom: leave out --parts"
    if t.sequence_parallel_size > 1:
        yield (
            "--sequence_parallel_size needs the schedule of --class_type custom: leave out "
            "--parts, or use --class_type vanilla or liger"
        )
    if t.label_smoothing_factor and not {WHOLE, FUSED} & {*m.patch_options.parts}:
        yield (
            f"--label_smoothing_factor is of our loss, which is not among --parts: add {FUSED} or "
            f"{WHOLE}"
        )


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
                if problem := about(field).range.problem(number):
                    raise UserError(f"--{field.name} must be {problem}, got {number}")
        for word in words_of(value):
            if not word.strip() and value != field.default:
                raise UserError(f"--{field.name} is empty: give it a value, or leave it out")
            if "\0" in word or not _is_text(word):
                raise UserError(
                    f"--{field.name} {word!r} is not UTF-8 text: rename it, or link to it"
                )


def refuse_not_ours(options: Any) -> None:
    """Raises UserError for an option of transformers that cannot be used here."""
    for name in given(options).keys() & NOT_OURS.keys():
        raise UserError(f"--{name} {NOT_OURS[name]}")


def check_together(model: Any, data: Any, train: Any) -> None:
    """Raises UserError for options that contradict each other."""
    for line in conflicts(model, data, train):
        raise UserError(line)


def idle_options(model: Any, data: Any, train: Any) -> Iterator[str]:
    """A line for every option that was given and does nothing."""
    idle: dict[str, list[str]] = {}
    for options in (model, data, train):
        found = given(options)
        for option in fields(options):
            for need in about(option).needs if option.name in found else ():
                if not need.is_met(model, data, train):
                    idle.setdefault(need.words, []).append(f"--{option.name}")
    for words, names in idle.items():
        yield f"{', '.join(names)} needs {words}; without it, the option has no effect"


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
