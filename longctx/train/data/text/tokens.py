"""Records into tokens, once a tokenizer: one row a record, on disk.

A row is a document's tokens and which of them are trained (encoding.py), or the tokens of a prompt
and its answers (encoding_groups.py). Rows of `seq_len` are packed from them (rows.py); another
length, seed or way to cut long documents tokenises nothing again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from longctx.system import expanded
from longctx.train.data.pack.cache import open_arrow, scratch_folder, write_arrow
from longctx.train.data.pack.packing import Piece
from longctx.train.data.reading.groups import (
    GROUP_IMAGE_FEATURES,
    GROUP_TOKEN_FEATURES,
    IMAGE_COUNTS,
    Group,
    Rows,
    columns_of,
    group_of,
)
from longctx.train.data.reading.image_sources import trusted
from longctx.train.data.reading.media import IMAGE_COLUMNS
from longctx.train.data.reading.records import CHAT_ANSWERS, CHATS, Document, as_document
from longctx.train.data.reading.turns import TURNS
from longctx.train.data.reading.values import read_row
from longctx.train.data.text.encoding import encode
from longctx.train.data.text.encoding_groups import encode_groups
from longctx.train.safety.processes import bound_children, explained_workers, same_environ

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor

DOCUMENT_FEATURES = Features(
    {
        "kind": Value("string"),
        "content": Value("large_string"),  # JSON
        "where": Value("string"),
        "replaced_bytes": Value("int64"),
        "unread": List(Value("string")),
    }
)
TOKEN_FEATURES = Features({"input_ids": List(Value("int32")), "trained": List(Value("bool"))})
IMAGE_TOKEN_FEATURES = Features({**TOKEN_FEATURES, **IMAGE_COUNTS})
BATCH_DOCUMENTS = 256
# 20,000 conversations of six turns take 13.3 s in one process and 6.9 s in two (two cores).
DOCUMENTS_PER_PROCESS = 5_000
IMAGES_PER_PROCESS = 100
"""Those with images, each of which is opened."""


def tokens_of(
    path: Path,
    records: Dataset,
    name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    rows: Rows,
    images: ImageProcessor | None = None,
) -> Dataset:
    """One row a record: the rows of the dataset `name`, or our documents where that is None.
    `images` are those of a model that sees some."""
    cached = open_arrow(path, len(records))
    if cached is not None:
        return cached
    features = _features(rows, with_images=images is not None)
    reader = Reader(records.features, name, rows, with_images=images is not None)
    tokenise = _Tokenise(reader, tokenizer, vocab_size, images, [*features])
    # Map leaves a file a process. They become one: for a billion tokens 20 s after minutes of
    # tokenising, on disk space that their rows will take anyway.
    with scratch_folder(path) as folder, explained_workers(), bound_children(), same_environ():
        mapped = records.map(
            tokenise,
            batched=True,
            with_indices=True,
            batch_size=BATCH_DOCUMENTS,
            writer_batch_size=BATCH_DOCUMENTS,
            remove_columns=records.column_names,
            features=features,
            num_proc=_processes(records, tokenizer, rows, with_images=images is not None),
            cache_file_name=str(folder / "tokens.arrow"),
            new_fingerprint=path.stem,
            desc="Tokenising",
        )
        order = range(len(mapped))
        columns: Iterable[dict[str, Any]] = (
            map(_columns_of_piece, pieces_of(mapped, order))
            if rows == "text"
            else map(columns_of, groups_of(mapped, order))
        )
        named = ({name: found[name] for name in features} for found in columns)
        return write_arrow(path, features, named)


def _columns_of_piece(piece: Piece) -> dict[str, Any]:
    """A row of IMAGE_TOKEN_FEATURES, whose file calls images pictures."""
    return vars(piece) | {"pictures": piece.images}


def _features(rows: Rows, *, with_images: bool) -> Features:
    if rows == "text":
        return IMAGE_TOKEN_FEATURES if with_images else TOKEN_FEATURES
    return GROUP_IMAGE_FEATURES if with_images else GROUP_TOKEN_FEATURES


@dataclass(frozen=True)
class Reader:
    """Makes a document of a row of records and its number. An object, as what follows is, since
    datasets pickles functions with all that they call, as deep as that goes."""

    types: Features
    """Of the records' columns."""
    name: str | None
    """Of the dataset; None: our own documents."""
    rows: Rows
    with_images: bool
    """Whether records may name images."""

    def __call__(self, record: dict[str, Any], number: int) -> Document | None:
        if self.name is None:
            return Document(**{**record, "content": json.loads(record["content"])})
        read, types = read_row(record, self.types), self.types
        if self.with_images:
            read |= {key: trusted(read[key], types[key]) for key in IMAGE_COLUMNS if key in read}
        where, folder = f"{self.name} row {number}", folder_of(self.name)
        return as_document(read, where, rows=self.rows, folder=folder, with_images=self.with_images)


@dataclass(frozen=True)
class _Tokenise:
    """What `datasets.map` calls with a batch of records."""

    reader: Reader
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    images: ImageProcessor | None
    names: list[str]
    """Of the columns to make."""

    def __call__(self, batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        values = zip(*batch.values(), strict=True)
        records = [dict(zip(batch, row, strict=True)) for row in values]
        documents = [*map(self.reader, records, numbers)]
        if self.reader.rows == "text":
            pieces = encode(documents, self.tokenizer, self.vocab_size, self.images)
            columns = [*map(_columns_of_piece, pieces)]
        else:
            given = [document for document in documents if document]
            groups = encode_groups(given, self.tokenizer, self.vocab_size, self.images)
            columns = [columns_of(group) for group in groups]
        return {key: [column[key] for column in columns] for key in self.names}


def folder_of(name: str) -> Path:
    """Where paths of a dataset's images begin: a local one's folder."""
    folder = expanded(name)
    return folder if folder.is_dir() else Path()


def kinds_of(records: Dataset, rows: Rows) -> set[str]:
    """Kinds of documents, of our own or of a dataset by its columns (Document.kind)."""
    columns = set(records.column_names)
    if set(DOCUMENT_FEATURES) <= columns:
        return set(records.unique("kind"))
    parts = any("image" in str(records.features[name]) for name in {*TURNS} & columns)
    of_images = parts or bool({*IMAGE_COLUMNS} & columns)
    turned = {"messages", "conversations"} & columns
    answered = {"prompt", "completion"} <= columns or {"instruction", "output"} <= columns
    if rows != "text":
        words = {"prompt", "completion", "chosen", "rejected"} & columns
        turns = any(not isinstance(records.features[key], Value) for key in words)
        named = {"prompt", "chosen"} & columns
        if of_images:
            return {"answers_with_pictures"}
        return {"chat_answers" if turns or not named else "answers"}
    if of_images and (turned or answered):
        return {"chat_with_pictures"}
    if turned:
        return {"chat"}
    if {"prompt", "completion"} <= columns:
        turns = not isinstance(records.features["prompt"], Value)
        return {"chat" if turns else "completion"}
    return {"instruction"} if {"instruction", "output"} <= columns else {"text"}


def _processes(
    records: Dataset, tokenizer: PreTrainedTokenizerBase, rows: Rows, *, with_images: bool
) -> int | None:
    """Worker processes for tokenising; None where this one is fastest.

    Fast tokenizers use every core by themselves, chat templates and slow tokenizers only one.
    """
    if tokenizer.is_fast and not kinds_of(records, rows) & {*CHATS, *CHAT_ANSWERS}:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    each = IMAGES_PER_PROCESS if with_images else DOCUMENTS_PER_PROCESS
    count = min(cores or 1, len(records) // each)
    return count if count > 1 else None


def pieces_of(tokens: Dataset, order: Iterable[int]) -> Iterator[Piece]:
    """The documents of `tokens_of` with these numbers, in this order."""
    column = {name: tokens.data.column(name) for name in tokens.column_names}
    for i in order:
        ids, trained = (
            column[name][int(i)].values.to_numpy(zero_copy_only=False) for name in TOKEN_FEATURES
        )
        of_images = (column[name][int(i)].as_py() for name in IMAGE_COUNTS if name in column)
        yield Piece(ids, trained, int(i), *of_images)


def groups_of(tokens: Dataset, order: Iterable[int]) -> Iterator[Group]:
    """The groups of `tokens_of` with these numbers, in this order."""
    column = {name: tokens.data.column(name) for name in tokens.column_names}
    for i in order:
        ids, lengths, sides = (
            column[name][int(i)].values.to_numpy(zero_copy_only=False)
            for name in ("input_ids", "lengths", "sides")
        )
        margin, dropped = (column[name][int(i)].as_py() for name in ("margin", "dropped"))
        of_images = (column[name][int(i)].as_py() for name in IMAGE_COUNTS if name in column)
        yield group_of(ids, lengths, sides, margin, dropped, int(i), *of_images)
