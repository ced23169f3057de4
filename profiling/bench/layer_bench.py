"""Times decoder layers of Llama-3.1-8B's dimensions, or of another preset's, forward and backward,
one process per case.

    python profiling/bench/layer_bench.py --cases h200 --output profiling/results/h200_layer.json
    python profiling/bench/layer_bench.py --case tokens=131072,layers=4,head_groups=8,offload=all

A case is `layers` decoder layers and the final norm on one row of random activations: no embedding
and no lm_head, so the figures are the layers'. As in training, nobody but the layers holds on to
their input and output (`Source` and `Sink` stand for embedding and loss). Each case has a process
of its own, so that one out of memory is a row with that status and the next starts clean.
Peers (vanilla, liger) run as peers.py sets them: checkpointing=none, layers or selective, and
offload=none or all.

`layer_s` is forward + backward over `layers`, the median of `--repeats` after a warm-up of at most
131072 tokens; `peak_gib` is the allocator's peak less weights and gradients (bf16, the same size
each); `host_gib` the process's peak resident memory; `ladder` and `cut` what custom's layers kept,
and how their work was cut (ladders.py).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from profiling.bench import runner
from profiling.bench.runner import Case, Row, rounded, until_out_of_memory
from profiling.ladders import ladder_columns

WARM_UP_TOKENS = 131072

DEFAULTS: Case = {
    "class_type": "custom",
    "preset": "llama-3.1-8b",
    "tokens": 131072,
    "layers": 4,
    "head_groups": None,
    "tile_tokens": None,
    "backend": "auto",
    "keep": "auto",
    "checkpointing": None,
    "offload": "all",
    "limit_gib": None,
}


def h200_cases() -> list[Case]:
    """The cases of the published table."""
    long = [
        dict(head_groups=8, backend="fa4"),
        dict(head_groups=8, backend="fa4", offload="none"),
        dict(head_groups=2, backend="fa4"),
        dict(head_groups=1, backend="fa4"),
        dict(head_groups=1, backend="cudnn"),
        dict(head_groups=8, backend="fa4", keep="x"),
    ]
    peers = [
        dict(tokens=tokens, backend="fa4", **settings)
        for tokens in (32768, 131072)
        for settings in (
            dict(class_type="custom", keep="all", offload="none"),
            dict(class_type="custom"),
            dict(class_type="liger", checkpointing="selective"),
            dict(class_type="liger", checkpointing="selective", offload="none"),
            dict(class_type="liger", checkpointing="layers"),
            dict(class_type="liger", checkpointing="none", offload="none"),
            dict(class_type="vanilla", checkpointing="selective"),
        )
    ]
    extreme = [
        dict(tokens=1048576, layers=2, head_groups=8, backend="fa4"),
        dict(tokens=2097152, layers=1, head_groups=8, backend="fa4", limit_gib=80),
    ]
    families = [
        dict(preset=preset, layers=1, backend="fa4", **settings)
        for preset in ("qwen3-8b", "qwen2.5-7b", "mistral-7b", "phi-4")
        for settings in (
            dict(class_type="custom"),
            dict(class_type="liger", checkpointing="selective", offload="none"),
        )
    ]
    return [*long, *peers, *extreme, *families]


def source_and_sink():
    """Stand-ins for embedding and loss that keep nothing of a row's size."""
    import torch

    class Source(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, tokens, hidden):
            return torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx, dx):
            return dx[0, 0, 0].float(), None, None

    class Sink(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.like = y.shape, y.dtype
            return y.new_zeros(())

        @staticmethod
        def backward(ctx, d_loss):
            return torch.randn(ctx.like[0], dtype=ctx.like[1], device=d_loss.device)

    return Source.apply, Sink.apply


def run_case(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """One row of the results, from this process."""
    import torch

    from longctx.calls.caller import Caller
    from longctx.loop.metrics import peak_memory
    from profiling.build import build_model

    if case["limit_gib"]:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["limit_gib"] * GIB / total_bytes)
    torch.manual_seed(0)
    settings = {name: case[name] for name in ("head_groups", "tile_tokens", "keep")}
    settings |= dict(offload_activations=case["offload"], host_memory_gib=100)
    model = build_model(case, device=torch.device("cuda"), vocabulary=128, **settings)
    tokens = case["tokens"]
    positions = torch.arange(tokens, device="cuda")[None]
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    source, sink = source_and_sink()

    def layers_of(x: torch.Tensor) -> torch.Tensor:
        position_ids = positions[:, : x.shape[1]]
        inputs = dict(inputs_embeds=x, position_ids=position_ids, use_cache=False)
        if case["class_type"] == "custom":  # as before the loss, nobody else holds the gradient
            inputs["caller"] = Caller(owns_gradient=True)
        return model.model(**inputs).last_hidden_state

    weights_bytes = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
    forward_s, backward_s = [], []
    row = {key: value for key, value in case.items() if key != "limit_gib"}
    with until_out_of_memory() as outcome:
        if case["class_type"] == "custom":
            model.longctx.reserve(model, tokens)
            row |= ladder_columns(model.longctx.store.ladder, model.longctx.adopted.cut)
        for step in range(repeats + 1):
            length = tokens if step else min(tokens, WARM_UP_TOKENS)
            model.zero_grad(set_to_none=True)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            loss = sink(layers_of(source(anchor, length, model.config.hidden_size)))
            events[1].record()
            loss.backward()
            events[2].record()
            torch.cuda.synchronize()
            if step:  # the first compiles the kernels
                forward_s.append(events[0].elapsed_time(events[1]) / 1e3)
                backward_s.append(events[1].elapsed_time(events[2]) / 1e3)
            else:
                torch.cuda.reset_peak_memory_stats()
    row |= outcome
    if row["status"] == "oom":
        return [row]
    peak = peak_memory(torch.device("cuda"))
    layers = case["layers"]
    row |= {
        "fwd_s": statistics.median(forward_s) / layers,
        "bwd_s": statistics.median(backward_s) / layers,
        "layer_s": statistics.median(map(sum, zip(forward_s, backward_s, strict=True))) / layers,
        "peak_gib": peak["peak_gpu_gib"] - 2 * weights_bytes / GIB,
        "peak_total_gib": peak["peak_gpu_gib"],
        "reserved_gib": peak["peak_reserved_gib"],
        "host_gib": peak["peak_host_gib"],
    }
    return [rounded(row)]


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={"h200": h200_cases()},
    measure=run_case,
)

if __name__ == "__main__":
    runner.main(BENCH)
