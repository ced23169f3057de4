"""Tables of records: CSV and TSV as cells of text, Parquet and Arrow as typed columns.

    a.csv       text,label            a record is named by the line on which it begins: a.csv:2
                "a b",true
    a.parquet   columns text, label   by its row, as datasets count them: a.parquet row 0

A cell stays the text that it is: the `csv` builder of datasets makes 7.0 of 007 and null of NA, and
tells no line. Where a record needs another value (`messages`, `label`, ...), the cell is JSON, and
an empty one is no value. Rows are read in batches, so that a file need not fit in memory.
"""

from __future__ import annotations

import base64
import csv
import json
import mmap
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from longctx.errors import UserError, many, one_line, printable
from longctx.train.data.reading.image_sources import DATA_URL, undecoded
from longctx.train.data.reading.json_values import Found, has_form
from longctx.train.data.reading.kinds import record_suffix
from longctx.train.data.reading.media import IMAGE_COLUMNS
from longctx.train.data.reading.opened import Text, check_growth
from longctx.train.data.reading.turns import TURNS
from longctx.train.data.reading.values import read_row

STRINGS = frozenset(
    "text prompt completion instruction input output chosen rejected system system_prompt".split()
)
"""Columns whose cells are text: an empty one is an empty text."""
STRINGS_OR_TURNS = frozenset({"prompt", "completion", "chosen", "rejected"})
VALUES = frozenset(
    "messages conversations history tools functions documents chat_template_kwargs label margin "
    "train training weight loss_mask train_detail roles_to_train train_on_inputs mask_history mask "
    "images image videos video audios audio".split()
)
"""Columns whose cells are JSON, or a word."""
MOST_CELL_CHARS = 1 << 30
BATCH_ROWS = 32
ROW_PIECES_BYTES = 1 << 20
SHOWN_COLUMNS = 12


def read_cells(text: Text) -> Iterator[Found]:
    """The records of a CSV or TSV file, whose first line names the columns.

    Raises UserError, with the line, for no column of a record, a column that stands twice, a row of
    more or fewer cells than there are columns, and quotes that do not match.
    """
    csv.field_size_limit(MOST_CELL_CHARS)  # 131072 by default, for all of the process
    replaced = 0

    def lines() -> Iterator[str]:
        nonlocal replaced
        for line, count in text.lines():
            replaced += count
            yield line

    source = lines()
    first = _header(text.path, source)
    delimiter = _delimiter(text.path, first)
    rows = csv.reader(chain([first], source), delimiter=delimiter, strict=True)
    begins = 1
    try:
        columns = _checked_names(text.path, next(rows, []))
        while True:
            begins = rows.line_num + 1
            row = next(rows, None)
            if row is None:
                return
            if not row or row == [""]:
                continue
            where = printable(f"{text.path}:{begins}")
            if len(row) != len(columns):
                raise UserError(
                    f"{where} has {many(len(row), 'cell')}, and line 1 has {len(columns)}"
                )
            record = {name: cell_value(name, cell) for name, cell in zip(columns, row, strict=True)}
            yield Found(where, record, replaced)
            replaced = 0
    except csv.Error as error:
        raise UserError(
            f"{text.path}:{begins} is not a row of cells ({one_line(error)}): quote a cell that "
            "holds quotes or line breaks, and write its own quotes twice"
        ) from error


def columns_of_cells(text: Text) -> list[str]:
    """The columns that the first line of a CSV or TSV file names."""
    line = _header(text.path, (line for line, _ in text.lines()))
    return _split(line, _delimiter(text.path, line))


def read_columns(path: Path) -> Iterator[Found]:
    """The rows of a Parquet or Arrow file. Raises UserError for a broken one."""
    number = read_bytes = 0
    try:
        with path.open("rb") as file:
            for batch in _batches(path, file):
                read_bytes += batch.nbytes
                check_growth(path, read_bytes, "write its records as .jsonl, if that is meant")
                for start in range(0, len(batch), BATCH_ROWS):
                    table = pa.Table.from_batches([batch.slice(start, BATCH_ROWS)])
                    records = undecoded(Dataset(table, fingerprint="rows"))
                    types = records.features  # a copy, which takes longer than a short row
                    for row in records:
                        where = printable(f"{path} row {number}")
                        yield Found(where, _named_images(read_row(row, types)))
                        number += 1
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(
            f"{path} broke after {number:,} rows ({one_line(error, 200)}): get it again"
        ) from error


def _batches(path: Path, file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    if record_suffix(path) == ".parquet":
        # Neither whole row groups nor whole columns of one: pieces of them.
        parquet = pq.ParquetFile(file, buffer_size=ROW_PIECES_BYTES, pre_buffer=False)
        yield from parquet.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
        return
    mapped = pa.BufferReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if file.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(mapped)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(mapped))
    for batch in batches:
        batch.validate(full=True)  # offsets of a broken file point anywhere
        yield batch


def _header(path: Path, lines: Iterator[str]) -> str:
    """The first line. Raises UserError where it is all, since the lines end as on old Macs."""
    first = next(lines, "")
    if "\r" in first.rstrip("\r\n"):
        old, new = (shlex.quote(str(p)) for p in (path, path.with_stem(f"{path.stem}.lf")))
        raise UserError(
            f"{path} ends its lines with a carriage return alone: tr '\\r' '\\n' < {old} > {new}"
        )
    return first


def _split(line: str, delimiter: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]


def _delimiter(path: Path, line: str) -> str:
    """Between the cells: spreadsheets write semicolons where the comma is the decimal sign."""
    if record_suffix(path) == ".tsv":
        return "\t"
    return next((sign for sign in ",;\t" if has_form(_split(line, sign))), ",")


def _checked_names(path: Path, cells: list[str]) -> list[str]:
    """The columns of a header."""
    columns = [name.strip() for name in cells]
    if not has_form(columns):
        raise UserError(
            f"{path} has no columns of records. The first line names {_listed(columns)}; {_READ}"
        )
    if twice := next((name for name in columns if name and columns.count(name) > 1), None):
        raise UserError(f"{path} has two columns `{twice}`: rename or remove one")
    return columns


_READ = (
    "`text`, `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, "
    "or `chosen` and `rejected` are read: rename its columns"
)


def _listed(columns: Sequence[str]) -> str:
    shown = ", ".join(f"`{name[:40]}`" for name in columns[:SHOWN_COLUMNS])
    more = len(columns) - SHOWN_COLUMNS
    return (shown or "nothing") + f" and {more} more" * (more > 0)


def cell_value(name: str, cell: str) -> Any:
    """The value of a cell in the column `name`; None for an empty one that is no text."""
    if name in STRINGS:
        return _turns_or_text(cell) if name in STRINGS_OR_TURNS else cell
    if not cell.strip():
        return None
    if name not in VALUES:
        return cell
    try:
        return json.loads(cell.lower() if cell.lower() in ("true", "false") else cell)
    except (ValueError, RecursionError):
        return cell  # for the reader of records, who says what it needs


def _turns_or_text(cell: str) -> Any:
    """A list of turns where the cell is one in JSON."""
    if not cell.lstrip().startswith("[{"):
        return cell
    try:
        turns = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    named = all(isinstance(turn, Mapping) and {"role", "from"} & set(turn) for turn in turns)
    return turns if named else cell


def _named_images(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a data URL for each image whose bytes it holds."""
    return {
        key: _without_bytes(value) if key in (*IMAGE_COLUMNS, *TURNS) else value
        for key, value in record.items()
    }


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"{DATA_URL}image;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, list):
        return [_without_bytes(item) for item in value]
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return _without_bytes(value["bytes"])
        return {key: _without_bytes(item) for key, item in value.items()}
    return value
