"""Times the steps of everyday fine-tunes on one GPU, ours and those of peers on the same rows.

    python profiling/bench/everyday_bench.py --case qlora:2048 --side custom,unsloth \\
        --unsloth_env /tmp/uns_env.sh --output profiling/results/h100_everyday.json
    python profiling/bench/everyday_bench.py --case qlora:2048@8 --side custom -- --cuda_graphs off
    python profiling/bench/everyday_bench.py --case llama-3.2-1b,dpo --side custom,liger,compile,trl
    python profiling/bench/everyday_bench.py --case llama-3.2-1b --side custom,compile,compile_loss
    python profiling/bench/everyday_bench.py --case qlora:131072 --side liger \\
        --setting selective,layers+host,selective+fp32
    python profiling/bench/everyday_bench.py --case llama-3.2-1b --side custom -- --torch_compile
    python profiling/bench/everyday_bench.py --list

A case is one row of the table: `qlora:2048` has 2048 tokens and all of the GPU's memory,
`qlora:2048@8` is within 8 GiB, `qlora` names all of them. A budget is ours alone: a peer has no
limit, and its row says what it took. Random weights, random tokens.

    qlora, lora     Llama-3.1-8B, adapters of rank 16 on all maps, over NF4 or 16 bits
    longest         qlora's rows, every side held to 79 GiB
    llama-3.2-1b    all weights, one document a row
    documents       the same model, documents packed into the row
    qwen3-0.6b      all weights, 8 rows of 2048 tokens; smollm2-135m, too
    qwen3.5-9b, granite-4.0-h-tiny, lfm2-1.2b, falcon-h1-0.5b, qwen3-30b-a3b
                    adapters of rank 16 on all maps and experts over 16 bits; `/8` behind a name
                    leaves 8 of the layers, so that every peer fits
    gpt-oss-20b, qwen3-8b-fp8, ministral-3-8b-fp8
                    the same over weights as they are published, which peers have in 16 bits, or in
                    NF4 with `+nf4`; gpt-oss-20b:262144@79 holds every side to 79 GiB
    qwen3-8b        the same over NF4, beside qwen3-8b-fp8
    dpo             LoRA on Llama-3.1-8B, pairs: a prompt of 1024 tokens, two answers of as many
    dpo_varied      the same, prompts of 100 to 1500 tokens and answers of 50 to 700

Sides: `custom` is train.py's trainer with its defaults, and what comes after `--` goes to it.
`unsloth` (unsloth_peer.py), `liger`, `compile`, `compile_loss` and `trl` (everyday_peers.py) run
with each of their settings in turn, or with those of `--setting`: what layers keep, then `+host` if
that waits in host memory, `+fp32` for adapters in fp32, `+tiled_mlp` for an MLP in tiles. The
fastest of these rows and the one that takes the least memory stand in the tables.
Peers run in a plain loop that neither clips nor logs, pairs in TRL's trainer. Our states are exact
(fp32), those of peers bf16, so that peers have less to do.

Pairs are the same on every side, and the reference's log-probabilities are there before the steps.
Pairs that vary are packed into rows of that many tokens on our side; TRL and Unsloth pad a batch of
about as much work. A step holds other numbers of pairs on each side, so `pairs_per_s` compares
them: the `pairs` of the timed steps over the seconds of these steps, which are one epoch, after
another one that warms up. There `idle` is rough: two steps stand for all.

`step_s` is the median of `steps` steps after a few others, from one step's begin to the next by the
GPU's clock, without a synchronisation in between (step_clock.py); `slowest_s` is the longest.
`fwd_s`, `bwd_s`, `opt_s` (clipping included) and `rest_s` are medians of its phases. `idle` is the
share of a step in which the GPU did nothing, by what two further steps kept it busy; steps of more
than 65536 tokens, which take half a minute, have none. `peak_gib` and
`reserved_gib` are of the timed steps, the former with the pool of CUDA graphs (`graphs_gib`),
`host_gib` is what the process holds of the host's memory after them, `packed` the format of our
frozen weights.

A process measures one row, so that what an earlier one left in the host's memory counts in none.
With `--ahead` the next row's process imports its packages meanwhile: that takes a core and up to
half a GiB of the GPU, and spares 10 to 50 s a row, of which one of 1024 tokens then takes 7 s. A
case that fails is a row with its reason, and the others go on. Unsloth needs other versions of
packages: `--unsloth_env` names a shell file that sets PYTHONPATH for its process, and the folder
`--models` takes the weights that it reads (16 GiB for 8B), which stay there for the next run.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from longctx.cost.flops import mfu, step_flops
from longctx.memory.machine import held_host_bytes
from profiling.bench import everyday_peers
from profiling.bench.everyday_peers import (
    PEERS,
    Case,
    Peer,
    Rows,
    Setting,
    make_weights,
    measure_peer,
)
from profiling.bench.runner import (
    Row,
    child_lines,
    kill_with_workers,
    lines_of,
    rounded,
    start_child,
)
from profiling.bench.step_clock import Clock, time_trainer
from profiling.results import results_file, write_results

UNSLOTH = Path(__file__).with_name("unsloth_peer.py")
QLORA = dict(name="qlora", preset="llama-3.1-8b", lora=16, quantize="nf4")
DPO_VARIED = dict(preset="llama-3.1-8b", lora=16, task="dpo")
LENGTHS = {1024: 8, 2048: 8, 4096: 9, 8192: 10, 32768: 12, 131072: 12}
"""Tokens of a row -> GiB of our budget."""
LORA = dict(name="lora", preset="llama-3.1-8b", lora=16)
LONGEST = (262144, 327680, 393216, 473088)


def adapted(preset: str, *lengths: int, layers: int | None = None, **more: Any) -> list[Case]:
    """Rows of a model, or of so many of its layers, with adapters on all maps and experts."""
    return [
        Case(
            name=f"{preset}/{layers}" if layers else preset,
            preset=preset,
            lora=16,
            layers=layers,
            tokens=tokens,
            **more,
        )
        for tokens in lengths
    ]


CASES = [
    *(Case(**QLORA, tokens=n, gpu_gib=gib) for n, most in LENGTHS.items() for gib in (0, most)),
    *(Case(**LORA, tokens=tokens) for tokens in LENGTHS),
    *(Case(**LORA, tokens=tokens, gpu_gib=24) for tokens in (4096, 131072)),
    *(
        Case(**QLORA | {"name": "longest"}, tokens=tokens, gpu_gib=79, all_held=True)
        for tokens in LONGEST
    ),
    *(Case(name="llama-3.2-1b", preset="llama-3.2-1b", tokens=n) for n in (4096, 8192)),
    Case(name="documents", preset="llama-3.2-1b", tokens=8192, documents=True),
    *(Case(name=name, preset=name, tokens=2048, rows=8) for name in ("qwen3-0.6b", "smollm2-135m")),
    *adapted("qwen3.5-9b", 2048, 8192, layers=8),
    *adapted("qwen3.5-9b", 1024, 2048, 4096, 8192, 65536),
    *adapted("granite-4.0-h-tiny", 1024, 2048, 4096, 8192, layers=12),
    *adapted("lfm2-1.2b", 1024, 2048, 4096, 8192),
    *adapted("falcon-h1-0.5b", 1024, 2048, 4096, 8192),
    *adapted("qwen3-30b-a3b", 2048, 8192, 32768, layers=8),
    *adapted("gpt-oss-20b", 2048, 8192, 32768, layers=8),
    *adapted("qwen3-30b-a3b", 8192),
    *adapted("gpt-oss-20b", 2048, 8192, 32768),
    *adapted("gpt-oss-20b", 131072, 262144, 524288, gpu_gib=79, all_held=True),
    *adapted("qwen3-8b-fp8", 2048, 8192),
    *adapted("ministral-3-8b-fp8", 2048, 8192),
    *adapted("qwen3-8b", 2048, 8192, quantize="nf4"),
    Case(name="dpo", preset="llama-3.1-8b", lora=16, tokens=2048, task="dpo"),
    *(
        Case(name="dpo_varied", **DPO_VARIED, tokens=tokens, peer_pairs=pairs)
        for tokens, pairs in ((4096, 2), (8192, 4))
    ),
]
SIDES: dict[str, tuple[str | None, ...]] = {
    "custom": (None,),
    "unsloth": ("unsloth+fp32", "none+fp32", "unsloth+tiled_mlp+fp32", "none"),
    "liger": ("selective", "none", "layers", "selective+host", "layers+host"),
    "compile": ("none",),
    "compile_loss": ("none",),
    "trl": ("none", "layers"),
}
"""Side -> its settings, in turn; ours has its schedule."""
ATTENTION = {"custom": "auto", "liger": "fa4"} | dict.fromkeys(
    ("compile", "compile_loss", "trl"), "sdpa"
)
"""Side -> the attention that its row names; Unsloth chooses its own."""
KEY = ("case", "side", "checkpointing", "offload", "adapters", "tiled_mlp", "nf4", "flags")
LONG_TOKENS, VERY_LONG_TOKENS = 16384, 65536
"""Steps of more tokens are timed less often."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of the benchmark, which measures one row."""

    side: str
    case: Case
    setting: str | None
    models: str
    flags: list[str]
    timed: int | None = None

    @classmethod
    def parsed(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(**{**fields, "case": Case(**fields["case"])})

    @property
    def weights(self) -> Path:
        """The folder of weights of the case's model."""
        layers = f"-{self.case.layers}" if self.case.layers else ""
        return Path(self.models) / f"{self.case.preset}{layers}"

    def settings(self) -> Row:
        row = {
            "case": self.case.text,
            "side": self.side,
            "checkpointing": None,
            **asdict(self.case),
        }
        row["attention"] = ATTENTION.get(self.side, "its own")
        if self.setting:
            row |= asdict(Setting.parsed(self.setting))
        if not row.get("nf4"):  # as older rows, which have no such key
            row.pop("nf4", None)
        if not self.case.lora:
            row.pop("adapters", None)
        row["states"] = "fp32" if self.side == "custom" else row.get("adapters", "bf16")
        return row | {"flags": " ".join(self.flags)}


def fits(case: Case, side: str) -> bool:
    """Whether a side has something to say on a case."""
    if side == "custom":
        return True
    if case.gpu_gib and not case.all_held:  # as without a budget
        return False
    if case.task == "dpo":
        return side in ("unsloth", "trl")
    return side in ("unsloth", "liger") or (side.startswith("compile") and not case.lora)


def jobs_of(
    cases: Sequence[Case], sides: Sequence[str], chosen: Sequence[str], **rest: Any
) -> Iterator[Job]:
    """The jobs of some cases on some sides, with a side's own settings or those that are chosen."""
    for side in sides:
        ours = side == "custom"
        rest_of_side = rest if ours else {**rest, "flags": []}
        for case in cases:
            words = [*SIDES[side]] if ours or not chosen else [*chosen]
            if not ours and not case.lora:
                words = [*dict.fromkeys(word.replace("+fp32", "") for word in words)]
            for word in words if fits(case, side) else ():
                yield Job(side=side, case=case, setting=word, **rest_of_side)


# --- in a child ------------------------------------------------------------------------------

IMPORTS = ("datasets", "peft", "bitsandbytes", "longctx.train.start.loading", "profiling.build")
IMPORTS_OF = {
    "custom": ("deepspeed", "profiling.bench.step_bench", "longctx.train.trainer"),
    "liger": ("liger_kernel.transformers", "flash_attn.cute.interface"),
}
"""Modules that the first step of any side, and of one side, imports and that take seconds."""


def child(
    job_text: str,
    peers: Mapping[str, Peer] = PEERS,
    versions: Row | None = None,
    ahead: bool = False,
) -> None:
    """Prints the row of a job; all else goes to stderr. If it was started ahead, it waits for a
    line first."""
    job, printed = Job.parsed(job_text), sys.stdout
    with redirect_stdout(sys.stderr):
        if ahead:
            wait_for_turn(job.side)
        row = row_of(job, peers) | ({"peer_versions": versions} if versions else {})
        print(json.dumps([row]), file=printed, flush=True)
    sys.stderr.flush()
    os._exit(0)  # what ran out of memory may hang in its own clean-up


def wait_for_turn(side: str) -> None:
    """Imports what a side needs, as far as it is installed, and reads a line from stdin."""
    for name in (*IMPORTS, *IMPORTS_OF.get(side, ())):
        with suppress(Exception):  # a case that does need it says why it has none
            importlib.import_module(name)
    if not sys.stdin.readline():
        sys.exit("error: the bench has ended")


def row_of(job: Job, peers: Mapping[str, Peer]) -> Row:
    """The row of a job; of weights, whether they were made."""
    if job.side == "weights":
        return attempt({}, partial(make_weights, job.case, job.weights))
    return attempt(job.settings(), partial(measure, job, peers.get(job.side)))


def measure(job: Job, peer: Peer | None) -> Row:
    """The columns of a row that are measured."""
    case = job.case
    pairs = pairs_of_batches(case, ours=peer is None)
    steps = steps_of(case, job.timed)
    if case.peer_pairs:
        steps = (len(pairs), job.timed or len(pairs))  # every length is seen before
    long = case.step_tokens > VERY_LONG_TOKENS
    clock = Clock(*steps, idle_steps=0 if long else None)
    if peer is None or job.setting is None:
        with tempfile.TemporaryDirectory() as folder:
            row = measure_custom(case, clock, job.flags, Path(folder))
    else:
        if case.all_held and torch.cuda.is_available():
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(case.gpu_gib * GIB / whole)
        model = measure_peer(peer, case, Setting.parsed(job.setting), clock, job.weights)
        row = columns(case, clock, model)
    return row | (pair_columns(pairs, clock) if pairs else {})


def attempt(settings: Row, function: Callable[[], Row | None]) -> Row:
    """The settings with what a function returns and its status: `ok`, or `oom` or `failed` with a
    reason. The GPU memory that a failed attempt held is free again."""
    try:
        row = {**settings, **(function() or {}), "status": "ok"}
    except Exception as error:
        traceback.print_exc()
        oom = "out of memory" in str(error)
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        row = {**settings, "status": "oom" if oom else "failed", "reason": reason}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rounded(row)


def steps_of(case: Case, timed: int | None) -> tuple[int, int]:
    """The steps that warm up and those that are timed."""
    if case.step_tokens > VERY_LONG_TOKENS:
        return (1, timed or 1)
    return (2, timed or 3) if case.step_tokens > LONG_TOKENS else (3, timed or 8)


def pairs_of_batches(case: Case, ours: bool) -> list[int]:
    """The pairs in each batch of an epoch; none where no pairs are trained."""
    if case.task != "dpo":
        return []
    if ours:
        counts = [len(row["documents"]) for row in everyday_peers.packed_pairs(case)]
        return [sum(counts[i : i + case.rows]) for i in range(0, len(counts), case.rows)]
    left, size = everyday_peers.EPOCH_PAIRS, case.peer_pairs or case.rows
    return [min(size, left - first) for first in range(0, left, size)]


def measure_custom(case: Case, clock: Clock, flags: list[str], folder: Path) -> Row:
    """Steps of train.py's trainer with its defaults."""
    from longctx.runtime.runtime import patched_part
    from profiling.bench import step_bench
    from profiling.build import build_trainer
    from profiling.ladders import ladder_columns

    step_case = {**step_bench.DEFAULTS, **asdict(case), "engine": "plain", "offload": "auto"}
    flags = [*step_bench.train_flags(step_case, case.row_tokens), *flags]
    if not torch.cuda.is_available():
        flags.append("--use_cpu")
    rows: Any = Rows(case, clock.total * case.rows)
    if case.task == "dpo":
        rows = everyday_peers.packed_pairs(case)
    trainer, _ = build_trainer(
        flags,
        steps=clock.total,
        output_dir=folder,
        layers=case.layers,
        rows=rows,
    )
    time_trainer(trainer, clock)
    row = columns(case, clock, trainer.model) | step_bench.packed_as(trainer.model)
    if patched := patched_part(trainer.model):
        row |= ladder_columns(patched.longctx.store.ladder, patched.longctx.adopted.cut)
        if graphs := patched.longctx.graphs:  # whose pool torch does not count as allocated
            row["graphs_gib"] = graphs.held_bytes / GIB
            row["peak_gib"] = row.get("peak_gib", 0.0) + row["graphs_gib"]
    return row


def columns(case: Case, clock: Clock, model: Any) -> Row:
    """Returns a row's measured columns, with MFU where all weights train."""
    row: Row = clock.columns()
    if not case.peer_pairs:
        row["tokens_per_s"] = case.step_tokens / row["step_s"]
    row["host_gib"] = held_host_bytes() / GIB
    if not case.lora and (share := mfu_of(case, clock.timed, model, row["step_s"])):
        row["mfu"] = share
    return row


def pair_columns(batches: Sequence[int], clock: Clock) -> Row:
    """The pairs of the timed steps, from those in each batch of an epoch."""
    pairs = sum(batches[step % len(batches)] for step in clock.timed_steps)
    return {"pairs": pairs, "pairs_per_s": pairs / clock.timed_s}


def mfu_of(case: Case, count: int, model: Any, step_s: float) -> float | None:
    """The share of the card's peak that a step's FLOPs are, with attention as over `count` rows of
    the case; None for an unknown card."""
    from longctx.loop.metrics import attended, device_peak_flops, parameters_in_matmuls

    peak = device_peak_flops(next(model.parameters()).device)
    if peak is None:
        return None
    rows = Rows(case, count)
    pairs = [float(attended(model.config, rows[n]["position_ids"])) for n in range(count)]
    flops = step_flops(
        parameters=parameters_in_matmuls(model), tokens=case.tokens, attended=statistics.mean(pairs)
    )
    return mfu(case.rows * flops, step_s, peak)


# --- the command -----------------------------------------------------------------------------


def run_job(
    job: Job, unsloth_env: str | None, limit_s: float, started: subprocess.Popen[str] | None = None
) -> Row:
    """The row of a job, from a process of its own, which may have been started ahead, or a row with
    the reason why there is none. Unsloth's weights are made before, if they are not there."""
    if job.side == "unsloth" and not (job.weights / "tokenizer.json").exists():
        made = run_job(replace(job, side="weights"), None, limit_s)
        if made["status"] != "ok":
            if started:
                kill_with_workers(started.pid)
            return job.settings() | {name: made[name] for name in ("status", "reason")}
    if started:
        lines, reason = lines_of(started, limit_s)
    else:
        lines, reason = child_lines(command(job, unsloth_env), limit_s)
    for (row,) in lines:
        return row
    if job.side == "weights":
        reason = f"no weights: {reason}"
    return job.settings() | {"status": "failed", "reason": reason}


def command(job: Job, unsloth_env: str | None) -> list[str]:
    """The command of a job's process."""
    if job.side != "unsloth":
        return [sys.executable, __file__, "--child", json.dumps(asdict(job))]
    words = [sys.executable, str(UNSLOTH), json.dumps(asdict(job))]
    return ["bash", "-c", '. "$0" && exec "$@"', unsloth_env, *words] if unsloth_env else words


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.child:
        child(args.child, ahead=args.ahead)
        return
    settings = dict(models=args.models, flags=args.flags, timed=args.steps)
    jobs = list(jobs_of(args.case, args.side, args.setting, **settings))
    if args.list or not jobs:
        for job in jobs:
            print(f"{job.side:8} {job.case.text} {job.setting or ''}".rstrip())
        return
    found: list[Row] = []
    started: list[subprocess.Popen[str]] = []
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.side} {job.case.text} {job.setting or ''}", flush=True)
        own = started.pop() if started else None
        if args.ahead:
            started += [
                start_child([*command(job, args.unsloth_env), "--ahead"])
                for job in jobs[number : number + 1]
            ]
        row = run_job(job, args.unsloth_env, args.limit_s, own)
        print("    " + json.dumps(row), flush=True)
        if args.output:
            write_results(args.output, [row], key=KEY)
        found.append(row)
    print(table(found))
    if failed := sum(row["status"] == "failed" for row in found):
        sys.exit(f"error: {failed} of {len(found)} rows failed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--case", type=cases_named, default=CASES, help="NAME[:TOKENS[@GIB]],...")
    parser.add_argument("--side", type=sides_named, default=[*SIDES], help=",".join(SIDES))
    parser.add_argument(
        "--setting", type=settings_named, default=[], help="of peers: layers+host,none,..."
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="timed steps (default: 8, of long rows 3, of pairs that vary an epoch)",
    )
    parser.add_argument("--limit_s", type=float, default=540, help="seconds a process may take")
    parser.add_argument(
        "--unsloth_env", type=shell_file, help="shell file that sets PYTHONPATH for Unsloth"
    )
    parser.add_argument("--models", default="/dev/shm/everyday", help="folder of Unsloth's weights")
    parser.add_argument("--output", type=results_file, help="JSON file; rows are added to its own")
    parser.add_argument(
        "--ahead", action="store_true", help="import the next row's packages beside a row"
    )
    parser.add_argument("--list", action="store_true", help="print the processes and run nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py, for custom")
    return parser.parse_args(argv)


def cases_named(text: str) -> list[Case]:
    """The cases that words name, in the order of the table."""
    words = text.split(",")
    known = {word for case in CASES for word in (case.name, case.text)}
    if unknown := [word for word in words if word not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(sorted(known))}")
    return [case for case in CASES if {case.name, case.text} & {*words}]


def sides_named(text: str) -> list[str]:
    if unknown := [word for word in text.split(",") if word not in SIDES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SIDES)}")
    return text.split(",")


def settings_named(text: str) -> list[str]:
    for word in text.split(","):
        try:
            Setting.parsed(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text.split(",")


def shell_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return str(Path(text).resolve())  # a bare name would be looked for along PATH


def setting_of(row: Row) -> str:
    """The word of a row's setting."""
    parts = [row.get("checkpointing") or ""]
    parts += ["host"] * bool(row.get("offload")) + ["tiled_mlp"] * bool(row.get("tiled_mlp"))
    parts += ["nf4"] * bool(row.get("nf4"))
    parts += ["fp32"] * (bool(parts[0]) and row.get("adapters") == "fp32")
    return "+".join(parts)


def table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    names = ("step_s", "fwd_s", "bwd_s", "opt_s", "tokens_per_s", "pairs_per_s", "mfu", "idle")
    names += ("peak_gib", "reserved_gib", "status")
    lines = [f"{'case':20} {'side':8} {'setting':20}" + "".join(f"{n:>13}" for n in names)]
    for row in rows:
        start = f"{row['case']:20} {row['side']:8} {setting_of(row):20}"
        values = [row.get(name, "") for name in names]
        cells = [f"{v:13.3f}" if isinstance(v, float) else f"{v:>13}" for v in values]
        lines.append(start + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
