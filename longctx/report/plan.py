"""Whether a run fits, how fast it is and why, before it starts and on any machine.

    longctx plan --preset llama-3.1-8b --seq_len 65536 --gpu rtx-4090 --host_memory_gib 128 --sweep
    longctx plan --config recipes/llama-3.2-1b_32k.yaml

takes train.py's flags and recipes. Arithmetic alone (longctx/plan): no GPU is needed, no weight and
no text is read. Runs in bfloat16, under any engine, on --gpus GPUs of one host. Without --gpu the
machine is this one, whose rates are measured once, in about ten seconds, and kept (longctx doctor);
with it `--host_memory_gib` is the memory that machine's host has free (default: what is free here).
Ends with status 1 where the run does not fit.
"""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longctx.config import ModelArguments, TrainArguments
from longctx.constants import GIB, VOCAB_SIZE
from longctx.cost.kept import describe
from longctx.cost.machines import MACHINES, Machine, machine_named
from longctx.engines import Engine
from longctx.engines.rows import groups_of, ulysses
from longctx.errors import UserError, printable
from longctx.memory.machine import host_share_bytes
from longctx.plan.changes import Change, changes
from longctx.plan.given import written
from longctx.plan.measure import this_machine
from longctx.plan.predict import DTYPE, Plan, Run, Subject, longest, plan
from longctx.program import Parser
from longctx.report.page import figure, heading, paragraph, pyplot, table, write_page
from longctx.run.loading import HF_ATTENTION, load_config
from longctx.run.options import check_towers, parse_planned
from longctx.run.states import describe_states, uses_exact_states
from longctx.writing import check_writable

SWEEP_FROM = 4096
MOST_GPUS = 1024
MOST_TOKENS, MOST_ROWS = 1 << 34, 1 << 20
"""Of a batch, and rows of a GPU in a step: beyond, no answer comes in seconds, nor would a step."""
DAY = 24 * 60 * 60


def main(argv: Sequence[str] | None = None) -> None:
    args, flags = _parse(argv)
    with redirect_stdout(io.StringIO()):  # what options do without a GPU
        model_args, train_args, engine = parse_planned(flags)
    if not (model_args.model_name_or_path or model_args.preset):
        raise UserError("name the model to plan for: --model_name_or_path, --preset or --config")
    if train_args.plan:
        raise UserError("--plan is train.py's, which runs what --json writes here: leave it out")
    check_known(model_args, train_args)
    _check_dtype(model_args)
    with redirect_stdout(sys.stderr):  # what RoPE does beyond the model's positions
        config = load_config(model_args, vocab_size=VOCAB_SIZE)
        check_towers(config, engine, args.gpus)
        subject = Subject(config, model_args)
    machine = machine_named(args.gpu) if args.gpu else this_machine()
    run = run_of(model_args, train_args, engine, args.gpus, args.document_tokens)
    for line in unplanned(train_args, args.answer_tokens):
        print(printable(line), file=sys.stderr)
    run = with_answers(run, args.answer_tokens)
    host = host_share_bytes()
    if args.gpu and model_args.host_memory_gib is not None:
        host = int(model_args.host_memory_gib * GIB)
    planned = plan(subject, run, machine, host)
    found = []
    if not planned.fits:
        found = changes(subject, run, machine, host, host_grows=bool(args.gpu))
    swept = sweep(subject, run, machine, host) if args.sweep else []
    data_tokens = args.data_tokens
    if data_tokens is None and train_args.max_steps > 0:
        data_tokens = train_args.max_steps * planned.step_tokens
    result = as_json(planned, found, swept, data_tokens)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    if args.html:
        write_html(args.html, result)
        print(printable(f"wrote {args.html}"), file=sys.stderr)
    if not planned.fits:
        sys.exit(1)


def _parse(argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    parser = Parser(
        prog="longctx plan",
        usage="longctx plan [--gpu NAME] [--sweep] [--json] [--html FILE] [train.py's flags]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", help=f"{', '.join(MACHINES)}; default: the one that is here")
    parser.add_argument(
        "--gpus", type=number, default=1, help="of the host, a process each; default: 1"
    )
    parser.add_argument(
        "--document_tokens", type=number, help="of a document; default: one document a row"
    )
    parser.add_argument(
        "--answer_tokens",
        type=number,
        help="of each of a pair's two answers, behind their prompt in a row (--task dpo, ...)",
    )
    parser.add_argument(
        "--data_tokens", type=number, help="of all data, for the days it takes (2.5e9)"
    )
    parser.add_argument("--sweep", action="store_true", help="lengths, up to the longest that fits")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--html", type=Path, help="a page with every buffer, as bars and tables")
    args, flags = parser.parse_known_args(argv)
    if args.html:
        check_writable(args.html)
    return args, flags


def number(text: str) -> int:
    """A whole one, also as 2.5e9. Raises ValueError."""
    found = float(text)
    if not 1 <= found < 1e18:
        raise ValueError
    return int(found)


def check_known(
    model_args: ModelArguments, args: TrainArguments, who: str = "longctx plan"
) -> None:
    """Raises UserError for runs that the plan does not know."""
    if model_args.lora_r is not None and model_args.class_type != "custom":
        raise UserError(
            f"{who} knows adapters of --class_type custom, not of {model_args.class_type}: leave "
            "out --lora_r or --class_type"
        )
    if model_args.class_type != "custom" and not args.gradient_checkpointing:
        raise UserError(
            f"{who} knows --class_type {model_args.class_type} with checkpointing by layer: "
            "leave out --gradient_checkpointing false"
        )


def _check_dtype(model_args: ModelArguments) -> None:
    if model_args.dtype not in ("auto", "bfloat16"):
        raise UserError(
            f"longctx plan knows runs in bfloat16, and this one is in {model_args.dtype}: leave "
            "out --dtype, --bf16 and --fp16"
        )


def run_of(
    model_args: ModelArguments,
    args: TrainArguments,
    engine: Engine,
    gpus: int,
    document_tokens: int | None = None,
) -> Run:
    """Raises UserError for GPUs that cannot do it together, and what of them no plan knows."""
    ranks, exact = args.sequence_parallel_size, uses_exact_states(args, DTYPE)
    patched = model_args.class_type == "custom"
    passes = args.gradient_accumulation_steps
    rows = args.per_device_train_batch_size
    if rows * model_args.seq_len > MOST_TOKENS or rows * passes > MOST_ROWS or gpus > MOST_GPUS:
        raise UserError(
            f"the plan knows batches of up to {MOST_TOKENS:.0e} tokens, {MOST_ROWS} rows a step "
            f"and {MOST_GPUS} GPUs: lower --per_device_train_batch_size, "
            "--gradient_accumulation_steps or --gpus"
        )
    engine.check_shares_rows(ranks > 1, patched)
    if ranks > 1 and not patched:
        ulysses(HF_ATTENTION.get(model_args.attn_backend, "sdpa"))
    groups_of(ranks, gpus)
    if not exact and engine.shards_states:
        raise UserError(f"the plan knows AdamW under engines, not --optim {args.optim}")
    if not exact and gpus > 1:
        raise UserError(
            "the plan knows several GPUs without an engine with exact states: leave out "
            "--optimizer_states as_weights and --optim"
        )
    return Run(
        model=model_args,
        place=args.place,
        gpu_memory_gib=args.gpu_memory_gib,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        exact=exact,
        document_tokens=document_tokens,
        task=args.task,
        gpus=gpus,
        sequence_parallel_size=ranks,
        engine=engine.layout(gpus, passes),
    )


def unplanned(args: Any, answer_tokens: int | None) -> Iterator[str]:
    """Yields a line for whatever of a task the plan leaves out or has to guess."""
    if args.task == "distill":
        yield "the plan is of the student: a teacher's memory and time are not in it"
    elif args.task != "sft" and answer_tokens is None:
        yield (
            "each row is planned as one document, all of whose tokens are answers': say how long "
            "an answer is with --answer_tokens"
        )


def with_answers(run: Run, answer_tokens: int | None) -> Run:
    """Returns the run of rows that are a prompt with two answers of so many tokens.

    Attention of a row costs P^2 + 2 ((P + A)^2 - P^2) in units of which a document of L tokens
    costs L^2, so that its tokens count as those of documents of (P^2 + 4 P A + 2 A^2) / (P + 2 A).
    Raises UserError for answers that a row has no room for, and for tasks without any.
    """
    if answer_tokens is None:
        return run
    row = run.model.seq_len
    prompt = row - 2 * answer_tokens
    if not run.scores or prompt < 1:
        raise UserError(
            f"--answer_tokens {answer_tokens}: of --task sft and distill there are none"
            if not run.scores
            else f"--answer_tokens {answer_tokens}: two of them leave no prompt in --seq_len {row}"
        )
    squared = prompt**2 + 4 * prompt * answer_tokens + 2 * answer_tokens**2
    return replace(run, answer_tokens=answer_tokens, document_tokens=squared // row)


def sweep(subject: Subject, run: Run, machine: Machine, host: int) -> list[Plan]:
    """Lengths that fit, each twice the one before, and the longest."""
    last = longest(subject, run, machine, host)
    if last is None:
        return []
    end, lengths = last.run.model.seq_len, list[int]()
    while (length := SWEEP_FROM * 2 ** len(lengths)) < end:
        lengths.append(length)
    tried = (plan(subject, run.having(seq_len=length), machine, host) for length in lengths)
    return [*(planned for planned in tried if planned.fits), last]


# --- as numbers ------------------------------------------------------------------------------


def as_json(
    planned: Plan, found: Sequence[Change], swept: Sequence[Plan], data_tokens: int | None
) -> dict[str, Any]:
    model, decision = planned.run.model, planned.decision
    result = {
        "model": model.preset or model.model_name_or_path,
        "class_type": model.class_type,
        "gpu": planned.machine.name,
        "gpus": planned.run.gpus,
        "sequence_parallel_size": planned.run.sequence_parallel_size,
        "engine": engine.name if (engine := planned.run.engine) else None,
        "rates": _rates(planned.machine),
        "attn_backend": planned.backend,
        "rows": planned.run.per_device_train_batch_size,
        "passes": planned.run.gradient_accumulation_steps,
        **_short(planned),
        "fits": planned.fits,
        "problem": planned.problem,
        "gpu_limit_gib": _gib(planned.gpu_limit),
        "host_locked_gib": _gib(planned.run.gpus * decision.host.nbytes),
        "host_limit_gib": _gib(planned.run.gpus * decision.budget.host),
        "states": _states(planned),
        "kept": _kept(planned),
        "parts_s": {
            name: round(value, 4)
            for name, value in planned.seconds._asdict().items()
            if name != "link"
        },
        "link_s": round(planned.seconds.link, 4),
        "phases": [
            {"phase": phase.name, "gib": _gib(phase.nbytes), "buffers": _gibs(phase.buffers)}
            for phase in planned.phases
        ],
    }
    if planned.fits and planned.run.exact and engine is None and planned.run.gpus == 1:
        result["plan"] = written(planned)
    if data_tokens:
        result |= {"data_tokens": data_tokens, "days": data_tokens / planned.tokens_per_s / DAY}
    if found:
        result["changes"] = [{"flags": flags, **_short(change)} for flags, change in found]
    if swept:
        result["sweep"] = [{**_short(other), "kept": _kept(other)} for other in swept]
    return result


def _states(planned: Plan) -> str:
    run, parameters = planned.run, planned.parameters
    if run.engine is not None:
        standing = run.engine.standing(parameters)
        standing["gradients"] = run.engine.gradient(parameters.total)
        shown = ", ".join(f"{name} {_gib(size):.2f}" for name, size in standing.items() if size)
        host = f"; {run.engine.host(parameters) / GIB:.2f} GiB of the host a process"
        return (
            f"states: {run.engine.name}, on each GPU: {shown or 'nothing'} GiB"
            f"{host if run.engine.host(parameters) else ''}"
        )
    if not run.exact:
        return "states: torch's AdamW, in bfloat16, on the GPU"
    return describe_states(planned.decision, DTYPE)


def _kept(planned: Plan) -> str:
    sizes, ladder = planned.decision.sizes, planned.decision.kept.ladder
    if sizes is None:
        return "kept: layers' inputs"
    return f"{describe(ladder)}; {sizes.cut(planned.run.tokens)}"


def _rates(machine: Machine) -> str:
    measured = "measured here" if machine.here else "measured"
    return measured if machine.measured else "estimated"


def _short(planned: Plan) -> dict[str, Any]:
    return {
        "seq_len": planned.run.model.seq_len,
        "gpu_gib": _gib(planned.gpu_bytes),
        "host_gib": _gib(planned.host_bytes),
        "step_s": round(planned.step_s, 4),
        "tokens_per_s": round(planned.tokens_per_s, 1),
    }


def _gib(nbytes: int) -> float:
    return round(nbytes / GIB, 3)


def _gibs(buffers: dict[str, int]) -> dict[str, float]:
    return {name: _gib(nbytes) for name, nbytes in buffers.items() if nbytes}


# --- to look at ------------------------------------------------------------------------------


def lines_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What the table says."""
    most = max(result["phases"], key=lambda phase: phase["gib"])
    buffers = sorted(most["buffers"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {gib:.1f}" for name, gib in buffers if gib >= 0.05)
    parts = ", ".join(f"{name} {s:.2f}" for name, s in result["parts_s"].items())
    lines = [
        ("fits", "yes" if result["fits"] else f"no: {result['problem']}"),
        (
            "GPU",
            f"{result['gpu_gib']:.1f} of {result['gpu_limit_gib']:.1f} GiB, in {most['phase']}: "
            + shown,
        ),
        (
            "host",
            f"{result['host_locked_gib']:.1f} GiB locked of {result['host_limit_gib']:.1f} that "
            f"may be; {result['host_gib']:.1f} with the process{'es' * (result['gpus'] > 1)}"
            f"{' and the engine' * bool(result['engine'])}",
        ),
        ("", result["states"]),
        ("", result["kept"]),
        (
            "seconds a step",
            f"{result['step_s']:.3g}: {parts}; the link is busy for {result['link_s']:.2f}",
        ),
        ("tokens/s", f"{result['tokens_per_s']:,.0f}"),
    ]
    if "days" in result:
        lines.append(("days", f"{result['days']:.3g} for {result['data_tokens']:.3g} tokens"))
    return lines


def title_of(result: dict[str, Any]) -> str:
    rows = f"{result['rows'] * result['passes']} rows" if result["rows"] > 1 else "rows"
    several, ranks = result["gpus"] > 1, result["sequence_parallel_size"]
    where = f"{result['gpus']} x {result['gpu']}" if several else result["gpu"]
    where += f", {ranks} a row" if ranks > 1 else ""
    engine = f" under {result['engine']}" if result["engine"] else ""
    return (
        f"{result['model']}, {result['class_type']}{engine}, {rows} of {result['seq_len']} tokens "
        f"on {where} (rates {result['rates']}, {result['attn_backend']} attention)"
    )


COLUMNS = ("seq_len", "gpu_gib", "host_gib", "step_s", "tokens_per_s")


def show(result: dict[str, Any]) -> None:
    console = Console()
    main_table = Table(title=escape(printable(title_of(result))), show_header=False)
    for name, text in lines_of(result):
        main_table.add_row(name, escape(printable(text)))
    console.print(main_table)
    for key, title, first in (
        ("changes", "It would fit with", ("flags",)),
        ("sweep", "Lengths that fit", ()),
    ):
        rows = result.get(key, [])
        if not rows:
            continue
        lines = Table(*first, *COLUMNS, title=title)
        for row in rows:
            lines.add_row(*(_cell(row[name]) for name in (*first, *COLUMNS)))
        console.print(lines)
    if not result["fits"] and not result.get("changes"):
        print("no flag makes it fit: a smaller model, or a larger machine")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return f"{value}"


def write_html(path: Path, result: dict[str, Any]) -> None:
    said = [{"what": name, "value": text} for name, text in lines_of(result)]
    parts = [table(said, ["what", "value"])]
    parts += [heading("A step's GPU memory by phase"), figure(_phases(result), "GiB by phase")]
    parts += [heading("A step's time"), figure(_seconds(result), "Seconds of a step by part")]
    if "changes" in result:
        parts += [heading("It would fit with"), table(result["changes"])]
    if "sweep" in result:
        parts += [heading("Lengths that fit"), table(result["sweep"])]
    parts.append(heading("Every large buffer"))
    parts.append(
        table(
            {"phase": phase["phase"], "buffer": name, "GiB": gib}
            for phase in result["phases"]
            for name, gib in phase["buffers"].items()
        )
    )
    parts.append(paragraph("Predicted by `longctx plan`, by arithmetic; nothing was run."))
    write_page(path, title_of(result), parts)


def _phases(result: dict[str, Any]) -> Any:
    """A stacked bar a phase, and the limit."""
    plt = pyplot()
    phases = result["phases"]
    drawn, axes = plt.subplots(figsize=(9, 4))
    names = list(dict.fromkeys(name for phase in phases for name in phase["buffers"]))
    left = [0.0] * len(phases)
    colours = plt.get_cmap("tab20")
    for i, name in enumerate(names):
        widths = [phase["buffers"].get(name, 0.0) for phase in phases]
        labels = [phase["phase"] for phase in phases]
        axes.barh(labels, widths, left=left, label=name, color=colours(i % 20))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(result["gpu_limit_gib"], color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel("GiB; dashed: what may be used")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    plt.close(drawn)
    return drawn


def _seconds(result: dict[str, Any]) -> Any:
    plt = pyplot()
    drawn, axes = plt.subplots(figsize=(9, 2.2))
    parts = {**result["parts_s"], "link, beside": result["link_s"]}
    axes.barh(list(parts), list(parts.values()), color="tab:blue")
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds; a step takes {result['step_s']:.3g}")
    plt.close(drawn)
    return drawn
