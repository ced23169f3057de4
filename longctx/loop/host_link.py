"""The rate of the link to the host where several processes of the host copy at once.

Each GPU has its own link, but all of them share the host's memory: on a host with four H100s each
process copied 55 GB/s alone, and 38 when all four did. So if activations or states may wait on the
host, the processes measure together, before any of them chooses which do.
"""

from __future__ import annotations

import os

import torch

from longctx.loop.collectives import all_reduce_max, all_reduce_min
from longctx.memory.rates import BESIDE_S, BRIEF_BYTES, link_beside_others


def shared_link_bytes(device: torch.device) -> float | None:
    """Returns the bytes per second each way of the slowest process while all copy; None if each
    host has one process. All processes must call this at the same point; it takes 0.1 s."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if all_reduce_max(local, device) == 1:
        return None

    def begin() -> None:
        all_reduce_max(0, device)  # a barrier: it returns once all processes are here

    own = link_beside_others(device, BRIEF_BYTES, BESIDE_S, begin)
    return float(all_reduce_min(int(own), device))
