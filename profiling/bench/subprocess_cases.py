"""Cases of a benchmark as `key=value,...`, each run in a process of its own.

A case that runs out of memory is a row with that status, and the next one starts clean.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from profiling.results import write_results

Case = dict[str, Any]


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


def run_cases(
    cases: Sequence[Case],
    defaults: Case,
    command: Callable[[Case, str], list[str]],  # a case and its text -> the child's command line
    output: Path | None,
    key: Sequence[str],
) -> None:
    """Runs each case; the child prints a JSON list of rows as its last line.

    Rows are written as they come, in place of those of an earlier run that agree in `key`."""
    for number, case in enumerate(cases, 1):
        text = case_text(case, defaults)
        print(f"[{number}/{len(cases)}] {text or 'defaults'}", flush=True)
        rows = run_child(command(case, text))
        if rows and output:
            write_results(output, rows, key=key)


def run_child(command: list[str], timeout_s: float | None = None) -> list[dict[str, Any]]:
    """The rows that a child prints as its last line; none, and the reason shown, if it fails."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    printed = None
    try:
        printed, _ = child.communicate(timeout=timeout_s)
        reason = f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"not done after {timeout_s:.0f} s"
    finally:
        if child.returncode is None:
            kill_with_workers(child.pid)
    if printed is None:
        printed, _ = child.communicate()
    lines = [line for line in printed.splitlines() if line.startswith("[{")]
    if not lines:
        print(f"    failed: {reason}", flush=True)
        return []
    rows: list[dict[str, Any]] = json.loads(lines[-1])
    for row in rows:
        print("    " + json.dumps(row), flush=True)
    return rows


def kill_with_workers(pid: int) -> None:
    """A launcher's workers have sessions of their own, outlive it, and hold the GPUs."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
