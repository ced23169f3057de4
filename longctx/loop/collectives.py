"""What processes ask each other, and how they see a tensor that is shared out among them.

What one process notices (a signal, a full disk, a loss that is not a number) all must act on at the
same step; otherwise one would save or stop while the others wait in a collective. A single process
skips the collective; otherwise each question is one all-reduce of 8 bytes.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist


def all_reduce_max(number: int, device: torch.device) -> int:
    """The highest `number` of all processes; each must ask in the same order."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return number
    answer = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return int(answer)


def all_reduce_min(number: int, device: torch.device) -> int:
    """The lowest. Nobody has it before all have asked."""
    return -all_reduce_max(-number, device)


def all_reduce_sum(numbers: list[float], device: torch.device) -> list[float]:
    """The sum of each number over all processes, in fp64."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return numbers
    answer = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(answer)
    return [float(number) for number in answer.tolist()]


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process."""
    return bool(all_reduce_max(int(flag), device))


def become_one_process() -> None:
    """Lets `longctx train --deepspeed FILE` run as one process without a launcher."""
    if "RANK" in os.environ:
        return
    # Port 0: the store takes a free one. One that was looked for may be another program's by then.
    alone = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    os.environ |= {name: str(value) for name, value in alone.items()}


def destroy_process_group() -> bool:
    """After a barrier: gloo's threads may abort a process that ends while another still works.
    Returns whether there was one."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    dist.barrier()
    dist.destroy_process_group()
    return True


def local_shard(tensor: Any) -> Any:
    """This process' part of a tensor that FSDP2 or ZeRO-3 has sharded; anything else as it is."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_numel(parameter: Any) -> int:
    """Elements of the whole parameter, also where ZeRO-3 has put it away or bitsandbytes has packed
    it."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        return math.prod(state.shape)
    return getattr(parameter, "ds_numel", None) or parameter.numel()
