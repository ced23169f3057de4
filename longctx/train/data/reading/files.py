"""Finds the files that paths, folders and globs name. A file that is named, or matched by a glob,
is read or refused; folders.py says which files of a folder are read.

Every error is a one-line UserError that names the file and what to do.
"""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from longctx.errors import UserError
from longctx.system import expanded
from longctx.train.data.reading.folders import Tell, files_in_folder, walk
from longctx.train.data.reading.kinds import check_readable, record_suffix

# The standard library without tests and without `encodings`, 1.4 MB of character tables. Python
# 3.11 leaves 536 files, 10.4 MB, 2.6M tokens of the default tokenizer: 650 rows of 4096 or 21 of
# 131072. Two cores read them in 0.1 s and tokenise them in 2 s, so no subset is needed.
STDLIB_SKIPPED = frozenset(
    "site-packages dist-packages test tests idle_test lib2to3 encodings __pycache__".split()
)


def find_files(patterns: Sequence[str], tell: Tell | None = None) -> list[Path]:
    """Returns the files that paths, folders and globs name, without repeats, in a fixed order.
    `tell` gets a line for each folder of which something is passed over.

    Raises UserError for what is missing, empty, unreadable or not text.
    """
    files: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _expand(pattern, tell):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def stdlib_files() -> list[Path]:
    """Returns the files of Python's own library: real long documents that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in walk(root, STDLIB_SKIPPED) if path.suffix == ".py")
    files = [path for path in found if path.stat().st_size]
    if not files:
        raise UserError(f"no standard library sources under {root}: give --train_file")
    return files


def file_of(where: str) -> str:
    """Returns the file of a document's place: without its line, record or row."""
    found = re.fullmatch(r"(.*?)(:\d+| row \d+)?( \(record \d+( of `.*`)?\))?", where, re.DOTALL)
    file = found[1] if found else where
    return file if record_suffix(Path(file)) else where


def unreadable(path: Path, error: OSError) -> UserError:
    """Returns the line for an error of the system while a file is read."""
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
            files = files_in_folder(path, tell)
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
