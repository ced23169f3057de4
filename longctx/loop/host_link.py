"""The rate of the link to the host where several processes of the host copy at once.

Each GPU has a link of its own, but the host's memory is behind all of them: on a host with four
H100s each process copied 55 GB/s alone, and 38 when all four did. So where activations or states
wait on the host, the processes measure together, before any of them chooses what is to wait.
"""

from __future__ import annotations

import os

import torch

from longctx.loop.collectives import all_reduce_max, all_reduce_min
from longctx.memory.rates import BESIDE_S, BRIEF_BYTES, link_beside_others


def shared_link_bytes(device: torch.device) -> float | None:
    """Returns the bytes per second each way that the slowest process has while all copy; None if
    each host has one process. All processes call this at the same point; it takes 0.1 s."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if all_reduce_max(local, device) == 1:
        return None

    def begin() -> None:
        all_reduce_max(0, device)  # nobody has the answer before all have asked

    own = link_beside_others(device, BRIEF_BYTES, BESIDE_S, begin)
    return float(all_reduce_min(int(own), device))
