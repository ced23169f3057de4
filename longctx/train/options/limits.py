"""What the value of an option may be, so that a run that cannot work ends before it begins.

NOT_OURS lists the options of transformers that would break what a run promises, or do nothing here.
conflicts.py has what cannot be together. The range of a number, and what an option does nothing
without, is known of each option (about.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from longctx.errors import UserError
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
EQUAL_ROWS = "orders rows by length, but all have --seq_len tokens: leave it out"

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
    "length_column_name": EQUAL_ROWS,
    "restore_callback_states_from_checkpoint": "does nothing: no callback of a run has a state; "
    "leave it out",
}
"""Option -> why it is refused unless it has its default, and what to do instead."""


def non_defaults(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that do not have their defaults."""
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


def refuse_unsupported(options: Any) -> None:
    """Raises UserError for an option of transformers that cannot be used here."""
    for name in non_defaults(options).keys() & NOT_OURS.keys():
        raise UserError(f"--{name} {NOT_OURS[name]}")


def idle_options(model: Any, data: Any, train: Any) -> Iterator[str]:
    """Yields a line for every option that was given and does nothing."""
    idle: dict[str, list[str]] = {}
    for options in (model, data, train):
        found = non_defaults(options)
        for option in fields(options):
            for need in about(option).needs if option.name in found else ():
                if not need.is_met(model, data, train):
                    idle.setdefault(need.words, []).append(f"--{option.name}")
    for words, names in idle.items():
        yield f"{', '.join(names)} needs {words}; without it, the option has no effect"


def words_of(value: Any) -> Iterator[str]:
    """Yields the words in an option's value, which may be a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from words_of(item)


def _is_text(word: str) -> bool:
    """Whether a word is text. A name in bytes that are no UTF-8 is not, and JSON, Arrow and
    safetensors cannot hold it."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
