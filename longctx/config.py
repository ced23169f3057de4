"""Every option of a run: documented dataclasses behind the flags and the YAML recipes.

    flags   --preset tiny --seq_len 8192     an unknown flag or key, a value of the wrong type or
    recipe  preset: tiny                     an impossible combination is a one-line `UserError`
            seq_len: 8192                    that names the closest valid name or the fix

A recipe (recipe.py) is read as if its keys stood on the command line, where flags win, and both go
through the same checks (limits.py). Options only: what they need of the machine is started by the
engine (longctx/engines) between `parse_flags` and `make_arguments`; longctx/run/options.py does all
three.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from argparse import ArgumentError, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import DynamoBackend
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool
from transformers.integrations import get_available_reporting_integrations

from longctx.errors import UserError, one_line, print_rank0, say
from longctx.habits import unknown
from longctx.help import help_text
from longctx.limits import check_together, check_values, refuse_not_ours
from longctx.options import Backend, ClassType, Keeping, ModelSource, Offload, PatchOptions
from longctx.program import Parser, started_as
from longctx.recipe import Written, read_recipe, read_text
from longctx.shipped import find
from longctx.system import CACHE
from longctx.task_options import TaskOptions
from longctx.task_options import option as _option

_NO = ("false", "no", "none", "0", "off")
_YES = ("true", "yes", "1", "on", "t", "y")


def means_no(value: Any) -> bool:
    """Whether an option's value switches it off, also as a word (`deepspeed: no` in a recipe)."""
    return not value or str(value).lower() in _NO


Preset = Literal[
    "tiny",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "qwen3-8b",
    "qwen2.5-7b",
    "mistral-7b",
    "phi-4",
    "gemma-3-1b",
    "gemma-2-9b",
    "gemma-3-4b",
    "gemma-3-12b",
    "gemma-3-27b",
    "exaone-4-32b",
    "olmo-2-7b",
    "olmo-3-7b",
    "ministral-3-8b",
    "glm-4-9b",
    "command-r7b",
]


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """What is trained and which code runs it."""

    model_name_or_path: str | None = _option(
        None, "Pretrained model: a local folder, a .gguf file or a hub id. Give this or --preset."
    )
    preset: Preset | None = _option(
        None, "Architecture with random weights, for tests. Nothing is downloaded."
    )
    class_type: ClassType = _option(
        "custom", "custom (longctx), liger (Liger-Kernel), vanilla (as it is)."
    )
    seq_len: int = _option(4096, "Tokens in one packed row.")
    extend_context: bool = _option(
        False,
        "Allow a --seq_len beyond the model's positions. The run says what RoPE does there.",
    )
    rope_scaling: Literal["none", "yarn", "linear"] = _option(
        "none",
        "Scale RoPE to --seq_len: none, yarn or linear. For the run and in what it saves, from the "
        "model's max_position_embeddings; yarn is best after a short fine-tune. Implies "
        "--extend_context.",
    )
    attn_backend: Backend = _option(
        "auto",
        "Attention's kernel; auto takes the fastest there is. custom: fa4 (flash-attn-4), cudnn, "
        "flash or math; vanilla and liger: sdpa (auto), fa4, fa2 or eager.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "Dtype of the weights; auto: bfloat16 on a GPU, else float32."
    )
    dropout: float | None = _option(
        None,
        "0 sets the model's dropouts to 0, for the run and in what it saves. With dropout in its "
        "config.json Hugging Face's layers run, also under custom. Default: as config.json says.",
    )
    keep: Keeping = _option(
        "auto",
        "custom: activations kept per layer, x, o, h, qkv or all. The layer's input x, attention's "
        "output o, the residual stream h, q k v, or all, gate and up too; each has what stands "
        "before it, and the rest is computed again in backward. auto: as much as is fastest in the "
        "memory there is.",
    )
    offload_activations: Offload = _option(
        "auto",
        "custom: kept activations on the GPU (none) or host (all). auto: fills the GPU first.",
    )
    head_groups: int | None = _option(
        None,
        "custom: parts in which attention runs; more need less memory. Default: by what is free.",
    )
    tile_tokens: int | None = _option(
        None, "custom: tokens the token-wise work takes at a time. Default: by what is free."
    )
    share_prefixes: bool = _option(
        False, "custom: compute a prompt with which several documents of a batch begin once."
    )
    host_memory_gib: float | None = _option(
        None, "Host memory that the run may use, in GiB. Default: what is available."
    )
    lora_r: int | None = _option(
        None, "Train LoRA adapters of this rank. The model is frozen; PEFT makes them."
    )
    lora_alpha: int | None = _option(
        None, "Adapters count alpha / r times. Default: twice --lora_r."
    )
    lora_dropout: float = _option(0.0, "Share of an adapter's input that is dropped in training.")
    lora_targets: list[str] | None = _option(
        None,
        "Linear maps that get an adapter, as q_proj v_proj. Default: all-linear, those of all "
        "decoder layers.",
    )
    lora_modules_to_save: list[str] | None = _option(
        None, "Trained as a whole beside adapters and saved with them: embed_tokens, lm_head."
    )
    use_dora: bool = _option(
        False, "DoRA: adapters that also train the length of each row of what they adapt."
    )
    quantize: Literal["none", "nf4"] = _option(
        "none", "nf4: the frozen weights in 4 bits (QLoRA). By bitsandbytes; needs --lora_r."
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
        check_values(self)

    @property
    def patch_options(self) -> PatchOptions:
        """How the model is patched."""
        return PatchOptions(**{f.name: getattr(self, f.name) for f in fields(PatchOptions)})

    @property
    def source(self) -> ModelSource:
        """Where a pretrained model is."""
        return ModelSource(
            name=self.model_name_or_path,
            trust_remote_code=self.trust_remote_code,
            under_adapters=self.quantize == "nf4",
        )


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Which text becomes tokens, and how documents are packed into rows."""

    train_file: list[str] | None = _option(
        None,
        "Files, folders or globs: text, code or JSONL (docs/data.md). JSONL has `text`, "
        "`messages`, `conversations` or `prompt`/`completion`; for other tasks "
        "`prompt`/`chosen`/`rejected` or `prompt`/`completion`/`label`. Default: "
        "Python's own standard library.",
    )
    eval_file: list[str] | None = _option(None, "Evaluation data, in the same forms.")
    dataset_name: str | None = _option(
        None, "Hub id or local path of a dataset, instead of --train_file."
    )
    dataset_config: str | None = _option(None, "Configuration of --dataset_name.")
    dataset_split: str = _option("train", "Split of --dataset_name to train on.")
    streaming: bool = _option(
        False, "Read --dataset_name while training. No local copy is made; needs --max_steps."
    )
    long_documents: Literal["split", "truncate", "truncate_start"] = _option(
        "split",
        "Beyond --seq_len: split, truncate or truncate_start. A longer document is split into "
        "several rows, or cut at its end or its start. A prompt with its answers is refused, or "
        "loses the answers' ends or the prompt's start.",
    )
    allow_undecodable: bool = _option(
        False, "Train on files of which more than one byte in fifty is not text, and is replaced."
    )
    show_example: bool = _option(
        False, "Print one packed row, its trained tokens in colour, and end."
    )
    cache_dir: str = _option(CACHE, "Where tokenised data and the default tokenizer are kept.")

    def __post_init__(self) -> None:
        check_values(self)
        if self.train_file and self.dataset_name:
            raise UserError("give --train_file or --dataset_name, not both")
        if self.streaming and not self.dataset_name:
            raise UserError("--streaming reads a --dataset_name; local files need no streaming")


@dataclass(kw_only=True)
class TrainArguments(TaskOptions, TrainingArguments):
    """All of `transformers.TrainingArguments`, with defaults for long rows on one GPU, and what is
    trained for."""

    output_dir: str | None = _option("runs/longctx", "Checkpoints, metrics.jsonl and final model.")
    overwrite_output_dir: bool = _option(
        False, "Delete an earlier run in --output_dir, instead of refusing."
    )
    per_device_train_batch_size: int = _option(1, "Packed rows a device takes at a time.")
    per_device_eval_batch_size: int = _option(1, "Packed rows a device evaluates at a time.")
    num_train_epochs: float = _option(1.0, "Passes over the data, unless --max_steps is given.")
    sequence_parallel_size: int = _option(
        1,
        "Processes that share each row, with FSDP or DeepSpeed. Each has consecutive tokens.",
    )
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
        "Continue from a checkpoint-N folder, or from last or auto. `last`: the newest whole one "
        "in --output_dir; `auto`: that, or a new run where there is none yet, for jobs that are "
        "requeued.",
    )
    allow_changed: list[str] | None = _option(
        None,
        "Resume though these differ: seq_len, seed, data or others. The refusal names them.",
    )
    logging_steps: float = _option(1, "Steps between two logged lines.")
    report_to: list[str] = field(  # type: ignore[assignment]
        default_factory=list, metadata={"help": "tensorboard, wandb, ...; none by default."}
    )
    prediction_loss_only: bool = _option(
        True, "Evaluation returns the loss only: logits of a long row do not fit in memory."
    )
    save_total_limit: int | None = _option(
        2, "Checkpoints kept; the oldest is deleted. 0 keeps all."
    )
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
        "stop", "Loss or gradient not finite: stop the run or skip the step."
    )
    optimizer_states: Literal["fp32", "as_weights"] | None = _option(
        None,
        "AdamW's states: fp32 (exact) or as_weights. Without an engine. fp32: fp32 master weights "
        "and moments, also of bfloat16 weights (its default); as_weights: moments in the dtype of "
        "the weights and no master, which in bfloat16 loses most of the updates.",
    )
    place: Literal["auto", "gpu", "host"] = _option(
        "auto",
        "Where weights, gradients and states live: auto, gpu or host. auto fills the GPU first, "
        "block by block; weights leave it with --class_type custom only.",
    )
    gpu_memory_gib: float | None = _option(
        None, "GPU memory that the run may use, in GiB. Default: what is free."
    )
    plan: str | None = _option(
        None, "Run the plan in this file, of `longctx plan --json`. One of another run is refused."
    )
    save_fp32: bool = _option(False, "final/ holds the fp32 master weights, of twice the size.")
    peak_tflops: float | None = _option(
        None, "The device's dense peak in TFLOP/s, for MFU. Known for common GPUs."
    )

    def __post_init__(self) -> None:
        for name in (*_FILES, "resume_from_checkpoint"):
            if getattr(self, name) != "" and means_no(getattr(self, name)):
                setattr(self, name, None)
        if means_no(self.fsdp) or str(self.fsdp).lower() == "true":  # words, from a recipe
            self.fsdp = not means_no(self.fsdp)  # type: ignore[assignment]
        reports = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        self.report_to = [name for name in reports if not means_no(name)]
        check_values(self)
        refuse_not_ours(self)
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
    """transformers' own, or another library's, with the defaults of the options that are ours."""
    ours: Any = args
    for option in fields(TrainArguments):
        if not hasattr(ours, option.name):
            setattr(ours, option.name, option.default)
    completed: TrainArguments = ours
    return completed


_FILES = ("deepspeed", "fsdp_config", "accelerator_config")


def read_settings(name: str, settings: Any) -> dict[str, Any]:
    """What an option of settings holds: JSON or a dict, or for some the name of a file of JSON.
    Raises UserError for anything else."""
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
        if name not in available:
            raise UserError(
                f"--report_to {name} is not installed (pip install {name}), or is not known to "
                "transformers; here are: "
                f"{', '.join(available) or 'none'}"
            )


_DATACLASSES = (ModelArguments, DataArguments, TrainArguments)


class _Parser(HfArgumentParser, Parser):
    """Options are strict, but understand every word for yes and no, as YAML does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in self._actions:
            if action.type is string_to_bool:
                action.type = partial(_yes_or_no, words=_WORDS_BESIDE.get(action.dest, ()))
                action.nargs, action.const = "?", True
            elif action.choices and (no := {"no", "none"} & set(map(str, action.choices))):
                action.type = _choice(action.type, no.pop())


_WORDS_BESIDE = {"include_num_input_tokens_seen": ("all", "non_padding")}
"""Option -> what it may be instead of true or false."""


def _yes_or_no(word: str, words: Sequence[str] = ()) -> bool | str:
    if word in words:
        return word
    if word.lower() in (*_YES, "n", "f", *_NO):
        return word.lower() in _YES
    expected = ", ".join([*words, "true or false"])
    raise ArgumentTypeError(f"{expected} is expected, got {word!r}")


def _choice(parse: Any, no: str) -> Callable[[str], Any]:
    """A parser of words in which any word for no means `no`."""
    return lambda word: parse(no if word.lower() in _NO else word)


Arguments = tuple[ModelArguments, DataArguments, TrainArguments]


def parse_flags(
    argv: Sequence[str] | None = None, *, default_recipe: Path | None = None
) -> Namespace:
    """Every option by name, from flags and the recipe they name with `--config`.

    `default_recipe` is the quick start. It serves a command line that changes nothing else than how
    long it runs and in which memory; where there is one, any other command line names a model.
    Raises UserError for anything unknown or of the wrong type.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = _Parser(add_help=False)
    first.add_argument("--config")
    first.add_argument("-h", "--help", action="store_true")
    first.add_argument("--help_all", action="store_true")
    known, flags = first.parse_known_args(argv)

    parser = _Parser(_DATACLASSES, add_help=False)  # type: ignore[arg-type]
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
            values.pop("overwrite_output_dir", None)  # which is about the folder beside it
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
    return options


def make_arguments(flags: Namespace) -> Arguments:
    """The three dataclasses of `parse_flags`. Raises UserError for an impossible value."""
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
    return model, data, train


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
    """The option that another library's error names, or else whose value it repeats, as the
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
    """The names of the options on a command line."""
    return {f[2:].split("=")[0].replace("-", "_") for f in flags if f.startswith("--")}


def _recipe_values(path: Path, parser: _Parser, actions: dict[str, Any]) -> dict[str, Any]:
    """The recipe's options, as if they stood on the command line."""
    found = {}
    for name, written in read_recipe(path).items():
        if name not in actions:
            raise UserError(f"{path}: unknown key {name!r}{unknown(name, actions)}")
        try:
            found[name] = _parsed(parser, actions[name], written)
        except ArgumentError as error:
            raise UserError(f"{path}: --{name}: {error.message}") from error
    return found


def _parsed(parser: _Parser, action: Any, written: Written) -> Any:
    if isinstance(written, dict):
        if action.dest not in TrainingArguments._VALID_DICT_FIELDS:
            raise ArgumentError(action, "takes no settings of its own")
        return json.dumps(written)
    many = action.nargs == "+"
    if isinstance(written, list) and not many:
        raise ArgumentError(action, "takes one value, found a list")
    values = []
    for word in [written] if isinstance(written, str) else written:
        values.append(parser._get_value(action, word))
        parser._check_value(action, values[-1])
    return values if many else values[0]


def _refuse_unknown(parser: _Parser, arguments: list[str], valid: set[str]) -> None:
    _, words = parser.parse_known_args(arguments)
    if not words:
        return
    word = words[0]
    if not word.startswith("--"):
        raise UserError(f"unexpected word {word!r} on the command line; options start with --")
    name = word[2:].split("=")[0].replace("-", "_")
    raise UserError(f"unknown option --{name}{unknown(name, valid, dashes='--')}")
