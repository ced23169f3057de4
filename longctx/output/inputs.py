"""A run's own inputs are never among what it deletes to make way for itself.

Names are compared, not contents, at every step of the way that the kernel takes from a name to a
file: an input that is a link into the folder is lost with what it leads to, one that only leads
through the folder's link to a bigger disk loses its way, and what such a link points to stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from longctx.errors import UserError
from longctx.options.limits import words_of
from longctx.safety.system import expanded

_MOST_LINKS = 40
"""Linux follows as many links in one path."""


def named_inputs(argv: Sequence[str] | None, *options: Any) -> list[Path]:
    """Everything there that a word of the command line or the value of an option names, and where
    links in such folders lead: a model's weights may be links. `argv` are the words after the
    program's name (None: the process's own)."""
    given = sys.argv[1:] if argv is None else argv
    words = [*given, *(word.partition("=")[2] for word in given)]  # --option=value
    for of in options:
        words += words_of([getattr(of, field.name, None) for field in fields(of)])
    paths = [expanded(word) for word in dict.fromkeys(words) if word]
    found = [path for path in paths if os.path.lexists(path)]
    folders = [path for path in found if os.path.isdir(path) and os.access(path, os.R_OK)]
    links = [entry for folder in folders for entry in os.scandir(folder) if entry.is_symlink()]
    return found + [Path(os.path.dirname(link.path), os.readlink(link)) for link in links]


def refuse_lost(cleared: Sequence[Path], inputs: Iterable[Path]) -> None:
    """Raises UserError if an input would be deleted with one of the `cleared` entries."""
    doomed = {os.path.join(os.path.realpath(path.parent), path.name): path for path in cleared}
    for path in inputs if doomed else ():
        for place in _way(path):
            if place in doomed:
                raise UserError(
                    f"{doomed[place]} would be deleted to make way for this run, which reads "
                    f"{path}: choose another --output_dir, or move what is read"
                )


def _way(path: Path) -> Iterator[str]:
    """Every entry of a folder, without links in its own name, that a path leads through."""
    at, links = "/", 0
    waiting = os.path.join(os.getcwd(), path).split("/")[::-1]
    while waiting:
        name = waiting.pop()
        if name == "..":
            at = os.path.dirname(at)
        if name in ("", ".", ".."):
            continue
        entry = os.path.join(at, name)
        yield entry
        if os.path.islink(entry) and links < _MOST_LINKS:
            links += 1
            target = os.readlink(entry)
            at = "/" if target.startswith("/") else at
            waiting += target.split("/")[::-1]
        else:
            at = entry
