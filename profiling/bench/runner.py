"""Runs the cases of a benchmark, each in a process of its own.

A benchmark is data (`Benchmark`): the defaults of its cases, the published sets of cases, and the
function that measures one. `main` is its command line:

    --case KEY=VALUE,...    a case (repeatable); a key that is not named has its default
    --cases NAME            a published set; `published`, where there is one, is the default
    --only KEY=VALUE,...    of that set, the cases that have these values
    --dry_run               prints the cases and their commands, and runs nothing

A case that runs out of memory is a row with that status, and the next one starts clean. Rows are
written as they come, in place of those of an earlier run that agree in `key`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from longctx.errors import UserError
from longctx.train.program import program
from profiling.bench.peers import settled
from profiling.results import results_file, write_results

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_SET = "published"
Case = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What a benchmark's file declares."""

    script: str
    """The file's path."""
    description: str
    """The file's docstring, whose first paragraph is the help."""
    defaults: Case
    """Every key of a case. A case with `gpus` above 1 runs in as many processes."""
    measure: Callable[[Case, int, list[str]], list[Row]]
    """Measures a case, with a number of repeats and flags of train.py, in the case's process."""
    published: Mapping[str, Sequence[Case]] = field(default_factory=dict)
    """Name of a set -> its cases, each without its defaults."""
    settle: Callable[[Case], Case] = settled
    """Spells out the settings that follow from others."""
    key: Sequence[str] = ()
    """Columns that tell a row from others; the cases' keys where none are named."""
    repeats: int | None = 2
    """The default of `--repeats`; None where nothing is repeated."""
    takes_flags: bool = False
    """Whether what comes after `--` goes to train.py."""

    def case(self, settings: Case) -> Case:
        """A whole case."""
        return self.settle({**self.defaults, **settings})

    def parsed(self, text: str) -> Case:
        """A whole case from its text."""
        return self.case(parse_case(text, self.defaults))

    def command(self, case: Case, repeats: int, flags: Sequence[str] = ()) -> list[str]:
        """The command of the process, or of the processes, that measure a case."""
        command = [sys.executable, *on_gpus(case.get("gpus", 1))]
        command += [self.script, "--child", "--case", case_text(case, self.defaults)]
        return [*command, "--repeats", str(repeats), "--", *flags]

    def cases(self, name: str | None, only: str = "") -> list[Case]:
        """The whole cases of a published set that have the values of `only`."""
        wanted = parse_case(only, self.defaults).items()
        found = [self.case(settings) for settings in self.published.get(name or DEFAULT_SET, ())]
        return [case for case in found if wanted <= case.items()]


def on_gpus(gpus: int) -> list[str]:
    """The words after `python` that start a script in several processes, one a GPU."""
    if gpus <= 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]


# --- cases as text ---------------------------------------------------------------------------


def parse_case(text: str, defaults: Case) -> Case:
    """`tokens=8192,offload=none` -> a case without its defaults; unknown keys are refused."""
    case = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        if key not in defaults:
            sys.exit(f"error: unknown key {key!r} in --case; known: {', '.join(defaults)}")
        nothing = "none" if key in ("offload", "checkpointing", "quantize") else None
        words = {"true": True, "false": False, "none": nothing}
        case[key] = words[value] if value in words else _number(value)
    return case


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def case_text(case: Case, defaults: Case) -> str:
    return ",".join(f"{k}={str(v).lower()}" for k, v in case.items() if v != defaults[k])


# --- the command -----------------------------------------------------------------------------


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    args = _parse(benchmark, argv)
    cases = [benchmark.parsed(text) for text in args.case]
    if args.child:
        _measure(benchmark, cases[0], args)
        return
    if args.cases or not cases:
        cases += benchmark.cases(args.cases, args.only)
    if not cases:
        sys.exit("error: nothing to run: give --case or --cases")
    failed = 0
    for number, case in enumerate(cases, 1):
        text = case_text(case, benchmark.defaults)
        print(f"[{number}/{len(cases)}] {text or 'defaults'}", flush=True)
        command = benchmark.command(case, args.repeats, args.flags)
        if args.dry_run:
            print("    " + shlex.join(command))
            continue
        rows = run_child(command)
        failed += not rows
        if rows and args.output:
            write_results(args.output, rows, key=benchmark.key or tuple(benchmark.defaults))
    if failed:
        sys.exit(f"error: {failed} of {len(cases)} cases failed")


def _parse(benchmark: Benchmark, argv: Sequence[str] | None) -> argparse.Namespace:
    help_text = benchmark.description.split("\n\n")[0]
    parser = argparse.ArgumentParser(description=help_text, allow_abbrev=False)
    parser.add_argument("--case", action="append", default=[], help="key=value,... (repeatable)")
    parser.add_argument("--cases", choices=benchmark.published, help="a published set")
    parser.add_argument("--only", default="", help="of the set, those that hold this key=value,...")
    parser.add_argument("--repeats", type=int, help=f"of a case (default: {benchmark.repeats})")
    parser.add_argument(
        "--output", type=results_file, help="JSON file; rows are added to what it holds"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the cases and run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args(argv)
    if args.flags and not benchmark.takes_flags:
        parser.error("nothing here goes to train.py: leave out what comes after --")
    if args.repeats and benchmark.repeats is None and not args.child:
        parser.error("--repeats has no effect here: nothing is repeated")
    args.repeats = args.repeats or benchmark.repeats or 1
    return args


def _measure(benchmark: Benchmark, case: Case, args: argparse.Namespace) -> None:
    """Prints the rows of a case as a line of JSON; all else goes to stderr."""
    with program(), redirect_stdout(sys.stderr):
        rows = benchmark.measure(case, args.repeats, args.flags)
    short = any(row.get("status") == "oom" for row in rows)  # maybe in this process only
    if short or os.environ.get("RANK", "0") == "0":
        print(json.dumps(rows), flush=True)
    os._exit(0)  # an engine that ran out of memory may hang in its own clean-up


@contextmanager
def until_out_of_memory() -> Iterator[Row]:
    """Ends its block where memory runs out, and shows the message. The row that it yields says
    then that the status is `oom`, otherwise `ok`."""
    outcome = {"status": "ok"}
    try:
        yield outcome
    except (RuntimeError, UserError) as error:  # torch's, and longctx's OutOfMemory
        if "out of memory" not in str(error):
            raise
        print(error, file=sys.stderr)
        outcome["status"] = "oom"


def rounded(row: Row) -> Row:
    """The row with four decimals."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


# --- processes -------------------------------------------------------------------------------


def run_child(command: list[str], timeout_s: float | None = None) -> list[Row]:
    """The rows that a child prints as its last line; none, and the reason shown, if it fails."""
    lines, reason = child_lines(command, timeout_s)
    if not lines:
        print(f"    failed: {reason}", flush=True)
        return []
    for row in lines[-1]:
        print("    " + json.dumps(row), flush=True)
    return lines[-1]


def child_lines(command: list[str], timeout_s: float | None = None) -> tuple[list[list[Row]], str]:
    """The rows of each line of rows that a child prints until it ends or is late, and which of
    the two it was."""
    return lines_of(start_child(command), timeout_s)


def start_child(command: list[str]) -> subprocess.Popen[str]:
    """A child whose rows `lines_of` takes. What it reads from stdin comes from there."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)  # type: ignore[call-overload]


def lines_of(
    child: subprocess.Popen[str], timeout_s: float | None = None
) -> tuple[list[list[Row]], str]:
    """Gives a child the line that it may be waiting for, and returns what `child_lines` does."""
    printed = None
    try:
        printed, _ = child.communicate("\n", timeout=timeout_s)
        reason = f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"not done after {timeout_s:.0f} s"
    finally:
        if child.returncode is None:
            kill_with_workers(child.pid)
    if printed is None:
        printed, _ = child.communicate()
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[{")], reason


def kill_with_workers(pid: int) -> None:
    """A launcher's workers have sessions of their own, outlive it, and hold the GPUs."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def train_lines(
    flags: Sequence[str], folder: Path, program: Sequence[str] = ("train.py",)
) -> list[Row]:
    """Runs train.py, or a program like it, and returns the logged lines that have a loss. Raises
    UserError for a run that fails; what it printed is above."""
    command = [sys.executable, *program, *QUIET, "--output_dir", str(folder), *flags]
    try:
        subprocess.run(command, cwd=ROOT, check=True)
    except subprocess.CalledProcessError as error:
        raise UserError(f"exit code {error.returncode} of {shlex.join(command[1:])}") from error
    return logged_lines(folder)


QUIET = "--save_strategy no --disable_tqdm true".split()


def logged_lines(folder: Path) -> list[Row]:
    """The lines of a run's log that have a loss."""
    metrics = folder / "metrics.jsonl"
    lines = map(json.loads, metrics.open()) if metrics.exists() else ()
    return [line for line in lines if "loss" in line]
