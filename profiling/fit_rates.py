"""Fits the numbers of longctx/cost/fitted.py again, from the committed results.

    python profiling/fit_rates.py

prints a line for each: its value today, what the results give, and the files they are in; then
those that no results file can give. Nothing is measured and no GPU is needed; it takes 15 seconds,
most of them for plans of the steps that were measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.constants import GIB
from longctx.cost import fitted
from longctx.cost.images import Images
from longctx.cost.machines import MACHINES
from longctx.cost.seconds import Seconds
from longctx.cost.sizes import Sizes
from longctx.train.options.config import ModelArguments
from longctx.train.plan.engines import shared_rows
from longctx.train.plan.predict import plan
from longctx.train.plan.subject import Subject
from profiling.front import batches
from profiling.plan_cells import (
    LONGEST,
    PRESET,
    RESULTS,
    front_cell,
    image_cells,
    kept_as,
    machine_of,
    planned,
    results,
    rows_of,
    run_of,
    subject,
)

H200 = MACHINES["h200"]
PARAMETERS, LAYER, EMBEDDING = 8_030_261_248, 218_112_000, 525_336_576
"""Of Llama-3.1-8B: all, of a decoder layer, of the embedding and of lm_head each."""
D, F, LAYERS, BF16 = 4096, 14336, 32, 2
HOST_GIB = 252
"""Of the machine on which whole steps were measured."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    name: str
    today: float
    again: Callable[[], float]
    files: str
    tolerance: float
    """Relative: how far what the results give may be from today's value."""


def where(name: str, **values: Any) -> Iterator[dict[str, Any]]:
    """Rows of a results file that have these values."""
    for row in rows_of(name):
        if all(row.get(key) == value for key, value in values.items()):
            yield row


# --- memory ----------------------------------------------------------------------------------


def gaps() -> float:
    """The most with which every run that was measured within a budget still fits, with the ladder
    that ran: each is planned with less and less of its GPU until it does not fit."""
    rows = [row for name in (LONGEST, "h200_lora_step") for row in where(name, class_type="custom")]
    return fitted.GAPS + min(_spare_units(row) for row in rows if row["gpu_gib"])


def _spare_units(row: dict[str, Any]) -> float:
    """GPU memory that a run can do without, in (T, D) tensors; below 0: that it lacks."""
    run = run_of(row, exact=True)
    of, unit = _subject(run.model.lora_r, run.model.quantize), row["tokens"] * D * BF16

    def fits(units: float) -> bool:
        less = run.having(gpu_memory_gib=row["gpu_gib"] - units * unit / GIB)
        return plan(of, less, H200, HOST_GIB * GIB, kept_as(row)).fits

    low, high = -1.0, 1.0
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@cache
def _subject(lora_r: int | None, quantize: Literal["none", "nf4"]) -> Subject:
    return subject(args=ModelArguments(preset=PRESET, lora_r=lora_r, quantize=quantize))


def process_bytes() -> float:
    rows = where("h200_states_step", tokens=8192, rows=1, gpu_gib=0, place="auto", engine="plain")
    return statistics.median(row["host_gib"] for row in rows) * GIB


def engine_process_gib(engine: str) -> float:
    rows = [
        row
        for name in ("h200_step", "h200_shared_step")
        for row in where(name, engine=engine, gpus=2, offload="none")
        if "host_gib" in row
    ]
    return statistics.mean(row["host_gib"] / row["gpus"] for row in rows)


# --- seconds ---------------------------------------------------------------------------------


def small_heads() -> float:
    """Of forward and backward of one document of 8192 tokens and of 131072: what is not attention
    is taken from the plan."""
    shares = []
    for rows in ("8192 tokens", "131072 tokens"):
        tokens = batches()[rows]["input_ids"].numel()
        for row in where("h200_front", model="Llama-3.2-1B", rows=rows, class_type="custom"):
            seconds = front_cell(row, tokens, tokens).plan.seconds
            measured = row["s"] - (seconds.step - seconds.attention)
            shares.append(fitted.SMALL_HEADS * seconds.attention / measured)
    return statistics.mean(shares)


def wide_heads(backend: str, way: str) -> float:
    """Of one document of 131072 tokens, heads of 256 in those of 128."""

    def rate(head_dim: int) -> float:
        case = dict(backend=backend, tokens=131072, window=None, softcap=None)
        (row,) = where("h200_attention", **case, head_dim=head_dim)
        return float(row[f"{way}_tflops"])

    return rate(256) / rate(128)


def capped_scores(backend: str, head_dim: int, way: str) -> float:
    """Of one document of 131072 tokens, with a softcap of 50 in without."""

    def rate(softcap: float | None) -> float:
        case = dict(backend=backend, tokens=131072, window=None, head_dim=head_dim)
        (row,) = where("h200_attention", **case, softcap=softcap)
        return float(row[f"{way}_tflops"])

    return rate(50.0) / rate(None)


def window_edges(way: str) -> float:
    """Keys for each query that explain what fa4's windows take longer than by their area."""
    keys = []
    for head_dim in (128, 256):
        case = dict(backend="fa4", tokens=131072, softcap=None, head_dim=head_dim)
        rates = [
            next(iter(where("h200_attention", **case, window=window)))[f"{way}_tflops"]
            for window in (None, 1024)
        ]
        keys.append(1024 * (rates[0] / rates[1] - 1))
    return statistics.mean(keys)


def attention_share(way: str) -> float:
    """The smallest of the estimated machines'."""
    estimated = (machine for machine in MACHINES.values() if not machine.measured)
    return min(
        getattr(next(iter(machine.attention.values())), way) / machine.flops
        for machine in estimated
    )


def peer_bytes() -> float:
    """Of the gathers of a step of two ranks: of each layer and of the embedding twice, of lm_head
    once."""
    rows = json.loads((RESULTS / "h200_shared_trace.json").read_text())["rows"]
    (row,) = (row for row in rows if "AllGather" in row["kernel"])
    gathered = 2 * LAYERS * LAYER + 3 * EMBEDDING
    return float(gathered * BF16 / 2 / (row["ms"] / 1e3))


def cpu_adam() -> float:
    rows = [
        row
        for name in ("h200_step", "h200_states_step")
        for row in where(name, engine="zero3_cpu", layers=LAYERS)
    ]
    return statistics.median(PARAMETERS / row["opt_s"] for row in rows)


def update_bytes(engine: str) -> float:
    (row,) = where("h200_step", engine=engine, gpus=2, class_type="liger")
    return float(row["opt_s"] * H200.memory_bytes * row["gpus"] / PARAMETERS)


def hooks_parameters() -> float:
    def backward(engine: str, class_type: str) -> float:
        (row,) = where("h200_step", engine=engine, gpus=2, class_type=class_type)
        return float(row["bwd_s"])

    longer = [backward("zero3", kind) - backward("fsdp2", kind) for kind in ("custom", "liger")]
    return PARAMETERS / statistics.mean(longer)


def beside() -> float:
    """What measured steps take longer than planned without it, in exchanges of shared rows."""
    whole, found = subject(), []
    for row in where("h200_shared_step", engine="fsdp2", class_type="custom"):
        run = run_of(row, exact=True)
        made = planned(row, whole, run)["plan"]
        taken = _taken(made.sizes, run.tokens)
        found.append(fitted.BESIDE * (1 + (row["step_s"] - made.seconds.step) / taken))
    return statistics.mean(found)


def _taken(sizes: Sizes, tokens: int) -> float:
    exchanged = shared_rows(sizes, tokens, H200)
    return exchanged.taken_forward + exchanged.taken_backward


def peer_works(class_type: str) -> float:
    """Of a layer in units of (T, D), the median of all lengths."""
    rows = where("h200_layer", class_type=class_type)
    return statistics.median(row["peak_gib"] * GIB / (row["tokens"] * D * BF16) for row in rows)


def peer_moves(class_type: str) -> float:
    """Elements a token that forward moves, in D: what is left of its seconds when matmuls and
    attention are taken off, of torch's attention at 32768 tokens."""
    (row,) = where("h200_layer", class_type=class_type, tokens=32768, backend="sdpa")
    return _moved(row, "fwd_s", matmuls=1, backward=0)


def peer_moves_of_a_step(class_type: str) -> float:
    """The same of forward and backward, the median of all rows."""
    rows = where("h200_layer", class_type=class_type)
    return statistics.median(_moved(row, "layer_s", matmuls=4, backward=1) for row in rows)


def _moved(row: dict[str, Any], seconds: str, matmuls: int, backward: int) -> float:
    """`matmuls` times those of forward; attention's forward once, or with its backward twice."""
    tokens = row["tokens"]
    rates = H200.attention_at("cudnn" if row["backend"] == "sdpa" else row["backend"], tokens)
    attention = 2 * D * tokens**2
    left = row[seconds] - matmuls * 2 * tokens * LAYER / H200.flops
    left -= (1 + backward) * attention / rates.forward
    left -= backward * 2.5 * attention / rates.backward
    return float(left * H200.memory_bytes / (BF16 * tokens * D))


def _in_hidden(multiples: tuple[float, float]) -> float:
    """Multiples of D and of F, in D."""
    return multiples[0] + multiples[1] * F / D


def _of_peer(kind: str) -> Iterator[Fit]:
    peer, file = fitted.PEERS[kind], "h200_layer"
    moves = _in_hidden(peer.moves)
    for name, today, again, tolerance in (
        ("works", _in_hidden(peer.works), peer_works, 0.03),
        ("moves", moves, peer_moves, 0.03),
        ("moves * (2 + more)", moves * (2 + peer.more), peer_moves_of_a_step, 0.08),
    ):
        yield Fit(
            name=f"PEERS[{kind}].{name}, in D",
            today=today,
            again=partial(again, kind),
            files=file,
            tolerance=tolerance,
        )


def grouped() -> float:
    """FLOPs over seconds of the four matmuls of experts that are no gradients of weights."""
    names = ("gate_up", "down", "d_product", "d_hidden")
    rows = [
        row for row in where("h100_grouped", impl="longctx", blocks="default") if row["op"] in names
    ]
    flops = sum(row["tflop_per_s"] * row["ms"] * 1e9 for row in rows)
    return float(flops / sum(row["ms"] / 1e3 for row in rows) / MACHINES["h100"].flops)


def mixers(files: Sequence[str], layers: int, maps: Sequence[tuple[int, int]]) -> float:
    """A kind of MIXERS, forward twice and backward, the mean of these files: the FLOPs that the GPU
    computes in the seconds of the phase that matmuls and the rows around them (7 of them) do not
    take. `maps` are the inputs and outputs of a mixer's linear layers, the first of which reads
    the hidden state."""
    matmuls = 3 * 2 * sum(inputs * outputs for inputs, outputs in maps)
    return statistics.mean(
        (_mixer_flops(file, layers, maps[0][0]) - matmuls) / sum(outputs for _, outputs in maps)
        for file in files
    )


def _mixer_flops(file: str, layers: int, hidden: int) -> float:
    """FLOPs of matmuls for a token, in the seconds of a layer's mixer without the rows around."""
    found = results(file)
    (row,) = (row for row in found["rows"] if row["phase"] == "mixer")
    gpu = machine_of(file)
    seconds = row["s_per_step"] / layers / row["tokens"]
    return float((seconds - 7 * hidden * BF16 / gpu.memory_bytes) * gpu.flops)


QWEN3_5_9B = [(4096, 8192 + 4096 + 32 + 32), (4096, 4096)]
GRANITE_4_TINY = [(1536, 2 * 3072 + 2 * 128 + 48), (3072, 1536)]
"""The linear layers of their mixers."""


def towers() -> float:
    """The mean of two steps: of the seconds in which the GPU is not idle, those that the language
    model does not take."""
    shares = []
    for (_, seconds, images), row in zip(_image_steps(), _image_rows(), strict=True):
        rest = seconds.products + seconds.attention + seconds.memory
        busy = row["step_s"] * (1 - row["idle"]) - rest
        shares.append(images.flops / busy / MACHINES["h100"].flops)
    return statistics.mean(shares)


def tower_launch_s() -> float:
    """Of the step whose tower trains, which takes as long as Python launches its kernels."""
    *_, (step_s, seconds, images) = _image_steps()
    measured = step_s - (seconds.step - seconds.images)
    computed = images.flops / fitted.TOWERS / MACHINES["h100"].flops
    return float((measured**3 - computed**3) ** (1 / 3)) / images.kernels


def _image_steps() -> Iterator[tuple[float, Seconds, Images]]:
    """Yields the measured seconds of each step with images, and what is planned for it."""
    for cell in image_cells():
        assert cell.plan.images is not None
        yield cell.measured["step_s"], cell.plan.seconds, cell.plan.images


def _image_rows() -> list[dict[str, Any]]:
    rows = [*where("h100_images", side="custom")]
    return [row for row in rows if row["of_commit"] == rows[-1]["of_commit"]]


FITS: tuple[Fit, ...] = (
    Fit(
        name="GAPS",
        today=fitted.GAPS,
        again=gaps,
        files=f"{LONGEST}, h200_lora_step",
        tolerance=0.25,  # a tenth of a tensor is 0.1 GiB at 131072 tokens
    ),
    Fit(
        name="PROCESS_BYTES",
        today=fitted.PROCESS_BYTES,
        again=process_bytes,
        files="h200_states_step",
        tolerance=0.05,
    ),
    Fit(
        name="ENGINE_PROCESS_GIB",
        today=fitted.ENGINE_PROCESS_GIB,
        again=partial(engine_process_gib, "fsdp2"),
        files="h200_step",
        tolerance=0.05,
    ),
    Fit(
        name="ZERO_PROCESS_GIB",
        today=fitted.ZERO_PROCESS_GIB,
        again=partial(engine_process_gib, "zero3"),
        files="h200_step, h200_shared_step",
        tolerance=0.02,
    ),
    Fit(
        name="SMALL_HEADS",
        today=fitted.SMALL_HEADS,
        again=small_heads,
        files="h200_front",
        tolerance=0.03,
    ),
    *(
        Fit(
            name=f"WIDE_HEADS[{backend}], {way}",
            today=today,
            again=partial(wide_heads, backend, way),
            files="h200_attention",
            tolerance=0.03,
        )
        for backend, shares in fitted.WIDE_HEADS.items()
        for way, today in zip(("fwd", "bwd"), shares, strict=True)
    ),
    *(
        Fit(
            name=f"CAPPED_SCORES[{backend}][{head_dim}], {way}",
            today=today,
            again=partial(capped_scores, backend, head_dim, way),
            files="h200_attention",
            tolerance=0.03,
        )
        for backend, sizes in fitted.CAPPED_SCORES.items()
        for head_dim, shares in sizes.items()
        for way, today in zip(("fwd", "bwd"), shares, strict=True)
    ),
    *(
        Fit(
            name=f"WINDOW_EDGES, {way}",
            today=today,
            again=partial(window_edges, way),
            files="h200_attention",
            tolerance=0.03,
        )
        for way, today in zip(("fwd", "bwd"), fitted.WINDOW_EDGES, strict=True)
    ),
    *(
        Fit(
            name=f"ATTENTION_SHARES, {way}",
            today=today,
            again=partial(attention_share, way),
            files="longctx/cost/cards.py",
            tolerance=0.03,
        )
        for way, today in zip(("forward", "backward"), fitted.ATTENTION_SHARES, strict=True)
    ),
    Fit(
        name="NVLINK",
        today=fitted.NVLINK,
        again=peer_bytes,
        files="h200_shared_trace",
        tolerance=0.25,  # the trace's gathers run beside attention
    ),
    Fit(
        name="CPU_ADAM",
        today=fitted.CPU_ADAM,
        again=cpu_adam,
        files="h200_step, h200_states_step",
        tolerance=0.1,
    ),
    Fit(
        name="ENGINE_UPDATE_BYTES",
        today=fitted.ENGINE_UPDATE_BYTES,
        again=partial(update_bytes, "fsdp2"),
        files="h200_step",
        tolerance=0.02,
    ),
    Fit(
        name="ZERO_UPDATE_BYTES",
        today=fitted.ZERO_UPDATE_BYTES,
        again=partial(update_bytes, "zero3"),
        files="h200_step",
        tolerance=0.02,
    ),
    Fit(
        name="HOOKS_PARAMETERS",
        today=fitted.HOOKS_PARAMETERS,
        again=hooks_parameters,
        files="h200_step",
        tolerance=0.15,
    ),
    Fit(
        name="BESIDE",
        today=fitted.BESIDE,
        again=beside,
        files="h200_shared_step",
        tolerance=0.2,
    ),
    Fit(
        name="GROUPED",
        today=fitted.GROUPED,
        again=grouped,
        files="h100_grouped",
        tolerance=0.05,
    ),
    *(
        Fit(
            name=f"MIXERS[{kind}]",
            today=2 * fitted.MIXERS[kind][0] + fitted.MIXERS[kind][1],
            again=partial(mixers, files, *of),
            files=", ".join(files),
            tolerance=0.05,
        )
        for kind, files, *of in (
            ("delta rule", ("h100_hybrid_phases", "h200_hybrid_phases"), 24, QWEN3_5_9B),
            ("mamba", ("h200_granite_phases",), 36, GRANITE_4_TINY),
        )
    ),
    Fit(
        name="TOWERS",
        today=fitted.TOWERS,
        again=towers,
        files="h100_images",
        tolerance=0.1,
    ),
    Fit(
        name="TOWER_LAUNCH_S",
        today=fitted.TOWER_LAUNCH_S,
        again=tower_launch_s,
        files="h100_images",
        tolerance=0.1,
    ),
    *_of_peer("vanilla"),
    *_of_peer("liger"),
)
UNFITTED = {
    "CONTEXT_BYTES": "in no results file",
    "SHARED_LINK": "in no results file",
    "GPU_SPARE": "chosen",
    "GPU_SPARE_BYTES": "chosen",
    "GPU_MOST_SPARED": "chosen",
    "HOST_SPARE": "chosen",
    "HOST_MOST_SPARED_GIB": "chosen",
    "LAUNCHES": "chosen",
    "ADAPTER_LAUNCHES": "counted in h100_qlora_kernels.json",
    "EXPERT_LAUNCHES": "counted in a trace of layers of Qwen3-30B-A3B",
    "MIXER_LAUNCHES": "counted in the trace of h200_granite_phases.json",
    "LAUNCH_S": "chosen",
    "TOWER_LAUNCHES": "counted",
    "TOWER_GRADIENT_LAUNCHES": "counted",
    "GAP_S": "chosen",
    "HOST_S": "opt_s and rest_s of adapters in h100_everyday.json, less kernels",
    "GRAPHED_TOKENS": "chosen",
    "DEQUANTISE": "0.0564 ms for 14336 x 4096 in h100_nf4.json",
}


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for fit in FITS:
        again = fit.again()
        print(
            f"{fit.name:42} {fit.today:12.5g} today {again:12.5g} fitted "
            f"{again / fit.today - 1:+7.1%}  {fit.files}"
        )
    for name, how in UNFITTED.items():
        print(f"{name:42} {getattr(fitted, name):12.5g} today, {how}")


if __name__ == "__main__":
    main()
