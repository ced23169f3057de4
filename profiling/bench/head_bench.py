"""Times the streaming head beside its peers, in one process: python profiling/bench/head_bench.py

    log_probs    log-probabilities of labels, weighted by a gradient of each token (as DPO, GRPO)
    log_probs_frozen    the same with a frozen lm_head (LoRA)
    jsd          generalised JSD with beta 0.5 from a teacher as wide as the student, mean
    loss         mean cross-entropy: what the two cost that know no gradient of a token (for scale)

Per objective, implementation and length it prints forward ms (without gradients), forward+backward
ms, peak extra GiB and TFLOP/s over the products that the objective cannot do without, and what
`predicted_ms` expects of longctx from the rates of this run. Default sizes are those of TRL #7244:
a vocabulary of 151936, hidden 4096, bf16; its anchors on an H100 at 8192 tokens are 42 ms for the
three bare products and 60 to 80 ms as the aim.

Peers: `eager` holds all logits in fp32; `trl` is the function under `add_fused_lm_head` (tiles of
4096 tokens x 32768 entries) and under DistillationTrainer; `liger` is its fused linear JSD, and its
fused cross-entropy, which has no gradient of a token and therefore stands under loss alone, beside
`efficient_ce` (efficient_ce.py).

By count at the rates of h200_kernels.json, which are not measured here: log_probs 69, 274 and 1094
ms at 8192, 32768 and 131072 tokens, with a frozen head 35, 140 and 558, jsd 74, 293 and 1170.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from longctx.cost.sizes import default_logits_bytes
from longctx.head.distillation import linear_jsd, linear_jsd_reference
from longctx.head.log_probs import linear_log_probs, linear_log_probs_reference
from longctx.head.loss import linear_cross_entropy, linear_cross_entropy_reference
from longctx.head.pieces import _pieces
from profiling.bench.efficient_ce import efficient_cross_entropy
from profiling.results import results_file, write_results

ROOT = Path(__file__).resolve().parents[2]
OBJECTIVES = ("log_probs", "log_probs_frozen", "jsd", "loss")
ONLY = ("log_probs",)


class Inputs(NamedTuple):
    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    labels: Tensor  # (T,)
    teacher_hidden: Tensor  # (T, D)
    teacher_weight: Tensor  # (V, D)
    d_log_probs: Tensor  # (T,)


class Counts(NamedTuple):
    """Per token and entry of the vocabulary."""

    flops: int
    """In units of 2 D: products that the implementation computes."""
    needed: int
    """The same for one that computed no logits twice."""
    nbytes: int
    """Bytes of logits and their gradients that are written and read in device memory."""
    row_lines: int
    """Lines of the workspace a row (see `longctx.head.pieces._pieces`)."""


COUNTS = {
    "log_probs": Counts(4, 3, 4 * 4 + 3 * 2, 3),
    "log_probs_frozen": Counts(2, 2, 3 * 4 + 2 * 2, 3),
    "jsd": Counts(4, 4, 2 * 4 * 4 + 3 * 2, 5),
    "loss": Counts(3, 3, 2 * 4 + 3 * 2, 2),
}


def predicted_ms(
    objective: str, tokens: int, vocab: int, hidden: int, tflop_per_s: float, tb_per_s: float
) -> float:
    """What longctx should need, forward and backward: its products at the rate of bare ones, and
    the bytes of logits, of their gradients and of the fp32 sum of lm_head's at the copy rate."""
    counts = COUNTS[objective]
    nbytes = counts.nbytes * tokens * vocab
    if objective != "log_probs_frozen":
        lines = default_logits_bytes(vocab, hidden) // (2 * vocab)
        groups = -(-tokens // sum(_pieces(lines, counts.row_lines)))
        nbytes += 8 * groups * vocab * hidden
    flops = 2 * counts.flops * tokens * vocab * hidden
    return flops / tflop_per_s / 1e9 + nbytes / tb_per_s / 1e9


def implementations(objective: str) -> Iterator[tuple[str, Callable[[Inputs], Tensor]]]:
    """(name, function of the inputs whose result backward starts from). A peer that is missing is
    named and left out."""
    if objective.startswith("log_probs"):

        def weighted(function: Callable[..., Any]) -> Callable[[Inputs], Tensor]:
            def run(x: Inputs) -> Tensor:
                found = function(x.hidden, x.weight, x.labels, outputs=ONLY).log_probs
                return (found * x.d_log_probs).sum()

            return run

        yield "longctx", weighted(linear_log_probs)
        yield "eager", weighted(linear_log_probs_reference)
        yield from _trl("chunked_logprob", "ChunkedLogProbFunction", _trl_log_probs)
    elif objective == "jsd":
        yield "longctx", lambda x: linear_jsd(*_heads(x), x.labels)
        yield "eager", lambda x: linear_jsd_reference(*_heads(x), x.labels)
        yield from _trl("chunked_divergence", "ChunkedDivergenceFunction", _trl_jsd)
        yield from _liger("fused_linear_jsd", "LigerFusedLinearJSD", _liger_jsd)
    else:
        yield "longctx", lambda x: linear_cross_entropy(x.hidden, x.weight, x.labels)
        yield "eager", lambda x: linear_cross_entropy_reference(x.hidden, x.weight, x.labels)
        name = "LigerFusedLinearCrossEntropyLoss"
        yield from _liger("fused_linear_cross_entropy", name, _liger_loss)
        yield "efficient_ce", lambda x: efficient_cross_entropy(x.hidden, x.weight, x.labels)


def _heads(x: Inputs) -> tuple[Tensor, ...]:
    return x.hidden, x.weight, x.teacher_hidden, x.teacher_weight


Peer = Callable[[Any], Callable[[Inputs], Tensor]]


def _peer(module: str, name: str, impl: str, made: Peer) -> Iterator[tuple[str, Any]]:
    try:
        found = getattr(__import__(module, fromlist=[name]), name)
    except ImportError as e:
        print(f"no {module}: left out ({e})")
        return
    yield impl, made(found)


def _trl(file: str, name: str, made: Peer) -> Iterator[tuple[str, Any]]:
    return _peer(f"trl.kernels.{file}", name, "trl", made)


def _liger(file: str, name: str, made: Peer) -> Iterator[tuple[str, Any]]:
    return _peer(f"liger_kernel.transformers.{file}", name, "liger", made)


def _trl_log_probs(function: Any) -> Callable[[Inputs], Tensor]:
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as entries

    def run(x: Inputs) -> Tensor:
        settings = (1.0, entries, None, 1.0, ONLY)
        found = function.apply(x.hidden, x.weight, None, x.labels, *settings)[0]
        return (found * x.d_log_probs).sum()

    return run


def _trl_jsd(function: Any) -> Callable[[Inputs], Tensor]:
    def run(x: Inputs) -> Tensor:
        student, teacher = (x.hidden, x.weight, None), (x.teacher_hidden, x.teacher_weight, None)
        return function.apply(*student, *teacher, 0.5)[0].mean()

    return run


def _liger_jsd(module: Any) -> Callable[[Inputs], Tensor]:
    loss = module(jsd_beta=0.5)
    return lambda x: loss(*_heads(x), x.labels)


def _liger_loss(module: Any) -> Callable[[Inputs], Tensor]:
    loss = module()
    return lambda x: loss(x.weight, x.hidden, x.labels)


def inputs(
    objective: str, tokens: int, vocab: int, hidden: int, device: str, dtype: torch.dtype
) -> Inputs:
    """Normally distributed, with logits of variance one."""

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * scale

    given = Inputs(
        rand(tokens, hidden),
        rand(vocab, hidden, scale=hidden**-0.5),
        torch.randint(vocab, (tokens,), device=device),
        rand(tokens, hidden),
        rand(vocab, hidden, scale=hidden**-0.5),
        torch.randn(tokens, device=device) / tokens,
    )
    given.hidden.requires_grad_()
    given.weight.requires_grad_(objective != "log_probs_frozen")
    return given


def measure(function: Callable[[Inputs], Tensor], given: Inputs, seconds: float) -> dict[str, Any]:
    from profiling.bench.kernel_bench import sustained_ms

    def step() -> None:
        given.hidden.grad = given.weight.grad = None
        function(given).backward()

    def forward() -> None:
        with torch.no_grad():
            function(given)

    step()
    given.hidden.grad = given.weight.grad = None
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = (torch.cuda.max_memory_allocated() - base) / GIB
    both = sustained_ms(step, seconds)
    return {"fwd_ms": sustained_ms(forward, seconds), "fwd_bwd_ms": both, "peak_gib": peak}


def matmul_rate(tokens: int, vocab: int, hidden: int, seconds: float) -> float:
    """TFLOP/s of the head's three products in turn, in bf16, with normally distributed operands."""
    from profiling.bench.kernel_bench import sustained_ms

    x = inputs("log_probs_frozen", tokens, vocab, hidden, "cuda", torch.bfloat16)
    h, weight = x.hidden.detach(), x.weight
    logits = h @ weight.t()
    d_hidden, d_weight = torch.empty_like(h), torch.empty_like(weight)

    def products() -> None:
        torch.mm(h, weight.t(), out=logits)
        torch.mm(logits, weight, out=d_hidden)
        torch.mm(logits.t(), h, out=d_weight)

    return 6 * tokens * vocab * hidden / sustained_ms(products, seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row and each rate")
    parser.add_argument("--impls", nargs="+", help="only these implementations")
    parser.add_argument(
        "--out", type=results_file, default=ROOT / "profiling/results/h200_heads.json"
    )
    options = parser.parse_args()
    from profiling.bench.kernel_bench import copy_rate

    torch.manual_seed(0)
    vocab, hidden, rows = options.vocab, options.hidden, []
    copy, matmul = copy_rate(), matmul_rate(8192, vocab, hidden, options.seconds)
    print(f"copy {copy:.3f} TB/s, matmul {matmul:.0f} TFLOP/s", flush=True)
    print(
        "objective         impl           tokens    fwd ms   both ms  peak GiB  TFLOP/s  predicted"
    )
    for objective in options.objectives:
        for impl, function in implementations(objective):
            if options.impls and impl not in options.impls:
                continue
            for tokens in options.tokens:
                torch.cuda.empty_cache()
                case = {"objective": objective, "impl": impl, "tokens": tokens, "vocab": vocab}
                name = f"{objective:18s}{impl:13s}{tokens:8d}"
                try:
                    given = inputs(objective, tokens, vocab, hidden, "cuda", torch.bfloat16)
                    row = case | measure(function, given, options.seconds)
                except torch.OutOfMemoryError:
                    print(f"{name}   out of memory", flush=True)
                    rows.append(case | {"status": "out of memory"})
                    continue
                except Exception as e:  # a peer that cannot run this case must not end the run
                    print(f"{name}   failed: {repr(e)[:200]}", flush=True)
                    continue
                needed = 2 * COUNTS[objective].needed * tokens * vocab * hidden
                row |= {"hidden": hidden, "dtype": "bf16", "status": "ok"}
                row |= {"tflop_per_s": needed / row["fwd_bwd_ms"] / 1e9, "predicted_ms": None}
                if impl == "longctx":
                    sizes = (tokens, vocab, hidden, matmul, copy)
                    row["predicted_ms"] = predicted_ms(objective, *sizes)
                rows.append(row)
                print(
                    f"{name}{row['fwd_ms']:10.2f}{row['fwd_bwd_ms']:10.2f}{row['peak_gib']:10.2f}"
                    f"{row['tflop_per_s']:9.0f}  {row['predicted_ms'] or '':.6}",
                    flush=True,
                )
    ceilings = {"copy_tb_per_s": copy, "matmul_tflop_per_s": matmul}
    write_results(options.out, rows, extra={"ceilings": ceilings})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
