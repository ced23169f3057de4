"""Arrow files under cache_dir, named by a hash of everything they are made from.

A file is written beside its place, flushed to disk and renamed, so that neither a killed run nor a
power cut leaves a half file that looks whole; one that cannot be read is reported and made again.
Nothing is ever invalidated: other inputs have another name.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError, print_rank0

BATCH_BYTES = 64 << 20
FORMAT = 1
"""Of the files, and of what tokenising and packing make of an input: a change that gives other
rows raises it (tests/data/test_cache.py knows the rows of this one)."""


def digest(*parts: Any) -> str:
    """A name for what `parts` (JSON values) produce in this format."""
    text = json.dumps([FORMAT, *parts], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def file_identity(path: Path) -> list[Any]:
    """Changes whenever the file does: even a copy that keeps size and mtime changes ctime."""
    stat = path.stat()
    return [str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """All of a tokenizer that decides a document's tokens."""
    identity = [type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.chat_template]
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by the last call, and set anew by the next.
        del backend["truncation"], backend["padding"]
        return [*identity, hashlib.sha256(json.dumps(backend).encode()).hexdigest()]
    return [*identity, sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs]


def open_arrow(path: Path, rows: int | None = None) -> Dataset | None:
    """The file as a memory-mapped dataset; None where it is missing or damaged."""
    if not path.exists():
        return None
    try:
        dataset = Dataset.from_file(str(path))
        if rows is None or len(dataset) == rows:
            return dataset
        reason = f"{len(dataset)} of {rows} rows"
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
    print_rank0(f"rebuilding the damaged cache file {path} ({reason})")
    path.unlink()
    return None


def write_arrow(path: Path, features: Features, rows: Iterable[dict[str, Any]]) -> Dataset:
    """Writes rows as an Arrow stream, in batches of about BATCH_BYTES."""
    schema = features.arrow_schema
    with _replacing(path) as file, pa.ipc.new_stream(file, schema) as writer:
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
    return Dataset.from_file(str(path))


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    with writable(path.parent):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _size_bytes(value: Any) -> int:
    return value.nbytes if hasattr(value, "nbytes") else len(value) if isinstance(value, str) else 8
