"""Times the losses of Medusa's five heads on one trunk, forward and backward, one process per case.

    python profiling/bench/medusa_bench.py --output profiling/results/h200_medusa.json
    python profiling/bench/medusa_bench.py --case impl=liger,tokens=32768

A case is one row of hidden states, as a trunk leaves them, and `heads` heads of recipes/medusa.py:
a residual block and an output layer each. `trunk=true` takes the gradient of the hidden states,
too. The trunk itself is the same whatever computes the losses, and is left out.

    longctx         `medusa_backward` of the recipe: one head after the other, without logits
    longctx_at_once the sum of the five losses, and one backward
    liger           Liger's fused linear cross-entropy, and one backward, as its Medusa example does
    liger_in_turn   the same with the recipe's order
    logits          all logits of all heads, and torch's cross-entropy in fp32

`step_s` is forward + backward, the median of `--repeats` after a warm-up; `peak_gib` the
allocator's peak less weights, their gradients and the hidden states; `tokens_per_s` counts a token
once for all heads.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from profiling.bench import runner
from profiling.bench.runner import Case, Row, rounded, until_out_of_memory

RECIPE = Path(__file__).resolve().parents[2] / "recipes/medusa.py"
DEFAULTS: Case = {
    "impl": "longctx",
    "tokens": 32768,
    "heads": 5,
    "vocab": 128256,
    "hidden": 4096,
    "trunk": False,
}
IMPLS = ("longctx", "longctx_at_once", "liger", "liger_in_turn", "logits")
PUBLISHED = [
    dict(impl=impl, tokens=tokens, trunk=trunk)
    for trunk in (False, True)
    for tokens in (2048, 8192, 32768, 131072)
    for impl in IMPLS
]


@cache
def recipe() -> Any:
    """The module of the recipe."""
    spec = importlib.util.spec_from_file_location("medusa", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Backward = Callable[[Any, Any, Any], Any]
"""(hidden, heads, labels) -> the sum of the losses, after backward."""


def backward_of(impl: str) -> Backward:
    """Returns what runs the losses forward and backward."""
    import torch

    import longctx

    def logits_loss(states: Any, weight: Any, labels: Any) -> Any:
        logits = torch.nn.functional.linear(states, weight).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits.float(), labels.flatten())

    def liger_loss(states: Any, weight: Any, labels: Any) -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        return fused(weight, states.flatten(0, -2), labels.flatten())

    if impl == "longctx":
        return lambda *given: recipe().medusa_backward(*given)
    if impl == "liger_in_turn":
        return lambda *given: recipe().medusa_backward(*given, loss_of=liger_loss)
    if impl not in IMPLS:
        sys.exit(f"error: impl={impl}: one of {', '.join(IMPLS)}")
    loss_of = {"longctx_at_once": longctx.linear_cross_entropy, "liger": liger_loss}
    loss_of = loss_of.get(impl, logits_loss)

    def at_once(hidden: Any, heads: Any, labels: Any) -> Any:
        total = sum(
            0.8 ** (n + 1) * loss_of(head(hidden), head.lm_head.weight, _ahead(labels, n + 2))
            for n, head in enumerate(heads)
        )
        total.backward()
        return total.detach()

    return at_once


def _ahead(labels: Any, places: int) -> Any:
    import torch

    return torch.nn.functional.pad(labels[:, places:], (0, places), value=-100)


def made(case: Case, device: str, dtype: Any) -> tuple[Any, Any, Any]:
    """Returns hidden states (1, T, D), heads and labels (1, T) of a case."""
    import torch

    torch.manual_seed(0)
    width, vocab = case["hidden"], case["vocab"]
    lm_head = torch.nn.Linear(width, vocab, bias=False, device=device, dtype=dtype)
    heads = torch.nn.ModuleList(recipe().MedusaHead(lm_head) for _ in range(case["heads"]))
    hidden = torch.randn(1, case["tokens"], width, device=device, dtype=dtype)
    labels = torch.randint(vocab, (1, case["tokens"]), device=device)
    return hidden.requires_grad_(case["trunk"]), heads, labels


def run_case(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """One row of the results, from this process."""
    import torch

    hidden, heads, labels = made(case, "cuda", torch.bfloat16)
    backward, seconds = backward_of(case["impl"]), []
    with until_out_of_memory() as outcome:
        for step in range(repeats + 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            loss = backward(hidden, heads, labels)
            last.record()
            torch.cuda.synchronize()
            if step:  # the first compiles the kernels
                seconds.append(first.elapsed_time(last) / 1e3)
            else:  # gradients are there from now on
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
    row = {**case, "gpu": torch.cuda.get_device_name(), **outcome}
    if row["status"] == "oom":
        return [row]
    step_s = statistics.median(seconds)
    row |= {"loss": loss.item(), "step_s": step_s, "tokens_per_s": case["tokens"] / step_s}
    row |= {"peak_gib": (torch.cuda.max_memory_allocated() - held) / GIB, "held_gib": held / GIB}
    return [rounded(row)]


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={"published": PUBLISHED},
    measure=run_case,
    settle=dict,
    repeats=5,
)

if __name__ == "__main__":
    runner.main(BENCH)
