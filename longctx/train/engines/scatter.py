"""Where FSDP2 puts the gradients that it scatters.

By default they lie in memory of the stream that scatters. torch's allocator lends none of it to
another stream, so that they would take no other tensor's place and leave theirs to none: 16 GiB a
GPU of Llama-3.1-8B on two, in which activations could be kept from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from transformers import TrainerCallback


class GradientsTakeTurns(TrainerCallback):
    """Scattered gradients get memory that activations leave as they go."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(ScatterFromCompute(args.device))


class ScatterFromCompute(DefaultReduceScatter):
    """Reduce-scatter into memory of the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._compute: Any = torch.cuda.current_stream(device) if on_gpu else None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates on the stream that will write: it waits for all computation so far, so that
        what was there is not read any more."""
        if self._compute is None:
            return super().allocate(size, dtype=dtype, device=device)
        with torch.cuda.stream(self._compute):
            memory = torch.empty(*size, dtype=dtype, device=device)
        memory.record_stream(torch.cuda.current_stream(device))  # may be dropped while it adds up
        return memory
