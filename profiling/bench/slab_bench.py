"""What a page-locked slab costs (longctx/memory/slab.py): to lock it, and a fork beside it, as data
loader workers do.

    python profiling/bench/slab_bench.py --output profiling/results/h200_slab.json

Rows: slab_gib, lock_s (mapped, touched and locked), untouched_s (the same bytes locked by CUDA
alone), fork_s (until the call returns to the parent), child_rss_gib (the memory that the child has
mapped as its own, shared or not).
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from longctx.memory.slab import PinnedSlab
from profiling.bench import runner
from profiling.bench.runner import Case, Row


def measure(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """Forks once beside a slab that is locked and used by a copy."""
    torch.zeros(1, device="cuda")  # or the first time would be that of CUDA's start
    slab_gib = case["slab_gib"]
    untouched_s = lock_untouched(slab_gib * GIB)
    start = time.perf_counter()
    slab = PinnedSlab(slab_gib * GIB, torch.device("cuda"))
    lock_s = time.perf_counter() - start
    slab.data[:GIB].copy_(torch.ones(GIB, dtype=torch.uint8, device="cuda"))
    rss_gib, fork_s = fork()
    row = {
        "slab_gib": slab_gib,
        "lock_s": round(lock_s, 2),
        "untouched_s": round(untouched_s, 2),
        "fork_s": round(fork_s, 4),
        "child_rss_gib": round(rss_gib, 2),
    }
    return [row]


def lock_untouched(nbytes: int) -> float:
    """Seconds that `cudaHostRegister` takes for pages that nobody has touched."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    start = time.perf_counter()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), nbytes, 0))
    seconds = time.perf_counter() - start
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(data.data_ptr()))
    return seconds


def fork() -> tuple[float, float]:
    """GiB that a child has mapped as its own, shared or not, and seconds until the parent goes
    on."""
    reads, writes = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        fields = dict(line.split(":") for line in open("/proc/self/status"))
        os.write(writes, fields["RssAnon"].split()[0].encode())
        os._exit(0)
    fork_s = time.perf_counter() - start
    os.waitpid(child, 0)
    rss_gib = int(os.read(reads, 100)) / 2**20
    os.close(reads)
    os.close(writes)
    return rss_gib, fork_s


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults={"slab_gib": 4},
    published={"published": [dict(slab_gib=4), dict(slab_gib=16)]},
    measure=measure,
    settle=dict,
    repeats=None,
)

if __name__ == "__main__":
    runner.main(BENCH)
