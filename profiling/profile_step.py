"""Where a training step's time and memory go: trace, phase table, memory snapshot and timeline.

    python profiling/profile_step.py --preset llama-3.1-8b --layers 4 --seq_len 131072
    python profiling/profile_step.py --config recipes/quickstart.yaml --use_cpu
    accelerate launch --config_file ds_configs/zero3.yaml profiling/profile_step.py --preset ...

All options but the ones below are train.py's (after `--`, if you like). The rows are documents of
random tokens unless --train_file or --dataset_name is given. After `--wait` steps, which compile
kernels, and `--warmup` steps, `--active` steps are recorded; on a GPU one more step follows,
without the profiler, whose allocations are recorded. Memory is asked for by the host, ahead of the
GPU; with `--memory_only` every kernel is waited for, so the timeline shows when memory is used, and
no trace is made. With `--from_beginning` all allocations from before the model is loaded to the end
of the first step are recorded as well. Kernels of CUDA graphs belong to no phase, so layers run
without graphs here unless --cuda_graphs is among the options. Into --profile_dir go, for each
process N,

    trace_rankN.json.gz     open it at https://ui.perfetto.dev or in chrome://tracing
    phases_rankN.json       the table by phase (profiling/phases.py)
    memory_rankN.pickle     open it at https://pytorch.org/memory_viz
    memory_rankN.json.gz    what profiling/memory_timeline.py draws
    beginning_rankN.*       the same two of loading, engine and first step

and, from the first process, profile.html with all of it, profile.png, memory.png and memory.html,
beginning.png and beginning.html.
docs/reading_a_profile.md says how to read them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.constants import GIB
from longctx.errors import UserError
from longctx.kernels.annotate import annotated
from longctx.train.report.page import code, figure, heading, paragraph, pyplot, table, write_page
from longctx.train.trainer.oom import explained_oom
from longctx.train.trainer.trainer import LongTrainer
from profiling import memory_timeline
from profiling.build import PhaseMarks, build_trainer
from profiling.memory_recorder import RecordBeginning, RecordMemory
from profiling.phases import LINES, Table, phase_table, read_trace, show
from profiling.results import describe_run, write_results

NOT_KNOWN = (
    "There is no GPU in this profile. It cannot tell where a step on a GPU would wait for copies, "
    "for the host or for other GPUs, nor which copies would run beside computation. The shares are "
    "a CPU's, which runs plain torch where a GPU runs kernels: those of a GPU are others."
)
"""Of a profile of a CPU."""
ROW_KEYS = ("class_type", "engine", "tokens", "layers")
"""What each row of phases_rankN.json says of the run."""


class RecordTime(TrainerCallback):
    """Runs torch's profiler over the first steps and writes a trace."""

    reads_weights = False

    def __init__(self, args: argparse.Namespace, trace: Path, on_gpu: bool) -> None:
        self.steps_left = args.wait + args.warmup + args.active
        # No stacks: together with named ranges they make torch's own tables fail at random.
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=args.wait, warmup=args.warmup, active=args.active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        )

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.profiler.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.steps_left == 0:
            return
        self.steps_left -= 1
        self.profiler.step()
        if self.steps_left == 0:
            self.profiler.stop()


def annotate_modules(model: Any) -> None:
    """Names the parts of a model that runs Hugging Face's layers, as longctx's own code does."""
    ranges = {"Attention": "attention", "MLP": "mlp", "RMSNorm": "norm", "Layer": "layer forward"}
    sources = set()
    for module in model.modules():
        kind = type(module).__name__
        name = next((name for end, name in ranges.items() if kind.endswith(end)), None)
        if name is not None:
            module.forward = annotated(name)(module.forward)
        if kind.endswith("Attention"):
            for projection in module.children():
                projection.forward = annotated("projections")(projection.forward)
            sources.add(sys.modules[type(module).__module__])
    for source in sources:  # the rotation is a function of the model's source file
        if hasattr(source, "apply_rotary_pos_emb"):
            source.apply_rotary_pos_emb = annotated("rope")(source.apply_rotary_pos_emb)
    model.lm_head.forward = annotated("loss")(model.lm_head.forward)
    model.loss_function = annotated("loss")(model.loss_function)


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """This script's options, and train.py's. Raises UserError."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile_dir", type=Path, default=Path("runs/profile"))
    parser.add_argument("--wait", type=int, default=1, help="steps before the profiler (1)")
    parser.add_argument("--warmup", type=int, default=1, help="steps that warm it up (1)")
    parser.add_argument("--active", type=int, default=1, help="recorded steps (1)")
    parser.add_argument("--layers", type=int, help="instead of the preset's, to fit a machine")
    parser.add_argument("--memory_only", action="store_true", help="no trace; kernels waited for")
    parser.add_argument(
        "--from_beginning", action="store_true", help="memory of loading and first step, too"
    )
    args, flags = parser.parse_known_args(argv)
    for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("layers", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, got {value}")
    if args.memory_only:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when CUDA starts, so before it is asked
    for name in ("memory_only", "from_beginning"):
        if getattr(args, name) and not _on_gpu(flags):
            raise UserError(f"--{name} needs a GPU: torch records none of a CPU's memory")
    flags = [flag for flag in flags if flag != "--"]
    theirs = re.search(r"--class_type[= ]+(vanilla|liger)\b", " ".join(flags))
    if not theirs and not any(flag.startswith("--cuda_graphs") for flag in flags):
        flags += ["--cuda_graphs", "off"]
    return args, flags


def _on_gpu(flags: list[str]) -> bool:
    use_cpu = re.search(r"--use_cpu(?![= ]+(false|0|no))", " ".join(flags), re.IGNORECASE)
    return torch.cuda.is_available() and not use_cpu


def run(args: argparse.Namespace, flags: list[str]) -> LongTrainer:
    """Trains the steps and writes everything. Raises UserError, OutOfMemory among them."""
    on_gpu = _on_gpu(flags)
    args.profile_dir.mkdir(parents=True, exist_ok=True)
    steps_before = 1 if args.memory_only else args.wait + args.warmup + args.active
    with tempfile.TemporaryDirectory() as folder:
        beginning = RecordBeginning() if args.from_beginning else None
        trainer, model_args = build_trainer(
            flags, steps=steps_before + on_gpu, output_dir=Path(folder), layers=args.layers
        )
        rank = trainer.args.process_index
        trace = args.profile_dir / f"trace_rank{rank}.json.gz"
        stem = args.profile_dir / f"memory_rank{rank}"
        description = describe(trainer, model_args, args.profile_dir)
        if model_args.class_type != "custom":
            annotate_modules(trainer.model)
        if not args.memory_only:
            trainer.add_callback(RecordTime(args, trace, on_gpu))
        recorders: list[RecordBeginning | RecordMemory] = []
        if beginning:
            beginning.loaded(trainer, description, args.profile_dir / f"beginning_rank{rank}")
            recorders.append(beginning)
        if on_gpu:
            recorders.append(RecordMemory(trainer, steps_before, description, stem))
        for recorder in recorders:
            trainer.add_callback(recorder)

        def mark(name: str) -> None:
            for recorder in recorders:
                recorder.mark(name)

        trainer.add_callback(PhaseMarks(trainer, mark))
        with explained_oom(trainer, model_args):
            trainer.train()
    by_phase = None if args.memory_only else phase_table(read_trace(trace))
    if by_phase:
        rows = [{**row, **{key: description[key] for key in ROW_KEYS}} for row in by_phase.rows()]
        extra = {"step_s": by_phase.step_s, "copies_s": by_phase.copies_s}
        write_results(args.profile_dir / f"phases_rank{rank}.json", rows, extra=extra)
    if trainer.is_world_process_zero():
        stems = [recorder.stem for recorder in recorders]
        timelines = [memory_timeline.read(stem.with_suffix(".json.gz")) for stem in stems]
        publish(args.profile_dir, description, by_phase, timelines)
    return trainer


def publish(
    folder: Path,
    description: dict[str, Any],
    by_phase: Table | None,
    timelines: list[dict[str, Any]],
) -> None:
    """Prints the table and writes the pictures and pages."""
    if by_phase:
        show(by_phase)
        draw_shares(by_phase).savefig(folder / "profile.png", dpi=110, bbox_inches="tight")
    for timeline in timelines:
        early = memory_timeline.from_beginning(timeline)
        memory_timeline.write([timeline], folder / ("beginning" if early else "memory"))
        of = " from loading to the first step's end" if early else ""
        print(f"peak {timeline['peak_gib']:.2f} GiB allocated{of}")
    if not timelines:
        print("no GPU: no memory timeline (torch records none of a CPU's memory)")
    write_profile(folder / "profile.html", description, by_phase, timelines)
    print(f"wrote {folder}/profile.html and, beside it, what it was made from")


def describe(trainer: LongTrainer, model_args: Any, folder: Path) -> dict[str, Any]:
    """What ran and on which machine, for the pages and files."""
    description = describe_run(folder / "phases.json")
    if trainer.args.device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(trainer.args.device).total_memory
        description["capacity_gib"] = total_bytes / GIB
    return {
        **description,
        "class_type": model_args.class_type,
        "engine": trainer.engine.name,
        "tokens": model_args.seq_len,
        "layers": trainer.model.config.num_hidden_layers,  # type: ignore[union-attr]
    }


def write_profile(
    path: Path,
    description: dict[str, Any],
    by_phase: Table | None,
    timelines: list[dict[str, Any]],
) -> None:
    sections = [
        paragraph(
            f"{description['hardware']}; commit {description['commit']}; {description['date']}."
        ),
        code(description["command"]),
    ]
    if by_phase:
        sections += time_section(by_phase)
    sections.append(heading("Memory"))
    for timeline in timelines:
        sections += memory_timeline.memory_section([timeline])
    if not timelines:
        sections.append(
            paragraph("A timeline of memory needs a GPU: torch records none of a CPU's.")
        )
    write_page(path, f"Profile: {memory_timeline.title(description)}", sections)


def time_section(by_phase: Table) -> list[str]:
    caption = (
        "Share of a step, by what the GPU computes; copies and communication only where nothing "
        "computes beside them."
    )
    if not by_phase.on_gpu:
        caption = "Share of a step, by what the CPU computes."
    rows = [
        {"phase": r["phase"], "s a step": r["s_per_step"], "share": f"{r['share']:.1%}"}
        for r in by_phase.rows()
    ]
    copies = f"Copies between host and GPU take {by_phase.copies_s:.3f} s a step in all."
    return [
        heading(f"Time: {by_phase.step_s:.3f} s a step under the profiler"),
        figure(draw_shares(by_phase), caption),
        table(rows),
        *([paragraph(copies)] if by_phase.copies_s else []),
        *([] if by_phase.on_gpu else [paragraph(NOT_KNOWN)]),
    ]


def draw_shares(by_phase: Table) -> Any:
    """A bar for each line of the table, in the table's order."""
    plt = pyplot()
    rows = by_phase.rows()[::-1]
    fig, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1))
    colours = ["#999999" if r["phase"] in LINES[-3:] else "#4c72b0" for r in rows]
    bars = axes.barh([r["phase"] for r in rows], [100 * r["share"] for r in rows], color=colours)
    axes.bar_label(bars, [f"{r['share']:.1%}" for r in rows], padding=3, fontsize=8)
    axes.set_xlabel("% of the step")
    plt.close(fig)
    return fig


def main() -> None:
    try:
        args, flags = parse()
        trainer = run(args, flags)
    except UserError as error:
        sys.exit(f"error: {error}")
    trainer.engine.shutdown(trainer.args)


if __name__ == "__main__":
    main()
