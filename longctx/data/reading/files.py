"""Finds the files that paths, folders and globs name. A folder's files of records are read, or, if
it has none, its texts.

    data/README.md            passed over: there are records
    data/train.parquet        read
    data/test.parquet         passed over: another split than train
    data/settings.json        passed over: its first object is no record
    data/a.png, b.docx        passed over: no text

What is passed over is told in one line. A file that is named, or matched by a glob, is read or
refused. Every error is a one-line UserError that names the file and what to do.
"""

from __future__ import annotations

import csv
import glob
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from longctx.data.reading.json_values import has_form, read_json_file
from longctx.data.reading.kinds import (
    CELL_SUFFIXES,
    IMAGE_SUFFIXES,
    TEXT_SUFFIXES,
    check_readable,
    record_suffix,
)
from longctx.data.reading.opened import Text
from longctx.data.reading.tables import columns_of_cells
from longctx.errors import UserError, many, printable
from longctx.safety.system import expanded

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
# The standard library without tests and without `encodings`, 1.4 MB of character tables. Python
# 3.11 leaves 536 files, 10.4 MB, 2.6M tokens of the default tokenizer: 650 rows of 4096 or 21 of
# 131072. Two cores read them in 0.1 s and tokenise them in 2 s, so no subset is needed.
STDLIB_SKIPPED = frozenset(
    "site-packages dist-packages test tests idle_test lib2to3 encodings __pycache__".split()
)
CARDS = re.compile(r"(?i)(readme|license|licence|notice|citation|changelog|contributing)\b.*")
"""Names of files about the data or the code, which nobody misses when records are read."""
TRAIN = frozenset({"train", "training"})
HELD_OUT = frozenset({"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})
"""Words of a file's name by which datasets of the hub tell their splits."""
_KEYS = re.compile(r'"(\w+)"\s*:\s*["\[{]')
"""Keys of JSON whose value is a text, a list or an object."""
MOST_NAMED = 3
MOST_KINDS = 8
Tell = Callable[[str], None]


def find_files(patterns: Sequence[str], tell: Tell | None = None) -> list[Path]:
    """The files that paths, folders and globs name, without repeats, in a fixed order. `tell` gets
    a line for each folder of which something is passed over.

    Raises UserError for what is missing, empty, unreadable or not text.
    """
    files: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _expand(pattern, tell):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def stdlib_files() -> list[Path]:
    """Python's own library: real long documents that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in _walk(root, STDLIB_SKIPPED) if path.suffix == ".py")
    files = [path for path in found if path.stat().st_size]
    if not files:
        raise UserError(f"no standard library sources under {root}: give --train_file")
    return files


def file_of(where: str) -> str:
    """The file of a document's place: without its line, record or row."""
    found = re.fullmatch(r"(.*?)(:\d+| row \d+)?( \(record \d+( of `.*`)?\))?", where, re.DOTALL)
    file = found[1] if found else where
    return file if record_suffix(Path(file)) else where


def unreadable(path: Path, error: OSError) -> UserError:
    """The line for an error of the system while a file is read."""
    name = error.filename or path
    return UserError(f"cannot read {name}: {error.strerror or error}; check it and its permissions")


def _expand(pattern: str, tell: Tell | None) -> list[Path]:
    path = expanded(pattern)
    if re.match(r"[a-z][a-z0-9+]+://", pattern) and not path.exists():
        raise UserError(
            f"{pattern} is an address: download it and give the file, or name a dataset of the hub "
            "with --dataset_name"
        )
    try:
        if path.is_dir():
            files = _in_folder(path, tell)
        elif path.exists() or not glob.has_magic(pattern):
            _check_file(path)
            files = [path]
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            files = [p for p in matches if p.is_file() and p.stat().st_size]
            if not files:
                raise UserError(f"{pattern} matches no non-empty file: check the pattern")
        for file in files:
            check_readable(file)
    except OSError as error:
        raise unreadable(path, error) from error
    return files


def _check_file(path: Path) -> None:
    try:
        size_bytes = path.stat().st_size
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the name
        raise UserError(f"{path} does not exist: check the path") from None
    if not path.is_file():
        raise UserError(f"{path} is not a regular file or a folder: give files of text or records")
    if size_bytes == 0:
        raise UserError(f"{path} is empty: remove it or give another file")


@dataclass
class _Folder:
    """A folder's files by what becomes of them."""

    records: list[Path] = field(default_factory=list)
    other_splits: list[Path] = field(default_factory=list)
    """Records to evaluate, as their names tell."""
    texts: list[Path] = field(default_factory=list)
    no_records: list[Path] = field(default_factory=list)
    """JSON, CSV and TSV files of something else."""
    empty: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)


def _in_folder(folder: Path, tell: Tell | None) -> list[Path]:
    found = _sorted_out(folder)
    if not found.records and all(CARDS.fullmatch(path.name) for path in found.texts):
        found.records, found.no_records = found.no_records, []  # reading them says what they lack
    passed = _passed_over(found)
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
    if tell and words:
        missed = any(not CARDS.fullmatch(path.name) for path in found.texts)
        if found.records and missed:
            words += "; to train on its texts too, name them as files or by a glob"
        tell(printable(f"in {folder} passed over: {words}"))
    return files


def _sorted_out(folder: Path) -> _Folder:
    found = _Folder()
    for path in _walk(folder, SKIPPED_FOLDERS):
        if not path.stat().st_size:
            found.empty.append(path)
        elif record_suffix(path) is not None:
            (found.records if _holds_records(path) else found.no_records).append(path)
        else:
            text = path.suffix.lower() in TEXT_SUFFIXES
            (found.texts if text else found.others).append(path)
    found.records, found.other_splits = _split(found.records, folder)
    return found


def _passed_over(found: _Folder) -> list[str]:
    """Returns phrases that list the files of a folder which are not read."""
    words = _kinds(found.texts, named=True) if found.records else []
    words += _kinds(found.others, " (read where records name them)" if found.records else "")
    words += _first(found.no_records, "no records")
    words += _first(found.other_splits, "not the split train")
    return words + ([many(len(found.empty), "empty file")] if found.empty else [])


def _first(paths: list[Path], why: str) -> list[str]:
    words = [f"{path.name} ({why})" for path in paths[:MOST_NAMED]]
    more = len(paths) - MOST_NAMED
    return [*words, f"{many(more, 'more file')} ({why})"] if more > 0 else words


def _kinds(paths: list[Path], seen: str = "", *, named: bool = False) -> list[str]:
    """Kinds of files with their numbers; by name where few of a kind should be `named`. `seen` is
    said of images."""
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
            return has_form(_KEYS.findall(head))
        first = next(read_json_file(Text(path)), None)
    except (UserError, OSError, csv.Error):
        return True
    return first is not None and isinstance(first.value, Mapping) and has_form(first.value)


def _split(records: list[Path], folder: Path) -> tuple[list[Path], list[Path]]:
    """The files to train on, and those of other splits, if names tell."""
    words = {path: _words(path.relative_to(folder)) for path in records}
    if not any(words[path] & TRAIN for path in records):
        return records, []
    held = [path for path in records if words[path] & HELD_OUT and not words[path] & TRAIN]
    return [path for path in records if path not in set(held)], held


def _words(path: Path) -> set[str]:
    return set(re.findall(r"[a-z]+", str(path).lower()))


def _walk(root: Path, skipped: Collection[str]) -> Iterator[Path]:
    """The regular files below a folder but hidden ones, in a fixed order."""

    def stop(error: OSError) -> None:
        raise error

    # os.walk does not follow links to folders, so a loop of links ends.
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
