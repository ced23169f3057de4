"""Text into training rows: documents -> tokens -> rows of `seq_len` tokens, cached.

    sources.py, records.py   files, folders, globs, datasets -> checked documents
    tokens.py                a document                      -> token ids, and which are trained
    packing.py               tokenised documents, shuffled   -> input_ids, labels, position_ids,
                                                                documents
    packing_groups.py        the same for prompts with their answers, which are packed whole
    cache.py                 three Arrow files under cache_dir: the documents, their tokens
                             (4 bytes and a bit a token), the rows (12 bytes a token, 4 a document)

The files' names say all they depend on: the format (a number in cache.py) and a hash of the
sources' identities, the tokenizer, seq_len and seed, and the kind of rows but for packed text.
With --streaming nothing is kept (stream.py).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash
from datasets import Dataset, IterableDataset, List, Value
from datasets.utils import tqdm
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.errors import UserError, many, print_rank0, shortened
from longctx.system import expanded
from longctx.train.data.chat.rendering import lines_of
from longctx.train.data.pack.cache import (
    cache_path,
    content_of,
    dataset_identity,
    digest,
    file_identity,
    open_arrow,
    read_json,
    remove_leftovers,
    tokenizer_identity,
    write_arrow,
    write_text,
)
from longctx.train.data.pack.packing import (
    ROW_FEATURES,
    PackingStats,
    check_trainable,
    lengthened,
    pack,
)
from longctx.train.data.pack.packing_groups import (
    GROUP_ROW_FEATURES,
    GroupStats,
    check_groups,
    pack_groups,
)
from longctx.train.data.reading.files import file_of, find_files, stdlib_files
from longctx.train.data.reading.groups import READERS, Rows
from longctx.train.data.reading.image_sources import (
    DATA_URL,
    Source,
    linked_files,
    source_named,
    undecoded,
)
from longctx.train.data.reading.kinds import LINE_SUFFIXES, record_suffix
from longctx.train.data.reading.media import IMAGE_COLUMNS
from longctx.train.data.reading.named import check_dataset_name, load_records
from longctx.train.data.reading.records import FORMATS, WITH_IMAGES, Document
from longctx.train.data.reading.sources import read_documents
from longctx.train.data.stream import stream_rows
from longctx.train.data.text.encoding import check_vocabulary, pad_token_id
from longctx.train.data.text.remarks import media_line, unread_lines
from longctx.train.data.text.tokens import (
    DOCUMENT_FEATURES,
    Reader,
    folder_of,
    groups_of,
    kinds_of,
    pieces_of,
    tokens_of,
)
from longctx.train.options.config import DataArguments

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor


class ImageReading(NamedTuple):
    """How `build_dataset` reads the images of records, for a vision-language model."""

    read: Callable[[], ImageProcessor]
    """Reads the processor. It is called if there are images alone."""
    one_document: bool
    """Whether rows of text with images are not packed: where positions do not keep them apart."""


def build_dataset(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    files: list[str] | None,
    seq_len: int,
    vocab_size: int | None,
    seed: int,
    rows: Rows = "text",
    mismatched: bool = False,
    one_document: bool = False,
    held_out: bool = False,
    evaluates: bool = False,
    image_reading: ImageReading | None = None,
    config: PretrainedConfig | None = None,
) -> Dataset | IterableDataset:
    """Packed rows from `files`, else from --dataset_name, else from the standard library. With
    --eval_share they are those of the share that is `held_out`, or of the other documents.

    Each row is {input_ids, labels, position_ids}, lists of seq_len ints, and {documents}, one
    number a document (`document_names` turns them into names). Rows of "pairs" and "rated" hold
    prompts with their answers and say which is which (packing_groups.py); `mismatched` gives each
    answer another prompt's beside it. With `one_document` rows of text are not packed: each holds
    one document and has its length, a stream's `seq_len`. With `image_reading` records may name
    images, whose tokens are in the rows; `images_of` finds them again. `config` is the model's,
    which may name tokens of media. The same arguments give the same rows in the same order.
    Prints one summary line, which says whether a run trains on the rows or `evaluates` them. Raises
    UserError for bad sources, a record that cannot be trained on, and a token id of `vocab_size` or
    more.
    """
    _check_rows(args, files, rows)
    paths: list[Path] = []
    records: Dataset | None = None
    if files is None and args.dataset_name:
        loaded = load_records(args, None if held_out else print_rank0)
        if isinstance(loaded, IterableDataset):
            return stream_rows(
                args,
                undecoded(loaded),
                tokenizer,
                seq_len=seq_len,
                vocab_size=vocab_size,
                seed=seed,
                one_document=one_document,
                config=config,
            )
        identity = [*dataset_identity(loaded), *_limit(args), *_beside_text(rows)]
        records = loaded = undecoded(loaded)
        if args.max_samples:
            records = loaded.select(range(min(args.max_samples, len(loaded))))
    else:
        paths = stdlib_files() if files is None else find_files(files)
        identity = _identity(args, paths, rows, image_reading is not None)

    dataset_name = None if paths else args.dataset_name
    images: ImageProcessor | None = None
    if image_reading is not None:
        if records is None:
            records = _documents(args, paths, rows=rows, with_images=True)
        shown = {*WITH_IMAGES} & kinds_of(records, rows)
        if shown or {*IMAGE_COLUMNS} & {*records.column_names}:
            images = image_reading.read()
            shown_files = _image_files(records, dataset_name)  # whose tokens the rows count
            identity += [images.identity(), *map(file_identity, shown_files)]
            one_document = one_document or (rows == "text" and image_reading.one_document)
    name = ", ".join(files or [args.dataset_name or "the standard library"])
    name = f"held out of {name}" if held_out else name
    cache_dir = expanded(args.cache_dir)
    remove_leftovers(cache_dir)
    padding = pad_token_id(tokenizer, vocab_size)
    source_key = digest(identity)
    tokens_key = digest(source_key, tokenizer_identity(tokenizer))
    added: list[Any] = ["mismatched"] * mismatched + ["one document"] * one_document
    added += [["held out" if held_out else "not held out", args.eval_share]] * bool(args.eval_share)
    rows_key = digest(tokens_key, seq_len, args.long_documents, padding, seed, *added)
    rows_path = cache_path(cache_dir, "rows", rows_key)
    report_path = cache_path(cache_dir, "rows", rows_key, ".json")

    report = _report(report_path, rows)
    packed = open_arrow(rows_path, report["stats"]["rows"]) if report else None
    stats: PackingStats | GroupStats
    if report is None or packed is None:
        if records is None:
            records = _documents(args, paths, rows=rows)
        replaced = _replaced_bytes(records) if paths else {}
        if not len(records):
            check_trainable(PackingStats(), name)
        tokens = tokens_of(
            cache_path(cache_dir, "tokens", tokens_key),
            records,
            dataset_name,
            tokenizer,
            vocab_size,
            rows,
            images,
        )
        order = np.random.default_rng(seed).permutation(len(tokens))
        if args.eval_share:
            order = _part(order, args.eval_share, held_out)
        shuffled = _shown(order, rows)
        if rows == "text":
            stats = PackingStats(one_document=one_document)
            packing = pack(
                pieces_of(tokens, shuffled),
                seq_len,
                long_documents=args.long_documents,
                pad_token_id=padding,
                stats=stats,
                own_lengths=one_document,
                where=_namer(records, dataset_name),
            )
            packed = write_arrow(rows_path, ROW_FEATURES, packing)
        else:
            stats = GroupStats(kind=rows)
            packing = pack_groups(
                groups_of(tokens, shuffled),
                seq_len,
                long_documents=args.long_documents,
                pad_token_id=padding,
                stats=stats,
                where=_namer(records, dataset_name),
                mismatched=mismatched,
            )
            packed = write_arrow(rows_path, GROUP_ROW_FEATURES, packing)
        namer = _namer(records, dataset_name)
        said = lines_of(kinds_of(records, rows), tokenizer)
        reader = Reader(records.features, dataset_name, rows, with_images=image_reading is not None)
        said += [*unread_lines(records, reader, namer)]
        said += media_line(tokens, tokenizer, config, images, namer)
        report = {"stats": _saved(stats), "replaced_bytes": replaced, "said": said}
        report |= {"pixels": _pixels(tokens, order)} if images is not None else {}
        write_text(report_path, json.dumps(report))

    stats = _stats(report["stats"], rows)
    of_files = [
        f"{file}: replaced {count:,} undecodable bytes; save it as UTF-8 to keep them"
        for file, count in report["replaced_bytes"].items()
    ]
    for line in [] if held_out else [*of_files, *report["said"]]:  # once of the same files
        print_rank0(line)
    check_vocabulary(stats.largest_token_id, vocab_size)
    if isinstance(stats, GroupStats):
        check_groups(stats, name)
        for line in stats.warnings():
            print_rank0(line)
    else:
        check_trainable(stats, name)
    use = "evaluated" if evaluates else "trained"
    print_rank0(f"{shortened(name, 80)}: {stats.summary(seq_len, use)}")
    return packed


def check_sources(args: DataArguments, rows: Rows = "text") -> list[Path]:
    """The files that hold the data, of which beginnings alone are read. Prints what is passed over
    in folders. Raises UserError for data that is missing, empty or unreadable, or that cannot be
    rows of this kind."""
    _check_rows(args, args.train_file, rows)
    found = find_files([*(args.train_file or []), *(args.eval_file or [])], tell=print_rank0)
    if args.dataset_name:
        check_dataset_name(args.dataset_name)
        if os.path.isdir(expanded(args.dataset_name)):  # and not a name on the hub
            found += expanded(args.dataset_name).rglob("*")
    return found


def _check_rows(args: DataArguments, files: list[str] | None, rows: Rows) -> None:
    if rows == "text":
        return
    if args.streaming:
        raise UserError(f"--streaming is for text: leave it out with {READERS[rows]}")
    if files is None and not args.dataset_name:
        raise UserError(
            f"{READERS[rows]} needs records with {FORMATS[rows]}: give --train_file or "
            "--dataset_name"
        )


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks rows into int64 tensors (B, S): input_ids, labels, position_ids, documents. S is
    seq_len, or the longest row of the batch where rows have a length of their own.

    No attention_mask but where rows were lengthened, as one document each has to be: an all-ones
    mask switches HF's packing detection off, and `position_ids` already say where documents begin.
    `documents` is filled up with -1, to a width that is the same in every process; LongTrainer
    takes it out before the model is called.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    longest = int(lengths.max())
    full = [lengthened(row, longest) for row in rows]
    batch = {name: torch.from_numpy(np.stack([row[name] for row in full])) for name in full[0]}
    if bool((lengths < longest).any()):
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    if "documents" not in rows[0]:  # --remove_unused_columns
        return batch
    documents = torch.full_like(batch["input_ids"], -1)
    for filled, row in zip(documents, rows, strict=True):
        filled[: len(row["documents"])] = torch.as_tensor(row["documents"])
    return {**batch, "documents": documents}


def as_arrays(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Makes rows arrays for `collate`: lists would take 7 ms for 32768 tokens. A reference's fp64
    stays in lists, since datasets would round it to fp32."""
    if not isinstance(rows, Dataset):
        return rows
    exact = [name for name, kind in rows.features.items() if kind == List(Value("float64"))]
    if not exact:
        return rows.with_format("numpy")
    columns = [name for name in rows.column_names if name not in exact]
    return rows.with_format("numpy", columns=columns, output_all_columns=True)


def rows_identity(args: DataArguments, rows: Dataset | IterableDataset) -> Any:
    """Differs where the rows of `build_dataset` do; of a stream, which nobody has read yet, where
    it comes from."""
    if isinstance(rows, IterableDataset):
        return [args.dataset_name, args.dataset_config, args.dataset_split]
    return content_of(rows)


def pixels_identity(rows: Dataset | IterableDataset, images: ImageProcessor) -> str:
    """Differs where the pixels of the rows of a `build_dataset` do: where the bytes of images'
    files or the processor's settings do."""
    return digest(_report_beside(rows).get("pixels"), images.settings)


def _pixels(tokens: Dataset, order: np.ndarray) -> str:  # (n,) int64: numbers of documents
    hashes = tokens.data.column("pixels").to_numpy()[np.sort(order)]
    return xxhash.xxh3_64_hexdigest(hashes.tobytes())


def images_of(
    args: DataArguments, files: list[str] | None, rows: Rows = "text"
) -> Callable[[Iterable[int]], list[Source]]:
    """Finds the images of a row's documents, in their order, given its `documents`.

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
    return _image_files(*_records_of(args, files, rows))


def _records_of(
    args: DataArguments, files: list[str] | None, rows: Rows
) -> tuple[Dataset, str | None]:
    """Returns the records of a `build_dataset` with `image_reading`, and their dataset's name."""
    if files is None and args.dataset_name:
        loaded = load_records(args)
        assert isinstance(loaded, Dataset)
        return undecoded(loaded), args.dataset_name
    paths = stdlib_files() if files is None else find_files(files)
    return _documents(args, paths, rows=rows, with_images=True), None


def _image_files(records: Dataset, name: str | None) -> Iterator[Path]:
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
    """Says where the records of a row came from (`file`, `file:line`), given its `documents`.

    `args`, `files` and `rows` are those of `build_dataset`, and `with_images` whether it had an
    `image_reading`; files that change afterwards change no name.
    """
    if files is None and args.dataset_name:
        kind = "record of the shuffled stream" if args.streaming else "row"
        return lambda numbers: [f"{args.dataset_name} {kind} {n}" for n in numbers if n >= 0]
    paths = stdlib_files() if files is None else find_files(files)
    path = _documents_path(args, paths, rows, with_images)

    def names(numbers: Iterable[int]) -> list[str]:
        if not path.exists() and _documents_path(args, paths, rows, with_images) != path:
            raise UserError("the data has changed since it was read")
        documents = _documents(args, paths, path, rows, with_images=with_images)
        return [documents[number]["where"] for number in numbers if number >= 0]

    return names


def _report(path: Path, rows: Rows = "text") -> dict[str, Any] | None:
    """Reads what was reported of cached rows; None where it is missing or damaged."""
    report: Any = read_json(path)
    try:
        _stats(report["stats"], rows).summary(1)
        report["replaced_bytes"].items()
        "".join(report["said"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return report


def _stats(counted: dict[str, Any], rows: Rows) -> PackingStats | GroupStats:
    named = {"images" if name == "pictures" else name: n for name, n in {**counted}.items()}
    return PackingStats(**named) if rows == "text" else GroupStats(**named)


def _saved(stats: PackingStats | GroupStats) -> dict[str, Any]:
    """Returns counts as files have them, where images are called pictures."""
    return {"pictures" if name == "images" else name: n for name, n in asdict(stats).items()}


def counts(rows: Dataset | IterableDataset) -> dict[str, int]:
    """Returns the counts that `build_dataset` wrote beside its rows, by name: documents or groups,
    tokens, rows and others. Empty for a stream, which nobody has counted."""
    stats = _report_beside(rows).get("stats", {})
    return {name: count for name, count in stats.items() if type(count) is int and count > 0}


def _report_beside(rows: Dataset | IterableDataset) -> dict[str, Any]:
    """Returns what `build_dataset` has written beside its rows; empty for a stream."""
    for file in rows.cache_files if isinstance(rows, Dataset) else ():
        report: Any = read_json(Path(file["filename"]).with_suffix(".json"))
        return report if isinstance(report, dict) else {}
    return {}


def _identity(args: DataArguments, files: list[Path], rows: Rows, with_images: bool) -> list[Any]:
    """All that decides what is read from files. Tables and .json were once read as plain text, so
    their records have a name of their own."""
    suffixes = {record_suffix(file) for file in files} - {None, *LINE_SUFFIXES}
    more = (
        ["records"] * bool(suffixes)
        + ["undecodable"] * args.allow_undecodable
        + ["pictures"] * with_images
    )
    return [*map(file_identity, files), *more, *_limit(args), *_beside_text(rows)]


def _limit(args: DataArguments) -> list[str]:
    return [f"first {args.max_samples}"] if args.max_samples else []


def _beside_text(rows: Rows) -> list[Rows]:
    """Returns the part of a cache file's key that names the kind of rows. Files of text have none:
    they keep the names that they had before there were other kinds."""
    return [] if rows == "text" else [rows]


def _documents_path(args: DataArguments, files: list[Path], rows: Rows, with_images: bool) -> Path:
    key = digest(_identity(args, files, rows, with_images))
    return cache_path(expanded(args.cache_dir), "documents", key)


def _documents(
    args: DataArguments,
    files: list[Path],
    path: Path | None = None,
    rows: Rows = "text",
    *,
    with_images: bool = False,
) -> Dataset:
    """The documents of files, as columns; read once and kept (at `path`), so that they need not fit
    in RAM. With `with_images` they may name images."""
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


def _replaced_bytes(documents: Dataset) -> dict[str, int]:
    """Undecodable bytes by file."""
    counts: Counter[str] = Counter()
    replaced = np.asarray(documents.data.column("replaced_bytes"))
    for i in np.flatnonzero(replaced):
        counts[file_of(documents[int(i)]["where"])] += int(replaced[i])
    return dict(counts)


def _namer(records: Dataset, name: str | None) -> Callable[[int], str]:
    """Says where a record came from: a row of the dataset `name`, or our document's place."""
    return lambda number: f"{name} row {number}" if name else records[number]["where"]


def _shown(order: np.ndarray, rows: Rows) -> Iterable[int]:
    unit = " documents" if rows == "text" else " records"
    return tqdm(order, desc="Packing", unit=unit, leave=False, disable=None)


def _part(order: np.ndarray, share: float, held_out: bool) -> np.ndarray:  # (n,) -> (k,) int64
    """The documents that are held out, the first of the shuffled ones and at least one of them, or
    the others. Raises UserError where none is left to train."""
    count = max(1, round(share * len(order)))
    if count >= len(order):
        raise UserError(
            f"--eval_share {share:g} of {many(len(order), 'document')} leaves none to train: lower "
            "it, give more documents, or name others with --eval_file"
        )
    return order[:count] if held_out else order[count:]
