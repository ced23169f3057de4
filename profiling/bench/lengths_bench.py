"""Times attention on documents of lengths that the process has not seen before, and then again.

    python profiling/bench/lengths_bench.py --output profiling/results/h200_attention_lengths.json

cuDNN builds an execution plan for every new shape, in forward and in backward: `first_s` holds them
and `again_s` does not. With `rounded`, TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 has its plans made for
lengths rounded up to powers of two (pytorch#155958). A row is forward and backward of one layer on
one document, by the median of those drawn, with the host memory that they took and never gave back.
`o_error` and `dq_error` are the largest differences to torch's flash op, relative to the largest
value.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, AttentionCall
from longctx.constants import GIB
from profiling.bench.runner import Benchmark, Case, Row, main, rounded

HEADS = {"llama-3.1-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
"""Model -> query heads, key/value heads, their size."""
LENGTHS = (1024, 4096, 16384, 32768, 65536)
DRAWN = 6
"""Documents of each length: their tokens are drawn between 3/4 and 5/4 of it."""
DEFAULTS: Case = dict(backend="cudnn", model="llama-3.1-8b", rounded=False)
CASES = [
    dict(backend=backend, model=model, rounded=plans)
    for model in HEADS
    for backend, plans in (("flash", False), ("fa4", False), ("cudnn", False), ("cudnn", True))
]


def measure(case: Case, _repeats: int, _flags: list[str]) -> list[Row]:
    if case["rounded"]:  # torch reads it at its first call
        os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] = "1"
    device = torch.device("cuda")
    heads = HEADS[case["model"]]
    _, attention = choose_attention(case["backend"], device, torch.bfloat16, head_dim=heads[2])
    flash = choose_attention("flash", device, torch.bfloat16, head_dim=heads[2])[1]
    timed(attention, inputs(heads, 256))  # libraries are loaded
    return [case | row_of(attention, flash, heads, tokens) for tokens in LENGTHS]


def row_of(
    attention: Attention, flash: Attention, heads: tuple[int, int, int], tokens: int
) -> dict[str, Any]:
    drawn = random.Random(tokens).sample(range(3 * tokens // 4, 5 * tokens // 4), DRAWN)
    held = psutil.Process().memory_info().rss
    first_s = [timed(attention, inputs(heads, length)) for length in drawn]
    held = psutil.Process().memory_info().rss - held
    again_s = [timed(attention, inputs(heads, length)) for length in drawn]
    same = inputs(heads, drawn[0])
    errors = map(difference, outputs(attention, same), outputs(flash, same))
    return rounded(
        dict(tokens=tokens, first_s=median(first_s), worst_first_s=max(first_s))
        | dict(again_s=median(again_s), host_gib=held / GIB)
        | dict(zip(("o_error", "dq_error"), errors, strict=True))
    )


def inputs(heads: tuple[int, int, int], length: int) -> tuple[QKV, torch.Tensor]:
    """Returns q, k and v, and the gradient of attention's output."""
    of_q, of_kv, size = heads

    def numbers(count: int) -> torch.Tensor:  # (L, heads, d)
        return torch.randn(length, count, size, device="cuda", dtype=torch.bfloat16)

    return QKV(numbers(of_q), numbers(of_kv), numbers(of_kv)), numbers(of_q)


def timed(attention: Attention, given: tuple[QKV, torch.Tensor]) -> float:
    """Returns the seconds of forward and backward, with what the host does before them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs(attention, given)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def outputs(
    attention: Attention, given: tuple[QKV, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and dq, (L, H, d)."""
    qkv, do = given
    length, heads, size = qkv.q.shape
    o, lse = torch.empty_like(do), torch.empty(heads, length, device="cuda")
    call = AttentionCall(qkv, Documents.of([length], device="cuda"), size**-0.5, o, lse)
    attention.forward(call)
    kept = o.clone()  # backward may write over it
    return kept, attention.backward(do, call).q


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


BENCHMARK = Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    measure=measure,
    published={"published": CASES},
    key=(*DEFAULTS, "tokens"),
    settle=dict,
    repeats=None,
)

if __name__ == "__main__":
    main(BENCHMARK)
