"""What the cache folder holds; `--prune` deletes what has not been used for --days.

    longctx cache                      a table: files, GiB and last use of each kind
    longctx cache --prune --days 90    deletes, and says what it freed

Deleted are files not used for --days, and after one day what a killed run left half done. Files
count as ours by their whole name (`rows-v1-<20 hex digits>.arrow`); anything else in the folder
stays, and so do links. A run that has a file open keeps it: it is mapped into memory, and Linux
frees a deleted file when the last process lets go of it. What a later run misses, it makes again.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longctx.constants import GIB
from longctx.errors import UserError, say
from longctx.system import expanded
from longctx.train.data.pack.cache import CHECKSUM, FILE_NAME, FORMAT, TEMPORARY_NAME
from longctx.train.options.config import DataArguments
from longctx.train.program import Parser

DAY_S = 24 * 3600
KILLED, OTHER = "killed runs' leftovers", "other formats"
GROUPS = {
    "documents": "documents",
    "tokens": "tokens",
    "rows": "rows",
    "reference": "references",
    "tokenizer": "tokenizers",
}
"""Kind of file -> its line of the table; KILLED and OTHER have lines of their own."""


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """Files that are used, and deleted, together."""

    group: str
    paths: tuple[Path, ...]
    files: int
    size_bytes: int
    used_s: float
    """When it was last used, in seconds since 1970."""

    def unused(self, days: int) -> bool:
        return time.time() - self.used_s >= DAY_S * (1 if self.group == KILLED else days)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="longctx cache", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache_dir", default=DataArguments.cache_dir, help="default: %(default)s")
    parser.add_argument("--prune", action="store_true", help="delete what is not used")
    parser.add_argument("--days", type=int, default=30, help="default: %(default)s, at least 1")
    args = parser.parse_args(argv)
    if args.days < 1:  # a younger file may belong to a run that is about to open it
        raise UserError(f"--days must be at least 1, got {args.days}")
    folder = expanded(args.cache_dir)
    entries = read_cache(folder)
    say(*table(folder, entries))
    unused = [entry for entry in entries if entry.unused(args.days)]
    size_gib = sum(entry.size_bytes for entry in unused) / GIB
    size = f"{size_gib:.2f} GiB, {_count(sum(entry.files for entry in unused), 'file')}"
    if args.prune:
        prune(folder, unused)
        say(f"freed {size}")
    else:
        say(
            f"--prune would free {size}: not used for {_count(args.days, 'day')}, or left half done"
        )


def read_cache(folder: Path) -> list[CachedFile]:
    """Returns longctx's files in the folder. Raises UserError where it cannot be read."""
    groups: dict[str, list[Path]] = defaultdict(list)
    try:
        with os.scandir(folder) as items:
            for item in items:
                if match := FILE_NAME.fullmatch(item.name):
                    if item.is_file(follow_symlinks=False):
                        groups[match["stem"]].append(Path(item.path))
                elif TEMPORARY_NAME.fullmatch(item.name) and not item.is_symlink():
                    groups[item.name].append(Path(item.path))
    except OSError as error:
        raise UserError(
            f"cannot read the cache folder {folder} ({error.strerror or error}): give another "
            "with --cache_dir"
        ) from error
    # The longest name first, so that a file loses its checksum before it goes itself.
    return [_entry(sorted(paths, reverse=True)) for paths in groups.values()]


def table(folder: Path, entries: Sequence[CachedFile]) -> Iterator[str]:
    yield f"{folder}"
    yield f"{'':24}{'files':>7}{'GiB':>10}  last used"
    for group in (*GROUPS.values(), KILLED, OTHER, None):
        chosen = [entry for entry in entries if group in (entry.group, None)]
        size_gib = sum(entry.size_bytes for entry in chosen) / GIB
        used = max((entry.used_s for entry in chosen), default=None)
        ago = "-" if used is None else _ago(used)
        files = sum(entry.files for entry in chosen)
        yield f"{group or 'all':24}{files:>7,}{size_gib:>10.2f}  {ago}"


def prune(folder: Path, entries: Sequence[CachedFile]) -> None:
    """Deletes entries. Raises UserError where that is not allowed."""
    try:
        for entry in entries:
            for path in entry.paths:
                with suppress(FileNotFoundError):  # another process was faster
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise UserError(
            f"cannot delete from {folder} ({error.strerror or error}): check who owns it"
        ) from error


def _entry(paths: Sequence[Path]) -> CachedFile:
    found: list[tuple[str, os.stat_result]] = []
    for path in paths:
        inside = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
        for file in (str(path), *inside):
            with suppress(FileNotFoundError):  # another process was faster
                found.append((file, os.lstat(file)))
    group = _group(paths)
    checksums = [info for file, info in found if file.endswith(CHECKSUM)]
    used_s = 0.0
    for info in checksums or [info for _, info in found]:
        # Looking into a leftover folder is an access, but no use.
        used_s = max(used_s, info.st_mtime, 0 if group == KILLED else info.st_atime)
    return CachedFile(
        group=group,
        paths=tuple(paths),
        files=sum(not stat.S_ISDIR(info.st_mode) for _, info in found),
        size_bytes=sum(info.st_size for _, info in found),
        used_s=used_s,
    )


def _group(paths: Sequence[Path]) -> str:
    match = FILE_NAME.fullmatch(paths[0].name)
    if match is None:
        return KILLED
    if match["format"] != str(FORMAT):
        return OTHER
    names = {path.suffix for path in paths}
    finished = {".json"} if match["kind"] == "tokenizer" else {".arrow", CHECKSUM}
    return GROUPS[match["kind"]] if finished <= names else KILLED


def _ago(used_s: float) -> str:
    days = int((time.time() - used_s) / DAY_S)
    return "today" if days < 1 else f"{_count(days, 'day')} ago"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
