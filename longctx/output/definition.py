"""What defines a run: the options that decide which rows it trains and the numbers that come out.

A checkpoint's manifest records them. Resumed with others, the run would go on as a different one
under the old one's name, so a difference is refused in one line; `--allow_changed NAME ...` lets it
through. What people change on purpose (APPLIED) is applied, and said. Options that change nothing
but speed, memory or rounding are not recorded.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from longctx.errors import UserError, print_rank0
from longctx.output.manifest import read_manifest

OPTIONS = (
    # which rows, and in which order
    "seq_len",
    "long_documents",
    "seed",
    "data_seed",
    "train_sampling_strategy",
    "group_by_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "dataloader_drop_last",
    "split_batches",
    "dispatch_batches",
    "even_batches",
    # which numbers
    "rope_scaling",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "lora_modules_to_save",
    "use_dora",
    "quantize",
    "dtype",
    "bf16",
    "fp16",
    "optim",
    "optim_args",
    "optim_target_modules",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "average_tokens_across_devices",
    # what is trained for; --reference and --teacher are recorded by their weights
    "task",
    "loss_type",
    "loss_weights",
    "beta",
    "label_smoothing",
    "f_divergence_type",
    "f_alpha_divergence_coef",
    "discopop_tau",
    "ld_alpha",
    "cpo_alpha",
    "simpo_gamma",
    "desirable_weight",
    "undesirable_weight",
    "center_rewards_coefficient",
    "teacher_quantize",
    "distill_beta",
    "temperature",
)
APPLIED = (
    "learning_rate",
    "weight_decay",
    "max_steps",
    "num_train_epochs",
    "save_steps",
    "logging_steps",
    "eval_steps",
    "class_type",
    "attn_backend",
    "optimizer_states",
)
DATA, MODEL, BASE, PROCESSES = "data", "model", "base", "num_processes"
REFERENCE, TEACHER = "reference", "teacher"
NAMES = (*OPTIONS, DATA, MODEL, BASE, REFERENCE, TEACHER, PROCESSES)
"""What `--allow_changed` takes."""

_WEIGHTS = {
    BASE: "the frozen weights",
    REFERENCE: "the reference model",
    TEACHER: "the teacher model",
}
"""Models that no checkpoint holds."""
_ROWS = {"seq_len", "long_documents", "seed"}
"""Other values give other rows from the same data."""
_NO_MODEL = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"}
"""What a config.json says besides what the model computes."""
RunDefinition = dict[str, Any]


def define(
    options: Sequence[Any],
    *,
    dtype: Any,
    data: Any,
    model: Mapping[str, Any],
    num_processes: int,
    base: str | None = None,
    reference: str | None = None,
    teacher: str | None = None,
) -> RunDefinition:
    """The definition, as JSON. `options` are the run's dataclasses, `dtype` is what theirs means
    here, `data` whatever differs where the rows do, `model` a configuration's `to_dict()`, `base`
    what tells the frozen weights under adapters from others (checkpoints do not hold them), and
    `reference` and `teacher` the same of those models."""
    run: RunDefinition = {}
    for name in (*OPTIONS, *APPLIED):
        owner = next((o for o in options if hasattr(o, name)), None)
        if owner is not None:
            run[name] = plain(getattr(owner, name))
    run |= {"dtype": str(dtype), DATA: data, PROCESSES: num_processes}
    run[MODEL] = {k: plain(v) for k, v in model.items() if k not in _NO_MODEL}
    beside = {BASE: base, REFERENCE: reference, TEACHER: teacher}
    return run | {name: value for name, value in beside.items() if value is not None}


def check_same_run(
    checkpoint: Path | None,
    run: RunDefinition,
    allowed: Collection[str],
    kept: Collection[str] = (),
) -> None:
    """Compares with the definition in the checkpoint; says what is applied.

    Raises UserError for a difference that is not `allowed`, for one in what the engine keeps from
    the checkpoint (`kept`), and for an unknown name.
    """
    if unknown := [name for name in allowed if name not in (*NAMES, *APPLIED)]:
        close = difflib.get_close_matches(unknown[0], NAMES, n=1)
        raise UserError(
            f"--allow_changed {unknown[0]}: no such part of a run"
            + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(NAMES)}")
        )
    if checkpoint is None:
        return
    manifest = read_manifest(checkpoint)
    if manifest is None or manifest["run"] is None:
        print_rank0(
            f"{checkpoint} does not say what it was trained with (another program saved it): "
            "options and data are taken as they are now"
        )
        return
    before: RunDefinition = manifest["run"]
    if BASE in run and BASE not in before:
        print_rank0(
            f"{checkpoint} does not say which weights its adapters were trained over (an earlier "
            "version saved it): those that are given are taken"
        )
    changed = differences(before, run)
    if found := [what for name, what in changed.items() if name in kept]:
        raise UserError(
            f"{', '.join(found)} (then and now) cannot be changed: this engine takes it from "
            f"{checkpoint}; give what it was trained with, or start from its weights with "
            "--model_name_or_path"
        )
    refused = {name: what for name, what in changed.items() if name not in allowed}
    refused = {name: what for name, what in refused.items() if name not in applied(run)}
    if refused:
        raise UserError(
            f"{checkpoint} is of another run: {', '.join(refused.values())} (then and now); give "
            f"what it was trained with, or train on with --allow_changed {' '.join(refused)}"
        )
    if changed:
        print_rank0(f"resuming with other options (then and now): {', '.join(changed.values())}")


def applied(run: RunDefinition) -> set[str]:
    """What may change without being asked for."""
    on_plateau = run.get("lr_scheduler_type") == "reduce_lr_on_plateau"
    return set(APPLIED) - ({"learning_rate"} if on_plateau else set())


def differences(before: RunDefinition, now: RunDefinition) -> dict[str, str]:
    """Name -> `name 64 -> 128`, of what both record."""
    found = {
        name: f"{name} {_shown(before[name])} -> {_shown(now[name])}"
        for name in (*OPTIONS, PROCESSES, *APPLIED)
        if name in before and name in now and before[name] != now[name]
    }
    if before.get(DATA) != now[DATA] and not _ROWS & found.keys():
        found[DATA] = "data (the rows are not the same)"
    for name, what in _WEIGHTS.items():
        if before.get(name, now.get(name)) != now.get(name, before.get(name)):
            found[name] = f"{name} ({what}, {_shown(before[name])} -> {now[name]})"
    model = before.get(MODEL)
    model = model if isinstance(model, dict) else {}
    keys = [key for key in model if key in now[MODEL] and model[key] != now[MODEL][key]]
    if keys:
        found[MODEL] = f"model ({', '.join(sorted(keys)[:3])} in config.json)"
    return found


def _shown(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(getattr(value, "value", value))
