"""Where text comes from: files, folders, globs and records become documents.

    book.txt, notes.md, main.py        one document: the whole file
    chats.jsonl                        one document a line (records.py says what it holds)
    --dataset_name                     one document a row, the same

A folder is searched for files with the suffixes below. Without any file the documents are the
source files of Python's own standard library. Every error is a one-line UserError that names the
file (and line) and what to do.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Generator, Iterator, Sequence
from pathlib import Path

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from longctx.data.reading.groups import READERS, Rows
from longctx.data.reading.records import FORMATS, Document, as_document
from longctx.data.reading.values import parse_json
from longctx.errors import UserError, printable
from longctx.options.config import DataArguments
from longctx.safety.system import expanded

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .org .adoc .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .cu .cuh"
    " .rs .go .java .kt .scala .js .jsx .ts .tsx .rb .php .pl .lua .sh .sql .swift .m .r .jl .hs"
    " .ml .ex .erl .clj .cs .fs .zig .html .css .vue .cmake".split()
)
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins with that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# A Latin-1 page of French holds 3% accented letters, and every one of them would be lost.
UNDECODABLE_SHARE = 0.02
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
    rb"%PDF-": ("a PDF", CONVERT),
    rb"\x89PNG\r\n": ("a PNG picture", CONVERT),
    rb"\xff\xd8\xff": ("a JPEG picture", CONVERT),
    rb"GIF8[79]a": ("a GIF picture", CONVERT),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an Office document", CONVERT),
    rb"\x7fELF": ("a program", "remove it"),
    rb"SQLite format 3\0": ("an SQLite database", CONVERT),
    rb"PAR1[\0-\x1f]": ("a Parquet file", "give its folder as --dataset_name"),
    rb"ARROW1\0\0": ("an Arrow file", "give its folder as --dataset_name"),
    rb"\x80[\x02-\x05][\x95cX}\]K(q.]": ("a Python pickle", "write its text as .jsonl"),
    rb"\x93NUMPY": ("a NumPy array", CONVERT),
    rb"\x89HDF\r\n": ("an HDF5 file", CONVERT),
}
"""How a file that is no text begins (a regular expression) -> what it is, and what to do."""
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})

# The standard library without tests and without `encodings`, 1.4 MB of character tables. Python
# 3.11 leaves 536 files, 10.4 MB, 2.6M tokens of the default tokenizer: 650 rows of 4096 or 21 of
# 131072. Two cores read them in 0.1 s and tokenise them in 2 s, so no subset is needed.
STDLIB_SKIPPED = frozenset(
    "site-packages dist-packages test tests idle_test lib2to3 encodings __pycache__".split()
)


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths, folders and globs name, without repeats, in a fixed order.

    Raises UserError for what is missing, empty, unreadable or not text.
    """
    files: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _expand(pattern):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def stdlib_files() -> list[Path]:
    """Python's own library: real long documents that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, {".py"}, STDLIB_SKIPPED) if path.stat().st_size]
    if not files:
        raise UserError(f"no standard library sources under {root}: give --train_file")
    return files


def read_documents(
    files: Sequence[Path],
    *,
    allow_undecodable: bool = False,
    rows: Rows = "text",
    max_samples: int | None = None,
    sees: bool = False,
) -> Iterator[Document]:
    """The documents of text and JSONL files, in order; blank ones are left out. They say where they
    are from in printable words: a name may be bytes that are no text, or hold terminal codes. Of
    each JSONL file, and of all text files together, `max_samples` are read. Where the model `sees`,
    records may name pictures in the folder of their file.

    Raises UserError for a file of which more than UNDECODABLE_SHARE is not text, and for plain text
    where `rows` are made of records.
    """
    most = max_samples or sys.maxsize
    texts = 0
    for path in files:
        jsonl = _is_jsonl(path)
        if rows != "text" and not jsonl:
            raise UserError(
                f"{path} is plain text, but {READERS[rows]} reads .jsonl files of records with "
                f"{FORMATS[rows]}"
            )
        try:
            if jsonl:
                folder = path.absolute().parent if sees else None
                replaced_bytes = yield from _read_jsonl(path, rows, most, folder)
            elif texts < most:
                replaced_bytes = yield from _read_text(path)
                texts += 1
            else:
                continue
            share = replaced_bytes / max(1, path.stat().st_size)
        except OSError as error:
            raise _unreadable(path, error) from error
        if share > UNDECODABLE_SHARE and not allow_undecodable:
            raise UserError(
                f"{path}: {share:.0%} of its bytes are not UTF-8 text: save it as UTF-8, remove it "
                "or train on it as it is with --allow_undecodable"
            )


Reading = Generator[Document, None, int]
"""Yields a file's documents and returns its undecodable bytes."""


def _read_text(path: Path) -> Reading:
    data = path.read_bytes()
    encoding = _encoding(data)
    text, replaced = _decode(data, encoding)
    del data  # as large as the text
    # A file that was being written when the power went is filled up with NULs.
    replaced += text.count("\0")
    text = text.replace("\r\n", "\n").replace("\0", "\ufffd")
    if text.strip():
        where = printable(str(path))
        yield Document(kind="text", content=text, where=where, replaced_bytes=replaced)
    return replaced


def _read_jsonl(path: Path, rows: Rows, most: int, pictures: Path | None) -> Reading:
    total = found = 0
    for number, (text, replaced) in enumerate(_lines(path), 1):
        total += replaced
        where = printable(f"{path}:{number}")
        if not text.strip():
            continue
        record = parse_json(text, where)
        # JSON can spell half a surrogate pair, which is no character and cannot be encoded.
        if "\\ud" in text.lower():
            try:
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                clean = json.dumps(record, ensure_ascii=False).encode(errors="replace")
                record, replaced = json.loads(clean), replaced + 1
        document = as_document(record, where, replaced, rows, pictures)
        if document is not None:
            yield document
            found += 1
        if found == most:
            break
    return total


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """The lines of a file and how many bytes of each were replaced."""
    with path.open("rb") as file:
        encoding = _encoding(file.read(4))
        file.seek(0)
        if encoding == "utf-8-sig":
            yield from (_decode(line, encoding) for line in file)
            return
        width_bytes = int(encoding[-2:]) // 8
        for line in io.TextIOWrapper(file, encoding, errors="replace", newline="\n"):
            yield line, line.count("\ufffd") * width_bytes


def _encoding(data: bytes) -> str:
    """Tells the encoding by the byte order mark; it is UTF-8 without one."""
    return next((e for mark, e in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8-sig")


def _decode(data: bytes, encoding: str) -> tuple[str, int]:
    """Text without byte order mark, and the bytes replaced."""
    try:
        return data.decode(encoding), 0
    except UnicodeDecodeError:
        # Bytes that survive a round trip were text; the rest were replaced.
        with_mark = encoding.removesuffix("-sig")
        kept = len(data.decode(with_mark, errors="ignore").encode(with_mark))
        return data.decode(encoding, errors="replace"), len(data) - kept


def load_records(args: DataArguments) -> Dataset | IterableDataset:
    """--dataset_name: a folder of `save_to_disk`, or what `load_dataset` takes (local or hub)."""
    assert args.dataset_name
    check_dataset_name(args.dataset_name)
    folder = expanded(args.dataset_name)
    name = f"the dataset {args.dataset_name}"
    try:
        if any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
            saved = load_from_disk(str(folder))
            if isinstance(saved, DatasetDict):
                if args.dataset_split not in saved:
                    raise UserError(
                        f"{name} has no split {args.dataset_split!r}: give one of "
                        f"{', '.join(saved)} as --dataset_split"
                    )
                saved = saved[args.dataset_split]
            elif args.dataset_split not in ("train", str(saved.split)):
                raise UserError(
                    f"{name} has no splits: leave out --dataset_split {args.dataset_split}"
                )
            if args.dataset_config:
                raise UserError(
                    f"{name} was saved by save_to_disk and has no configurations: leave out "
                    f"--dataset_config {args.dataset_config}"
                )
            if not len(saved):
                raise UserError(f"{name} has no rows in the split {args.dataset_split!r}")
            return saved.to_iterable_dataset() if args.streaming else saved
        return load_dataset(
            str(folder) if folder.exists() else args.dataset_name,
            args.dataset_config,
            split=args.dataset_split,
            streaming=args.streaming,
        )
    except UserError:
        raise
    except Exception as error:  # missing, offline, gated, bad split, bad file: datasets raises many
        cause = error.__cause__ or error
        if isinstance(cause, IndexError):  # what save_to_disk writes of no rows has no file
            raise UserError(f"{name} has no rows in the split {args.dataset_split!r}") from error
        reason = " ".join(str(cause).split())[:200]
        raise UserError(
            f"cannot load {name} ({type(cause).__name__}: {reason}); check the name, "
            "--dataset_config, --dataset_split and the connection"
        ) from error


def check_dataset_name(name: str) -> None:
    """Raises UserError for a local path that does not exist; hub ids are not looked up."""
    if name.startswith((".", "/", "~")) and not os.path.exists(expanded(name)):
        raise UserError(f"the dataset {name} does not exist: check the path in --dataset_name")


def _expand(pattern: str) -> list[Path]:
    path = expanded(pattern)
    if re.match(r"[a-z][a-z0-9+]+://", pattern) and not path.exists():
        raise UserError(
            f"{pattern} is an address: download it and give the file, or name a dataset of the hub "
            "with --dataset_name"
        )
    try:
        if path.is_dir():
            files = [
                p
                for p in _walk(path, TEXT_SUFFIXES | JSONL_SUFFIXES, SKIPPED_FOLDERS)
                if p.stat().st_size
            ]
            if not files:
                raise UserError(
                    f"no readable text in the folder {path}: it needs non-empty .txt, .md, .jsonl "
                    "or source files"
                )
        elif path.exists() or not glob.has_magic(pattern):
            _check_file(path)
            files = [path]
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            files = [p for p in matches if p.is_file() and p.stat().st_size]
            if not files:
                raise UserError(f"{pattern} matches no non-empty file: check the pattern")
        for file in files:
            _check_readable(file)
    except OSError as error:
        raise _unreadable(path, error) from error
    return files


def _check_file(path: Path) -> None:
    try:
        size_bytes = path.stat().st_size
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in the name
        raise UserError(f"{path} does not exist: check the path") from None
    if not path.is_file():
        raise UserError(f"{path} is not a regular file or a folder: give text or JSONL files")
    if size_bytes == 0:
        raise UserError(f"{path} is empty: remove it or give another file")


def _check_readable(path: Path) -> None:
    if path.suffix.lower() == ".json":
        raise UserError(f"{path}: JSON is read line by line; write one object a line as .jsonl")
    with path.open("rb") as file:
        head = file.read(8192)
    for magic_number, (what, cure) in MAGIC_NUMBERS.items():
        if re.match(magic_number, head):
            raise UserError(f"{path} is no text but {what}: {cure}")
    if b"\0" in head and _encoding(head) == "utf-8-sig":
        raise UserError(f"{path} is binary or UTF-16, not UTF-8 text: convert or remove it")


def _unreadable(path: Path, error: OSError) -> UserError:
    name = error.filename or path
    return UserError(f"cannot read {name}: {error.strerror or error}; check it and its permissions")


def _walk(root: Path, suffixes: Collection[str], skipped: Collection[str]) -> list[Path]:
    def stop(error: OSError) -> None:
        raise error

    found = []
    # os.walk does not follow links to folders, so a loop of links ends.
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        found += [
            Path(folder, name)
            for name in sorted(names)
            if Path(name).suffix.lower() in suffixes and Path(folder, name).is_file()
        ]
    return found


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in JSONL_SUFFIXES
