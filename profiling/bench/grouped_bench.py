"""Times the matmuls of a layer of experts beside torch's grouped product, one process a case.

    python profiling/bench/grouped_bench.py --cases qwen3
    python profiling/bench/grouped_bench.py --case model=mixtral-8x7b,tokens=32768,routing=skewed
    python profiling/bench/grouped_bench.py --case blocks=sweep,ops=gate_up+down
    python profiling/bench/grouped_bench.py --case blocks=128x256x64w8s3g8+64x128x64w4s4g8

A case is a model's layer, a tile of tokens and a routing: `balanced` (all experts alike), `random`
(uniform choices) or `skewed` (the top k of normal logits, on top of a normal bias of 1.5 of each
expert); `most` is the largest expert's load over the mean. Operations, with their row counts n =
tokens x chosen experts:

    gate_up     (n, D) (D, 2I), rows gathered       d_hidden     (n, 2I) (2I, D)
    down        (n, I) (I, D)                       d_product    (n, D) (D, I), rows gathered
    dw_gate_up  (2I, n) (n, D), rows gathered       dw_down      (D, n) (n, I), rows gathered
    combine, slot_dots, sort                        TB/s over the fewest bytes, and ms

`longctx` gathers where it loads, and adds weight gradients to fp32 sums. `torch` is
`torch._grouped_mm` in bf16 with the copies of gathered rows that it needs, and with the addition to
fp32 sums; `torch_bare` is its product alone. `dense` is one matmul of as many FLOPs.

`blocks` are tiles in place of those that grouped_mm.py chooses: rows x columns x depth, warps,
stages and group, with an h for halves, joined by +; `sweep` is a list of them. All are compiled
first, side by side; then each operation is compared with a loop in fp32 on few tokens with the same
compiled kernel (`checked`; another result is an error), and timed back to back for `seconds`, of
which the first third is not counted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.kernels.grouped_mm import (
    TileConfig,
    combine,
    grouped_mm,
    grouped_outer_,
    slot_dots,
)
from longctx.kernels.sort_slots import Sorted, sort_slots
from profiling.bench import runner
from profiling.bench.runner import Case, Row, rounded, until_out_of_memory


class Shape(NamedTuple):
    """The sizes of a layer of experts."""

    hidden: int
    inner: int
    experts: int
    chosen: int
    """Experts of a token."""


MODELS = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "olmoe-1b-7b": Shape(2048, 1024, 64, 8),
}
ROUTINGS = ("balanced", "random", "skewed")
PRODUCTS = ("gate_up", "down", "d_product", "d_hidden")
OUTER = ("dw_gate_up", "dw_down")
MOVES = ("combine", "slot_dots", "sort")
OPS = (*PRODUCTS, *OUTER, *MOVES)
DEVICE = "cuda"
CHECKED_TOKENS = 200
SWEEP = (
    "128x256x64w8s3g8h+128x256x64w8s3g8+128x256x64w8s4g8h+128x256x64w8s3g2h+128x256x64w8s3g4h"
    "+128x256x64w8s3g32h+256x128x64w8s3g8h+256x128x64w8s4g8h+128x128x64w4s3g8h"
    "+128x128x64w4s4g8h+128x128x64w8s3g8h+128x128x64w8s4g8h+128x128x128w8s3g8h"
    "+64x256x64w4s3g8+64x256x64w4s4g8+64x128x64w4s4g8"
)


class Operands(NamedTuple):
    """The operands of all operations of a layer of experts, on a tile of t tokens."""

    ids: Tensor  # (t, k)
    slots: Sorted
    hidden: Tensor  # (t, D)
    dy: Tensor  # (t, D)
    product: Tensor  # (n, I)
    d_gate_up: Tensor  # (n, 2I)
    gate_up: Tensor  # (E, 2I, D)
    down: Tensor  # (E, D, I)
    weights: Tensor  # (t, k) fp32


def choices(routing: str, tokens: int, shape: Shape, device: str) -> Tensor:  # (t, k)
    """The experts of each token."""
    experts, k = shape.experts, shape.chosen
    if routing == "balanced":
        slots = torch.arange(tokens * k, device=device) % experts
        return slots.view(tokens, k)[torch.randperm(tokens, device=device)]
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    logits = torch.randn(tokens, experts, device=device)
    if routing == "skewed":
        logits += 1.5 * torch.randn(experts, device=device)
    return logits.topk(k).indices


def operands(
    shape: Shape, tokens: int, routing: str, device: str, dtype: torch.dtype, like: Any = None
) -> Operands:
    """Normally distributed operands; the weights are those of `like` where it is given."""

    def rand(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype) * scale

    D, inner, experts, k = shape
    ids = choices(routing, tokens, shape, device)
    n = tokens * k
    return Operands(
        ids=ids,
        slots=sort_slots(ids, experts),
        hidden=rand(tokens, D),
        dy=rand(tokens, D),
        product=rand(n, inner),
        d_gate_up=rand(n, 2 * inner),
        gate_up=rand(experts, 2 * inner, D, scale=D**-0.5) if like is None else like.gate_up,
        down=rand(experts, D, inner, scale=inner**-0.5) if like is None else like.down,
        weights=torch.rand(tokens, k, device=device),
    )


def product_operands(op: str, x: Operands) -> tuple[Tensor, Tensor | None, Tensor]:
    """(the first operand, the rows of it that are gathered, the weights (E, O, K))."""
    return {
        "gate_up": (x.hidden, x.slots.rows, x.gate_up),
        "down": (x.product, None, x.down),
        "d_product": (x.dy, x.slots.rows, x.down.transpose(1, 2)),
        "d_hidden": (x.d_gate_up, None, x.gate_up.transpose(1, 2)),
    }[op]


def outer_operands(op: str, x: Operands) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(a, the rows of it, b, the rows of it)."""
    if op == "dw_gate_up":
        return x.d_gate_up, None, x.hidden, x.slots.rows
    return x.dy, x.slots.rows, x.product, None


def gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def flops(op: str, shape: Shape, tokens: int) -> int:
    outputs = 2 * shape.inner if op in ("gate_up", "d_hidden", "dw_gate_up") else shape.inner
    return 2 * tokens * shape.chosen * outputs * shape.hidden


def ours(op: str, x: Operands, sums: Tensor | None, config: TileConfig | None) -> Tensor:
    """The operation by longctx's kernel. `sums` (E, O, K) fp32 are added to."""
    if op in PRODUCTS:
        a, rows, weight = product_operands(op, x)
        return grouped_mm(a, weight, x.slots.ends, rows=rows, config=config)
    a, rows_a, b, rows_b = outer_operands(op, x)
    rows = dict(rows_a=rows_a, rows_b=rows_b)
    return grouped_outer_(sums, a, b, x.slots.ends, **rows, add=True, config=config)


def peers(op: str, x: Operands, sums: Tensor | None) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(impl, function) of the others. `torch` returns the sums that it added to."""
    ends = x.slots.ends
    if op in PRODUCTS:
        a, rows, weight = product_operands(op, x)
        inputs, copy = weight.transpose(1, 2), gathered(a, rows)
        if rows is not None:
            yield "torch", lambda: torch._grouped_mm(gathered(a, rows), inputs, offs=ends)
        yield "torch_bare", lambda: torch._grouped_mm(copy, inputs, offs=ends)
        yield "dense", lambda: copy @ inputs[0]
        return
    a, rows_a, b, rows_b = outer_operands(op, x)
    left, right = gathered(a, rows_a), gathered(b, rows_b)

    def added() -> Tensor:
        copies = gathered(a, rows_a).t(), gathered(b, rows_b)
        return sums.add_(torch._grouped_mm(*copies, offs=ends))

    yield "torch", added
    yield "torch_bare", lambda: torch._grouped_mm(left.t(), right, offs=ends)
    yield "dense", lambda: left.t() @ right


def moves(op: str, x: Operands, shape: Shape) -> tuple[Callable[[], Any], int]:
    """(the operation, the fewest bytes it can move)."""
    n, t, D = len(x.slots.rows), len(x.hidden), shape.hidden
    if op == "combine":
        z = gathered(x.hidden, x.slots.rows)
        nbytes = 2 * D * (n + 2 * t) + 8 * n
        return lambda: combine(z, x.slots.places, weights=x.weights, onto=x.hidden), nbytes
    if op == "slot_dots":
        return lambda: slot_dots(x.product, x.d_gate_up[:, : shape.inner]), 4 * n * shape.inner
    return lambda: sort_slots(x.ids, shape.experts), 24 * n


def error(op: str, x: Operands, sums: Tensor | None, config: TileConfig | None) -> float:
    """The relative error (Frobenius norm) of longctx's result, from a loop in fp32."""
    if sums is not None:
        sums.zero_()
    result = ours(op, x, sums, config)
    ends = x.slots.ends.tolist()
    wrong = whole = 0.0
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if op in PRODUCTS:
            a, rows, weight = product_operands(op, x)
            truth = gathered(a, rows)[start:end].float() @ weight[e].float().t()
            found = result[start:end]
        else:
            a, rows_a, b, rows_b = outer_operands(op, x)
            left, right = (gathered(*pair)[start:end] for pair in ((a, rows_a), (b, rows_b)))
            truth, found = left.float().t() @ right.float(), result[e]
        wrong = wrong + (found.float() - truth).double().square().sum()
        whole = whole + truth.double().square().sum()
    return float((wrong / whole) ** 0.5)


LARGEST_ERROR = 5e-3
"""One rounding to bf16 is 1.7e-3; fp32 sums of exact products are far below."""


def parse_blocks(text: str) -> list[TileConfig | None]:
    """The configurations of a case; None is what grouped_mm.py chooses."""
    if text == "default":
        return [None]
    configs: list[TileConfig | None] = []
    for word in (SWEEP if text == "sweep" else text).split("+"):
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)w(\d+)s(\d+)g(\d+)(h?)", word)
        if not match:
            sys.exit(f"error: blocks are like 128x256x64w8s3g8, got {word!r}")
        rows, block, depth, warps, stages, group = map(int, match.groups()[:-1])
        how: dict[str, Any] = dict(num_warps=warps, num_stages=stages, group=group)
        how["halves"] = bool(match[7])
        configs.append(TileConfig(rows=rows, block=block, depth=depth, **how))
    return configs


def blocks_text(config: TileConfig | None) -> str:
    if config is None:
        return "default"
    c = config
    return f"{c.rows}x{c.block}x{c.depth}w{c.num_warps}s{c.num_stages}g{c.group}{'h' * c.halves}"


def distinct(op: str, configs: list[TileConfig | None]) -> list[TileConfig | None]:
    """The configurations that differ for this operation: outer products have no halves."""
    if op in PRODUCTS:
        return configs
    return [*dict.fromkeys(c and replace(c, halves=False) for c in configs)]


def failing(
    ops: list[str], configs: list[TileConfig | None], x: Operands, sums: dict[str, Tensor]
) -> dict[tuple[str, str], str]:
    """Compiles all, side by side, and returns (operation, blocks) -> why one cannot run."""
    cases = [(op, config) for op in ops for config in distinct(op, configs)]

    def run(case: tuple[str, TileConfig | None]) -> str:
        op, config = case
        try:
            ours(op, x, sums.get(op), config)
        except Exception as e:  # too much shared memory, or a tile that does not compile
            return repr(e)[:150]
        return ""

    run(cases[0])  # Triton's own set-up is not for several threads
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        why = list(pool.map(run, cases))
    found = {(op, blocks_text(c)): w for (op, c), w in zip(cases, why, strict=True) if w}
    for (op, blocks), reason in found.items():
        print(f"{op:12s}{blocks:22s} left out: {reason}", flush=True)
    return found


def measure(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    shape, rows, base = MODELS[case["model"]], [], {}
    with until_out_of_memory() as outcome:
        torch.manual_seed(0)
        x = operands(shape, case["tokens"], case["routing"], DEVICE, torch.bfloat16)
        loads = x.slots.ends.diff(prepend=x.slots.ends.new_zeros(1)).float()
        base = {**case, "most": (loads.max() / loads.mean()).item()}
        print(f"{case['model']} {case['tokens']} {case['routing']}, most {base['most']:.2f}")
        for row in _rows(case, shape, x):
            rows.append(rounded(base | outcome | row))
            rate = f"{row['tflop_per_s']:8.1f} TFLOP/s" if "tflop_per_s" in row else ""
            rate = rate or f"{row['tb_per_s']:8.2f} TB/s"
            name = f"{row['op']:12s}{row['impl']:12s}{row['blocks']:22s}"
            print(f"{name}{row['ms']:9.3f} ms{rate}", flush=True)
    return [*rows, base | case | outcome] if outcome["status"] == "oom" else rows


def _rows(case: Case, shape: Shape, x: Operands) -> Iterator[Row]:
    from profiling.bench.kernel_bench import sustained_ms

    configs = parse_blocks(case["blocks"])
    ops = [*OPS] if case["ops"] == "all" else case["ops"].split("+")
    if unknown := {*ops} - {*OPS}:
        sys.exit(f"error: unknown ops {', '.join(unknown)}; known: {', '.join(OPS)}")
    sums = {
        op: torch.zeros(weight.shape, device=DEVICE)
        for op, weight in (("dw_gate_up", x.gate_up), ("dw_down", x.down))
        if op in ops
    }
    products = [op for op in ops if op not in MOVES]
    few = operands(shape, CHECKED_TOKENS, "skewed", DEVICE, torch.bfloat16, like=x)
    left_out = failing(products, configs, few, sums) if products else {}
    for op in products:
        total = flops(op, shape, case["tokens"])

        def row(impl: str, blocks: str, run: Callable[[], Any], *, op=op, total=total) -> Row:
            ms = sustained_ms(run, case["seconds"])
            rate = {"ms": ms, "tflop_per_s": total / ms / 1e9}
            return {"op": op, "impl": impl, "blocks": blocks, **rate}

        for config in distinct(op, configs):
            blocks = blocks_text(config)
            if (op, blocks) in left_out:
                continue
            found = error(op, few, sums.get(op), config)
            if not found < LARGEST_ERROR:
                raise RuntimeError(f"{op} with {blocks} is wrong: relative error {found:.3g}")
            run = lambda op=op, config=config: ours(op, x, sums.get(op), config)  # noqa: E731
            yield row("longctx", blocks, run) | {"checked": True}
        for impl, peer in () if case["blocks"] == "sweep" else peers(op, x, sums.get(op)):
            try:
                yield row(impl, "none", peer)
            except (RuntimeError, AttributeError) as e:  # a peer must not end the run
                print(f"{op:12s}{impl:12s} failed: {repr(e)[:150]}", flush=True)
    for op in MOVES:
        if op in ops and case["blocks"] == "default":
            move, nbytes = moves(op, x, shape)
            ms = sustained_ms(move, case["seconds"])
            rate = {"ms": ms, "tb_per_s": nbytes / ms / 1e9}
            yield {"op": op, "impl": "longctx", "blocks": "none", **rate}


def _cases(models: tuple[str, ...], tokens: tuple[int, ...]) -> list[Case]:
    return [
        dict(model=model, tokens=count, routing=routing)
        for model in models
        for count in tokens
        for routing in ROUTINGS
    ]


DEFAULTS: Case = {
    "model": "qwen3-30b-a3b",
    "tokens": 8192,
    "routing": "random",
    "ops": "all",
    "blocks": "default",
    "seconds": 0.3,
}
BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={
        "published": _cases(tuple(MODELS), (8192, 32768)),
        "qwen3": _cases(("qwen3-30b-a3b",), (8192, 32768)),
    },
    measure=measure,
    settle=dict,
    key=(*DEFAULTS, "op", "impl"),
    repeats=None,
)

if __name__ == "__main__":
    runner.main(BENCH)
