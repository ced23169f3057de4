"""What one process notices, every process must act on at the same step: a signal, a full disk, a
loss that is not a number. Otherwise one would save or stop while the others wait in a collective.

One process asks nobody. Several exchange 8 bytes a question.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def highest(number: int, device: torch.device) -> int:
    """The highest `number` of all processes; each must ask in the same order."""
    if not _several():
        return number
    answer = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return int(answer)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process."""
    return bool(highest(int(flag), device))


def gather(value: Any) -> list[Any]:
    """The picklable `value` of every process, by rank."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
