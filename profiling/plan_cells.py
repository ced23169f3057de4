"""Predicted beside measured, for every whole step and layer in profiling/results that a plan knows.

    python profiling/plan_cells.py --output profiling/results/plan_cells

writes plan_cells.json and, one panel for GPU, host and seconds each, plan_cells.png.

A row that was measured before the ladder and the larger pieces (rows without `keep`) is predicted
with what was then: x and o kept, tiles of 4096 tokens, 1 GiB of logits; where states live is always
decided as today. Rows of the front (forward and backward alone, by budget) are predicted with the
ladder and the cut that their text names; those that ran out of memory must be refused. Host memory
is compared where a row is of a process of its own, on a machine that nothing else used.

So are rows of engines, for which the run's free host memory is not known. Left out are peers with
`offload=all` or `checkpointing=selective`: no flag of train.py makes them so. Of the engines'
numbers fitted to rows are the update's seconds and attention's beside exchanges; bytes are counted.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.config import ModelArguments
from longctx.engines import choose_engine
from longctx.engines.layout import Layout
from longctx.memory import plan as memory_plan
from longctx.memory.ladder import Chosen, Keep, Ladder, Rung
from longctx.memory.plan import GIB, Place, default_head_groups
from longctx.model.blocks import state_blocks
from longctx.plan import predict
from longctx.plan.buffers import other_phases, scheduled_phases
from longctx.plan.decide import Budget, Decision, HostRoom, Kept, keeping
from longctx.plan.machines import MACHINES
from longctx.plan.predict import Plan, Run, Subject, plan
from longctx.plan.seconds import Task, seconds
from longctx.report.page import pyplot, with_ending
from longctx.report.predicted import equal_tokens
from longctx.run.loading import load_config
from profiling.build import VOCABULARY
from profiling.front import MODELS, batches
from profiling.results import files_named, write_results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiling" / "results"
LONGEST = "h200_longest_step"
PRESET, KV_HEADS = "llama-3.1-8b", 8
STATES_MD = {131072: 11.65, 8192: 6.94}
"""docs/states.md: peaks with everything on the host, in GiB, by tokens."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str
    plan: Plan
    measured: dict[str, float]

    @property
    def kind(self) -> str:
        """Its colour in the plot."""
        run = self.plan.run
        if run.model.lora_r is not None:
            return "adapters"
        if run.engine is None:
            return "no engine" if run.model.class_type == "custom" else run.model.class_type
        return f"{run.engine.name}, {run.gpus} GPU{'s' * (run.gpus > 1)}"

    def predicted(self) -> dict[str, float]:
        return {
            "gpu_gib": self.plan.gpu_bytes / GIB,
            "host_gib": self.plan.host_bytes / GIB,
            "step_s": self.plan.seconds.step,
        }

    def row(self) -> dict[str, Any]:
        """Of the results file."""
        row: dict[str, Any] = {"cell": self.name, "kind": self.kind}
        row |= {"class_type": self.plan.run.model.class_type, "fits": self.plan.fits}
        for key, value in self.predicted().items():
            if key in self.measured or not self.measured:
                row[f"predicted_{key}"] = round(value, 4)
        return row | {f"measured_{key}": value for key, value in self.measured.items()}

    def errors(self) -> dict[str, float]:
        """Relative; of what was measured."""
        predicted = self.predicted()
        return {key: predicted[key] / value - 1 for key, value in self.measured.items()}


@contextmanager
def logits_of_1_gib() -> Iterator[None]:
    with patch.object(memory_plan, "default_logits_bytes", lambda *_: GIB):
        yield


def rows_of(name: str, *others: str) -> list[dict[str, Any]]:
    """Those that ran, and those of `others`."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in rows if row["status"] in ("ok", *others)]


def subject(
    layers: int = 32, vocab: int | None = None, args: ModelArguments | None = None
) -> Subject:
    config = load_config(ModelArguments(preset=PRESET, seq_len=8192), vocab_size=1)
    config.num_hidden_layers = layers
    config.vocab_size = vocab or config.vocab_size
    return Subject(config, args)


def run_of(row: dict[str, Any], exact: bool) -> Run:
    settings: dict[str, Any] = {}
    tokens = row.get("rows", 1) * row["tokens"]
    if row["class_type"] == "custom":
        settings = dict(offload_activations=row["offload"])
        if "ladder" not in row:
            settings |= dict(
                keep="o" if row.get("keep_attention", True) else "x",
                tile_tokens=4096,
                head_groups=row.get("head_groups") or default_head_groups(tokens, KV_HEADS),
            )
    model = ModelArguments(
        preset=PRESET,
        class_type=row["class_type"],
        seq_len=row["tokens"],
        attn_backend=row["backend"],
        host_memory_gib=row.get("host_memory_gib"),
        lora_r=row.get("lora"),
        quantize=row.get("quantize", "none"),
        **settings,
    )
    return Run(
        model=model,
        place=row.get("place", "auto"),
        gpu_memory_gib=row.get("gpu_gib") or None,
        per_device_train_batch_size=row.get("rows", 1),
        exact=exact,
        gpus=row.get("gpus", 1),
        sequence_parallel_size=row.get("sequence_parallel", 1),
        engine=layout_of(row),
    )


def layout_of(row: dict[str, Any]) -> Layout | None:
    name = row.get("engine", "plain")
    if name == "plain":
        return None
    flags = Namespace(deepspeed=None, fsdp=None, fsdp_config=None)
    if name.startswith("fsdp"):
        flags.fsdp, flags.fsdp_config = "true", str(ROOT / f"fsdp_configs/{name}.json")
    else:
        flags.deepspeed = str(ROOT / f"ds_configs/{name}.json")
    engine = choose_engine(flags)
    engine.read(flags)
    return engine.layout(row["gpus"], row.get("passes", 1))


def step_cells() -> Iterator[Cell]:
    """Whole steps, of all 32 layers and of 4."""
    whole, four = subject(), subject(layers=4)
    names = "h100_states_step h200_states_step h200_step h200_compare h200_shared_step"
    for name in (*names.split(), LONGEST):
        for row in rows_of(name):
            if row["engine"] != "plain" or row["tokens"] == 196608 or row.get("lora"):
                continue  # not of these cells; a row whose ladder left 20 GiB of the GPU free
            host_gib = 125 if "16 CPU" in row.get("hardware", "") else 252
            exact = row.get("states") == "fp32"
            with kept_as(row):
                planned = plan(
                    whole if row["layers"] == 32 else four,
                    run_of(row, exact),
                    MACHINES[name[:4]],
                    host_gib * GIB,
                )
            measured = {"gpu_gib": row["peak_gib"], "step_s": row["step_s"]}
            # The first two shared a process, and its slab. The last has 28 GiB more of the host in
            # use than it keeps there, on a machine of two GPUs.
            if exact and row["place"] != "host" and "ladder" not in row:
                measured["host_gib"] = row["host_gib"]
            place = f" of {row['gpu_gib']} GiB" if row.get("gpu_gib") else ""
            place += " on the host" if row.get("place") == "host" else ""
            what = f"{row['class_type']} {row['layers']} layers"
            place += ", today" if "ladder" in row else ""
            cell = f"{name[:4]}{place}: {what}, {row.get('rows', 1)} x {row['tokens']}"
            yield Cell(name=cell, plan=planned, measured=measured)
    for tokens, peak_gib in STATES_MD.items():
        model = ModelArguments(preset=PRESET, seq_len=tokens, offload_activations="all")
        planned = plan(whole, Run(model=model, place="host"), MACHINES["h200"], 252 * GIB)
        cell = f"h200 on the host: custom 32 layers, 1 x {tokens}, today"
        yield Cell(name=cell, plan=planned, measured={"gpu_gib": peak_gib})


def is_custom(row: dict[str, Any]) -> bool:
    return bool(row["class_type"] == "custom")


def is_planned(row: dict[str, Any]) -> bool:
    """Whether flags of train.py ask for what layers keep."""
    settings = row["offload"], row.get("checkpointing")
    return is_custom(row) or settings in (("none", None), ("none", "layers"))


def engine_cells() -> Iterator[Cell]:
    """Whole steps under engines, of all 32 layers."""
    whole = subject()
    for name in ("h200_step", "h200_states_step", "h200_shared_step"):
        rows = [row for row in rows_of(name) if row["engine"] != "plain"]
        mine = sorted((row for row in rows if is_custom(row)), key=itemgetter("tokens"))
        slabs = {row.get("ladder"): row["tokens"] for row in mine}  # the longest row's of a process
        for row in filter(is_planned, rows):
            with kept_as(row):
                planned = plan(whole, run_of(row, exact=True), MACHINES["h200"], 252 * GIB)
            measured = {"gpu_gib": row["peak_gib"], "step_s": row["step_s"]}
            custom, ladder = is_custom(row), row.get("ladder")
            alone = not custom or row["tokens"] == slabs[ladder]
            if alone and "host_gib" in row:
                measured["host_gib"] = row["host_gib"]
            ranks = row.get("sequence_parallel", 1)
            shared = f", {ranks} a row" if ranks > 1 else ""
            old = ", of an older commit" if custom and ladder is None else ""
            what = f"{row['class_type']}, 1 x {row['tokens']}{shared}{old}"
            held = f" of {row['gpu_gib']} GiB" if row.get("gpu_gib") else ""
            cell = f"h200 x {row['gpus']}{held}, {row['engine']}: {what}"
            yield Cell(name=cell, plan=planned, measured=measured)


def adapter_cells() -> Iterator[Cell]:
    """Whole steps of LoRA and QLoRA. Something else ran on the machine: its host is left out."""
    for row in (*rows_of("h200_lora_step"), *rows_of(LONGEST)):
        if row["class_type"] != "custom" or not row.get("lora"):
            continue
        run = run_of(row, exact=True)
        with kept_as(row):
            planned = plan(subject(args=run.model), run, MACHINES["h200"], 252 * GIB)
        kind = "LoRA over bf16" if run.model.quantize == "none" else "QLoRA"
        place = ", weights on the host" if row["place"] == "host" else ""
        cell = f"h200 of {row['gpu_gib']} GiB: {kind}{place}, 1 x {row['tokens']}"
        measured = {"gpu_gib": row["peak_gib"], "step_s": row["step_s"]}
        yield Cell(name=cell, plan=planned, measured=measured)


@contextmanager
def kept_as(row: dict[str, Any]) -> Iterator[None]:
    """With the ladder and the cut that a row names."""
    if "ladder" not in row:
        with logits_of_1_gib():
            yield
        return
    text = row["ladder"]
    ladder, cut = read_ladder(text if "head group" in text else f"{text}; {FIRST_CUT}")
    given = lambda sizes, *_: Chosen(ladder, replace(sizes, **cut))  # noqa: E731
    with patch.object(predict, "_choose", given):
        yield


FIRST_CUT = "1 head group, tiles of 8192 tokens"
"""Of 8192 tokens, before rows said it."""


def layer_cells() -> Iterator[Cell]:
    """Layers alone: seconds."""
    for name in ("h200_layer", "h200_layer_long"):
        for row in rows_of(name):
            few = subject(layers=row["layers"], vocab=128)
            with logits_of_1_gib():
                planned = plan(few, run_of(row, exact=False), MACHINES["h200"], 512 * GIB)
            groups = row["head_groups"] or "default"
            what = f"{row['class_type']} {row['backend']}, {groups} head groups, {row['tokens']}"
            measured = {"step_s": row["layer_s"] * row["layers"]}
            yield Cell(name=f"h200 layers: {what}", plan=planned, measured=measured)


# --- the front -------------------------------------------------------------------------------

NAMES = ("x", "o", "h", "q k v", "gate up")


def read_ladder(text: str) -> tuple[Ladder, dict[str, int]]:
    """From what `Runtime.describe` says: the ladder, and how the work is cut."""
    kept, _, cut = text.removeprefix("kept for backward: ").rpartition("; ")
    ladder: list[Keep] = []
    for first, last, what in re.findall(r"layers (\d+) to (\d+): ([^;]+)", kept):
        places = {place: names for names, place in re.findall(r"([a-z ]+?) on the (\w+)", what)}
        hosted, on_gpu = (_count(places.get(place, "")) for place in ("host", "GPU"))
        keep = Keep(Rung(hosted + on_gpu - 1), Rung(hosted - 1) if hosted else None)
        ladder += (int(last) - int(first) + 1) * [keep]
    found = re.match(r"(\d+) head groups?, tiles of (\d+) tokens(?:, ([\d.]+) GiB of logits)?", cut)
    assert found is not None, text
    pieces = dict(head_groups=int(found[1]), tile_tokens=int(found[2]))
    return tuple(ladder), pieces | (
        {"logits_bytes": int(float(found[3]) * GIB)} if found[3] else {}
    )


def _count(names: str) -> int:
    return sum(f" {name} " in f" {names.strip()} " for name in NAMES)


def front_cells() -> Iterator[Cell]:
    """Forward and backward alone: no states, no update. Of the peers, checkpointing by layer."""
    found = batches()
    documents = {k: round(equal_tokens(b["position_ids"].numpy())) for k, b in found.items()}
    for row in rows_of("h200_front", "oom"):
        settings = row.get("checkpointing"), row.get("offload")
        if row["class_type"] == "custom" or settings == ("layers", "none"):
            yield front_cell(row, found[row["rows"]]["input_ids"].numel(), documents[row["rows"]])


def front_cell(row: dict[str, Any], tokens: int, document: int) -> Cell:
    machine, ours = MACHINES["h200"], row["class_type"] == "custom"
    preset, layers = MODELS[row["model"]]
    args = ModelArguments(
        preset=preset,  # type: ignore[arg-type]
        class_type=row["class_type"],
        seq_len=tokens,
        extend_context=True,
        attn_backend="fa4",
    )
    config = load_config(args, vocab_size=VOCABULARY)
    config.num_hidden_layers = layers or config.num_hidden_layers
    made, run = Subject(config), Run(model=args, exact=False)
    sizes, ladder = made.sizes(run), ()
    if ours:
        ladder, cut = read_ladder(row["ladder"])
        sizes = replace(sizes, writes_gradients=True, **cut)
    specs = state_blocks(made.model, movable=ours)
    places, kept = [Place() for _ in specs], keeping(sizes, tokens, ladder) if ours else Kept()
    limit = int(row.get("budget_gib", machine.gpu_gib) * GIB)
    decision = Decision(
        specs=specs,
        blocks=[replace(spec.sizes(accumulates=False), states=0) for spec in specs],
        places=places,
        kept=kept,
        host=HostRoom(specs, places, accumulates=False, kept_bytes=kept.hosted),
        budget=Budget(limit, 0),
        needed_bytes=0,
        sizes=sizes if ours else None,
    )
    phases = (
        scheduled_phases(decision, sizes, tokens, False)
        if ours
        else other_phases(decision, sizes, tokens, False, row["class_type"])
    )
    task = Task(
        sizes=sizes,
        tokens=tokens,
        document=document,
        class_type=row["class_type"],
        ladder=ladder,
        trained=0,
        exact=False,
    )
    planned = Plan(
        run=run,
        machine=machine,
        sizes=sizes,
        backend="fa4",
        decision=decision,
        phases=[phase for phase in phases if phase.name != "update"],
        seconds=seconds(task, decision, machine, "fa4", 1),
        gpu_limit=limit,
        problem=None,
        rank_host_bytes=decision.host.nbytes,
        parameters=made.parameters,
    )
    ran = row["status"] == "ok"
    if not ran and planned.gpu_bytes <= limit:
        sys.exit(f"error: not refused: {row}")
    budget = f" in {row['budget_gib']:g} GiB" if ours else ""
    name = f"{row['model']}, {row['rows']}: {row['class_type']}{budget}"
    measured = {"gpu_gib": row["peak_gib"], "step_s": row["s"]} if ran else {}
    return Cell(name=name if ran else f"{name}: refused", plan=planned, measured=measured)


# --- the plot --------------------------------------------------------------------------------

PANELS = (
    ("gpu_gib", "GPU peak (GiB)"),
    ("host_gib", "host memory (GiB)"),
    ("step_s", "a step (s)"),
)
MARKERS = {"custom": "o", "liger": "s", "vanilla": "^"}
BAND = 0.05


def draw(groups: dict[str, list[Cell]]) -> Any:
    """Predicted against measured, on logarithmic axes."""
    plt = pyplot()
    fig, panels = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.8))
    kinds = list(dict.fromkeys(cell.kind for cells in groups.values() for cell in cells))
    colours = plt.get_cmap("tab10")
    for axes, (key, title) in zip(panels, PANELS, strict=True):
        shown = [c for cells in groups.values() for c in cells if key in c.measured]
        for cell in shown:
            axes.plot(
                cell.measured[key],
                cell.predicted()[key],
                MARKERS[cell.plan.run.model.class_type],
                color=colours(kinds.index(cell.kind)),
                markersize=4,
                alpha=0.8,
                label=cell.kind,
            )
        ends = [f * m(c.measured[key] for c in shown) for f, m in ((0.8, min), (1.25, max))]
        axes.plot(ends, ends, color="grey", linewidth=0.8)
        low, high = ([(1 + sign * BAND) * x for x in ends] for sign in (-1, 1))
        axes.fill_between(ends, low, high, color="grey", alpha=0.2, label="within 5%")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{title}: {len(shown)} cells", fontsize=9)
        axes.set_xlabel("measured")
    panels[0].set_ylabel("predicted")
    found = {
        t: h for axes in fig.axes for h, t in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    fig.tight_layout()
    fig.legend(found.values(), found.keys(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0))
    plt.close(fig)
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--output", type=files_named(".json", ".png"), help="files are OUTPUT.json, .png"
    )
    args = parser.parse_args()
    groups = {
        "whole steps and layers": [*step_cells(), *layer_cells()],
        "engines": [*engine_cells()],
        "adapters": [*adapter_cells()],
        "the front": [*front_cells()],
    }
    for title, cells in groups.items():
        for cell in cells:
            found = ", ".join(f"{key} {error:+.1%}" for key, error in cell.errors().items())
            print(f"{cell.name:74} {found}")
        for key in ("gpu_gib", "host_gib", "step_s"):
            errors = [abs(e[key]) for cell in cells if key in (e := cell.errors())]
            if errors:
                mean, worst = statistics.mean(errors), max(errors)
                print(f"{title}, {key}: {len(errors)} cells, mean {mean:.1%}, worst {worst:.1%}")
    if args.output:
        rows = [{"of": title, **cell.row()} for title, cells in groups.items() for cell in cells]
        write_results(with_ending(args.output, ".json"), rows)
        drawn = draw(groups)
        drawn.savefig(with_ending(args.output, ".png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
