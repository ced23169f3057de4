"""Whether a run's options ask for longctx's AdamW, whose states are exact."""

from __future__ import annotations

import torch

from longctx.errors import UserError
from longctx.train.options.config import TrainArguments

ADAMW = ("adamw_torch", "adamw_torch_fused")


def uses_exact_states(args: TrainArguments, dtype: torch.dtype) -> bool:
    """Whether a run without an engine trains with longctx's optimizer: by default where weights
    have 16 bits, else where something is to live on the host.

    Raises UserError for options that contradict each other.
    """
    asks = args.optimizer_states == "fp32" or args.place == "host" or args.gpu_memory_gib
    if args.optimizer_states == "as_weights":
        if args.place == "host" or args.save_fp32:
            raise UserError(
                "--place host and --save_fp32 are of exact states: leave out "
                "--optimizer_states as_weights"
            )
        return False
    if args.optim not in ADAMW or args.fp16 or args.optim_args:
        if asks or (args.save_fp32 and dtype != torch.float32):
            raise UserError(
                "--optimizer_states fp32, --place host, --gpu_memory_gib and --save_fp32 are for "
                "AdamW in bfloat16 or float32: leave out --optim, --optim_args and --fp16"
            )
        return False
    return bool(asks) or dtype == torch.bfloat16
