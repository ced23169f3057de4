"""What a run's folder says of it: metrics.jsonl, run.json, and the manifests of what it saved.

A run of an earlier version has no run.json; its checkpoints say which options defined it. Values of
these files may be of any type: what is not as expected is left out of the page.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longctx.errors import UserError, printable
from longctx.train.output import FINAL, METRICS, checkpoints
from longctx.train.output.definition import APPLIED, OPTIONS
from longctx.train.output.manifest import Damaged, read_manifest
from longctx.train.output.record import read_record

Line = dict[str, Any]
LARGEST_BYTES = 1 << 28
"""Largest file of metrics: a million logged lines."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """One run, as its folder says."""

    name: str
    lines: list[Line]
    record: dict[str, Any]
    """The contents of run.json; empty without one."""
    options: dict[str, Any]
    """The options that are known, by name."""

    def series(self, key: str) -> list[tuple[int, float]]:
        """Returns (step, value) of every line that has `key` as a number."""
        return [
            (line["step"], float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), (int, float)) and not isinstance(line[key], bool)
        ]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.series(key)]

    def get(self, *keys: str | int) -> Any:
        """Returns run.json's value under these keys; None where it has none."""
        found: Any = self.record
        for key in keys:
            try:
                found = found[key]
            except (LookupError, TypeError):
                return None
        return found

    @property
    def tokens(self) -> int | None:
        """Tokens trained on, by the last line that says it."""
        return max((int(x) for x in self.values("tokens") if math.isfinite(x)), default=None)


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Returns the runs of these folders or metrics files, each with a name of its own. Raises
    UserError."""
    files = [metrics_path(path) for path in paths]
    names = [file.parent.resolve().name for file in files]
    if len({*names}) < len(names):
        names = [str(path) for path in paths]
    return [_read(name, file) for name, file in zip(names, files, strict=True)]


def _read(name: str, file: Path) -> LoggedRun:
    record = read_record(file.parent) or {}
    saved, options = dict(_defined(file.parent)), record.get("options")
    known = saved | (options if isinstance(options, dict) else {})
    return LoggedRun(name=name, lines=read_metrics(file), record=record, options=known)


def _defined(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the options by which the newest thing that the run saved is defined."""
    for saved in [folder / FINAL, *reversed(checkpoints(folder))]:
        try:
            manifest = read_manifest(saved)
        except Damaged:
            continue
        run: Mapping[str, Any] = (manifest or {}).get("run") or {}
        if run:
            yield from ((name, run[name]) for name in (*OPTIONS, *APPLIED) if name in run)
            return


def metrics_path(run: Path) -> Path:
    """Returns the metrics file of a folder or file. Raises UserError that says what is missing."""
    if os.path.isdir(run):  # False for a name too long, where Path.is_dir raises
        if not os.path.isfile(run / METRICS):
            raise UserError(
                f"{run} holds no {METRICS}: give the --output_dir of a run that logged a step"
            )
        return run / METRICS
    if not os.path.isfile(run):
        raise UserError(f"no such folder or file: {run}")
    return run


def read_metrics(path: Path) -> list[Line]:
    """Returns the logged lines in order. Half a line, as a kill or a full disk leaves, is left out
    and said. Raises UserError for a file without any logged step."""
    try:
        if (size_bytes := path.stat().st_size) > LARGEST_BYTES:
            raise UserError(f"{path} has {size_bytes >> 20} MiB, which no run logs")
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    lines: list[Line] = []
    broken: list[int] = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text, parse_int=_number)
            step = line["step"]
            if not isinstance(step, int):
                raise TypeError(step)
        except (ValueError, LookupError, TypeError, RecursionError):
            broken.append(number)
            continue
        lines.append(line)
    if broken and not lines:
        raise UserError(f"{path}:{broken[0]} is no line of metrics (a JSON object with a step)")
    if broken:
        said = f"{path}: left out {len(broken)} damaged line(s), the first is {broken[0]}"
        print(printable(said))
    if not any(key in line for line in lines for key in ("loss", "eval_loss")):
        raise UserError(f"{path} holds no logged step yet")
    return lines


def loss_change(losses: Sequence[float]) -> str:
    """Returns how a loss went, from its first value to its last, or its only value."""
    ends = losses if len(losses) < 2 else (losses[0], losses[-1])
    return " -> ".join(f"{loss:.4f}" for loss in ends)


def _number(digits: str) -> int | float:
    """Returns an integer; beyond 64 bits a float, infinite if need be, as no figure can show
    more."""
    return int(digits) if len(digits) < 20 else float(digits)
