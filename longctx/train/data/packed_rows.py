"""Text into training rows: documents -> tokens -> rows of `seq_len` tokens, cached.

    origins.py               files, folders, globs, datasets -> checked documents
    tokens.py                a document                      -> token ids, and which are trained
    packing.py               tokenised documents, shuffled   -> input_ids, labels, position_ids,
                                                                documents
    packing_groups.py        prompts with their answers      -> the same, and the groups
    row_report.py            what is counted and said of rows, a JSON file beside them
    cache.py                 three Arrow files under cache_dir: the documents, their tokens
                             (4 bytes and a bit a token), the rows (12 bytes a token, 4 a document)

The files' names say all they depend on: the format (a number in cache.py) and a hash of the
sources' identities, the tokenizer, seq_len and seed, and the kind of rows but for packed text.
With --streaming nothing is kept (streamed.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset
from datasets.utils import tqdm
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.errors import UserError, many, print_rank0, shortened
from longctx.system import expanded
from longctx.train.data.chat.rendering import lines_of
from longctx.train.data.origins import (
    check_kind,
    file_documents,
    files_identity,
    kind_key,
    limit_key,
    named_image_files,
    place_namer,
)
from longctx.train.data.pack.cache import (
    cache_path,
    dataset_identity,
    digest,
    file_identity,
    open_arrow,
    remove_leftovers,
    tokenizer_identity,
    write_arrow,
    write_text,
)
from longctx.train.data.pack.packing import ROW_FEATURES, PackingStats, check_trainable, pack
from longctx.train.data.pack.packing_groups import (
    GROUP_ROW_FEATURES,
    GroupStats,
    check_groups,
    pack_groups,
)
from longctx.train.data.reading.files import find_files, stdlib_files
from longctx.train.data.reading.groups import Rows
from longctx.train.data.reading.image_sources import undecoded
from longctx.train.data.reading.media import IMAGE_COLUMNS
from longctx.train.data.reading.named_datasets import load_records
from longctx.train.data.reading.records import WITH_IMAGES
from longctx.train.data.row_report import (
    pixels_hash,
    read_report,
    replaced_bytes,
    saved_counts,
    stats_of,
)
from longctx.train.data.streamed import stream_rows
from longctx.train.data.text.encoding import check_vocabulary, pad_token_id
from longctx.train.data.text.remarks import media_line, unread_lines
from longctx.train.data.text.tokens import Reader, groups_of, kinds_of, pieces_of, tokens_of
from longctx.train.options.config import DataArguments

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor


class ImageReading(NamedTuple):
    """The way in which `build_dataset` reads the images of records, for a vision-language
    model."""

    read: Callable[[], ImageProcessor]
    """Reads the processor. It is called if there are images alone."""
    one_document: bool
    """Whether rows of text with images are not packed: where positions do not keep them apart."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options of `build_dataset` besides those of data."""

    files: list[str] | None
    """Files, folders and globs to read; None: --dataset_name, or else the standard library."""
    seq_len: int
    """Tokens of a row."""
    vocab_size: int | None
    """The number of the model's token ids, which the rows are checked against; None: unknown."""
    seed: int
    """The seed of the order of documents."""
    rows: Rows = "text"
    """Whether rows hold documents of "text", or prompts with their answers: "pairs" or "rated"."""
    mismatched: bool = False
    """Whether each answer is followed by another prompt's answer."""
    one_document: bool = False
    """Whether rows of text are not packed: each holds one document and has its length, or
    `seq_len` in a stream."""
    held_out: bool = False
    """Whether the rows are those of --eval_share; else they are those of the other documents."""
    evaluates: bool = False
    """Whether a run evaluates the rows, for the line that is printed; else it trains on them."""
    image_reading: ImageReading | None = None
    """The way in which images are read, whose tokens are in the rows; None: records may name
    none."""
    config: PretrainedConfig | None = None
    """The model's configuration, which may name tokens of media."""

    def name(self, args: DataArguments) -> str:
        """Returns what messages call the data."""
        name = ", ".join(self.files or [args.dataset_name or "the standard library"])
        return f"held out of {name}" if self.held_out else name


@dataclass(kw_only=True)
class _Origin:
    """The records of which rows are made."""

    paths: list[Path]
    """The files that hold the records; empty for a dataset."""
    dataset: str | None
    """The name of the dataset; None for files."""
    identity: list[Any]
    """JSON values that differ if the records do, for the names of the cache's files."""
    records: Dataset | None = None
    """The records; None for files that need not be read if their rows are in the cache."""
    images: ImageProcessor | None = None
    """The images of the records; None if no record names one."""


def build_dataset(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, options: RowOptions
) -> Dataset | IterableDataset:
    """Makes packed rows, or finds them in the cache.

    Each row is {input_ids, labels, position_ids}, lists of seq_len ints, and {documents}, one
    number a document (`document_names` turns them into names, `images_of` into images). Rows of
    "pairs" and "rated" say which tokens are of prompts and answers (packing_groups.py). The same
    arguments give the same rows in the same order.
    Prints one summary line. Raises UserError for bad sources, a record that cannot be trained on,
    and a token id of `vocab_size` or more.
    """
    check_kind(args, options.files, options.rows)
    origin = _origin(args, options)
    if isinstance(origin, IterableDataset):
        return stream_rows(
            args,
            origin,
            tokenizer,
            seq_len=options.seq_len,
            vocab_size=options.vocab_size,
            seed=options.seed,
            one_document=options.one_document,
            config=options.config,
        )
    image_reading = options.image_reading if origin.images is not None else None
    if image_reading is not None and image_reading.one_document and options.rows == "text":
        options = replace(options, one_document=True)
    remove_leftovers(expanded(args.cache_dir))
    tokens_path, rows_path = _cache_paths(args, tokenizer, options, origin)
    report = read_report(rows_path.with_suffix(".json"), options.rows)
    packed = open_arrow(rows_path, report["stats"]["rows"]) if report else None
    if report is None or packed is None:
        packed, report = _packed(args, tokenizer, options, origin, tokens_path, rows_path)
    _say(report, options, options.name(args))
    return packed


def _origin(args: DataArguments, options: RowOptions) -> _Origin | IterableDataset:
    """Finds the records, and reads the processor if they name images."""
    files, rows, with_images = options.files, options.rows, options.image_reading is not None
    if files is None and args.dataset_name:
        # A run with --eval_share reads the dataset twice and says once what is passed over.
        loaded = load_records(args, None if options.held_out else print_rank0)
        if isinstance(loaded, IterableDataset):
            return undecoded(loaded)
        identity = [*dataset_identity(loaded), *limit_key(args), *kind_key(rows)]
        records = undecoded(loaded)
        if args.max_samples:
            records = records.select(range(min(args.max_samples, len(records))))
        origin = _Origin(paths=[], dataset=args.dataset_name, identity=identity, records=records)
    else:
        paths = stdlib_files() if files is None else find_files(files)
        identity = files_identity(args, paths, rows, with_images=with_images)
        origin = _Origin(paths=paths, dataset=None, identity=identity)
    if options.image_reading is not None:
        _look_for_images(args, options.image_reading, rows, origin)
    return origin


def _look_for_images(
    args: DataArguments, image_reading: ImageReading, rows: Rows, origin: _Origin
) -> None:
    """Reads the processor if records name images. Their files decide the rows, too, which count
    their tokens."""
    if origin.records is None:
        origin.records = file_documents(args, origin.paths, rows=rows, with_images=True)
    kinds = {*WITH_IMAGES} & kinds_of(origin.records, rows)
    if kinds or {*IMAGE_COLUMNS} & {*origin.records.column_names}:
        origin.images = image_reading.read()
        files = named_image_files(origin.records, origin.dataset)
        origin.identity += [origin.images.identity(), *map(file_identity, files)]


def _cache_paths(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    origin: _Origin,
) -> tuple[Path, Path]:
    """Returns the cache's files of the records' tokens and of the rows."""
    tokens_key = digest(digest(origin.identity), tokenizer_identity(tokenizer))
    # What most runs do not ask for adds to the key only if it is asked for: a key that changed
    # would make all rows of earlier versions again.
    added: list[Any] = ["mismatched"] * options.mismatched
    added += ["one document"] * options.one_document
    if args.eval_share:
        added.append(["held out" if options.held_out else "not held out", args.eval_share])
    padding = pad_token_id(tokenizer, options.vocab_size)
    rows_key = digest(
        *(tokens_key, options.seq_len, args.long_documents, padding, options.seed), *added
    )
    folder = expanded(args.cache_dir)
    return cache_path(folder, "tokens", tokens_key), cache_path(folder, "rows", rows_key)


def _packed(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    origin: _Origin,
    tokens_path: Path,
    rows_path: Path,
) -> tuple[Dataset, dict[str, Any]]:
    """Tokenises and packs the records. Returns the rows and the report that is kept of them."""
    rows, images, records = options.rows, origin.images, origin.records
    if records is None:
        records = file_documents(args, origin.paths, rows=rows)
    replaced = replaced_bytes(records) if origin.paths else {}
    if not len(records):
        check_trainable(PackingStats(), options.name(args))
    tokens = tokens_of(
        tokens_path, records, origin.dataset, tokenizer, options.vocab_size, rows, images
    )
    order = np.random.default_rng(options.seed).permutation(len(tokens))
    if args.eval_share:
        order = _part(order, args.eval_share, options.held_out)
    namer = place_namer(records, origin.dataset)
    padding = pad_token_id(tokenizer, options.vocab_size)
    features, stats, packing = _packing(args, options, tokens, order, padding, namer)
    packed = write_arrow(rows_path, features, packing)
    said = lines_of(kinds_of(records, rows), tokenizer)
    reader = Reader(
        records.features, origin.dataset, rows, with_images=options.image_reading is not None
    )
    said += [*unread_lines(records, reader, namer)]
    said += media_line(tokens, tokenizer, options.config, images, namer)
    report = {"stats": saved_counts(stats), "replaced_bytes": replaced, "said": said}
    report |= {"pixels": pixels_hash(tokens, order)} if images is not None else {}
    write_text(rows_path.with_suffix(".json"), json.dumps(report))
    return packed, report


def _packing(
    args: DataArguments,
    options: RowOptions,
    tokens: Dataset,
    order: np.ndarray,  # (n,) int64: numbers of documents
    padding: int,
    namer: Callable[[int], str],
) -> tuple[Features, PackingStats | GroupStats, Iterator[dict[str, np.ndarray]]]:
    """Returns the rows' columns, the counts that are complete when all rows are made, and the
    rows."""
    shuffled = _shown(order, options.rows)
    alike: dict[str, Any] = dict(
        long_documents=args.long_documents, pad_token_id=padding, where=namer
    )
    if options.rows == "text":
        alone = options.one_document
        stats = PackingStats(one_document=alone)
        pieces = pieces_of(tokens, shuffled)
        packing = pack(pieces, options.seq_len, stats=stats, own_lengths=alone, **alike)
        return ROW_FEATURES, stats, packing
    counted = GroupStats(kind=options.rows)
    groups = groups_of(tokens, shuffled)
    packing = pack_groups(
        groups, options.seq_len, stats=counted, mismatched=options.mismatched, **alike
    )
    return GROUP_ROW_FEATURES, counted, packing


def _say(report: dict[str, Any], options: RowOptions, name: str) -> None:
    """Prints what the report says of the rows. Raises UserError for rows that cannot be used."""
    stats = stats_of(report["stats"], options.rows)
    of_files = [
        f"{file}: replaced {count:,} undecodable bytes; save it as UTF-8 to keep them"
        for file, count in report["replaced_bytes"].items()
    ]
    # The held-out rows are of the same files, whose lines the other rows have printed.
    for line in [] if options.held_out else [*of_files, *report["said"]]:
        print_rank0(line)
    check_vocabulary(stats.largest_token_id, options.vocab_size)
    if isinstance(stats, GroupStats):
        check_groups(stats, name)
        for line in stats.warnings():
            print_rank0(line)
    else:
        check_trainable(stats, name)
    use = "evaluated" if options.evaluates else "trained"
    print_rank0(f"{shortened(name, 80)}: {stats.summary(options.seq_len, use)}")


def _shown(order: np.ndarray, rows: Rows) -> Iterable[int]:
    unit = " documents" if rows == "text" else " records"
    return tqdm(order, desc="Packing", unit=unit, leave=False, disable=None)


def _part(order: np.ndarray, share: float, held_out: bool) -> np.ndarray:  # (n,) -> (k,) int64
    """Returns the documents that are held out, the first of the shuffled ones and at least one of
    them, or the others. Raises UserError where none is left to train."""
    count = max(1, round(share * len(order)))
    if count >= len(order):
        raise UserError(
            f"--eval_share {share:g} of {many(len(order), 'document')} leaves none to train: lower "
            "it, give more documents, or name others with --eval_file"
        )
    return order[:count] if held_out else order[count:]
