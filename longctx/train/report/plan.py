"""Whether a run fits, how fast it is and why, before it starts and on any machine.

    longctx plan --preset llama-3.1-8b --seq_len 65536 --gpu rtx-4090 --host_memory_gib 128 --sweep
    longctx plan --config recipes/llama-3.2-1b_32k.yaml

takes the flags and recipes of `longctx train`. Arithmetic alone (longctx/train/plan): no GPU is
needed, no weight and no text is read; with --class_type any this machine's GPU runs a layer of each
kind. Runs in bfloat16, under any engine, on --gpus GPUs of one host. Without --gpu the machine is
this one, whose rates are measured once, in about ten seconds, and kept (longctx doctor); with it
`--host_memory_gib` is the memory that machine's host has free (default: what is free here). Ends
with status 1 where the run does not fit.
"""

from __future__ import annotations

import io
import json
import math
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch

from longctx.constants import GIB, VOCAB_SIZE
from longctx.cost.machines import MACHINES, Machine
from longctx.cost.named import machine_named, several
from longctx.errors import UserError, printable
from longctx.memory.machine import host_share_bytes
from longctx.ranges import COUNT
from longctx.train.options.config import ModelArguments
from longctx.train.options.written import LENGTH, token_count
from longctx.train.plan.changes import Change, changes
from longctx.train.plan.measure import gpu_here, this_machine
from longctx.train.plan.predict import Plan, longest, plan
from longctx.train.plan.shortage import Shortage, shortage
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.program import Parser
from longctx.train.report.plan_numbers import Answer, as_json
from longctx.train.report.plan_page import write_html
from longctx.train.report.plan_run import (
    check_dtype,
    check_known,
    run_of,
    unplanned,
    with_answers,
    with_images,
)
from longctx.train.report.plan_text import show
from longctx.train.safety.writing import check_writable
from longctx.train.start.loading import load_config
from longctx.train.start.options import check_layers, check_towers, parse_planned

SWEEP_FROM = 4096
LESS = (0.75, 0.5, 0.35, 0.25)
"""Shares of the memory that a step takes, for which the seconds are told as well."""


def main(argv: Sequence[str] | None = None) -> None:
    args, flags = _parse(argv)
    with redirect_stdout(io.StringIO()):  # what options do without a GPU
        model_args, data_args, train_args, engine = parse_planned(flags)
    if not (model_args.model_name_or_path or model_args.preset):
        raise UserError("name the model to plan for: --model_name_or_path, --preset or --config")
    if train_args.plan:
        raise UserError(
            "--plan is longctx train's, which runs what --json writes here: leave it out"
        )
    check_known(model_args, train_args)
    check_dtype(model_args)
    with redirect_stdout(sys.stderr):  # what RoPE does beyond the model's positions
        config = load_config(model_args, vocab_size=VOCAB_SIZE, engine=engine)
        check_towers(model_args, config, engine, args.gpus)
        check_layers(model_args, train_args, config)
        here = None if args.gpu else _gpu_here()
        subject = Subject(config, model_args, here, shards=engine.shards_states)
    machine = machine_named(args.gpu) if args.gpu else this_machine()
    run = run_of(model_args, train_args, engine, args.gpus, args.document_tokens)
    said = subject.declined(run), _of_files(subject, model_args)
    for line in (*said, *unplanned(train_args, args.answer_tokens)):
        if line:
            print(printable(line), file=sys.stderr)
    run = with_answers(run, args.answer_tokens)
    run = with_images(run, config, args.images, data_args.image_pixels)
    result = as_json(_answer(args, subject, run, machine, train_args.max_steps))
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    if args.html:
        write_html(args.html, result)
        print(printable(f"wrote {args.html}"), file=sys.stderr)
    if not result["fits"]:
        sys.exit(1)


def _of_files(subject: Subject, model_args: ModelArguments) -> str | None:
    """Returns what is said of a model whose files have weights packed."""
    if subject.packed is None or subject.quantised:
        return None
    how = "packed, as it stays" if subject.packed.form else "dense, as it is read"
    name = model_args.model_name_or_path or f"the public model of --preset {model_args.preset}"
    return f"{name} is in {subject.packed.name}: planned {how}"


def _answer(
    args: Namespace, subject: Subject, run: PlannedRun, machine: Machine, max_steps: int
) -> Answer:
    """Plans the run, with what lacks and ways out if it does not fit, and what else is asked."""
    host = host_share_bytes()
    if args.gpu and run.model.host_memory_gib is not None:
        host = int(run.model.host_memory_gib * GIB)
    planned = plan(subject, run, machine, host)
    lacks: Shortage | None = None
    found: list[Change] = []
    if not planned.fits:
        lacks = shortage(subject, planned, host)
        found = changes(subject, run, machine, host, host_grows=bool(args.gpu))
    data_tokens = args.data_tokens
    if data_tokens is None and max_steps > 0:
        data_tokens = max_steps * planned.step_tokens
    return Answer(
        plan=planned,
        host_bytes=host,
        shortage=lacks,
        changes=found,
        sweep=sweep(subject, run, machine, host) if args.sweep and not planned.unknown else [],
        less_memory=less_memory(subject, planned, host) if planned.fits else [],
        data_tokens=data_tokens,
    )


def _parse(argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """Returns this command's options and the flags of the run. Raises UserError."""
    args, flags = _parser().parse_known_args(argv)
    if args.html:
        check_writable(args.html)
    for name in ("images", "document_tokens", "answer_tokens"):
        value = getattr(args, name)
        if value is not None and (problem := COUNT.problem(value)):
            raise UserError(f"--{name} must be {problem}, got {value}")
    _count_gpus(args)
    return args, flags


def _parser() -> Parser:
    parser = Parser(
        prog="longctx plan",
        usage="longctx plan [--gpu NAME] [--sweep] [--json] [--html FILE] [OPTIONS of train]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpu",
        help=f"{', '.join(MACHINES)}; several as 2x4090; or a card of your own by its "
        "datasheet: gib=24,flops=165e12 and, where known, bandwidth=1008e9,link=31.5e9; default: "
        "the one that is here",
    )
    parser.add_argument(
        "--gpus", type=number, help="GPUs of the host, one process each; default: 1"
    )
    parser.add_argument(
        "--document_tokens",
        type=token_count,
        help=f"tokens in a document, {LENGTH}; default: one document a row",
    )
    parser.add_argument(
        "--answer_tokens",
        type=token_count,
        help="tokens in each of a pair's two answers, which follow their prompt (--task dpo, ...)",
    )
    parser.add_argument(
        "--images",
        type=int,
        help="images in each row of a vision-language model, of --image_pixels each, as 448x448; "
        "two frames of a video count as one with Qwen",
    )
    parser.add_argument(
        "--data_tokens", type=number, help="tokens in all data, as 2.5e9 or 2.5B: prints the days"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="also plan other lengths, up to the longest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--html", type=Path, help="write a page with every buffer, as bars and tables"
    )
    return parser


def _count_gpus(args: Namespace) -> None:
    """Sets how many GPUs there are, and which: `--gpu 2x4090` is `--gpu 4090 --gpus 2`. Raises
    UserError for two counts."""
    count, args.gpu = several(args.gpu) if args.gpu else (1, None)
    if count > 1 and args.gpus not in (None, count):
        raise UserError(f"--gpu names {count} GPUs and --gpus {args.gpus}: give one of the two")
    args.gpus = args.gpus or count


def _gpu_here() -> torch.device | None:
    """Returns the GPU on which layers of --class_type any are measured."""
    return gpu.device if (gpu := gpu_here()) else None


_AMOUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def number(text: str) -> int:
    """Returns a whole number, also as 2.5e9, 2.5B or 300M. Raises ValueError."""
    unit = _AMOUNTS.get(text.strip()[-1:].lower())
    found = float(text.strip()[:-1]) * unit if unit else float(text)
    if not 1 <= found < 1e18:
        raise ValueError
    return int(found)


def less_memory(subject: Subject, planned: Plan, host: int) -> list[Plan]:
    """Returns the plans of the same run in less of the GPU's memory, whole GiB each: they tell what
    a further GiB buys. None where states and activations cannot leave the GPU."""
    run = planned.run
    if run.engine is not None or run.gpus > 1 or not run.exact or not subject.schedules(run):
        return []
    budgets = dict.fromkeys(math.ceil(share * planned.gpu_bytes / GIB) for share in LESS)
    tried = (
        plan(subject, run.having(gpu_memory_gib=float(gib)), planned.machine, host)
        for gib in budgets
        if gib * GIB < planned.gpu_bytes
    )
    return [found for found in tried if found.fits]


def sweep(subject: Subject, run: PlannedRun, machine: Machine, host: int) -> list[Plan]:
    """Returns the lengths that fit, each twice the one before, and the longest. Each has room for
    the row's images."""
    last = longest(subject, run, machine, host)
    if last is None:
        return []
    end, lengths = last.run.model.seq_len, list[int]()
    while (length := SWEEP_FROM * 2 ** len(lengths)) < end:
        lengths.append(length)
    lengths = [length for length in lengths if length >= run.image_tokens]
    tried = (plan(subject, run.having(seq_len=length), machine, host) for length in lengths)
    return [*(planned for planned in tried if planned.fits), last]
