"""What a run tells people: errors of one line, and lines that are printed once however many
processes run. Imports nothing heavy, so that commands can use it without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Bad input. The message is one line that names what is wrong and what to do."""


def print_rank0(line: str) -> None:
    """Prints a line, in the first process only."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a file's folder; a full disk or a place that may not be written is a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
