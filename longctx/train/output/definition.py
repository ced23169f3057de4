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
from longctx.train.options.about import NUMBERS, ROWS, Resume
from longctx.train.options.arguments import OPTIONS as ABOUT
from longctx.train.output.manifest import read_manifest

OPTIONS = tuple(
    name for kind in (ROWS, NUMBERS) for name, known in ABOUT.items() if known.resume is kind
)
"""Those that decide which rows are trained, and which numbers come out. --reference and --teacher
are recorded by their weights."""
APPLIED = tuple(name for name, known in ABOUT.items() if known.resume is Resume.APPLIED)
DATA, MODEL, BASE, PROCESSES = "data", "model", "base", "num_processes"
REFERENCE, TEACHER, IMAGES = "reference", "teacher", "pictures"  # as checkpoints have them
NAMES = (*OPTIONS, DATA, IMAGES, MODEL, BASE, REFERENCE, TEACHER, PROCESSES)
"""What `--allow_changed` takes."""

_WEIGHTS = {
    BASE: "the frozen weights",
    REFERENCE: "the reference model",
    TEACHER: "the teacher model",
}
"""Models that no checkpoint holds."""
_ROWS = {"seq_len", "long_documents", "seed", "max_samples", "eval_share"}
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
    images: str | None = None,
) -> RunDefinition:
    """The definition, as JSON. `options` are the run's dataclasses, `dtype` is what theirs means
    here, `data` whatever differs where the rows do, `model` a configuration's `to_dict()`, `base`
    what tells the frozen weights under adapters from others (checkpoints do not hold them),
    `reference` and `teacher` the same of those models, and `images` whatever differs where the
    pixels of the data do."""
    run: RunDefinition = {}
    for name in (*OPTIONS, *APPLIED):
        owner = next((o for o in options if hasattr(o, name)), None)
        if owner is not None:
            run[name] = plain(getattr(owner, name))
    run |= {"dtype": str(dtype), DATA: data, PROCESSES: num_processes}
    run[MODEL] = {k: plain(v) for k, v in model.items() if k not in _NO_MODEL}
    beside = {BASE: base, REFERENCE: reference, TEACHER: teacher, IMAGES: images}
    return run | {name: value for name, value in beside.items() if value is not None}


def check_same_run(
    checkpoint: Path | None,
    run: RunDefinition,
    allowed: Collection[str],
    kept: Collection[str] = (),
    *,
    tokens_vary: bool = False,
) -> None:
    """Compares with the definition in the checkpoint; says what is applied. `tokens_vary` says that
    the tokenizer makes other tokens each time, which is why rows are not the same.

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
    if DATA in changed and tokens_vary:
        changed[DATA] = (
            "data (the rows are not the same: the tokenizer makes other tokens of a text each "
            "time, and the rows of the first start are not in --cache_dir)"
        )
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
    elif IMAGES in before and IMAGES in now and not _ROWS & found.keys():
        if before[IMAGES] != now[IMAGES]:
            found[IMAGES] = "images (files of them, or the processor's settings, have changed)"
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
