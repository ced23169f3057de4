"""Times clip and step of an optimizer for many tensors that are all on the GPU.

    python profiling/bench/optimizer_bench.py
    python profiling/bench/optimizer_bench.py --case model=llama_1b,impl=torch_fused

Models: adapters (LoRA r16 on all maps of Llama-3.1-8B, in fp32) and llama_1b (all weights of
Llama-3.2-1B, in bf16). torch's fused AdamW keeps bf16 weights' moments in bf16, and clips by
`clip_grad_norm_`.

Rows: host_ms, the time until the calls of clip and step have returned, with a GPU that has nothing
else to do; gpu_ms, the time that the GPU takes where all of its work is queued already, so that it
waits for no launch. Both are medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import Place
from longctx.memory.states import Block, BlockSpec
from longctx.memory.stream import StateStream
from profiling.bench import runner
from profiling.bench.runner import Case, Row

RANK = 16
SLEEP_CYCLES = 10**8
"""Cycles for which the GPU is kept busy while work is queued: 50 ms, longer than any host_ms."""


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """The trained tensors of a model."""
    if model == "adapters":
        hidden, kv, inner = 4096, 1024, 14336
        maps = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
        maps += [(inner, hidden), (inner, hidden), (hidden, inner)]
        return [s for out, into in maps for s in ((RANK, into), (out, RANK))] * 32
    hidden, kv, inner = 2048, 512, 8192
    layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    return [(128256, hidden), *layer * 16, (hidden,)]


def make(impl: str, weights: list[nn.Parameter]) -> Callable[[], Any]:
    """A function that clips and steps."""
    options: dict[str, Any] = dict(lr=1e-4, weight_decay=0.1)
    if impl == "torch_fused":
        fused = torch.optim.AdamW(weights, fused=True, **options)
        return lambda: (nn.utils.clip_grad_norm_(weights, 1.0), fused.step())
    device = weights[0].device
    named = {str(i): weight for i, weight in enumerate(weights)}
    block = Block(BlockSpec(name="all", parameters=named), Place())
    block.settle(device, lambda numel, dtype: torch.zeros(numel, dtype=dtype), None)
    exact = ExactAdamW(weights, stream=StateStream([block], device), **options)
    return lambda: (exact.clip(1.0), exact.step())


def measure(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    dtype = torch.float32 if case["model"] == "adapters" else torch.bfloat16
    with torch.device("cuda"):
        shapes = shapes_of(case["model"])
        weights = [nn.Parameter(0.02 * torch.randn(s, dtype=dtype)) for s in shapes]
        grads = [1e-3 * torch.randn(s, dtype=dtype) for s in shapes]
    step = make(case["impl"], weights)
    host, gpu = [], []
    for n in range(2 + 2 * repeats):
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if n % 2:
            torch.cuda._sleep(SLEEP_CYCLES)
        first.record()
        start = time.perf_counter()
        step()
        host_ms = 1e3 * (time.perf_counter() - start)
        last.record()
        last.synchronize()
        if n >= 2:  # kernels were compiled before
            host += [] if n % 2 else [host_ms]
            gpu += [first.elapsed_time(last)] if n % 2 else []
    row = {**case, "tensors": len(weights), "parameters": sum(w.numel() for w in weights)}
    times = {"host_ms": statistics.median(host), "gpu_ms": statistics.median(gpu)}
    return [row | {name: round(ms, 3) for name, ms in times.items()}]


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults={"model": "adapters", "impl": "longctx"},
    published={
        "published": [
            dict(model=model, impl=impl)
            for model in ("adapters", "llama_1b")
            for impl in ("longctx", "torch_fused")
        ]
    },
    measure=measure,
    settle=dict,
    repeats=10,
)

if __name__ == "__main__":
    runner.main(BENCH)
