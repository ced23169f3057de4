"""How fast this GPU multiplies and copies, and its link: measured once in a process, in 20 ms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from longctx.memory.ladder import Rates

SIDE = 4096
COPIED_BYTES = 2**26  # more than the GPU's caches hold


@cache
def gpu_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Of products in `dtype` and of copies from page-locked memory."""
    a = torch.randn(SIDE, SIDE, device=device).to(dtype)
    product = torch.empty_like(a)
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    copy = torch.empty_like(host, device=device)
    other = torch.empty_like(copy)
    return Rates(
        flops=2 * SIDE**3 / _seconds(lambda: torch.mm(a, a, out=product)),
        link_bytes=COPIED_BYTES / _seconds(lambda: copy.copy_(host, non_blocking=True)),
        memory_bytes=2 * COPIED_BYTES / _seconds(lambda: other.copy_(copy)),
    )


def _seconds(work: Callable[[], object], repeats: int = 4) -> float:
    for _ in range(2):
        work()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats
