"""Times attention's forward and backward by backend, head size, window and cap of scores: the rates
that longctx/cost/machines.py holds.

    python profiling/bench/attention_bench.py --output profiling/results/h200_attention.json

One causal document of L tokens. The FLOPs counted are those of the pairs of tokens that are seen: 4
H d for each in forward, 10 H d in backward, whose pairs are L^2 / 2, or about L W with a window.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from longctx.attention.backends import BACKENDS, choose_attention
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, AttentionCall
from longctx.errors import UserError
from longctx.train.plan.measure import seconds_of
from profiling.results import results_file, write_results

HEADS = {256: (16, 8), 128: (32, 8), 64: (32, 8)}
"""Head size -> heads of q and of k and v: Gemma 3 12B's, Llama 3.1 8B's, Llama 3.2 1B's."""
LENGTHS = (8192, 32768, 131072)
WINDOW, CAP = 1024, 50.0
SETTLED_S = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=results_file, required=True)
    args = parser.parse_args()
    rows = []
    for case in cases():
        rows.append(case | measured(**case))
        print(rows[-1], flush=True)
        write_results(args.output, rows)


def cases() -> Iterator[dict[str, Any]]:
    for head_dim in HEADS:
        for backend in BACKENDS:
            if backend == "math":  # of tests, and for what no other backend does
                continue
            for tokens in LENGTHS:
                case = dict(backend=backend, head_dim=head_dim, tokens=tokens)
                yield case | dict(window=None, softcap=None)
                if tokens == LENGTHS[-1]:
                    yield case | dict(window=WINDOW, softcap=None)
                    yield case | dict(window=None, softcap=CAP)


def measured(
    backend: str, head_dim: int, tokens: int, window: int | None, softcap: float | None
) -> dict[str, Any]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    needs = dict(head_dim=head_dim, windows=window is not None, softcap=softcap)
    try:
        _, attention = choose_attention(backend, device, dtype, **needs)
    except UserError as error:
        return {"status": str(error)}
    heads, kv_heads = HEADS[head_dim]

    def numbers(heads: int) -> torch.Tensor:  # (L, heads, d)
        return torch.randn(tokens, heads, head_dim, device=device, dtype=dtype)

    qkv, do = QKV(numbers(heads), numbers(kv_heads), numbers(kv_heads)), numbers(heads)
    o, lse = torch.empty_like(do), torch.empty(heads, tokens, device=device)
    documents = Documents.of([tokens], device=device)
    call = AttentionCall(qkv, documents, head_dim**-0.5, o, lse, window)
    forward_s = seconds_of(lambda: attention.forward(call), SETTLED_S)
    backward_s = seconds_of(lambda: attention.backward(do, call), SETTLED_S)
    pairs = tokens**2 / 2 if window is None else window * (tokens - window / 2)
    flops = 4 * pairs * heads * head_dim
    return {
        "status": "ok",
        "fwd_tflops": round(flops / forward_s / 1e12, 1),
        "bwd_tflops": round(2.5 * flops / backward_s / 1e12, 1),
    }


if __name__ == "__main__":
    main()
