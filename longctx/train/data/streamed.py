"""Packed rows of a dataset that is read while training runs (--streaming): nothing is kept on disk.

The steps are those of packed_rows.py, but records are shuffled through a buffer instead of all at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from datasets import IterableDataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.errors import UserError, print_rank0, shortened
from longctx.train.data.chat.rendering import lines_of
from longctx.train.data.pack.packing import (
    ROW_FEATURES,
    LongDocuments,
    PackingStats,
    Piece,
    check_trainable,
    pack,
)
from longctx.train.data.reading.records import Document, as_document
from longctx.train.data.reading.unread_media import unread_line
from longctx.train.data.reading.values import read_row
from longctx.train.data.text.encoding import encode, pad_token_id
from longctx.train.data.text.remarks import media_tokens, token_line, token_of_media
from longctx.train.options.config import DataArguments

SHUFFLE_BUFFER_DOCUMENTS = 256
"""Records that are in memory to be shuffled. A larger buffer shuffles better, and delays the first
row."""
BATCH_DOCUMENTS = 16  # tokenised together; a row waits for as many


def stream_rows(
    args: DataArguments,
    records: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    vocab_size: int | None,
    seed: int,
    one_document: bool = False,
    config: PretrainedConfig | None = None,
) -> IterableDataset:
    """Returns the rows as those of `build_dataset`, all of `seq_len` tokens: one process reads them
    for the others, and cuts batches of one shape. Raises UserError where the first record is no
    good; a later bad record ends the iteration with one."""
    name = args.dataset_name or "the dataset"
    records = records.take(args.max_samples) if args.max_samples else records
    first = next(_numbered(records, name), None)
    if first is None:
        raise UserError(f"{name} has no rows in the split {args.dataset_split!r}")
    document = as_document(first[1], f"{name} row 0")
    encode([document], tokenizer, vocab_size)
    for line in lines_of({document.kind} if document else set(), tokenizer):
        print_rank0(line)

    shuffled = records.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_DOCUMENTS)
    rows = _Stream(
        *(shuffled, name, tokenizer, vocab_size, seq_len, args.long_documents, one_document),
        media=media_tokens(tokenizer, config),
    )
    return IterableDataset.from_generator(rows, features=ROW_FEATURES)


@dataclass(frozen=True)
class _Stream:
    """Yields rows when called. An object, since datasets pickles functions with all that they call,
    as deep as that goes."""

    records: IterableDataset
    name: str
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    seq_len: int
    long_documents: LongDocuments
    one_document: bool
    media: dict[int, str]
    """The tokens that stand for media, by id."""

    def __call__(self) -> Iterator[dict[str, list[int]]]:
        stats = PackingStats(one_document=self.one_document)
        for row in pack(
            self._pieces(),
            self.seq_len,
            long_documents=self.long_documents,
            pad_token_id=pad_token_id(self.tokenizer, self.vocab_size),
            stats=stats,
        ):
            yield {key: values.tolist() for key, values in row.items()}
        check_trainable(stats, self.name)
        print_rank0(f"{shortened(self.name, 80)}: {stats.summary(self.seq_len)}")

    def _pieces(self) -> Iterator[Piece]:
        numbered, said = _numbered(self.records, self.name), set[str]()
        while batch := list(islice(numbered, BATCH_DOCUMENTS)):
            places = [f"{self.name} streamed record {n}" for n, _ in batch]
            documents = [as_document(x, at) for (_, x), at in zip(batch, places, strict=True)]
            pieces = encode(documents, self.tokenizer, self.vocab_size)
            for (n, _), document, piece in zip(batch, documents, pieces, strict=True):
                if document:
                    self._remark(document, piece, said)
                yield replace(piece, record=n)

    def _remark(self, document: Document, piece: Piece, said: set[str]) -> None:
        """Says once what `remarks.py` says of records on disk; `said` holds what was."""
        word = token_of_media(piece.input_ids, self.media)
        remarks = {} if word is None else {word: token_line(document.where, word)}
        if document.unread:
            remarks[",".join(document.unread)] = unread_line(document.where, document.unread)
        for subject, line in remarks.items():
            if subject not in said:
                said.add(subject)
                print_rank0(line)


def _numbered(records: IterableDataset, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Raises UserError where the stream breaks: a connection, a shard, a decompressor."""
    number = -1
    try:
        for number, record in enumerate(records):
            yield number, read_row(record, records.features)
    except Exception as error:  # datasets passes on what every library below it raises
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{name} broke after {number + 1:,} streamed records ({type(error).__name__}: {reason})"
            ": check the connection and the file, and continue from the last checkpoint"
        ) from error
