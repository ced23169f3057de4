"""Times how packed weights are made dense (longctx/layer/packed_weights.py), beside bitsandbytes'
own kernels for NF4, in the GPU's time: what the host takes to launch them is hidden.

    python profiling/bench/packed_bench.py --output profiling/results/h200_packed.json

Rows: the dense weight's `shape`, in bf16; `us` microseconds into a given place; `tb_per_s` over the
bytes that are read and written; `of_copy` that rate over the rate of a copy within the GPU in the
same run; `dense_bytes` how many bytes such a copy reads and writes in that time, for each byte of
the dense weight (`DEQUANTISE` of longctx/cost/fitted.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from longctx.layer.packed_weights import Mxfp4, Nf4, PackedState
from longctx.train.loading.packed_formats import Fp8Files, Mxfp4Files
from profiling.bench.runner import Row, rounded
from profiling.results import results_file, write_results

LINEAR = ((1024, 4096), (4096, 4096), (12288, 4096))
EXPERTS = (32, 2880, 5760)
"""gate and up of gpt-oss-20b as its model holds them: (experts, columns, rows)."""
DEVICE = torch.device("cuda")
HIDDEN_CYCLES = 400_000
"""Clock cycles that the GPU waits for each launch, while the host prepares it."""


def packed() -> Iterator[tuple[str, PackedState, Tensor]]:
    """Yields weights in each format: a name, what they are, and their bytes."""
    for shape in map(torch.Size, LINEAR):
        for name, block in (("128 x 128", (128, 128)), ("a matrix", (0, 0)), ("a row", (1, 0))):
            form = Fp8Files(block)
            data, scale = form.drawn("weight", shape, DEVICE)
            yield f"FP8, a scale for {name}", form.state(shape, torch.bfloat16, scale), data
        yield "NF4", *nf4(shape)
    shape = torch.Size(EXPERTS)
    data, scale = Mxfp4Files().drawn("weight", shape, DEVICE)
    yield "MXFP4", Mxfp4Files().state(shape, torch.bfloat16, scale), data


def nf4(shape: torch.Size) -> tuple[PackedState, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    data, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return Nf4(state), data


def ways(state: PackedState) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yields each implementation with a function of the bytes. Mxfp4's experts lie as in files."""
    room = torch.empty(state.shape, dtype=state.dtype, device=DEVICE)
    yield "longctx", lambda data: state.dense(data, None if isinstance(state, Mxfp4) else room)
    if isinstance(state, Nf4):
        from bitsandbytes.functional import dequantize_4bit

        yield "bitsandbytes", lambda data: dequantize_4bit(data, state.state)


def seconds(function: Callable[[Tensor], object], data: Tensor) -> float:
    """Returns the GPU's seconds for one of many tensors, of which none is in its cache."""
    copies = [data.clone() for _ in range(2 + GIB // 2 // data.nbytes)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(5):
        torch.cuda._sleep(HIDDEN_CYCLES * len(copies))
        begin.record()
        for copy in copies:
            function(copy)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(copies))
    return statistics.median(found)


def rows() -> Iterator[Row]:
    x = torch.empty(GIB // 2, dtype=torch.uint8, device=DEVICE)
    copied = 2 * x.nbytes / seconds(x.copy_, torch.empty_like(x))
    yield {"format": "copy", "tb_per_s": copied / 1e12}
    for name, state, data in packed():
        for impl, function in ways(state):
            s = seconds(function, data)
            written = 2 * state.shape.numel()
            moved = written + data.nbytes + sum(getattr(*own).nbytes for own in state.beside)
            yield {
                **{"format": name, "shape": list(state.shape), "impl": impl, "us": s * 1e6},
                "tb_per_s": moved / s / 1e12,
                "of_copy": moved / s / copied,
                "dense_bytes": s * copied / written,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=results_file, help="JSON file; rows are added to its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: needs a GPU")
    found = []
    for row in map(rounded, rows()):
        print(row, flush=True)
        found.append(row)
    if args.output:
        write_results(args.output, found, key=("format", "shape", "impl"))


if __name__ == "__main__":
    main()
