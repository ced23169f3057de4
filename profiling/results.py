"""Writes `profiling/results/*.json`: rows with the hardware, versions, commit, command and date."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from longctx.errors import UserError
from longctx.train.report.page import code, heading, paragraph, with_ending
from longctx.train.safety.strange_files import read_json
from longctx.train.safety.writing import check_writable, is_marked, replace_file

_PACKAGES = (
    "torch triton transformers accelerate liger-kernel cut-cross-entropy flash-attn-4 deepspeed trl"
).split()


def results_file(text: str) -> Path:
    """The type of an option that names a results file: one that is not there yet, or holds results.
    Hours of work are not lost at their end, and somebody else's file is not replaced."""
    path = Path(text)
    _check(path, path)
    return path


def files_named(*endings: str) -> Callable[[str], Path]:
    """The type of an option that names OUTPUT + each of the endings: OUTPUT.json are results, and
    the others are made of them or are marked as ours."""

    def named(text: str) -> Path:
        for ending in endings:
            _check(with_ending(Path(text), ending), with_ending(Path(text), ".json"))
        return Path(text)

    return named


def _check(path: Path, results: Path) -> None:
    try:
        check_writable(path, ours=lambda path: _holds_results(results) or is_marked(path))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _holds_results(path: Path) -> bool:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"hardware", "commit", "rows"} <= found.keys()


def describe_run(path: Path) -> dict[str, Any]:
    """Everything in the results file `path` but its rows. The commit is that of the working tree,
    or `LONGCTX_COMMIT` where the tree is a copy without its history; the command writes to its
    place in the repository, wherever this run wrote."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        hardware = f"{count}x {torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores"
    else:
        hardware = f"{os.cpu_count()} CPU cores, no GPU"
    published = Path("profiling/results") / path.name
    published_names = {
        str(path): str(published),
        str(path.with_suffix("")): str(published.with_suffix("")),  # of several files
        str(path.parent): f"runs/{path.parent.name}",
    }
    words = [published_names.get(word, word) for word in sys.argv]
    versions = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "hardware": hardware,
        "versions": versions,
        "commit": os.environ.get("LONGCTX_COMMIT") or _commit(),
        "command": " ".join(["python", *map(shlex.quote, words)]),
        "date": datetime.date.today().isoformat(),
    }


def how_measured(described: dict[str, Any]) -> list[str]:
    """The part of a page that says where the rows of a results file come from."""
    where = f"{described['hardware']}; commit {described['commit']}; {described['date']}."
    return [heading("How it was measured"), paragraph(where), code(described["command"])]


def _commit() -> str:
    """HEAD, and whether the code differs from it; the results are what such a run writes."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    code = [":/", ":(top,exclude)profiling/results"]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return (git("rev-parse", "HEAD") or "unknown") + ("-dirty" if changed else "")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file; none where there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def write_results(
    path: Path,
    rows: Iterable[dict[str, Any]],
    *,
    key: Sequence[str] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes rows under a fresh description, which `extra` adds to. With `key`, a row replaces the
    one in the file that agrees with it in these columns, and the others stay."""
    rows = list(rows)
    if key is not None:
        fresh = [tuple(row.get(k) for k in key) for row in rows]
        rows = [r for r in read_rows(path) if tuple(r.get(k) for k in key) not in fresh] + rows
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(describe_run(path) | (extra or {}), indent=2).removesuffix("\n}")
    # As a whole: an interrupted write loses no rows.
    replace_file(path, f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n'.encode())
