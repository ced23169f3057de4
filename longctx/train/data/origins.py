"""Where rows come from: the records of files and datasets, and what each row's documents and
images are called there.

The documents of files are kept as an Arrow file under a name of what was read. A dataset's records
stay where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets.utils import tqdm

from longctx.errors import UserError, print_rank0
from longctx.system import expanded
from longctx.train.data.pack.cache import (
    cache_path,
    digest,
    file_identity,
    open_arrow,
    write_arrow,
)
from longctx.train.data.reading.files import find_files, stdlib_files
from longctx.train.data.reading.groups import READERS, Rows
from longctx.train.data.reading.image_sources import (
    DATA_URL,
    Source,
    linked_files,
    source_named,
    undecoded,
)
from longctx.train.data.reading.kinds import LINE_SUFFIXES, record_suffix
from longctx.train.data.reading.named_datasets import check_dataset_name, load_records
from longctx.train.data.reading.records import FORMATS, WITH_IMAGES, Document
from longctx.train.data.reading.sources import read_documents
from longctx.train.data.text.tokens import DOCUMENT_FEATURES, Reader, folder_of
from longctx.train.options.config import DataArguments


def check_sources(args: DataArguments, rows: Rows = "text") -> list[Path]:
    """Returns the files that hold the data, and reads their beginnings alone. Prints what is passed
    over in folders. Raises UserError for data that is missing, empty or unreadable, or that cannot
    be rows of this kind."""
    check_kind(args, args.train_file, rows)
    found = find_files([*(args.train_file or []), *(args.eval_file or [])], tell=print_rank0)
    if args.dataset_name:
        check_dataset_name(args.dataset_name)
        if os.path.isdir(expanded(args.dataset_name)):  # and not a name on the hub
            found += expanded(args.dataset_name).rglob("*")
    return found


def check_kind(args: DataArguments, files: list[str] | None, rows: Rows) -> None:
    """Raises UserError for sources of which rows of this kind cannot be made."""
    if rows == "text":
        return
    if args.streaming:
        raise UserError(f"--streaming is for text: leave it out with {READERS[rows]}")
    if files is None and not args.dataset_name:
        raise UserError(
            f"{READERS[rows]} needs records with {FORMATS[rows]}: give --train_file or "
            "--dataset_name"
        )


def images_of(
    args: DataArguments, files: list[str] | None, rows: Rows = "text"
) -> Callable[[Iterable[int]], list[Source]]:
    """Returns what finds the images of a row's documents, in their order, given its `documents`.

    `args`, `files` and `rows` are those of a `build_dataset` with `image_reading`.
    """
    records, name = _records_of(args, files, rows)
    document = Reader(records.features, name, rows, with_images=True)

    def found(numbers: Iterable[int]) -> list[Source]:
        sources: list[Source] = []
        for number in numbers:
            read = document(records[int(number)], int(number)) if number >= 0 else None
            if read is not None and read.kind in WITH_IMAGES:
                for count, named in enumerate(read.content["pictures"], 1):
                    sources.append(source_named(named, f"{read.where}: image {count}"))
        return sources

    return found


def image_files(
    args: DataArguments, files: list[str] | None, rows: Rows = "text"
) -> Iterator[Path]:
    """Yields the files of images that records name, given what `images_of` is given."""
    return named_image_files(*_records_of(args, files, rows))


def _records_of(
    args: DataArguments, files: list[str] | None, rows: Rows
) -> tuple[Dataset, str | None]:
    """Returns the records of a `build_dataset` with `image_reading`, and the name of their
    dataset; None for files."""
    if files is None and args.dataset_name:
        loaded = load_records(args)
        assert isinstance(loaded, Dataset)
        return undecoded(loaded), args.dataset_name
    paths = stdlib_files() if files is None else find_files(files)
    return file_documents(args, paths, rows=rows, with_images=True), None


def named_image_files(records: Dataset, name: str | None) -> Iterator[Path]:
    if name is not None:
        files = linked_files(records, folder_of(name))
        yield from (file for file in files if file.is_file())
        return
    for kind, content in zip(records["kind"], records["content"], strict=True):
        for named in json.loads(content)["pictures"] if kind in WITH_IMAGES else ():
            if not named.startswith(DATA_URL):
                yield Path(named)


def document_names(
    args: DataArguments, files: list[str] | None, rows: Rows = "text", *, with_images: bool = False
) -> Callable[[Iterable[int]], list[str]]:
    """Returns what says where the records of a row came from (`file`, `file:line`), given its
    `documents`.

    `args`, `files` and `rows` are those of `build_dataset`, and `with_images` whether it had an
    `image_reading`; files that change afterwards change no name.
    """
    if files is None and args.dataset_name:
        kind = "record of the shuffled stream" if args.streaming else "row"
        return lambda numbers: [f"{args.dataset_name} {kind} {n}" for n in numbers if n >= 0]
    paths = stdlib_files() if files is None else find_files(files)
    path = _documents_path(args, paths, rows, with_images=with_images)

    def names(numbers: Iterable[int]) -> list[str]:
        if (
            not path.exists()
            and _documents_path(args, paths, rows, with_images=with_images) != path
        ):
            raise UserError("the data has changed since it was read")
        documents = file_documents(args, paths, path, rows, with_images=with_images)
        return [documents[number]["where"] for number in numbers if number >= 0]

    return names


def files_identity(
    args: DataArguments, files: list[Path], rows: Rows, *, with_images: bool
) -> list[Any]:
    """Returns all that decides what is read from files. Tables and .json were once read as plain
    text, so their records have a name of their own."""
    suffixes = {record_suffix(file) for file in files} - {None, *LINE_SUFFIXES}
    more = (
        ["records"] * bool(suffixes)
        + ["undecodable"] * args.allow_undecodable
        + ["pictures"] * with_images
    )
    return [*map(file_identity, files), *more, *limit_key(args), *kind_key(rows)]


def limit_key(args: DataArguments) -> list[str]:
    """Returns the part of a cache file's key that says how many records are read."""
    return [f"first {args.max_samples}"] if args.max_samples else []


def kind_key(rows: Rows) -> list[Rows]:
    """Returns the part of a cache file's key that names the kind of rows. Files of text have none:
    they keep the names that they had before there were other kinds."""
    return [] if rows == "text" else [rows]


def _documents_path(
    args: DataArguments, files: list[Path], rows: Rows, *, with_images: bool
) -> Path:
    key = digest(files_identity(args, files, rows, with_images=with_images))
    return cache_path(expanded(args.cache_dir), "documents", key)


def file_documents(
    args: DataArguments,
    files: list[Path],
    path: Path | None = None,
    rows: Rows = "text",
    *,
    with_images: bool = False,
) -> Dataset:
    """Returns the documents of files, as columns. They are read once and kept at `path`, so that
    they need not fit in RAM. If the model `with_images`, they may name images."""
    path = path or _documents_path(args, files, rows, with_images=with_images)

    def columns(document: Document) -> dict[str, Any]:
        content = json.dumps(document.content, ensure_ascii=False)
        return {**vars(document), "content": content}

    cached = open_arrow(path)
    if cached is not None:
        return cached
    documents = tqdm(
        read_documents(
            files,
            allow_undecodable=args.allow_undecodable,
            rows=rows,
            max_samples=args.max_samples,
            with_images=with_images,
        ),
        desc="Reading",
        unit=" documents",
        leave=False,
        disable=None,
    )
    return write_arrow(path, DOCUMENT_FEATURES, map(columns, documents))


def place_namer(records: Dataset, name: str | None) -> Callable[[int], str]:
    """Returns what names a record by its number: a row of the dataset `name`, or the place of a
    document of files."""
    return lambda number: f"{name} row {number}" if name else records[number]["where"]
