"""Finds the files of a folder that are read: its files of records or, if it has none, its texts.

    data/README.md            passed over: there are records
    data/train.parquet        read
    data/test.parquet         passed over: another split than train (splits.py)
    data/dataset_info.json    passed over: settings, whose first object is no record
    data/a.png, b.docx        passed over: no text
    data/cache-1.arrow        passed over: save_to_disk's state.json does not name it (saved.py)

One line names what is passed over and, where names or a README tell several sets apart, what is
read.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from longctx.errors import UserError, many, printable
from longctx.train.data.reading.json_values import has_form, read_json_file
from longctx.train.data.reading.kinds import (
    CELL_SUFFIXES,
    IMAGE_SUFFIXES,
    TEXT_SUFFIXES,
    record_suffix,
)
from longctx.train.data.reading.opened import Text
from longctx.train.data.reading.saved import not_saved
from longctx.train.data.reading.splits import choose
from longctx.train.data.reading.tables import columns_of_cells

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
CARDS = re.compile(r"(?i)(readme|license|licence|notice|citation|changelog|contributing)\b.*")
"""Names of files about the data or the code, which hold no records."""
SETTINGS = frozenset("config.json dataset_info.json dataset_infos.json dataset_dict.json".split())
"""Names of JSON files that `datasets` never reads as data. LLaMA-Factory's dataset_info.json may
call a data set `messages`."""
_TOKENS = re.compile(r'("(?:[^"\\]|\\.)*")(?=\s*:\s*(["\[{]))?|[{}\[\]]')
"""Strings of JSON, with the sign behind them where they are keys of a text, a list or an object;
and brackets."""
MOST_NAMED = 3
MOST_KINDS = 8
"""A line about a folder names at most this many files of a kind, and kinds of files."""
Tell = Callable[[str], None]


@dataclass
class _Folder:
    """A folder's files by what becomes of them."""

    records: list[Path] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)
    """Records that are not read, each with the reason."""
    note: str | None = None
    """A note on the records that are read (splits.py)."""
    texts: list[Path] = field(default_factory=list)
    no_records: list[Path] = field(default_factory=list)
    """JSON, CSV and TSV files of something else."""
    empty: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)


def files_in_folder(folder: Path, tell: Tell | None) -> list[Path]:
    """Returns the files of a folder to read. `tell` gets the line that names what is passed over.
    Raises UserError for a folder without any."""
    found = _sorted_out(folder)
    if not found.records and all(CARDS.fullmatch(path.name) for path in found.texts):
        found.records = [path for path in found.no_records if path.name not in SETTINGS]
        found.no_records = []  # reading the others says what they lack
    passed = _passed_over(found, folder)
    words = ", ".join(passed[:MOST_KINDS])
    if len(passed) > MOST_KINDS:
        words += f" and {len(passed) - MOST_KINDS} other kinds"
    files = found.records or found.texts
    if not files:
        holds = f": it holds {words}" if words else ""
        raise UserError(
            f"no readable text in the folder {folder}{holds}: it needs non-empty .txt, .md or "
            "source files, or records as .jsonl, .json, .csv, .tsv, .parquet or .arrow"
        )
    lines = []
    if found.note is not None or found.left:
        lines.append(f"read: {named_files(files, folder)}{found.note or ''}")
    if words:
        missed = any(not CARDS.fullmatch(path.name) for path in found.texts)
        if found.records and missed:
            words += "; to train on its texts too, name them as files or by a glob"
        lines.append(f"passed over: {words}")
    if tell and lines:
        tell(printable(f"in {folder} {'; '.join(lines)}"))
    return files


def other_records(folder: Path, read: Collection[Path]) -> list[Path]:
    """Returns the files of records in a folder that are not among `read`."""
    skip = {path.resolve() for path in read}
    found = (path for path in walk(folder, SKIPPED_FOLDERS) if record_suffix(path) is not None)
    return [path for path in found if path.resolve() not in skip and _holds_records(path)]


def named_files(files: Sequence[Path], folder: Path) -> str:
    """Names a few files by their paths below their folder, or the first of many."""
    names = [path.relative_to(folder).as_posix() for path in files]
    more = len(names) - MOST_NAMED
    shown = ", ".join(names[:MOST_NAMED])
    return f"{shown} and {many(more, 'more file')}" if more > 0 else shown


def _sorted_out(folder: Path) -> _Folder:
    found = _Folder()
    for path in walk(folder, SKIPPED_FOLDERS):
        if not path.stat().st_size:
            found.empty.append(path)
        elif record_suffix(path) is not None:
            (found.records if _holds_records(path) else found.no_records).append(path)
        else:
            text = path.suffix.lower() in TEXT_SUFFIXES
            (found.texts if text else found.others).append(path)
    found.left = not_saved(found.records, folder)
    choice = choose([path for path in found.records if path not in found.left], folder)
    found.records, found.note = choice.read, choice.note
    found.left |= choice.left
    return found


def _passed_over(found: _Folder, folder: Path) -> list[str]:
    """Returns phrases that list the files of a folder which are not read."""
    reasons = found.left | dict.fromkeys(found.no_records, "no records")
    words = []
    for why in dict.fromkeys(reasons.values()):
        words += _first([path for path in reasons if reasons[path] == why], why, folder)
    words += _kinds(found.texts, named=True) if found.records else []
    words += _kinds(found.others, " (read where records name them)" if found.records else "")
    return words + ([many(len(found.empty), "empty file")] if found.empty else [])


def _first(paths: list[Path], why: str, folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in paths[:MOST_NAMED]]
    words = [f"{name} ({why})" for name in names]
    more = len(paths) - MOST_NAMED
    return [*words, f"{many(more, 'more file')} ({why})"] if more > 0 else words


def _kinds(paths: list[Path], seen: str = "", *, named: bool = False) -> list[str]:
    """Returns the kinds of files with their numbers; by name where few of a kind should be `named`.
    `seen` is said of images."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        suffix = path.suffix.lower()
        kinds.setdefault("image" if suffix in IMAGE_SUFFIXES else suffix or path.name, []).append(
            path.name
        )
    words = []
    for kind, names in kinds.items():
        if kind == "image":
            words.append(many(len(names), kind) + seen)
        elif named and len(names) <= MOST_NAMED:
            words += names
        else:
            several = kind.startswith(".") or len(names) > 1
            words.append(f"{len(names):,} {kind}" if several else kind)
    return words


def _holds_records(path: Path) -> bool:
    """Whether a file of records in a folder is one of training data: others hold settings or
    figures. A broken one counts, so that reading it says what is wrong."""
    if record_suffix(path) not in {".json", *CELL_SUFFIXES}:
        return True
    stat = path.stat()
    return _begins_with_record(path, (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4096)
def _begins_with_record(path: Path, version: tuple[int, int]) -> bool:
    text = Text(path)
    try:
        if record_suffix(path) in CELL_SUFFIXES:
            return has_form(columns_of_cells(text))
        head = next(text.blocks(), "")
        if not head.lstrip().startswith("["):  # an object may be as long as the file
            return path.name not in SETTINGS and any(map(has_form, _keys_of_records(head)))
        first = next(read_json_file(Text(path)), None)
    except (UserError, OSError, csv.Error):
        return True
    return first is not None and isinstance(first.value, Mapping) and has_form(first.value)


def _keys_of_records(head: str) -> Iterator[set[str]]:
    """Yields the keys of the objects with which a JSON text that begins with an object may hold
    records: the object itself, and the objects in its lists. Deeper ones are settings or
    features."""
    keys: dict[str, set[str]] = {"{": set(), "{[{": set()}
    opened = ""
    for token in _TOKENS.finditer(head):
        sign = token[0]
        if sign in "{[":
            opened += sign
        elif sign in "}]":
            if opened in keys:
                yield keys[opened]
                keys[opened] = set()
            opened = opened[:-1]
            if not opened:
                return
        elif token[2] and opened in keys:
            key = token[1][1:-1]
            if (key, token[2]) != ("text", "{"):  # an object is no text
                keys[opened].add(key)
    yield from keys.values()


def walk(root: Path, skipped: Collection[str]) -> Iterator[Path]:
    """Yields the regular files below a folder but hidden ones, in a fixed order."""

    def stop(error: OSError) -> None:
        raise error

    # os.walk does not follow links to folders, so a loop of links ends.
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
