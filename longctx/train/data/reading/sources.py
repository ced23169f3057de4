"""Reads documents from files.

    book.txt, notes.md, main.py        one document: the whole file
    chats.jsonl, a.json, a.csv,        one document a record (json_values.py, tables.py;
    a.parquet, a.jsonl.gz, ...         records.py says what a record holds)

files.py says which files are read, kinds.py what a file is, and named.py reads --dataset_name.
Every error is a one-line UserError that names the file (and line) and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from longctx.errors import UserError, printable
from longctx.train.data.reading.encodings import advice, byte_order_mark, decode, guess_file
from longctx.train.data.reading.files import unreadable
from longctx.train.data.reading.groups import READERS, Rows
from longctx.train.data.reading.json_values import Found, read_json_file, read_json_lines
from longctx.train.data.reading.kinds import (
    CELL_SUFFIXES,
    LINE_SUFFIXES,
    compression,
    record_suffix,
)
from longctx.train.data.reading.opened import Text
from longctx.train.data.reading.records import FORMATS, Document, as_document
from longctx.train.data.reading.tables import read_cells, read_columns

# A Latin-1 page of French holds 3% accented letters, and every one of them would be lost.
UNDECODABLE_SHARE = 0.02


def read_documents(
    files: Sequence[Path],
    *,
    allow_undecodable: bool = False,
    rows: Rows = "text",
    max_samples: int | None = None,
    with_images: bool = False,
) -> Iterator[Document]:
    """The documents of files of text and of records, in order; blank ones are left out. They say
    where they are from in printable words: a name may be bytes that are no text, or hold terminal
    codes. Of each file of records, and of all text files together, `max_samples` are read. Where
    `with_images`, records may name images in the folder of their file.

    Raises UserError for a file of which more than UNDECODABLE_SHARE is not text, and for plain text
    where `rows` are made of records.
    """
    most = max_samples or sys.maxsize
    texts = 0
    for path in files:
        of_records = record_suffix(path) is not None
        if rows != "text" and not of_records:
            raise UserError(
                f"{path} is plain text, but {READERS[rows]} reads files of records (.jsonl, .json, "
                f".csv, .tsv, .parquet, .arrow) with {FORMATS[rows]}"
            )
        try:
            if of_records:
                share = yield from _read_records(path, rows, most, with_images=with_images)
            elif texts < most:
                share = yield from _read_text(path)
                texts += 1
            else:
                continue
            if share > UNDECODABLE_SHARE and not allow_undecodable:
                found = None if compression(path) else guess_file(path)
                raise UserError(
                    f"{path}: {share:.0%} of its bytes are not UTF-8 text: {advice(path, found)}, "
                    "or train on it as it is with --allow_undecodable"
                )
        except OSError as error:
            raise unreadable(path, error) from error


Reading = Generator[Document, None, float]
"""Yields a file's documents and returns the share of its bytes that are undecodable."""


def _read_text(path: Path) -> Reading:
    data = path.read_bytes()
    size_bytes = max(1, len(data))
    text, replaced = decode(data, byte_order_mark(data) or "utf-8-sig")
    del data  # as large as the text
    # A file that was being written when the power went is filled up with NULs.
    replaced += text.count("\0")
    text = text.replace("\r\n", "\n").replace("\0", "\ufffd")
    if text.strip():
        where = printable(str(path))
        yield Document(kind="text", content=text, where=where, replaced_bytes=replaced)
    return replaced / size_bytes


def _read_records(path: Path, rows: Rows, most: int, *, with_images: bool) -> Reading:
    text, folder = Text(path), path.absolute().parent
    count = 0
    for found in _values(text):
        document = as_document(
            found.value, found.where, found.replaced_bytes, rows, folder, with_images=with_images
        )
        if document is not None:
            yield document
            count += 1
        if count == most:
            break
    return text.replaced_bytes / max(1, text.size_bytes)


def _values(text: Text) -> Iterator[Found]:
    suffix = record_suffix(text.path)
    if suffix in LINE_SUFFIXES:
        return read_json_lines(text)
    if suffix in CELL_SUFFIXES:
        return read_cells(text)
    return read_json_file(text) if suffix == ".json" else read_columns(text.path)
