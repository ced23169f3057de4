"""Predicted beside measured, for every whole step and layer in profiling/results that a plan knows.

    python profiling/plan_cells.py --output profiling/results/plan_cells

writes plan_cells.json and, one panel for GPU, host and seconds each, plan_cells.png.

A row that was measured before the ladder and the larger pieces (rows without `keep`) is predicted
with what was then: x and o kept, tiles of 4096 tokens, 1 GiB of logits; where states live is always
decided as today. Rows with a ladder (ladders.py) are predicted with it and with its cut. Of the
front (forward and backward alone, by budget), rows that ran out of memory must be refused. Host
memory is compared where a row is of a process of its own, on a machine that nothing else used.

So are rows of engines, for which the run's free host memory is not known. Left out are peers with
`offload=all` or `checkpointing=selective`: no flag of train.py makes them so. Of the engines'
numbers fitted to rows are the update's seconds and attention's beside exchanges; bytes are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.constants import GIB
from longctx.cost.machines import MACHINES, Machine, machine_like
from longctx.cost.peak import peak, phases
from longctx.cost.sizes import Batch, default_head_groups
from longctx.families.blocks import state_blocks
from longctx.families.vision import towers
from longctx.memory.decide import decided, keeping
from longctx.memory.ladder import Budget, Step, choose, predicted
from longctx.memory.levels import Levels
from longctx.memory.place import PlacedStates, usable_bytes
from longctx.runtime.costs import StepTable
from longctx.train.engines import choose_engine
from longctx.train.engines.layout import Layout
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.report.page import pyplot, with_ending
from longctx.train.report.plan_run import with_answers, with_images
from longctx.train.report.predicted import equal_tokens
from longctx.train.start.loading import load_config
from profiling.bench.everyday_peers import Case, Rows
from profiling.bench.step_bench import engine_options
from profiling.build import VOCABULARY, model_arguments
from profiling.front import MODELS, batches
from profiling.ladders import ladder_of
from profiling.pictures import legend_below
from profiling.results import files_named, write_results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiling" / "results"
LONGEST, PAIRS = "h200_longest_step", "h200_dpo_step"
PRESET, KV_HEADS = "llama-3.1-8b", 8
HOST_GIB = 252
"""What a host of 256 GiB has free; rows of other hosts have `host_free_gib`."""
STATES_MD = {131072: 11.65, 8192: 6.94}
"""docs/states.md: peaks with everything on the host, in GiB, by tokens."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str
    plan: Plan
    """With the ladder that ran."""
    measured: dict[str, float]
    own: Plan | None = None
    """With the plan's own choice of today, as a user is told who asks by flags alone."""

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
        return figures(self.plan)

    def row(self) -> dict[str, Any]:
        """Of the results file."""
        row: dict[str, Any] = {"cell": self.name, "kind": self.kind}
        row |= {"class_type": self.plan.run.model.class_type, "fits": self.plan.fits}
        for key, value in self.predicted().items():
            if key in self.measured or not self.measured:
                row[f"predicted_{key}"] = round(value, 4)
                if self.own is not None:
                    row[f"own_choice_{key}"] = round(figures(self.own)[key], 4)
        return row | {f"measured_{key}": value for key, value in self.measured.items()}

    def errors(self, own: bool = False) -> dict[str, float]:
        """Relative; of what was measured. `own`: of the plan's own choice."""
        predicted = figures(self.own if own and self.own else self.plan)
        return {key: predicted[key] / value - 1 for key, value in self.measured.items()}


def figures(found: Plan) -> dict[str, float]:
    return {
        "gpu_gib": found.gpu_bytes / GIB,
        "host_gib": found.host_bytes / GIB,
        "step_s": found.seconds.step,
    }


def results(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return read


def rows_of(name: str, *others: str) -> list[dict[str, Any]]:
    """The rows whose status is `ok` or one of `others`."""
    return [row for row in results(name)["rows"] if row["status"] in ("ok", *others)]


def machine_of(name: str) -> Machine:
    """The profile of the GPU that a results file was measured on."""
    machine = machine_like(results(name)["hardware"])
    assert machine is not None, name
    return machine


def subject(
    layers: int = 32, vocab: int | None = None, args: ModelArguments | None = None
) -> Subject:
    config = load_config(
        ModelArguments(cuda_graphs="off", preset=PRESET, seq_len=8192), vocab_size=1
    )
    config.num_hidden_layers = layers
    config.vocab_size = vocab or config.vocab_size
    return Subject(config, args)


def run_of(row: dict[str, Any], exact: bool) -> PlannedRun:
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
        cuda_graphs="off",
        preset=row.get("preset", PRESET),
        class_type=row["class_type"],
        seq_len=row["tokens"],
        attn_backend=row["backend"],
        host_memory_gib=row.get("host_memory_gib"),
        lora_r=row.get("lora") or None,
        quantize=row.get("quantize", "none"),
        **settings,
    )
    run = PlannedRun(
        model=model,
        task=row.get("task", "sft"),
        place=row.get("place", "auto"),
        gpu_memory_gib=row.get("gpu_gib") or None,
        per_device_train_batch_size=row.get("rows", 1),
        exact=exact,
        gpus=row.get("gpus", 1),
        sequence_parallel_size=row.get("sequence_parallel", 1),
        engine=layout_of(row),
    )
    return with_answers(run, row.get("answer"))


def layout_of(row: dict[str, Any]) -> Layout | None:
    name = row.get("engine", "plain")
    if name == "plain":
        return None
    flags = Namespace(**dict(deepspeed=None, fsdp=None, fsdp_config=None) | engine_options(name))
    engine = choose_engine(flags)
    engine.read(flags)
    return engine.layout(row["gpus"], row.get("passes", 1))


def step_cells() -> Iterator[Cell]:
    """Whole steps, of all 32 layers and of 4."""
    whole, four = subject(), subject(layers=4)
    names = "h100_states_step h200_states_step h200_step h200_compare h200_shared_step"
    for name in (*names.split(), LONGEST, PAIRS):
        for row in rows_of(name):
            if row["engine"] != "plain" or row["tokens"] == 196608 or row.get("lora"):
                continue  # not of these cells; a row whose ladder left 20 GiB of the GPU free
            exact = row.get("states") == "fp32"
            of = whole if row["layers"] == 32 else four
            plans = planned(row, of, run_of(row, exact), machine_of(name))
            if "ladder" not in row and partly_on_the_host(plans["plan"]):
                continue  # by another order than today's, which nobody wrote down
            measured = measured_of(row, plans["plan"])
            if "host_free_gib" in row and name != "h200_step":  # which counted the whole machine
                measured["host_gib"] = row["host_gib"]
            place = f" of {row['gpu_gib']} GiB" if row.get("gpu_gib") else ""
            place += " on the host" if row.get("place") == "host" else ""
            what = f"{row['class_type']} {row['layers']} layers"
            place += ", today" if "ladder" in row else ""
            cell = f"{name[:4]}{place}: {what}, {row.get('rows', 1)} x {row['tokens']}{pair(row)}"
            yield Cell(name=cell, **plans, measured=measured)
    for tokens, peak_gib in STATES_MD.items():
        model = ModelArguments(
            cuda_graphs="off", preset=PRESET, seq_len=tokens, offload_activations="all"
        )
        found = plan(whole, PlannedRun(model=model, place="host"), MACHINES["h200"], HOST_GIB * GIB)
        cell = f"h200 on the host: custom 32 layers, 1 x {tokens}, today"
        yield Cell(name=cell, plan=found, measured={"gpu_gib": peak_gib})


def pair(row: dict[str, Any]) -> str:
    """What a cell's name adds for a row that is a prompt with two answers."""
    return f", DPO with 2 x {row['answer']}" if row.get("answer") else ""


def partly_on_the_host(found: Plan) -> bool:
    """Some of the states that may wait there."""
    blocks = [
        b for b in zip(found.decision.blocks, found.decision.places, strict=True) if not b[0].fixed
    ]
    kinds = ("weight", "states", "grad")
    return any(
        len({getattr(place, kind) for block, place in blocks if getattr(block, kind)}) == 2
        for kind in kinds
    )


def measured_of(row: dict[str, Any], found: Plan) -> dict[str, float]:
    """GPU memory of runs whose states lived partly on the host is compared since their rows say
    what was free of it: before, which states did was decided in another order than today, and
    nobody wrote it down. At 88064 tokens the plan gives 0.5 GiB to them that it kept for the loss
    when the row was run."""
    today = "host_free_gib" in row and row["tokens"] != 88064
    known = today or not partly_on_the_host(found)
    gpu = {"gpu_gib": row["peak_gib"]} if known else {}
    return gpu | {"step_s": row["step_s"]}


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
        slabs = {process(row): row["tokens"] for row in mine}  # the longest row of each process
        for row in filter(is_planned, rows):
            plans = planned(row, whole, run_of(row, exact=True))
            measured = {"gpu_gib": row["peak_gib"], "step_s": row["step_s"]}
            custom = is_custom(row)
            alone = not custom or row["tokens"] == slabs[process(row)]
            if alone and "host_gib" in row:
                measured["host_gib"] = row["host_gib"]
            ranks = row.get("sequence_parallel", 1)
            shared = f", {ranks} a row" if ranks > 1 else ""
            old = ", of an older commit" if custom and "ladder" not in row else ""
            what = f"{row['class_type']}, 1 x {row['tokens']}{shared}{old}"
            held = f" of {row['gpu_gib']} GiB" if row.get("gpu_gib") else ""
            cell = f"h200 x {row['gpus']}{held}, {row['engine']}: {what}"
            yield Cell(name=cell, **plans, measured=measured)


def process(row: dict[str, Any]) -> str:
    """What the rows of one process share: their ladder and their cut."""
    return json.dumps([row.get("ladder"), row.get("cut")])


def adapter_cells() -> Iterator[Cell]:
    """Whole steps of LoRA and QLoRA. Something else ran on the machine: its host is left out."""
    for row in (*rows_of("h200_lora_step"), *rows_of(LONGEST), *rows_of(PAIRS)):
        if row["class_type"] != "custom" or not row.get("lora"):
            continue
        run = run_of(row, exact=True)
        plans = planned(row, subject(args=run.model), run)
        kind = "LoRA over bf16" if run.model.quantize == "none" else "QLoRA"
        place = ", weights on the host" if row["place"] == "host" else ""
        cell = f"h200 of {row['gpu_gib']} GiB: {kind}{place}, 1 x {row['tokens']}{pair(row)}"
        yield Cell(name=cell, **plans, measured=measured_of(row, plans["plan"]))


def everyday_cells() -> Iterator[Cell]:
    """Whole steps of short rows and of small models. Their host held what a process starts with."""
    ours = [row for row in rows_of("h100_everyday") if row["side"] == "custom"]
    newest = {row["case"]: row for row in ours if row.get("flags") == ""}  # older ones have none
    for row in newest.values():
        if row["task"] != "sft" or row["status"] != "ok":
            continue
        of_row = row | {"class_type": "custom", "backend": "auto", "offload": "auto"}
        run = run_of(of_row, exact=True)
        if row["documents"]:
            lengths = equal_tokens(Rows(case_of(row), 1)[0]["position_ids"].numpy())
            run = replace(run, document_tokens=round(lengths))
        graphs = "auto" if row.get("graphs_gib") else "off"
        run = replace(run, model=replace(run.model, cuda_graphs=graphs))
        made = Subject(load_config(run.model, vocab_size=VOCABULARY), run.model)
        plans = planned(row, made, run, machine_of("h100_everyday"))
        measured = {"gpu_gib": row["peak_gib"], "step_s": row["step_s"]}
        yield Cell(name=f"h100, {row['case']}", **plans, measured=measured)


def mixture_cells() -> Iterator[Cell]:
    """Whole steps of models with experts or mixers, with adapters or all weights. Bytes of the
    first rows of experts are left out: adapters of experts did not wait on the host then, so that
    other weights did. So is the host of short rows, which held little but the process."""
    for name in ("h200_experts_step", "h200_hybrid_step", "h100_hybrid_step"):
        for row in rows_of(name):
            if not is_custom(row):
                continue
            run = run_of(row, exact=True)
            # Layers with mixers did not run as CUDA graphs when these rows were taken.
            graphs = "off" if "hybrid" in name else "auto"
            run = replace(run, model=replace(run.model, cuda_graphs=graphs, extend_context=True))
            made = Subject(load_config(run.model, vocab_size=1), run.model)
            plans = planned(row, made, run, machine_of(name))
            measured = {"step_s": row["step_s"]}
            if "of_commit" in row or name != "h200_experts_step":
                measured["gpu_gib"] = row["peak_gib"]
                measured |= {"host_gib": row["host_gib"]} if row["tokens"] > 32768 else {}
            held = f" of {row['gpu_gib']} GiB" if row.get("gpu_gib") else ""
            four_bits = " in NF4" * (row.get("quantize") == "nf4")
            cell = f"{name[:4]}{held}: {row['preset']}{four_bits}, 1 x {row['tokens']}"
            yield Cell(name=cell, **plans, measured=measured)


_LANGUAGE = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()


def image_cells() -> Iterator[Cell]:
    """Whole steps of rows with the frames of a video, of which two are one image, by the newest
    commit. torch's AdamW held the states, and nobody wrote down what layers kept. A tower that
    trains did so as a whole, beside adapters of the language model alone."""
    rows = [row for row in rows_of("h100_images") if row["side"] == "custom"]
    for row in (row for row in rows if row["of_commit"] == rows[-1]["of_commit"]):
        args = ModelArguments(
            preset="qwen3-vl-8b",
            seq_len=row["tokens"],
            lora_r=row["lora"],
            lora_targets=[*_LANGUAGE],
            train_vision=row["tower"],
        )
        config = load_config(args, vocab_size=1)
        run = PlannedRun(model=args, exact=False)
        pixels = f"{row['pixels']}x{row['pixels']}"
        run = with_images(run, config, row["frames"] // 2, pixels)
        subject = Subject(config, args)
        if row["tower"]:
            for _, tower in towers(subject.model):
                tower.requires_grad_(True)
            subject.count()
        found = plan(subject, run, machine_of("h100_images"), HOST_GIB * GIB)
        trained = ", tower trained" * row["tower"]
        cell = f"h100: {row['frames']} frames of {pixels}, 1 x {row['tokens']}{trained}"
        measured = {"gpu_gib": row["peak_gib"], "step_s": row["step_s"]}
        yield Cell(name=cell, plan=found, measured=measured)


def case_of(row: dict[str, Any]) -> Case:
    """The case of a row of everyday_bench.py."""
    known = [field.name for field in fields(Case) if field.name in row]  # older rows have fewer
    return Case(**{name: row[name] for name in known})


def planned(
    row: dict[str, Any], of: Subject, run: PlannedRun, machine: Machine = MACHINES["h200"]
) -> dict[str, Plan]:
    """With the ladder that ran, and, where a row names it, with the plan's own choice."""
    host_bytes = int(row.get("host_free_gib", HOST_GIB) * GIB)
    if "host_free_gib" in row:  # when its process had taken 1 GiB
        machine = replace(machine, started_bytes=machine.started_bytes - GIB)
    plans = {"plan": plan(of, run, machine, host_bytes, kept_as(row))}
    if "ladder" not in row or (run.engine and run.gpu_memory_gib):  # a flag of no engine
        return plans
    return plans | {"own": plan(of, run, machine, host_bytes)}


def kept_as(row: dict[str, Any]) -> Callable[[Step], Step]:
    """With the ladder and the cut that a row names."""
    return partial(as_it_ran, row) if "ladder" in row else with_logits_of_1_gib


def as_it_ran(row: dict[str, Any], step: Step) -> Step:
    cut = row.get("cut", FIRST_CUT)
    return replace(step, given=(ladder_of(row), replace(step.sizes, **cut)))


def with_logits_of_1_gib(step: Step) -> Step:
    return replace(step, sizes=replace(step.sizes, logits_bytes=GIB))


FIRST_CUT = dict(head_groups=1, tile_tokens=8192)
"""Of 8192 tokens, before rows said it."""


def layer_cells() -> Iterator[Cell]:
    """Layers alone: seconds."""
    for name in ("h200_layer", "h200_layer_long"):
        for row in rows_of(name):
            few = subject(layers=row["layers"], vocab=128)
            run = run_of(row, exact=False)
            plans = {"plan": plan(few, run, MACHINES["h200"], 512 * GIB, with_logits_of_1_gib)}
            groups = row["head_groups"] or "default"
            what = f"{row['class_type']} {row['backend']}, {groups} head groups, {row['tokens']}"
            measured = {"step_s": row["layer_s"] * row["layers"]}
            yield Cell(name=f"h200 layers: {what}", **plans, measured=measured)


# --- other families --------------------------------------------------------------------------


def family_cells() -> Iterator[Cell]:
    """Forward and backward of a few layers alone, and a whole step of QLoRA."""
    for row in rows_of("h200_families_layer"):
        if row["class_type"] == "custom":
            yield family_layers(row)
    for row in rows_of("h200_families_step"):
        run = run_of(row, exact=True)
        plans = planned(row, Subject(load_config(run.model, vocab_size=1), run.model), run)
        cell = f"{row['preset']} of {row['gpu_gib']} GiB: QLoRA, 1 x {row['tokens']}"
        yield Cell(name=cell, **plans, measured=measured_of(row, plans["plan"]))


def family_layers(row: dict[str, Any]) -> Cell:
    machine, layers, tokens = MACHINES["h200"], row["layers"], row["tokens"]
    args = model_arguments(row)
    config = load_config(args, vocab_size=128)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = layers, 128, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    made, run = Subject(config), PlannedRun(model=args, exact=False)
    sizes = replace(made.sizes(run), writes_gradients=True)
    step = Step(
        count=StepTable.of,
        sizes=sizes,
        batch=Batch(tokens, tokens),
        rates=machine.rates("fa4", tokens, *sizes.scores),
        offload="auto",
    )
    without = ("update", "loss", "embedding")
    found = alone(made, run, machine, as_it_ran(row, step), machine.gpu_bytes, without)
    measured = {"gpu_gib": row["peak_total_gib"], "step_s": row["layer_s"] * layers}
    return Cell(name=f"{row['preset']}: {layers} layers, {tokens}", plan=found, measured=measured)


# --- the front -------------------------------------------------------------------------------


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
    args = model_arguments({**row, "preset": preset, "tokens": tokens})
    config = load_config(args, vocab_size=VOCABULARY)
    config.num_hidden_layers = layers or config.num_hidden_layers
    made, run = Subject(config), PlannedRun(model=args, exact=False)
    rates = machine.rates("fa4", document, *made.sizes(run).scores)
    sizes = replace(made.sizes(run), writes_gradients=True, trained=0)
    limit = int(row.get("budget_gib", machine.gpu_gib) * GIB)
    step = Step(
        count=StepTable.of,
        sizes=sizes,
        batch=Batch(tokens, document),
        rates=rates,
        offload="auto" if ours else "none",
    )
    if ours:
        step = as_it_ran(row, step)
    found = alone(made, run, machine, step, limit)
    ran = row["status"] == "ok"
    if not ran and found.gpu_bytes <= limit:
        sys.exit(f"error: not refused: {row}")
    budget = f" in {row['budget_gib']:g} GiB" if ours else ""
    name = f"{row['model']}, {row['rows']}: {row['class_type']}{budget}"
    measured = {"gpu_gib": row["peak_gib"], "step_s": row["s"]} if ran else {}
    own = alone(made, run, machine, replace(step, given=None), limit) if ours and ran else None
    return Cell(name=name if ran else f"{name}: refused", plan=found, measured=measured, own=own)


def alone(
    made: Subject,
    run: PlannedRun,
    machine: Machine,
    step: Step,
    limit: int,
    without: tuple[str, ...] = ("update",),
) -> Plan:
    """Returns the plan of a forward and a backward alone: it has no states, none of the phases that
    `without` names, and no trainer for whom the GPU would wait."""
    specs = state_blocks(made.model, movable=False)
    blocks = [replace(spec.sizes(accumulates=False), states=0) for spec in specs]
    levels = Levels(blocks, "gpu", accumulates=False)
    chosen = choose(step, [levels], Budget(usable_bytes(limit), FRONT_HOST_GIB * GIB))
    decision = decided(specs, blocks, chosen, Budget(limit, 0), keeping(step, chosen), False)
    standing = PlacedStates(blocks, chosen.places, accumulates=False)
    found = phases(step.count(chosen.sizes, step.batch), chosen.ladder, standing)
    found = [phase for phase in found if phase.name not in without]
    most = peak(found).nbytes
    return Plan(
        run=run,
        machine=machine,
        sizes=chosen.sizes,
        backend="fa4",
        decision=decision,
        phases=found,
        seconds=predicted(step, chosen)._replace(waits=0.0),
        gpu_limit=limit,
        problem=None if most <= limit else f"{most / GIB:.1f} GiB of GPU memory are needed",
        rank_host_bytes=decision.host.nbytes,
        reading_bytes=0,
        parameters=made.parameters,
    )


FRONT_HOST_GIB = 100
"""That the front's runs might take."""


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
    legend_below(fig, columns=4)
    plt.close(fig)
    return fig


def scores(title: str, cells: list[Cell]) -> Iterator[str]:
    """Of the ladders that ran, and of the plan's own choices."""
    for own, of in ((False, "the ladder that ran"), (True, "the plan's own choice")):
        scored = [cell for cell in cells if not own or cell.own is not None]
        for key in ("gpu_gib", "host_gib", "step_s"):
            errors = [abs(e[key]) for cell in scored if key in (e := cell.errors(own))]
            if errors:
                mean, worst = statistics.mean(errors), max(errors)
                counted = f"{len(errors)} cells, mean {mean:.1%}, worst {worst:.1%}"
                yield f"{title}, {key}, {of}: {counted}"


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
        "other families": [*family_cells()],
        "experts and mixers": [*mixture_cells()],
        "short rows and small models": [*everyday_cells()],
        "images": [*image_cells()],
        "the front": [*front_cells()],
    }
    for title, cells in groups.items():
        for cell in cells:
            found = ", ".join(f"{key} {error:+.1%}" for key, error in cell.errors().items())
            print(f"{cell.name:74} {found}")
        for line in scores(title, cells):
            print(line)
    if args.output:
        rows = [{"of": title, **cell.row()} for title, cells in groups.items() for cell in cells]
        write_results(with_ending(args.output, ".json"), rows)
        drawn = draw(groups)
        drawn.savefig(with_ending(args.output, ".png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
