"""Tells from a file's name and first bytes whether it holds records or text. A file of any other
kind is refused, with the command that makes text of it.

.jsonl .ndjson .json       records as JSON values      json_values.py    also .gz .bz2 .xz .zst
.csv .tsv                  records as lines of cells   tables.py         also .gz .bz2 .xz .zst
.parquet .arrow            records as columns          tables.py
.txt .md .py ...           one document a file, and so is a file of any other name that is text
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from longctx.errors import UserError
from longctx.train.data.reading.encodings import advice, byte_order_mark, guess

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
CELL_SUFFIXES = frozenset({".csv", ".tsv"})
COLUMN_SUFFIXES = frozenset({".parquet", ".arrow"})
RECORD_SUFFIXES = LINE_SUFFIXES | CELL_SUFFIXES | COLUMN_SUFFIXES | {".json"}
COMPRESSED = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}
"""A suffix behind that of records -> how such a file begins."""
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .org .adoc .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .cu .cuh"
    " .rs .go .java .kt .scala .js .jsx .ts .tsx .rb .php .pl .lua .sh .sql .swift .m .r .jl .hs"
    " .ml .ex .erl .clj .cs .fs .zig .html .css .vue .cmake".split()
)
IMAGE_SUFFIXES = frozenset(
    ".png .jpg .jpeg .webp .gif .bmp .tif .tiff .svg .heic .avif .ico".split()
)

_PANDOC = "pandoc -t plain --wrap=none {file} -o {stem}.txt"
_OFFICE = "libreoffice --headless --convert-to {kind} {file}"
_PDF = "pdftotext {file} {stem}.txt"
DOCUMENTS = {
    ".docx": ("a Word document", _PANDOC),
    ".doc": ("a Word document", _OFFICE.replace("{kind}", "txt:Text")),
    ".odt": ("an OpenDocument text", _PANDOC),
    ".rtf": ("a text in RTF", _PANDOC),
    ".epub": ("an EPUB book", _PANDOC),
    ".pdf": ("a PDF", _PDF),
    ".xlsx": ("an Excel table", _OFFICE.replace("{kind}", "csv")),
    ".xls": ("an Excel table", _OFFICE.replace("{kind}", "csv")),
    ".ods": ("an OpenDocument table", _OFFICE.replace("{kind}", "csv")),
    ".pptx": ("a PowerPoint document", _OFFICE.replace("{kind}", "pdf")),
}
"""A suffix -> what such a file is, and the command that makes text of it."""
UNPACK, CONVERT = "unpack it", "convert it to text"
MAGIC_NUMBERS = {
    rb"\x1f\x8b": ("gzip-compressed", UNPACK),
    rb"PK\x03\x04": ("a zip archive", UNPACK),
    rb"\x28\xb5\x2f\xfd": ("zstd-compressed", UNPACK),
    rb"\xfd7zXZ\0": ("xz-compressed", UNPACK),
    rb"BZh[1-9]1AY&SY": ("bzip2-compressed", UNPACK),
    rb"\x04\x22\x4d\x18": ("lz4-compressed", UNPACK),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", UNPACK),
    rb"(?s).{257}ustar": ("a tar archive", UNPACK),
    rb"%PDF-": ("a PDF", f"{CONVERT}: {_PDF}"),
    rb"\{\\rtf[0-9]": ("a text in RTF", f"{CONVERT}: {_PANDOC}"),
    rb"\x89PNG\r\n": ("a PNG image", CONVERT),
    rb"\xff\xd8\xff": ("a JPEG image", CONVERT),
    rb"GIF8[79]a": ("a GIF image", CONVERT),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an Office document", CONVERT),
    rb"\x7fELF": ("a program", "remove it"),
    rb"SQLite format 3\0": ("an SQLite database", CONVERT),
    rb"PAR1[\0-\x1f]": ("a Parquet file", "rename it to {stem}.parquet"),
    rb"ARROW1\0\0": ("an Arrow file", "rename it to {stem}.arrow"),
    rb"\x80[\x02-\x05][\x95cX}\]K(q.]": ("a Python pickle", "write its text as .jsonl"),
    rb"\x93NUMPY": ("a NumPy array", CONVERT),
    rb"\x89HDF\r\n": ("an HDF5 file", CONVERT),
}
"""How a file that is no text begins (a regular expression) -> what it is, and what to do."""
HEAD_BYTES = 8192


def record_suffix(path: Path) -> str | None:
    """The suffix of a file of records, without that of its compression; None for other files.
    Columns are compressed within their file, so `.parquet.gz` is not read."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
        return suffix if suffix in RECORD_SUFFIXES - COLUMN_SUFFIXES else None
    return suffix if suffix in RECORD_SUFFIXES else None


def compression(path: Path) -> str | None:
    """The suffix by which a file of records says that it is compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED and record_suffix(path) else None


def check_readable(path: Path) -> None:
    """Raises UserError for a file whose first bytes are not those of text or of the records that
    its name promises, with what to do; OSError where it cannot be read."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    suffix, packed = record_suffix(path), compression(path)
    if packed:
        if not head.startswith(COMPRESSED[packed]):
            raise UserError(f"{path} is named {packed} and is not compressed so: rename it")
        return
    if suffix in COLUMN_SUFFIXES:
        _check_columns(path, suffix, head)
        return
    _refuse_documents(path, head)
    for magic_number, (what, cure) in MAGIC_NUMBERS.items():
        if re.match(magic_number, head):
            raise UserError(f"{path} is no text but {what}: {_filled(cure, path)}")
    if b"\0" in head and byte_order_mark(head) is None:
        found = guess(head)
        cure = advice(path, found) if found and "16" in found.name else "convert or remove it"
        raise UserError(f"{path} is binary or UTF-16, not UTF-8 text: {cure}")


def _check_columns(path: Path, suffix: str, head: bytes) -> None:
    begins = (b"PAR1",) if suffix == ".parquet" else (b"ARROW1", b"\xff\xff\xff\xff")
    if not head.startswith(begins):
        what = "Parquet" if suffix == ".parquet" else "Arrow"
        raise UserError(f"{path} is not a file of {what}, as its name says: get it again")


def _refuse_documents(path: Path, head: bytes) -> None:
    """Raises UserError for a document of an office program, which is a zip archive, an old Office
    file, RTF or PDF within."""
    suffix = path.suffix.lower()
    if suffix in DOCUMENTS and head.startswith(
        (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"{\\rtf", b"%PDF-")
    ):
        what, command = DOCUMENTS[suffix]
        raise UserError(f"{path} is no text but {what}: {CONVERT}: {_filled(command, path)}")


def _filled(cure: str, path: Path) -> str:
    file, stem = shlex.quote(str(path)), shlex.quote(str(path.with_suffix("")))
    return cure.replace("{file}", file).replace("{stem}", stem)
