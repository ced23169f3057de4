"""Text into training rows: documents -> tokens -> rows of `seq_len` tokens, cached.

    sources.py, records.py   files, folders, globs, datasets -> checked documents
    encoding.py              a document                      -> token ids, and which are trained
    packing.py               tokenised documents, shuffled   -> input_ids, labels, position_ids,
                                                                documents
    cache.py                 three Arrow files under cache_dir: the documents, their tokens
                             (4 bytes and a bit a token), the rows (12 bytes a token, 4 a document)

The files' names say all they depend on: the format (a number in cache.py) and a hash of the
sources' identities, the tokenizer, seq_len and seed. With --streaming nothing is kept (stream.py).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.utils import tqdm
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from longctx.config import DataArguments
from longctx.data.cache import (
    cache_path,
    content_of,
    dataset_identity,
    digest,
    file_identity,
    open_arrow,
    read_json,
    remove_leftovers,
    scratch_folder,
    tokenizer_identity,
    write_arrow,
    write_text,
)
from longctx.data.chat import lines_of
from longctx.data.encoding import check_vocabulary, encode, pad_token_id
from longctx.data.packing import (
    ROW_FEATURES,
    TOKEN_COLUMNS,
    PackingStats,
    Piece,
    check_trainable,
    pack,
)
from longctx.data.records import CHATS, Document, as_document
from longctx.data.sources import (
    check_dataset_name,
    find_files,
    load_records,
    read_documents,
    stdlib_files,
)
from longctx.data.stream import stream_rows
from longctx.errors import UserError, print_rank0
from longctx.processes import bound_children, explained_workers
from longctx.system import expanded

DOCUMENT_FEATURES = Features(
    {
        "kind": Value("string"),
        "content": Value("large_string"),  # JSON
        "where": Value("string"),
        "replaced_bytes": Value("int64"),
    }
)
TOKEN_FEATURES = Features({"input_ids": List(Value("int32")), "trained": List(Value("bool"))})
BATCH_DOCUMENTS = 256
# 20,000 conversations of six turns take 13.3 s in one process and 6.9 s in two (two cores).
DOCUMENTS_PER_PROCESS = 5_000


def build_dataset(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    files: list[str] | None,
    seq_len: int,
    vocab_size: int | None,
    seed: int,
) -> Dataset | IterableDataset:
    """Packed rows from `files`, else from --dataset_name, else from the standard library.

    Each row is {input_ids, labels, position_ids}, lists of seq_len ints, and {documents}, one
    number a document (`document_names` turns them into names). The same arguments give the same
    rows in the same order. Prints one summary line. Raises UserError for bad sources, a record
    that cannot be trained on, and a token id of `vocab_size` or more.
    """
    paths: list[Path] = []
    records: Dataset | None = None
    if files is None and args.dataset_name:
        loaded = load_records(args)
        if isinstance(loaded, IterableDataset):
            return stream_rows(
                args, loaded, tokenizer, seq_len=seq_len, vocab_size=vocab_size, seed=seed
            )
        records, identity = loaded, dataset_identity(loaded)
    else:
        paths = stdlib_files() if files is None else find_files(files)
        identity = _identity(args, paths)

    name = ", ".join(files or [args.dataset_name or "the standard library"])
    cache_dir = expanded(args.cache_dir)
    remove_leftovers(cache_dir)
    padding = pad_token_id(tokenizer, vocab_size)
    source_key = digest(identity)
    tokens_key = digest(source_key, tokenizer_identity(tokenizer))
    rows_key = digest(tokens_key, seq_len, args.long_documents, padding, seed)
    rows_path = cache_path(cache_dir, "rows", rows_key)
    report_path = cache_path(cache_dir, "rows", rows_key, ".json")

    report = _report(report_path)
    rows = open_arrow(rows_path, report["stats"]["rows"]) if report else None
    if report is None or rows is None:
        if records is None:
            records = _documents(args, paths)
            replaced = _replaced_bytes(records)
        else:
            replaced = {}
        if not len(records):
            check_trainable(PackingStats(), name)
        tokens = _tokens(
            cache_path(cache_dir, "tokens", tokens_key),
            records,
            None if paths else args.dataset_name,
            tokenizer,
            vocab_size,
        )
        stats = PackingStats()
        rows = write_arrow(
            rows_path,
            ROW_FEATURES,
            pack(
                _shuffled(tokens, seed),
                seq_len,
                long_documents=args.long_documents,
                pad_token_id=padding,
                stats=stats,
            ),
        )
        said = lines_of(_kinds(records), tokenizer)
        report = {"stats": asdict(stats), "replaced_bytes": replaced, "said": said}
        write_text(report_path, json.dumps(report))

    stats = PackingStats(**report["stats"])
    for file, count in report["replaced_bytes"].items():
        print_rank0(f"{file}: replaced {count:,} undecodable bytes; save it as UTF-8 to keep them")
    for line in report["said"]:
        print_rank0(line)
    check_vocabulary(stats.largest_token_id, vocab_size)
    check_trainable(stats, name)
    print_rank0(stats.summary(seq_len))
    return rows


def check_sources(args: DataArguments) -> None:
    """Raises UserError for data that is missing, empty or unreadable; reads none of it."""
    for files in (args.train_file, args.eval_file):
        if files is not None:
            find_files(files)
    if args.dataset_name:
        check_dataset_name(args.dataset_name)


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks rows into int64 tensors (B, seq_len): input_ids, labels, position_ids, documents.

    No attention_mask: an all-ones mask switches HF's packing detection off, and `position_ids`
    already say where documents begin. `documents` is filled up with -1, to a width that is the
    same in every process; LongTrainer takes it out before the model is called.
    """
    batch = {
        name: torch.from_numpy(np.stack([np.asarray(row[name], dtype=np.int64) for row in rows]))
        for name in TOKEN_COLUMNS
    }
    if "documents" not in rows[0]:  # --remove_unused_columns
        return batch
    documents = torch.full_like(batch["input_ids"], -1)
    for filled, row in zip(documents, rows, strict=True):
        filled[: len(row["documents"])] = torch.as_tensor(row["documents"])
    return {**batch, "documents": documents}


def as_arrays(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """The same rows, for `collate`: lists would take 7 ms for 32768 tokens."""
    return rows.with_format("numpy") if isinstance(rows, Dataset) else rows


def rows_identity(args: DataArguments, rows: Dataset | IterableDataset) -> Any:
    """Differs where the rows of `build_dataset` do; of a stream, which nobody has read yet, where
    it comes from."""
    if isinstance(rows, IterableDataset):
        return [args.dataset_name, args.dataset_config, args.dataset_split]
    return content_of(rows)


def document_names(
    args: DataArguments, files: list[str] | None
) -> Callable[[Iterable[int]], list[str]]:
    """Says where the records of a row came from (`file`, `file:line`), given its `documents`.

    `args` and `files` are those of `build_dataset`; files that change afterwards change no name.
    """
    if files is None and args.dataset_name:
        kind = "record of the shuffled stream" if args.streaming else "row"
        return lambda numbers: [f"{args.dataset_name} {kind} {n}" for n in numbers if n >= 0]
    paths = stdlib_files() if files is None else find_files(files)
    path = _documents_path(args, paths)

    def names(numbers: Iterable[int]) -> list[str]:
        if not path.exists() and _documents_path(args, paths) != path:
            raise UserError("the data has changed since it was read")
        documents = _documents(args, paths, path)
        return [documents[number]["where"] for number in numbers if number >= 0]

    return names


def _report(path: Path) -> dict[str, Any] | None:
    """What was said of cached rows; None where it is missing or damaged."""
    report: Any = read_json(path)
    try:
        PackingStats(**report["stats"]).summary(1)
        report["replaced_bytes"].items()
        "".join(report["said"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return report


def _identity(args: DataArguments, files: list[Path]) -> list[Any]:
    """All that decides what is read from files."""
    return [file_identity(path) for path in files] + ["undecodable"] * args.allow_undecodable


def _documents_path(args: DataArguments, files: list[Path]) -> Path:
    return cache_path(expanded(args.cache_dir), "documents", digest(_identity(args, files)))


def _documents(args: DataArguments, files: list[Path], path: Path | None = None) -> Dataset:
    """The documents of files, as columns; read once and kept (at `path`), so that they need not fit
    in RAM."""
    path = path or _documents_path(args, files)

    def columns(document: Document) -> dict[str, Any]:
        content = json.dumps(document.content, ensure_ascii=False)
        return {**vars(document), "content": content}

    cached = open_arrow(path)
    if cached is not None:
        return cached
    documents = tqdm(
        read_documents(files, allow_undecodable=args.allow_undecodable),
        desc="Reading",
        unit=" documents",
        leave=False,
        disable=None,
    )
    return write_arrow(path, DOCUMENT_FEATURES, map(columns, documents))


def _replaced_bytes(documents: Dataset) -> dict[str, int]:
    """Undecodable bytes by file."""
    counts: Counter[str] = Counter()
    replaced = np.asarray(documents.data.column("replaced_bytes"))
    for i in np.flatnonzero(replaced):
        file = re.sub(r"(\.(jsonl|ndjson)):\d+$", r"\1", documents[int(i)]["where"], flags=re.I)
        counts[file] += int(replaced[i])
    return dict(counts)


def _tokens(
    path: Path,
    records: Dataset,
    name: str | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
) -> Dataset:
    """One row a record: the rows of the dataset `name`, or our documents where that is None."""
    cached = open_arrow(path, len(records))
    if cached is not None:
        return cached

    def tokenise(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[np.ndarray]]:
        records = [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]
        if name is None:
            documents: list[Document | None] = [
                Document(**{**record, "content": json.loads(record["content"])})
                for record in records
            ]
        else:
            documents = [
                as_document(record, f"{name} row {row}")
                for record, row in zip(records, rows, strict=True)
            ]
        pieces = encode(documents, tokenizer, vocab_size)
        return {
            "input_ids": [piece.input_ids for piece in pieces],
            "trained": [piece.trained for piece in pieces],
        }

    # Map leaves a file a process. They become one: for a billion tokens 20 s after minutes of
    # tokenising, on disk space that their rows will take anyway.
    with scratch_folder(path) as folder, explained_workers(), bound_children():
        mapped = records.map(
            tokenise,
            batched=True,
            with_indices=True,
            batch_size=BATCH_DOCUMENTS,
            writer_batch_size=BATCH_DOCUMENTS,
            remove_columns=records.column_names,
            features=TOKEN_FEATURES,
            num_proc=_processes(records, tokenizer),
            cache_file_name=str(folder / "tokens.arrow"),
            new_fingerprint=path.stem,
            desc="Tokenising",
        )
        pieces = _pieces(mapped, range(len(mapped)))
        columns = ({"input_ids": piece.input_ids, "trained": piece.trained} for piece in pieces)
        return write_arrow(path, TOKEN_FEATURES, columns)


def _kinds(records: Dataset) -> set[str]:
    """Kinds of documents, of our own or of a dataset by its columns (Document.kind)."""
    columns = set(records.column_names)
    if set(DOCUMENT_FEATURES) <= columns:
        return set(records.unique("kind"))
    if {"messages", "conversations"} & columns:
        return {"chat"}
    if {"prompt", "completion"} <= columns:
        turns = not isinstance(records.features["prompt"], Value)
        return {"chat" if turns else "completion"}
    return {"instruction"} if {"instruction", "output"} <= columns else {"text"}


def _processes(records: Dataset, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Worker processes for tokenising; None where this one is fastest.

    Fast tokenizers use every core by themselves, chat templates and slow tokenizers only one.
    """
    if tokenizer.is_fast and not _kinds(records) & set(CHATS):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(cores or 1, len(records) // DOCUMENTS_PER_PROCESS)
    return count if count > 1 else None


def _shuffled(tokens: Dataset, seed: int) -> Iterator[Piece]:
    order = np.random.default_rng(seed).permutation(len(tokens))
    bar = tqdm(order, desc="Packing", unit=" documents", leave=False, disable=None)
    return _pieces(tokens, bar)


def _pieces(tokens: Dataset, order: Iterable[int]) -> Iterator[Piece]:
    column = {name: tokens.data.column(name) for name in TOKEN_FEATURES}
    for i in order:
        ids, trained = (
            column[name][int(i)].values.to_numpy(zero_copy_only=False) for name in TOKEN_FEATURES
        )
        yield Piece(ids, trained, int(i))
