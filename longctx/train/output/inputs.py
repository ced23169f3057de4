"""A run's own inputs are never among what it deletes to make way for itself.

Inputs are what the command line and options name, and what these lead to: links in a folder, paths
in its settings (the base of an adapter) and the data files that a dataset's card names. Records
name images, which are compared once they are read. Names are compared, not contents, at every
step of the way that the kernel takes from a name to a file: an input that is a link into the folder
is lost with what it leads to, one that only leads through the folder's link to a bigger disk loses
its way, and what such a link points to stays.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from longctx.errors import UserError
from longctx.system import expanded
from longctx.train.options.limits import words_of
from longctx.train.output import CARD
from longctx.train.safety.files import read_small

_MOST_LINKS = 40
"""Linux follows as many links in one path."""
_MOST_SETTINGS_BYTES = 4 << 20
_CAME_FROM = {"_name_or_path", "name_or_path"}
"""Keys whose paths say where a model came from; nothing is read there."""


def named_inputs(argv: Sequence[str] | None, *options: Any) -> list[Path]:
    """Everything there that a word of the command line or the value of an option names, and where
    such folders lead: a model's weights may be links, and an adapter names its base. `argv` are the
    words after the program's name (None: the process's own)."""
    given = sys.argv[1:] if argv is None else argv
    words = [*given, *(word.partition("=")[2] for word in given)]  # --option=value
    for of in options:
        words += words_of([getattr(of, field.name, None) for field in fields(of)])
    paths = [expanded(word) for word in dict.fromkeys(words) if word]
    found = [path for path in paths if os.path.lexists(path)]
    for path in found:  # which grows
        if os.path.isdir(path) and os.access(path, os.R_OK):
            found += [inside for inside in _led_to(path) if inside not in found]
    return found


def _led_to(folder: Path) -> Iterator[Path]:
    """Yields where links in a folder lead, and the paths that its settings and its card name."""
    for entry in os.scandir(folder):
        if entry.is_symlink():
            yield Path(folder, os.readlink(entry.path))
    for file in folder.glob("*config.json"):
        yield from _there(_words(file, json.loads), Path())
    yield from _there(_words(folder / CARD, _front_matter), folder)


def _words(file: Path, parse: Callable[[str], Any]) -> list[str]:
    """Returns the strings in a small file; none of one that is missing or damaged, which its own
    reader refuses."""
    try:
        content = parse(read_small(file, _MOST_SETTINGS_BYTES).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    words, waiting = [], [content]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [value for key, value in one.items() if key not in _CAME_FROM]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str):
            words.append(one)
    return words


def _front_matter(card: str) -> Any:
    return yaml.safe_load(card.split("---")[1]) if card.startswith("---") else None


def _there(words: Iterable[str], folder: Path) -> Iterator[Path]:
    """Yields the words that are paths from a folder, each up to its first wildcard."""
    for word in words:
        fixed = re.split(r"[*?\[]", word)[0]
        if "/" not in fixed or "\0" in fixed or "://" in fixed:
            continue
        path = folder / (fixed if fixed == word else os.path.dirname(fixed))
        if os.path.lexists(path):
            yield path


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
