"""Which processes share a row: `--sequence_parallel_size R`, or accelerate's words for the same.

accelerate says it in a ParallelismConfig, given in TrainingArguments or by `accelerate launch`
(flags, YAML) through the environment: `cp_size` R where FSDP2 shards, `sp_size` R with DeepSpeed.

    class_type custom     the schedule exchanges tokens, under both engines
    vanilla, liger        DeepSpeed's Ulysses exchanges them, through accelerate
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig, parse_flag_from_env

from longctx.errors import UserError, one_line
from longctx.train.options.config import TrainArguments

_FROM_LAUNCHER = "ACCELERATE_USE_PARALLELISM_CONFIG"


def asked_parallelism(given: Any | None) -> ParallelismConfig | None:
    """Returns the ParallelismConfig of TrainingArguments, or else the launcher's. Raises UserError
    for one that accelerate refuses, or with dimensions that no engine here has."""
    config = given
    if config is None and parse_flag_from_env(_FROM_LAUNCHER):
        try:
            config = ParallelismConfig()  # reads the environment
        except ValueError as error:
            raise UserError(f"the launcher's parallelism_config: {one_line(error)}") from error
    others = ("tp_size", "dp_replicate_size")
    if asked := [name for name in others if config is not None and getattr(config, name) > 1]:
        raise UserError(
            f"a parallelism_config with {' and '.join(asked)} is not supported: engines shard over "
            "all processes, and cp_size or sp_size lets so many of them share each row"
        )
    return config


def ranks_a_row(size: int, config: ParallelismConfig | None) -> int:
    """Returns how many processes share a row, by --sequence_parallel_size `size` and the
    configuration. Raises UserError where they contradict each other; 1 says nothing."""
    if config is None:
        return size
    theirs: int = config.cp_size * config.sp_size
    if 1 != size != theirs != 1:
        name = "cp_size" if config.cp_size > 1 else "sp_size"
        raise UserError(
            f"--sequence_parallel_size {size}, but the parallelism_config has {name} {theirs}: "
            "leave one of them out"
        )
    return max(size, theirs)


def groups_of(size: int, processes: int) -> int:
    """Returns how many groups of `size` processes share rows. Raises UserError if processes are
    left over."""
    groups, rest = divmod(processes, size)
    if rest:
        raise UserError(
            f"--sequence_parallel_size {size} does not divide the {processes} processes"
        )
    return groups


def share_rows(args: TrainArguments, attention: str | None = None) -> None:
    """Neighbours share rows: in accelerate's mesh they are the dimension `cp`, which its data
    loaders know; or `sp`, where Ulysses wraps Hugging Face's `attention`. Raises UserError where
    the processes do not come out even, and for attention that Ulysses does not take."""
    asked = asked_parallelism(args.parallelism_config)
    size = args.sequence_parallel_size = ranks_a_row(args.sequence_parallel_size, asked)
    groups = groups_of(size, args.world_size)
    if asked and asked.dp_shard_size not in (1, groups):
        raise UserError(
            f"dp_shard_size {asked.dp_shard_size} of the parallelism_config: {args.world_size} "
            f"processes with {size} a row are {groups} groups; leave it out"
        )
    os.environ.pop(_FROM_LAUNCHER, None)  # accelerate would read it where the options have none
    args.parallelism_config = None
    if size == 1:
        return
    # Exchanges start when attention does: with a common priority they would wait until its blocks
    # leave a multiprocessor free. Read where NCCL makes a group, as those of the mesh are next.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    sizes: dict[str, Any] = dict(dp_replicate_size=1, dp_shard_size=groups, tp_size=1)
    if attention is None:
        sizes |= dict(cp_size=size, sp_size=1)
    else:
        sizes |= dict(cp_size=1, sp_size=size, sp_handler=ulysses(attention))
    args.parallelism_config = ParallelismConfig(**sizes)


def ulysses(attention: str) -> DeepSpeedSequenceParallelConfig:
    """Raises UserError for attention that it does not take."""
    try:
        return DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention)
    except ValueError as error:
        raise UserError(
            f"accelerate's sequence parallelism does not take {attention}: choose another "
            "--attn_backend, as sdpa, or --class_type custom"
        ) from error
