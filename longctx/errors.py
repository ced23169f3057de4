"""The error for bad input, apart from config.py so that commands can raise it without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Bad input. The message is one line that names what is wrong and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a file's folder; a full disk or a place that may not be written is a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
