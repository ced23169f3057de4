"""Files under cache_dir, named by their format and a hash of everything they are made from.

    documents-v4-<hash>.arrow    what was read                 each with its checksum beside it
    tokens-v4-<hash>.arrow       4 bytes and a bit a token     (.arrow.xxh3)
    rows-v4-<hash>.arrow         12 bytes a token
    rows-v4-<hash>.json          what was said when they were packed
    reference-v4-<hash>.arrow    8 bytes an answer: a reference model's log-probabilities
    tokenizer-v4-<hash>.json     the default tokenizer

A file is written next to its place, flushed to disk and renamed, so that neither a killed run nor a
power cut leaves a half file that looks whole. Who writes holds a lock on what it writes, which the
kernel drops when its process ends: the next run deletes what a killed one left
(`remove_leftovers`). The checksum is written after its file, so a file without one was never
finished and is made again. Opening a file reads all of it and compares the checksum, at 10 GB/s
from memory (64-bit xxHash) or as fast as the disk is: a flipped bit would otherwise be trained on
without a word. Nothing is ever invalidated, because other inputs have another name; `longctx cache
--prune` deletes what is no longer used (prune.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import xxhash
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError, print_rank0
from longctx.train.data.chat import training_templates
from longctx.train.safety.checksum import checksum
from longctx.train.safety.strange_files import MOST_JSON_BYTES, read_small

FORMAT = 4
"""The number of the format of the files and of what tokenising and packing make of an input. A
change that gives other rows raises it (tests/train/data/test_cache.py knows the rows of this
one)."""
KINDS = ("documents", "tokens", "rows", "reference", "tokenizer")
CHECKSUM = ".xxh3"
MOST_CHECKSUM_BYTES = 1000
"""More than any file of a checksum has, which is 16 hexadecimal digits: a larger file is not
read."""
TEMPORARY = ".tmp"
_STEM = rf"(?P<stem>(?P<kind>{'|'.join(KINDS)})-(?:v(?P<format>\d+)-)?[0-9a-f]{{20}})"
_SUFFIX = rf"(\.arrow|\.arrow\{CHECKSUM}|\.json)"
# Before the format had a number, datasets.map named the tokens' files, one a process.
FILE_NAME = re.compile(rf"{_STEM}(_\d{{5}}_of_\d{{5}})?{_SUFFIX}")
TEMPORARY_NAME = re.compile(rf"{_STEM}{_SUFFIX}?-?([0-9a-f]{{6}}-)?[a-z0-9_]{{8}}\{TEMPORARY}")
BATCH_BYTES = 64 << 20
"""Rows that are in memory together while an Arrow file is written."""


def digest(*parts: Any) -> str:
    """Returns a name for what `parts` (JSON values) say."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:20]


def cache_path(folder: Path, kind: str, key: str, suffix: str = ".arrow") -> Path:
    """Returns the path of a file of one of KINDS; `key` is the digest of what it is made from."""
    return folder / f"{kind}-v{FORMAT}-{key}{suffix}"


def file_identity(path: Path) -> list[Any]:
    """Returns what changes whenever the file does: even a copy that keeps size and mtime changes
    ctime."""
    stat = path.stat()
    return [str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def dataset_identity(dataset: Dataset) -> list[Any]:
    """Returns what changes whenever the dataset's files do: a fingerprint is only what its
    state.json says. A dataset in memory has no files."""
    files = [file_identity(Path(file["filename"])) for file in dataset.cache_files]
    return [dataset._fingerprint, *files]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Returns all of a tokenizer that decides a document's tokens."""
    ours = training_templates.identity() if tokenizer.chat_template else None
    template = [tokenizer.chat_template, ours]
    identity = [type(tokenizer).__name__, tokenizer.special_tokens_map, template]
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by the last call, and set anew by the next.
        del backend["truncation"], backend["padding"]
        return [*identity, hashlib.sha256(json.dumps(backend).encode()).hexdigest()]
    return [*identity, sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs]


def open_arrow(path: Path, rows: int | None = None) -> Dataset | None:
    """Returns the file as a memory-mapped dataset; None if it is missing, unfinished or damaged."""
    beside = _checksum_path(path)
    try:
        expected = read_small(beside, MOST_CHECKSUM_BYTES).decode(errors="replace")
        mark_used(beside)
        found = checksum(path)
        if found != expected:
            reason = f"its checksum is {found}, not {expected[:16]!r}"
        else:
            dataset = Dataset.from_file(str(path))
            if rows is None or len(dataset) == rows:
                return dataset
            reason = f"{len(dataset)} of {rows} rows"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
    print_rank0(f"rebuilding the damaged cache file {path} ({reason})")
    with writable(path.parent):
        beside.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return None


def write_arrow(path: Path, features: Features, rows: Iterable[dict[str, Any]]) -> Dataset:
    """Writes rows as an Arrow stream, in batches of about BATCH_BYTES, then its checksum.

    The same rows give the same bytes, so runs that write one file at the same time agree.
    """
    schema = features.arrow_schema
    with _replacing(path) as file:
        hashed = _Hashed(file)
        with pa.ipc.new_stream(hashed, schema) as writer:
            batch: list[dict[str, Any]] = []
            size_bytes = 0
            for row in rows:
                batch.append(row)
                size_bytes += sum(_size_bytes(value) for value in row.values())
                if size_bytes >= BATCH_BYTES:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                    batch, size_bytes = [], 0
            if batch:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
    write_text(_checksum_path(path), hashed.hash.hexdigest())
    return Dataset.from_file(str(path))


def forget(path: Path) -> None:
    """Deletes a file of `write_arrow` whose content lies in another one now."""
    with suppress(OSError):  # it stays for `longctx cache --prune`
        _checksum_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def content_of(dataset: Dataset) -> str | None:
    """Returns the checksum of a dataset of `write_arrow` or `open_arrow`: equal for equal rows,
    wherever their sources lie."""
    for file in dataset.cache_files:
        with suppress(OSError, ValueError):
            return read_small(_checksum_path(Path(file["filename"])), MOST_CHECKSUM_BYTES).decode()
    return None


def mark_used(path: Path) -> None:
    """Sets the time that `longctx cache` shows: many disks are mounted without access times."""
    with suppress(OSError):  # another user's cache can be read without being written
        os.utime(path, follow_symlinks=False)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(read_small(path, MOST_JSON_BYTES))
    except (OSError, ValueError):
        return None


def write_text(path: Path, text: str) -> None:
    with _replacing(path) as file:
        file.write(text.encode())


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turns a full disk or a read-only folder into a UserError that names the flag."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror or error}): free space or give another "
            "folder with --cache_dir"
        ) from error


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Makes an empty folder on the disk of `path`, and deletes it afterwards."""
    # A network disk keeps a file that is still mapped, under a name of its own, and so the folder.
    with writable(path.parent), ExitStack() as stack:
        while True:
            folder = tempfile.TemporaryDirectory(
                TEMPORARY, _prefix(path), path.parent, ignore_cleanup_errors=True
            )
            stack.enter_context(folder)
            handle = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, handle)
            if _lock(handle, Path(folder.name)):
                break
        yield Path(folder.name)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    with writable(path.parent), ExitStack() as stack:
        while True:
            handle, name = tempfile.mkstemp(TEMPORARY, _prefix(path), path.parent)
            temporary = Path(name)
            stack.callback(temporary.unlink, missing_ok=True)
            file = stack.enter_context(os.fdopen(handle, "wb"))
            if _lock(handle, temporary):
                break
        yield file
        file.flush()
        os.fsync(handle)
        os.replace(temporary, path)


def remove_leftovers(folder: Path) -> None:
    """Deletes what killed runs on this machine were writing into the cache folder.

    Locks may not reach other machines, so theirs stay for `longctx cache --prune`, as do those on a
    disk without locks.
    """
    leftovers: list[Path] = []
    with suppress(OSError):  # who writes there will say what is wrong with it
        leftovers += folder.glob(f"*-{_host()}-*{TEMPORARY}")
    for path in leftovers:
        with suppress(OSError):  # another user's, or deleted meanwhile
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
                if TEMPORARY_NAME.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(handle)


def _prefix(path: Path) -> str:
    return f"{path.name}-{_host()}-"


def _host() -> str:
    return digest(platform.node())[:6]


def _lock(handle: int, path: Path) -> bool:
    """Locks what was just made, until its handle is closed. False where another run took it for a
    leftover, between its making and its lock, and deleted it."""
    with suppress(OSError):  # a disk without locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return path.exists()


class _Hashed(io.RawIOBase):
    """Passes bytes on to a file and hashes them, so that nothing is read back."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = xxhash.xxh3_64()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.file.write(data)


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + CHECKSUM)


def _size_bytes(value: Any) -> int:
    return value.nbytes if hasattr(value, "nbytes") else len(value) if isinstance(value, str) else 8
