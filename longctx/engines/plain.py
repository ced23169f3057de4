"""No engine: PyTorch on one GPU or CPU, or DDP on several, with a copy of everything in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx.config import TrainArguments
from longctx.engines.protocol import Engine
from longctx.errors import print_rank0


class Plain(Engine):
    """In bf16 exact AdamW, its states where they fit (longctx/memory), 14 bytes a parameter."""

    name = "plain"
    shards_states = False
    maps_optimizer = True
    exact_states = True

    @classmethod
    def requested(cls, options: Any) -> bool:
        return True

    @classmethod
    def saved(cls, checkpoint: Path) -> bool:
        return True

    def start(self, args: TrainArguments) -> None:
        super().start(args)
        if args.n_gpu > 1:  # Trainer would split the batch by nn.DataParallel
            print_rank0(
                f"{args.n_gpu} GPUs are visible and one is used: for all of them "
                f"`accelerate launch --num_processes {args.n_gpu} train.py ...`"
            )
            args._n_gpu = 1

    def resume_problem(self, checkpoint: Path, args: TrainArguments) -> str | None:
        # transformers would start both from zero where one is missing.
        missing = [name for name in ("optimizer", "scheduler") if not _holds(checkpoint, name)]
        if not missing:
            return None
        return (
            f"{checkpoint} holds no {missing[0]} (--save_only_model?) and cannot be resumed: start "
            "from its weights with --model_name_or_path"
        )


def _holds(checkpoint: Path, name: str) -> bool:
    return any(checkpoint.glob(f"{name}.*"))
