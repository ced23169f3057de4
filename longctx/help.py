"""The help of `longctx train`, in groups of options: `--help` and `--help_all`.

    --help       the options that most runs need: a line each, with the first sentence of its help
    --help_all   those, the rest of longctx's and all of transformers' that a run can use, in full

An option that a run refuses (NOT_OURS in limits.py) is in neither.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from longctx.limits import NOT_OURS


class Group(NamedTuple):
    """Options that belong together, by name."""

    common: str
    """In both helps."""
    further: str
    """In --help_all alone."""


GROUPS: dict[str, Group] = {
    "model": Group(
        "model_name_or_path preset class_type seq_len rope_scaling extend_context attn_backend "
        "dtype trust_remote_code",
        "dropout tokenizer_name torch_compile torch_compile_backend torch_compile_mode tf32",
    ),
    "data": Group(
        "train_file eval_file dataset_name dataset_split streaming long_documents show_example",
        "dataset_config allow_undecodable cache_dir remove_unused_columns train_sampling_strategy "
        "dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_in_order "
        "dataloader_multiprocessing_context",
    ),
    "task": Group(
        "task loss_type beta reference teacher",
        "loss_weights label_smoothing f_divergence_type f_alpha_divergence_coef discopop_tau "
        "ld_alpha cpo_alpha simpo_gamma desirable_weight undesirable_weight "
        "center_rewards_coefficient teacher_quantize distill_beta temperature",
    ),
    "memory": Group(
        "place gpu_memory_gib host_memory_gib optimizer_states keep offload_activations "
        "head_groups tile_tokens plan deepspeed fsdp sequence_parallel_size",
        "share_prefixes gradient_checkpointing gradient_checkpointing_kwargs "
        "activation_checkpointing activation_checkpointing_kwargs fsdp_config "
        "torch_empty_cache_steps memory_snapshot_on_oom skip_memory_metrics",
    ),
    "adapters": Group(
        "lora_r lora_alpha lora_dropout lora_targets quantize", "lora_modules_to_save use_dora"
    ),
    "training": Group(
        "learning_rate lr_scheduler_type warmup_steps max_steps num_train_epochs "
        "per_device_train_batch_size gradient_accumulation_steps max_grad_norm weight_decay optim "
        "eval_strategy eval_steps seed use_cpu on_nonfinite",
        "lr_scheduler_kwargs optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon "
        "label_smoothing_factor neftune_noise_alpha bf16 fp16 average_tokens_across_devices "
        "per_device_eval_batch_size eval_delay eval_on_start data_seed full_determinism do_train "
        "do_eval debug",
    ),
    "output": Group(
        "output_dir overwrite_output_dir save_steps save_total_limit resume_from_checkpoint "
        "allow_changed logging_steps report_to",
        "save_strategy save_only_model save_on_each_node save_fp32 on_save_error "
        "load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip "
        "logging_strategy logging_first_step logging_nan_inf_filter log_level log_level_replica "
        "log_on_each_node include_num_input_tokens_seen peak_tflops disable_tqdm run_name project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
    ),
    "several processes": Group(
        "",
        "accelerator_config parallelism_config ddp_backend ddp_timeout ddp_bucket_cap_mb "
        "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph local_rank",
    ),
}
"""Group -> its options; some of transformers' are in some of its versions only."""
OTHERS = "others of transformers"
"""The group of options that a newer transformers adds."""

SAYS = {
    "deepspeed": "Train with DeepSpeed, by the settings in this JSON file.",
    "fsdp": "Shard weights, gradients and states over GPUs, by FSDP2.",
    "learning_rate": "Largest learning rate of the schedule.",
    "lr_scheduler_type": "Schedule of the learning rate: linear, cosine, constant.",
    "warmup_steps": "Steps in which the rate rises; below 1 a share of all.",
    "max_steps": "Steps to train; -1 trains by --num_train_epochs.",
    "gradient_accumulation_steps": "Batches that add up in a step.",
    "max_grad_norm": "Clip gradients to this norm; 0 does not.",
    "weight_decay": "AdamW's weight decay, of matrices alone.",
    "optim": "Optimizer: sgd, adafactor, lion and others.",
    "eval_strategy": "Evaluate during training: no, steps or epoch.",
    "eval_steps": "Steps between two evaluations. Default: --logging_steps.",
    "seed": "Seed of random weights, the order of rows and dropout.",
    "use_cpu": "Train on the CPU where there is a GPU, too.",
    "save_steps": "Steps between two checkpoints.",
}
"""transformers' common options in a line, instead of its own texts."""

NARROWEST = 40
"""Columns of a text, whatever COLUMNS says: narrower terminals break its lines themselves."""

_NOT_SHOWN: tuple[object, ...] = (None, False, "", [])
"""Defaults that say nothing."""


def help_text(actions: Iterable[argparse.Action], *, prog: str, everything: bool = False) -> str:
    """The help of a parser with these actions."""
    width = max(NARROWEST, shutil.get_terminal_size((100, 0)).columns)
    known = {a.dest: a for a in reversed([*actions]) if a.dest not in NOT_OURS}  # before --no_*
    lines = [
        f"usage: {prog} [--config RECIPE] [--OPTION VALUE ...]",
        f"  {'--config':31}A recipe, by file or by name; options given here win over its own",
    ]
    for group, names in in_groups(known, everything=everything).items():
        lines += ["", f"{group}:"]
        for name in names:
            lines += _in_full(known[name], width) if everything else [_in_a_line(known[name])]
    if not everything:
        lines += [
            "",
            "--help_all lists all options, in full. docs/flags.md explains the main ones.",
        ]
    return "\n".join(lines)


def in_groups(names: Iterable[str], *, everything: bool) -> dict[str, list[str]]:
    """Group -> those of the options that it holds, in its order; without empty groups."""
    left = dict.fromkeys(names)
    found = {}
    for group, (common, further) in GROUPS.items():
        held = [name for name in f"{common} {further}".split() if name in left]
        found[group] = held if everything else [name for name in held if name in common.split()]
        for name in held:
            del left[name]
    if everything:
        found[OTHERS] = [*left]
    return {group: held for group, held in found.items() if held}


def _in_a_line(action: argparse.Action) -> str:
    sentence = re.split(r"(?<!\.)\.( |$)", _says(action))[0]
    return f"  {_flag(action):31}{sentence}{_default(action)}"


def _in_full(action: argparse.Action, width: int) -> Iterator[str]:
    flag = f"{_flag(action)}{_values(action)}{_default(action)}"
    yield from textwrap.wrap(flag, width, initial_indent="  ", subsequent_indent="      ")
    yield from (f"      {line}" for line in textwrap.wrap(_says(action), width - 6))


def _says(action: argparse.Action) -> str:
    return SAYS.get(action.dest) or (action.help or "").replace("%%", "%")


def _flag(action: argparse.Action) -> str:
    return action.option_strings[0]


def _values(action: argparse.Action) -> str:
    if action.choices:
        return f" {{{','.join(map(str, action.choices))}}}"
    many = " ..." if action.nargs == "+" else ""
    return f" VALUE{many}" if action.nargs != "?" else " [true|false]"


def _default(action: argparse.Action) -> str:
    return "" if action.default in _NOT_SHOWN else f" [{action.default}]"
