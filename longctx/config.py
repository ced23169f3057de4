"""Every option of a run: documented dataclasses behind the flags and the YAML recipes.

    flags   --preset tiny --seq_len 8192     an unknown flag or key, a value of the wrong type or
    recipe  preset: tiny                     an impossible combination is a one-line `UserError`
            seq_len: 8192                    that names the closest valid name or the fix

A recipe is read as if its keys stood on the command line before the flags, so flags win and both
go through the same checks. Options only: what they need of the machine is started by the engine
(longctx/engines) between `parse_flags` and `make_arguments`; longctx/run/options.py does all three.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from longctx.errors import UserError


def expanded(path: str) -> Path:
    """With the home folder in place of `~`; a `~user` who does not exist stays as it is."""
    return Path(os.path.expanduser(path))


def means_no(value: Any) -> bool:
    """Whether an option's value switches it off, also as a word (`deepspeed: no` in a recipe)."""
    return not value or str(value).lower() in ("false", "no", "none", "0", "off")


def installed(module: str) -> bool:
    """Whether `import module` would find it; nothing is imported but its parent package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """What is trained and which code runs it."""

    model_name_or_path: str | None = _option(
        None, "Pretrained model: a local folder, a .gguf file or a hub id. Give this or --preset."
    )
    preset: Literal["tiny", "llama-3.2-1b", "llama-3.1-8b"] | None = _option(
        None, "Architecture with random weights, for tests and benchmarks without a download."
    )
    class_type: Literal["vanilla", "custom", "liger"] = _option(
        "custom", "vanilla: Hugging Face as it is; liger: Liger-Kernel's patch; custom: longctx."
    )
    seq_len: int = _option(4096, "Tokens in one packed row.")
    extend_context: bool = _option(
        False, "Allow --seq_len above the model's max_position_embeddings (prints what RoPE does)."
    )
    rope_scaling: Literal["none", "yarn", "linear"] = _option(
        "none",
        "Scale RoPE from the model's max_position_embeddings to --seq_len, for the run and in what "
        "it saves: yarn (best after a short fine-tune) or linear. Implies --extend_context.",
    )
    attn_backend: Literal["auto", "fa4", "cudnn", "flash", "math", "fa2", "sdpa", "eager"] = (
        _option(
            "auto",
            "custom: fa4 (flash-attn-4), cudnn, flash or math, auto takes the fastest that is "
            "installed; vanilla and liger: sdpa (auto), fa4, fa2 or eager.",
        )
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "Dtype of weights and compute: auto is bfloat16 on CUDA and float32 on CPU."
    )
    keep_attention: bool = _option(
        True, "custom: keep attention's output for backward, or run attention again (less memory)."
    )
    offload_activations: Literal["none", "all", "auto"] = _option(
        "auto", "custom: what is kept lives on the GPU, in host memory, or fills the GPU first."
    )
    head_groups: int | None = _option(
        None, "custom: parts in which attention runs. More need less memory. Default: by length."
    )
    tile_tokens: int | None = _option(
        None, "custom: tokens the token-wise work takes at a time. Default: by length."
    )
    host_memory_gib: float | None = _option(
        None, "Host memory that activations may use. Default: what is available."
    )
    tokenizer_name: str | None = _option(
        None, "Tokenizer folder or hub id, when it is not the model's own."
    )
    trust_remote_code: bool = _option(
        False, "Run Python code that a model repository ships. Only for repositories you trust."
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and self.preset:
            raise UserError(
                "give --model_name_or_path or --preset, not both "
                f"(got {self.model_name_or_path!r} and {self.preset!r})"
            )
        for name in ("seq_len", "head_groups", "tile_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Which text becomes tokens, and how documents are packed into rows."""

    train_file: list[str] | None = _option(
        None,
        "Files, folders or globs: text, Markdown, source code, or JSONL with `text`, `messages`, "
        "`conversations` or `prompt`/`completion`. Default: Python's own standard library.",
    )
    eval_file: list[str] | None = _option(None, "The same for evaluation data.")
    dataset_name: str | None = _option(
        None, "Hub id or local path of a dataset, instead of --train_file."
    )
    dataset_config: str | None = _option(None, "Configuration of --dataset_name.")
    dataset_split: str = _option("train", "Split of --dataset_name to train on.")
    streaming: bool = _option(
        False, "Read --dataset_name while training, without a local copy (needs --max_steps)."
    )
    long_documents: Literal["split", "truncate"] = _option(
        "split", "A document longer than --seq_len: split into several rows, or keep its start."
    )
    allow_undecodable: bool = _option(
        False, "Train on files of which more than 2% is not text; what cannot be read is replaced."
    )
    show_example: bool = _option(
        False, "Print one packed row, its documents and trained tokens in colour, and end."
    )
    cache_dir: str = _option(
        "~/.cache/longctx", "Where tokenised data and the default tokenizer are kept."
    )

    def __post_init__(self) -> None:
        if self.train_file and self.dataset_name:
            raise UserError("give --train_file or --dataset_name, not both")
        if self.streaming and not self.dataset_name:
            raise UserError("--streaming reads a --dataset_name; local files need no streaming")


_NOT_OURS = {
    "use_liger_kernel": "would replace the model's forward after it was patched: use --class_type "
    "liger",
    "enable_jit_checkpoint": "would handle SIGTERM a second time: leave it out, SIGTERM saves a "
    "checkpoint anyway",
}
"""Options of transformers that would undo what this run says it does."""


@dataclass(kw_only=True)
class TrainArguments(TrainingArguments):
    """All of `transformers.TrainingArguments`, with defaults for long rows on one GPU."""

    output_dir: str | None = _option("runs/longctx", "Checkpoints, metrics.jsonl and final model.")
    overwrite_output_dir: bool = _option(
        False, "Delete the checkpoints of an earlier run in --output_dir instead of refusing."
    )
    per_device_train_batch_size: int = _option(1, "Packed rows a device takes at a time.")
    per_device_eval_batch_size: int = _option(1, "Packed rows a device evaluates at a time.")
    num_train_epochs: float = _option(1.0, "Passes over the data, unless --max_steps is given.")
    gradient_checkpointing: bool | None = _option(
        True, "Recompute a layer's activations in backward instead of keeping them."
    )
    bf16: bool | None = _option(  # type: ignore[assignment]
        None,
        "Mixed precision: bf16 compute over fp32 weights. Default: on with DeepSpeed or FSDP on "
        "GPUs, which keep the fp32 weights; else off, and --dtype says what is trained.",
    )
    resume_from_checkpoint: str | None = _option(
        None,
        "Continue from a checkpoint-N folder. `last`: the newest whole one in --output_dir; "
        "`auto`: that, or a new run where there is none yet, for jobs that are requeued.",
    )
    allow_changed: list[str] | None = _option(
        None,
        "When resuming: parts of the run that may differ from the checkpoint's, by the names that "
        "the refusal shows (seq_len, seed, data, num_processes, ...).",
    )
    logging_steps: float = _option(1, "Steps between two logged lines.")
    report_to: None | str | list[str] = _option("none", "tensorboard, wandb, ...; none by default.")
    prediction_loss_only: bool = _option(
        True, "Evaluation returns the loss only: logits of a long row do not fit in memory."
    )
    save_total_limit: int | None = _option(2, "Checkpoints kept; the oldest is deleted.")
    memory_snapshot_on_oom: bool = _option(
        False,
        "Record allocations and, when the GPU's memory runs out, write them to --output_dir for "
        "PyTorch's memory viewer.",
    )
    remove_unused_columns: bool = _option(
        False,
        "Drop columns the model does not take. Rows carry their documents' numbers for errors.",
    )
    on_save_error: Literal["stop", "continue"] = _option(
        "stop", "A checkpoint that cannot be written (full disk): end the run, or train on."
    )
    on_nonfinite: Literal["stop", "skip"] = _option(
        "stop", "A loss or gradient that is not finite: end the run, or leave out the step."
    )
    peak_tflops: float | None = _option(
        None, "The device's dense peak in TFLOP/s, for MFU. Known for common GPUs."
    )

    def __post_init__(self) -> None:
        for name in ("deepspeed", "fsdp_config"):
            if means_no(getattr(self, name)):
                setattr(self, name, None)
            read_settings(name, getattr(self, name))
        if means_no(self.fsdp) or str(self.fsdp).lower() == "true":  # words, from a recipe
            self.fsdp = not means_no(self.fsdp)  # type: ignore[assignment]
        for name, fix in _NOT_OURS.items():
            if getattr(self, name, False):
                raise UserError(f"--{name} {fix}")
        with warnings.catch_warnings():
            # Newer transformers rename it to activation_checkpointing; 5.17 has only this name.
            warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
            super().__post_init__()
        if not torch.cuda.is_available():
            self.dataloader_pin_memory = False  # or torch warns that there is nothing to pin for
        if self.memory_snapshot_on_oom and (self.use_cpu or not torch.cuda.is_available()):
            raise UserError("--memory_snapshot_on_oom needs a GPU: CPU memory has no snapshot")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise UserError(f"--peak_tflops must be above 0, got {self.peak_tflops}")


def read_settings(name: str, settings: Any) -> dict[str, Any]:
    """What `--deepspeed` or `--fsdp_config` hold: a file's name, JSON or a dict. Raises UserError
    for anything else."""
    if means_no(settings) or not isinstance(settings, str):
        return settings if isinstance(settings, dict) else {}
    is_json = settings.lstrip().startswith("{")
    try:
        found = json.loads(settings if is_json else Path(settings).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("an object {...} is expected")
        return found
    except OSError as error:
        raise UserError(f"--{name}: no such file: {settings}") from error
    except ValueError as error:
        raise UserError(f"--{name} {settings}: not JSON: {error}") from error


_DATACLASSES = (ModelArguments, DataArguments, TrainArguments)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


Arguments = tuple[ModelArguments, DataArguments, TrainArguments]


def parse_flags(
    argv: Sequence[str] | None = None, *, default_recipe: Path | None = None
) -> Namespace:
    """Every option by name, from flags and the recipe they name with `--config`.

    `default_recipe` is used where neither a recipe nor a model nor data is named.
    Raises UserError for anything unknown or of the wrong type.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    config_parser = ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", type=Path)
    known, flags = config_parser.parse_known_args(argv)

    parser = _Parser(
        _DATACLASSES,  # type: ignore[arg-type]
        prog="train.py",
        allow_abbrev=False,
        epilog="--config recipe.yaml reads the same options from a file; flags win.",
    )
    valid = {action.dest for action in parser._actions} | {"config"}
    recipe = known.config
    if recipe is None and not _names_a_job(flags):
        recipe = default_recipe
    arguments = (_recipe_to_flags(recipe, valid) if recipe else []) + flags
    _refuse_unknown(parser, arguments, valid)
    return parser.parse_args(arguments)


def make_arguments(flags: Namespace) -> Arguments:
    """The three dataclasses of `parse_flags`. Raises UserError for an impossible value."""
    values = vars(flags)

    def make(kind: Any) -> Any:
        return kind(**{f.name: values[f.name] for f in fields(kind) if f.init})

    try:
        model, data, train = map(make, _DATACLASSES)
    except (ValueError, TypeError) as error:
        raise UserError(str(error).splitlines()[0]) from error
    if data.streaming and train.max_steps < 1:
        raise UserError("--streaming has no known length: say how long to train with --max_steps")
    return model, data, train


def _names_a_job(flags: Sequence[str]) -> bool:
    job = ("--model_name_or_path", "--preset", "--train_file", "--dataset_name")
    names = {flag.split("=")[0].replace("-", "_").replace("__", "--", 1) for flag in flags}
    return not names.isdisjoint(job)


def _recipe_to_flags(path: Path, valid: set[str]) -> list[str]:
    """The recipe's keys as command-line words: `seq_len: 8192` -> `--seq_len=8192`."""
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path} must hold `key: value` lines, found a {type(recipe).__name__}")
    words: list[str] = []
    for key, value in recipe.items():
        if key not in valid or key == "config":
            raise UserError(f"{path}: unknown key {key!r}{_closest(str(key), valid)}")
        if value is None:
            continue
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif isinstance(value, dict):
            words.append(f"--{key}={json.dumps(value)}")
        else:
            words.append(f"--{key}={value}")
    return words


def _refuse_unknown(parser: _Parser, arguments: list[str], valid: set[str]) -> None:
    _, unknown = parser.parse_known_args(arguments)
    if not unknown:
        return
    word = unknown[0]
    if not word.startswith("--"):
        raise UserError(f"unexpected word {word!r} on the command line; options start with --")
    name = word[2:].split("=")[0].replace("-", "_")
    raise UserError(f"unknown option --{name}{_closest(name, valid, prefix='--')}")


def _closest(name: str, valid: set[str], prefix: str = "") -> str:
    match = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"; did you mean {prefix}{match[0]}?" if match else ""
