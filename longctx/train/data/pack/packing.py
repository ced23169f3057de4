"""Documents into rows of `seq_len` tokens, without cutting a document that fits.

A document longer than a row is cut into pieces that are documents of their own, or keeps its first
or its last seq_len tokens (--long_documents). One with images is never cut: it is refused, or
left out where others are truncated. A piece goes into the open row with the least room
that still holds it (best fit, online). Full rows leave at once; the fullest leaves early when a
piece fits nowhere and all open rows are taken. What stays free is padding, marked as one last
document. seq_len 8, documents `abcde` and `xy`, padding `_`:

    input_ids      a    b  c  d  e     x  y     _
    labels      -100    b  c  d  e  -100  y  -100
    position_ids   0    1  2  3  4     0  1     0
    documents      the numbers of the two records, -1 for none known

Labels are NOT shifted here: the loss shifts once, so that logits at `a` predict the label at `b`.
The first label of a piece is -100 because the token before it belongs to another document.
Attention reads document boundaries off the zeros in `position_ids`.

Memory while packing: at most OPEN_ROWS rows of 5 bytes a token.

For a model that does not keep documents apart each row has one piece and its length. `lengthened`
makes the rows of a batch equal; positions go on into their padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from datasets import Features, List, Value

from longctx.constants import IGNORE_INDEX, PAD_TOKEN_ID
from longctx.errors import UserError, many, shortened

LongDocuments = Literal["split", "truncate", "truncate_start"]
TOKEN_COLUMNS = ("input_ids", "labels", "position_ids")
ROW_FEATURES = Features({name: List(Value("int32")) for name in (*TOKEN_COLUMNS, "documents")})
# Padding of the standard library's 4096-token rows: 1 open row 15%, 4 3.0%, 16 or more 1.0%.
# 64 leave room for sources of more varied lengths and cost 5 bytes x 64 x seq_len.
OPEN_ROWS = 64
MOST_NAMES = 3
"""So many of the documents that are left out are named."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one that shares no attention with the rest."""

    input_ids: np.ndarray  # (n,) int32
    trained: np.ndarray  # (n,) bool; the first is False
    record: int = -1
    """Which record of the data it comes from, so that a bad row can name its documents."""
    images: int = 0
    """Images among its tokens; such a document is never cut."""
    pixels: int = 0
    """63 bits that tell its images from others; 0 if it has none."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(kw_only=True)
class PackingStats:
    """Counts of what became of the documents, in tokens unless the name says otherwise."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated_tokens: int = 0
    untrained_tokens: int = 0
    """Tokens of pieces without a single label, left out because they would only cost time."""
    rows: int = 0
    padding_tokens: int = 0
    largest_token_id: int = -1
    one_document: bool = False
    """Whether rows are not packed: each has one piece."""
    images: int = 0
    """Images in the pieces."""
    too_long: list[str] = field(default_factory=list)
    """The names of documents with images that were left out, since they are longer than a row."""

    def summary(self, seq_len: int, use: str = "trained") -> str:
        """The line that a run prints; `use` says what becomes of the tokens that count."""
        share = self.padding_tokens / max(1, self.rows * seq_len)
        length = f"up to {seq_len:,}, one document in each" if self.one_document else f"{seq_len:,}"
        lost = {
            "tokens dropped by truncation": self.truncated_tokens,
            "left out with nothing to train": self.untrained_tokens,
        }
        parts = [f"{count:,} {what}" for what, count in lost.items() if count]
        if self.too_long:
            count = many(len(self.too_long), "document")
            names = left_out(self.too_long)
            parts.append(f"{count} with images left out as too long: {names}")
        parts.append(f"{self.padding_tokens:,} padding = {share:.1%}")
        images = f", those of {many(self.images, 'image')} among them" if self.images else ""
        return (
            f"{many(self.documents, 'document')}, {many(self.tokens, 'token')}{images} -> "
            f"{many(self.rows, 'row')} of {length} ({', '.join(parts)}); "
            f"{self.trained_tokens:,} are {use}"
        )


def left_out(names: Sequence[str]) -> str:
    """Returns the first names of what is left out."""
    more = ", ..." if len(names) > MOST_NAMES else ""
    return shortened(", ".join(names[:MOST_NAMES]), 200) + more


def check_trainable(stats: PackingStats, name: str) -> None:
    """Raises UserError where the documents of `name` gave no row."""
    if stats.too_long and not stats.rows:
        raise UserError(
            f"nothing to train on in {name}: {many(len(stats.too_long), 'document')} with "
            "images, too long for --seq_len: raise it, or lower --image_pixels"
        )
    if stats.documents == 0:
        raise UserError(f"no readable text in {name}: everything in it is blank")
    if stats.rows == 0:
        raise UserError(
            f"nothing to train on in {name}: no document has a trained token after its first "
            "within --seq_len"
        )


def pack(
    documents: Iterable[Piece],
    seq_len: int,
    *,
    long_documents: LongDocuments,
    pad_token_id: int,
    stats: PackingStats,
    open_rows: int = OPEN_ROWS,
    own_lengths: bool = False,
    where: Callable[[int], str] = str,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields rows {input_ids, labels, position_ids}, each (seq_len,) int32, and {documents}, one
    record number a piece; counts in `stats`, which say whether a row has one piece alone. With
    `own_lengths` rows have no padding, and seq_len is the most that they have. `where` names a
    record. Raises UserError for a document with images that would have to be split."""
    whole = _with_whole_images(documents, seq_len, long_documents, stats, where)
    cut = _cut(whole, seq_len, long_documents, stats)
    alone = ([piece] for piece in cut)
    for pieces in alone if stats.one_document else best_fit(cut, seq_len, open_rows):
        tokens = sum(map(len, pieces))
        row_tokens = tokens if own_lengths else seq_len
        stats.rows += 1
        stats.padding_tokens += row_tokens - tokens
        yield build_row(pieces, row_tokens, pad_token_id)


def build_row(pieces: list[Piece], seq_len: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """Lays pieces one after another into a row and fills it up with padding."""
    input_ids = np.full(seq_len, pad_token_id, dtype=np.int32)
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int32)
    position_ids = np.empty(seq_len, dtype=np.int32)
    start = 0
    for piece in pieces:
        end = start + len(piece)
        input_ids[start:end] = piece.input_ids
        labels[start:end] = np.where(piece.trained, piece.input_ids, IGNORE_INDEX)
        labels[start] = IGNORE_INDEX
        position_ids[start:end] = np.arange(len(piece))
        start = end
    position_ids[start:] = np.arange(seq_len - start)
    documents = np.array([piece.record for piece in pieces], dtype=np.int32)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "documents": documents,
    }


def lengthened(row: Mapping[str, Any], tokens: int) -> dict[str, np.ndarray]:
    """Returns the columns of tokens of a row, int64, with padding up to a number of tokens."""
    ids, labels, positions = (np.asarray(row[name], np.int64) for name in TOKEN_COLUMNS)
    more = tokens - len(ids)
    if more:
        ids = np.pad(ids, (0, more), constant_values=PAD_TOKEN_ID)
        labels = np.pad(labels, (0, more), constant_values=IGNORE_INDEX)
        positions = np.append(positions, positions[-1] + 1 + np.arange(more))
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _with_whole_images(
    documents: Iterable[Piece],
    seq_len: int,
    long_documents: LongDocuments,
    stats: PackingStats,
    where: Callable[[int], str],
) -> Iterator[Piece]:
    for document in documents:
        if document.images and len(document) > seq_len:
            name = where(document.record)
            if long_documents == "split":
                raise UserError(
                    f"{name} has {len(document):,} tokens with "
                    f"{many(document.images, 'image')}, and is never split: raise --seq_len "
                    f"({seq_len}), lower --image_pixels, or leave such documents out with "
                    "--long_documents truncate"
                )
            stats.too_long.append(name)
            continue
        stats.images += document.images
        yield document


def _cut(
    documents: Iterable[Piece], seq_len: int, long_documents: LongDocuments, stats: PackingStats
) -> Iterator[Piece]:
    """Pieces of at most seq_len tokens that train something."""
    for document in documents:
        if not len(document):
            continue
        stats.documents += 1
        stats.tokens += len(document)
        stats.largest_token_id = max(stats.largest_token_id, int(document.input_ids.max()))
        start, end = 0, len(document)
        if long_documents != "split" and end > seq_len:
            stats.truncated_tokens += end - seq_len
            start, end = (0, seq_len) if long_documents == "truncate" else (end - seq_len, end)
        while start < end:
            stop = min(start + seq_len, end)
            # A tail of one token would train nothing: it gets company from the piece before.
            if end - stop == 1 and stop - start > 2:
                stop -= 1
            piece = Piece(
                document.input_ids[start:stop], document.trained[start:stop], document.record
            )
            trained = int(piece.trained[1:].sum())
            if trained:
                stats.trained_tokens += trained
                yield piece
            else:
                stats.untrained_tokens += len(piece)
            start = stop


Item = TypeVar("Item", bound=Sized)


def best_fit(items: Iterable[Item], seq_len: int, open_rows: int) -> Iterator[list[Item]]:
    """Yields the items of each row: of the open rows that have room for an item, the fullest gets
    it. `len(item)` is the item's tokens, at most seq_len."""
    rows: dict[int, list[Item]] = {}
    free: list[tuple[int, int]] = []  # (free tokens, row number), fullest and oldest first
    opened = 0
    for item in items:
        found = bisect_left(free, (len(item), -1))
        if found < len(free):
            room, row = free.pop(found)
        else:
            if len(free) == open_rows:
                yield rows.pop(free.pop(0)[1])
            room, row = seq_len, opened
            rows[row] = []
            opened += 1
        rows[row].append(item)
        if room > len(item):
            insort(free, (room - len(item), row))
        else:
            yield rows.pop(row)
    for _, row in free:
        yield rows.pop(row)
