"""Agreement among processes, and their parts of sharded tensors.

If one process notices something (a signal, a full disk, a loss that is not a number), all must act
on it at the same step; otherwise one would save or stop while the others wait in a collective. Each
question is one all-reduce of 8 bytes, which a single process skips.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist

from longctx.layer.packed_weights import packed_state


def all_reduce_max(number: int, device: torch.device) -> int:
    """Returns the highest `number` of all processes, which must call this in the same order."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return number
    answer = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return int(answer)


def all_reduce_min(number: int, device: torch.device) -> int:
    """Returns the lowest `number` of all processes, once all have called this."""
    return -all_reduce_max(-number, device)


def all_reduce_sum(numbers: list[float], device: torch.device) -> list[float]:
    """Returns the sum of each number over all processes, in fp64."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return numbers
    # fp32 would round counts of tokens above 2^24, which are 128 rows of 131072.
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
    # Port 0: the store takes a free port. A port that was found free could be taken by then.
    alone = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    os.environ |= {name: str(value) for name, value in alone.items()}


def destroy_process_group() -> bool:
    """Destroys the process group after a barrier, since gloo's threads may abort a process that
    ends while another still works. Returns whether there was a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    dist.barrier()
    dist.destroy_process_group()
    return True


def local_shard(tensor: Any) -> Any:
    """Returns this process's part of a tensor that FSDP2 or ZeRO-3 has sharded, and any other
    tensor as it is."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_numel(parameter: Any) -> int:
    """Returns the number of elements of the whole parameter, also where ZeRO-3 has sharded it or
    bitsandbytes has packed it."""
    if (state := packed_state(parameter)) is not None:
        return math.prod(state.shape)
    return getattr(parameter, "ds_numel", None) or parameter.numel()
