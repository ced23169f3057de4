"""Reads the options of a run (arguments.py, and transformers') from flags and YAML recipes.

    flags   --preset tiny --seq_len 8192     an unknown flag or key, a value of the wrong type or
    recipe  preset: tiny                     an impossible combination is a one-line `UserError`
            seq_len: 8192                    that names the closest valid name or the fix

A recipe (recipe.py) is read as if its keys stood on the command line, where flags win, and both go
through the same parsers (written.py) and checks (limits.py, conflicts.py). Options only: what they
need of the machine is started by the engine (longctx/train/engines) between `parse_flags` and
`make_arguments`; longctx/train/start/options.py does all three.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from argparse import ArgumentError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import DynamoBackend
from transformers import TrainingArguments
from transformers.integrations import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from longctx.errors import UserError, did_you_mean, one_line, print_rank0, say
from longctx.train.options.arguments import DataArguments as DataArguments
from longctx.train.options.arguments import ModelArguments as ModelArguments
from longctx.train.options.arguments import TrainOptions
from longctx.train.options.conflicts import check_together
from longctx.train.options.habits import unknown
from longctx.train.options.help import help_text
from longctx.train.options.limits import check_values, refuse_unsupported
from longctx.train.options.parser import OptionParser, means_no
from longctx.train.options.recipe import Written, read_recipe, read_text
from longctx.train.options.shipped import OPTIONS, files, find
from longctx.train.program import started_as


@dataclass(kw_only=True)
class TrainArguments(TrainOptions, TrainingArguments):  # type: ignore[misc]
    """All options of `transformers.TrainingArguments`, and those of longctx."""

    named: ClassVar[frozenset[str]] = frozenset()
    """The options that a command line or a recipe has named, defaults among them."""

    def __post_init__(self) -> None:
        for name in (*_FILES, "resume_from_checkpoint"):
            if getattr(self, name) != "" and means_no(getattr(self, name)):
                setattr(self, name, None)
        if means_no(self.fsdp) or str(self.fsdp).lower() == "true":  # words, from a recipe
            self.fsdp = not means_no(self.fsdp)  # type: ignore[assignment]
        reports = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        self.report_to = [name for name in reports if not means_no(name)]
        check_values(self)
        refuse_unsupported(self)
        for name in self._VALID_DICT_FIELDS:
            read_settings(name, getattr(self, name, None))
        _check_accelerator(self.accelerator_config)
        _check_compile(self)
        if self.ddp_backend and "RANK" not in os.environ:
            raise UserError("--ddp_backend is for several processes: start with accelerate launch")
        if self.save_strategy == "best":
            self.metric_for_best_model = self.metric_for_best_model or "loss"
        with warnings.catch_warnings():
            # Newer transformers rename it to activation_checkpointing; 5.17 has only this name.
            warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
            super().__post_init__()
        _check_reports(self.report_to)
        if not torch.cuda.is_available():
            self.dataloader_pin_memory = False  # or torch warns that there is nothing to pin for
        if self.memory_snapshot_on_oom and (self.use_cpu or not torch.cuda.is_available()):
            raise UserError("--memory_snapshot_on_oom needs a GPU: CPU memory has no snapshot")


def with_our_options(args: TrainingArguments) -> TrainArguments:
    """Completes transformers' own arguments, or another library's, with the defaults of longctx's
    options."""
    ours: Any = args
    for option in fields(TrainArguments):
        if not hasattr(ours, option.name):
            setattr(ours, option.name, option.default)
    completed: TrainArguments = ours
    return completed


_FILES = ("deepspeed", "fsdp_config", "accelerator_config")


def read_settings(name: str, settings: Any) -> dict[str, Any]:
    """Returns what an option of settings holds: JSON or a dict, or for some the name of a file of
    JSON. Raises UserError for anything else."""
    if not isinstance(settings, str) or (name in _FILES and means_no(settings)):
        return settings if isinstance(settings, dict) else {}
    is_file = _is_file(name, settings)
    text = read_text(name, Path(settings)) if is_file else settings
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("an object {...} is expected")
        return found
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        shown = settings if is_file else settings[:80]
        raise UserError(f"--{name} {shown}: not JSON: {reason}") from error


def _is_file(name: str, settings: Any) -> bool:
    """Whether what an option of settings holds is the name of a file."""
    if not isinstance(settings, str) or name not in _FILES or means_no(settings):
        return False
    return not settings.lstrip().startswith(("{", "["))


def _check_accelerator(given: Any) -> None:
    """Raises UserError for what accelerate would only notice when the model is there."""
    settings = read_settings("accelerator_config", given)
    steps = settings.pop("gradient_accumulation_kwargs", None) or {}
    wrong = [name for name, value in settings.items() if not isinstance(value, bool | None)]
    if wrong:
        raise UserError(f"--accelerator_config: {wrong[0]} must be true or false")
    if settings.get("use_configured_state"):
        raise UserError("--accelerator_config: use_configured_state is for programs of your own")
    if not isinstance(steps, dict) or not steps.keys() <= _ACCUMULATION_KEYS:
        raise UserError(
            "--accelerator_config: gradient_accumulation_kwargs takes "
            f"{' and '.join(sorted(_ACCUMULATION_KEYS))}; steps are --gradient_accumulation_steps"
        )


_ACCUMULATION_KEYS = {"adjust_scheduler", "sync_each_batch", "sync_with_dataloader"}


def _check_compile(args: TrainingArguments) -> None:
    """Raises UserError for names that torch.compile does not know."""
    backends = {backend.value.lower() for backend in DynamoBackend} - {"no"}
    if args.torch_compile_backend and args.torch_compile_backend.lower() not in backends:
        raise UserError(f"--torch_compile_backend must be one of {', '.join(sorted(backends))}")
    if args.torch_compile_mode:
        modes = torch._inductor.list_mode_options()  # imports the compiler
        if args.torch_compile_mode not in modes:
            raise UserError(f"--torch_compile_mode must be one of {', '.join(modes)}")


def _check_reports(report_to: Sequence[str]) -> None:
    available = get_available_reporting_integrations()
    for name in report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            guess = did_you_mean(name, INTEGRATION_TO_CALLBACK)
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise UserError(f"--report_to {name}: {guess}transformers knows {known}")
        if name not in available:
            package = {"flyte": "flytekit", "azure_ml": "azureml-core"}.get(name, name)
            raise UserError(
                f"--report_to {name} is not installed: pip install {package}; here are: "
                f"{', '.join(available) or 'none'}"
            )


_DATACLASSES = (ModelArguments, DataArguments, TrainArguments)


Arguments = tuple[ModelArguments, DataArguments, TrainArguments]


def parse_flags(
    argv: Sequence[str] | None = None, *, default_recipe: Path | None = None
) -> Namespace:
    """Returns every option by name, from flags and the recipe they name with `--config`.

    `default_recipe` is the quick start. It serves a command line that changes nothing else than how
    long it runs and in which memory; where there is one, any other command line names a model.
    Raises UserError for anything unknown or of the wrong type.
    """
    argv = _with_config(list(sys.argv[1:] if argv is None else argv))
    first = OptionParser(add_help=False)
    first.add_argument("--config")
    first.add_argument("-h", "--help", action="store_true")
    first.add_argument("--help_all", action="store_true")
    known, flags = first.parse_known_args(argv)

    parser = OptionParser(_DATACLASSES, add_help=False)  # type: ignore[arg-type]
    if known.help or known.help_all:
        text = help_text(
            parser._actions, prog=started_as().removeprefix("python "), everything=known.help_all
        )
        say(*text.splitlines())
        sys.exit(0)
    actions = {action.dest: action for action in reversed(parser._actions)}  # before --no_*
    recipe = None if known.config is None else find("config", known.config)
    named = _named(flags)
    quick = default_recipe is not None and recipe is None and named <= _OF_QUICK_STARTS
    if recipe := default_recipe if quick else recipe:
        values = _recipe_values(recipe, parser, actions)
        if "output_dir" in values and "output_dir" in named:
            values.pop("overwrite_output_dir", None)  # it is about the recipe's folder
        parser.set_defaults(**values)
    _refuse_unknown(parser, flags, {*actions, "config"})
    options = parser.parse_args(flags)
    if quick:
        print_rank0(
            f"quick start: no model was named, so the preset {options.preset}, with random "
            f"weights, trains on Python's own source files, into {options.output_dir}"
        )
    elif default_recipe and options.model_name_or_path is None and options.preset is None:
        raise UserError(
            "no model was named: give --model_name_or_path or --preset (is a backslash missing at "
            "the end of a line?); --config quickstart is the quick start, with any other option"
        )
    for name in ("deepspeed", "fsdp_config"):
        if _is_file(name, getattr(options, name)):
            setattr(options, name, str(find(name, getattr(options, name))))
    options._named = frozenset({*named, *(values if recipe else ())})
    return options


def _with_config(argv: list[str]) -> list[str]:
    """Returns a command line in which a recipe that stands first, as in `longctx train mine.yaml`,
    is named by --config. Raises UserError for a first word that is no recipe, and for two."""
    if not argv or argv[0].startswith("-"):
        return argv
    word = argv[0]
    is_file = Path(word).suffix.lower() in ("", ".yaml", ".yml") and not os.path.isdir(word)
    if not is_file and word not in {file.stem for file in files(*OPTIONS["config"])}:
        raise UserError(
            f"{word!r} is no recipe, which is a .yaml file: a model is --model_name_or_path, and "
            "what it trains on is --train_file"
        )
    if any(other.split("=")[0] == "--config" for other in argv[1:]):
        raise UserError(f"{word!r} and --config name two recipes: give one")
    return ["--config", *argv]


def make_arguments(flags: Namespace) -> Arguments:
    """Returns the three dataclasses of `parse_flags`. Raises UserError for an impossible value."""
    values = vars(flags)

    def make(kind: Any) -> Any:
        return kind(**{f.name: values[f.name] for f in fields(kind) if f.init})

    try:
        model, data, train = map(make, _DATACLASSES)
    except UserError:
        raise
    except Exception as error:  # transformers' and accelerate's checks raise many types
        raise UserError(f"{_culprit(str(error), values)}{one_line(error)}") from error
    check_together(model, data, train)
    train.named = values.get("_named", frozenset())
    if not model.keeps_inputs and model.offload_activations == "all":
        offload_checkpoints(train)
    return model, data, train


def offload_checkpoints(train: Any) -> None:
    """Has the checkpoints of Hugging Face's layers keep their inputs in host memory, where those of
    a CPU are anyway. Newer transformers has a second name for the option."""
    if train.device.type == "cpu":
        return
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if hasattr(train, name):
            setattr(train, name, {**(getattr(train, name) or {}), "offload": True})


@contextmanager
def explained_options(options: str) -> Iterator[None]:
    """Turns what another library says of options, in any type of error, into a UserError."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(f"{options} cannot be used: {one_line(error)}") from error


def _culprit(message: str, values: dict[str, Any]) -> str:
    """Returns the option that another library's error names, or else whose value it repeats, as the
    beginning of a line."""
    for name in values:
        if re.search(rf"\b{name}\b", message):
            return "" if f"--{name}" in message else f"--{name}: "
    for word in map(re.escape, re.findall(r"'([^']+)'", message)):
        for name, value in values.items():
            if isinstance(value, str) and re.search(rf"(?<!\w){word}(?!\w)", value):
                return f"--{name}: "
    return "these options cannot be used: "


_OF_QUICK_STARTS = frozenset(
    "max_steps seq_len place gpu_memory_gib host_memory_gib keep offload_activations head_groups "
    "tile_tokens use_cpu cache_dir disable_tqdm".split()
)
"""Options that decide neither what is trained nor where it is kept."""


def _named(flags: Sequence[str]) -> set[str]:
    """Returns the names of the options on a command line."""
    return {f[2:].split("=")[0].replace("-", "_") for f in flags if f.startswith("--")}


def _recipe_values(path: Path, parser: OptionParser, actions: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe's options, as if they stood on the command line."""
    found = {}
    for name, written in read_recipe(path).items():
        if name not in actions:
            raise UserError(f"{path}: unknown key {name!r}{unknown(name, actions)}")
        try:
            found[name] = _parsed(parser, actions[name], written)
        except ArgumentError as error:
            raise UserError(f"{path}: --{name}: {error.message}") from error
    return found


def _parsed(parser: OptionParser, action: Any, written: Written) -> Any:
    if isinstance(written, dict):
        if action.dest not in TrainingArguments._VALID_DICT_FIELDS:
            raise ArgumentError(action, "takes no settings of its own")
        return json.dumps(written)
    many = action.nargs == "+"
    if isinstance(written, list) and not many:
        raise ArgumentError(action, "takes one value, found a list")
    if isinstance(written, list) and not (written and all(isinstance(x, str) for x in written)):
        found = "settings in it" if written else "an empty one"
        raise ArgumentError(action, f"takes a list of words, found {found}")
    values = []
    for word in [written] if isinstance(written, str) else written:
        values.append(parser._get_value(action, word))
        parser._check_value(action, values[-1])
    return values if many else values[0]


def _refuse_unknown(parser: OptionParser, arguments: list[str], valid: set[str]) -> None:
    _, words = parser.parse_known_args(arguments)
    if not words:
        return
    word = words[0]
    if not word.startswith("--"):
        raise UserError(
            f"unexpected word {word!r} on the command line; options start with --, and a recipe's "
            "name stands before them"
        )
    name = word[2:].split("=")[0].replace("-", "_")
    raise UserError(f"unknown option --{name}{unknown(name, valid, dashes='--')}")
