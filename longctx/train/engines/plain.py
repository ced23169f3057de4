"""No engine: PyTorch on one GPU or CPU, or DDP on several, with a copy of everything in each."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from longctx.errors import print_rank0
from longctx.memory.store import free_gpu_bytes
from longctx.train.engines.protocol import Engine
from longctx.train.options.config import TrainArguments
from longctx.train.program import started_as


class Plain(Engine):
    """Runs exact AdamW in bf16, its states where they fit: 14 bytes a parameter (memory/)."""

    name = "plain"
    shards_states = False
    hooks_layers = False
    maps_optimizer = True
    exact_states = True

    @classmethod
    def requested(cls, options: Any) -> bool:
        return True

    @classmethod
    def saved(cls, checkpoint: Path) -> bool:
        return True

    def random_weights(self, device: torch.device, nbytes: int) -> AbstractContextManager[Any]:
        """Allocates random weights on the device if they fit, else in host memory."""
        fits = device.type != "cuda" or nbytes <= free_gpu_bytes(device)
        return torch.device(device if fits else "cpu")

    def start(self, args: TrainArguments) -> None:
        super().start(args)
        if args.n_gpu > 1:  # Trainer would split the batch by nn.DataParallel
            print_rank0(
                f"{args.n_gpu} GPUs are visible and one is used: for all of them "
                f"`{started_as(f'accelerate launch --num_processes {args.n_gpu}')} ...`"
            )
            args._n_gpu = 1

    def resume_problem(self, checkpoint: Path, args: TrainArguments) -> str | None:
        # transformers would start both from zero where one is missing.
        exact = any(checkpoint.glob("optimizer.*.safetensors"))
        if exact and args.optimizer_states == "as_weights":
            return (
                f"{checkpoint} holds exact fp32 states, which --optimizer_states as_weights would "
                "round: leave it out"
            )
        missing = [name for name in ("optimizer", "scheduler") if not _holds(checkpoint, name)]
        if not missing:
            return None
        return (
            f"{checkpoint} holds no {missing[0]} (--save_only_model?) and cannot be resumed: start "
            "from its weights with --model_name_or_path"
        )

    def checkpoint_copies(self, args: TrainArguments, dtype: torch.dtype) -> int:
        """Returns the size of a checkpoint in copies of the weights: 12 bytes for 2 of bf16 if
        states are exact."""
        exact = dtype == torch.bfloat16 and args.optimizer_states != "as_weights"
        return 6 if exact else super().checkpoint_copies(args, dtype)

    def save_model(self, trainer: Any, path: Path, dtype: torch.dtype) -> None:
        if not trainer.args.save_fp32 or trainer.exact is None:
            return super().save_model(trainer, path, dtype)
        weights = trainer.exact.masters(trainer.model)
        if trainer.args.should_save:
            trainer._save(str(path), weights)
            config = copy.deepcopy(trainer.model.config)  # transformers wrote the model's dtype
            config.dtype = torch.float32
            config.save_pretrained(path)


def _holds(checkpoint: Path, name: str) -> bool:
    return any(checkpoint.glob(f"{name}.*"))
