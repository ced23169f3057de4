"""How a mixer runs over a batch's documents: in segments, a few thousand tokens at a time.

A mixer (parts/mixer.py) hands a state on from token to token, and no token may get that of another
document. So each call of it has one document, or a piece of one that begins with the state of the
piece before; or several short documents as the rows of a batch. Their rows are padded on the right:
a mixer is causal, so that no real token depends on padding, whatever the kernel computes there.

    documents of 40000, 900, 1000 and 800 tokens, segments of 16384:

    segment   rows                                begins with    state needed by
    0         tokens 0 to 13333                   nothing        1
    1         tokens 13333 to 26666               the state of 0 2
    2         tokens 26666 to 40000               the state of 1
    3         three rows of 1000, 900 and 800     nothing

A document that continues a prompt begins with the state of the prompt's end. Documents of similar
lengths share a batch, so that at most an eighth of its tokens are padding.

Mixers that read where documents begin (`Mixes.packs`) have short documents behind each other in one
row instead, as they are, without padding (row_documents.py). Then no length decides how the work is
cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.layer.row_documents import RowDocuments, most_places, places_of

SEGMENT_TOKENS = 16384
"""Tokens of a segment, padding included. By count the graph of a segment of Qwen3.5-9B's Gated
DeltaNet has 1.7 GiB, and its state, which is kept between segments, 2 MiB."""
MOST_PADDING = 1 / 8
"""The share of a batch of documents that may be padding."""


class Places(NamedTuple):
    """Maps the tokens of several documents to the padded batch that a mixer runs over."""

    tokens: Tensor  # (n,) int64: of the row of all tokens
    padded: Tensor  # (n,) int64: of the batch, its rows one after the other


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """The tokens over which a mixer is called once, and the state with which it begins."""

    rows: tuple[slice, ...]
    """The tokens of each row of its batch."""
    length: int
    """The tokens of a row, padding included."""
    begins: int | None = None
    """The number of the segment with whose last state each row begins; None: with none."""
    places: Places | None = None
    """None where there is a single row without padding."""
    packed: RowDocuments | None = None
    """The documents of a row that has several behind each other."""

    @classmethod
    def of_packed(cls, bounds: Tensor, tokens: slice) -> Segment:
        """Makes the segment of these tokens, which are the documents between the bounds."""
        length = tokens.stop - tokens.start
        return cls(rows=(tokens,), length=length, packed=RowDocuments(bounds, length))

    @property
    def tokens(self) -> slice:
        """Returns the tokens of a single row."""
        (row,) = self.rows
        return row

    def read(self, x: Tensor) -> Tensor:  # (T, D) -> (n, D)
        """Returns the rows of x that belong to the segment's tokens: a view of a single row."""
        return x[self.tokens] if self.places is None else x[self.places.tokens]

    def write(self, x: Tensor, found: Tensor) -> None:  # (T, D), (n, D)
        """Writes what belongs to the segment's tokens to their places in x."""
        if self.places is None:
            x[self.tokens] = found
        else:
            x.index_copy_(0, self.places.tokens, found)

    def batch(self, found: Tensor) -> Tensor:  # (n, D) -> (rows, length, D)
        """Returns the tokens as the mixer takes them. Padding is zero."""
        if self.places is None:
            return found[None]
        batch = found.new_zeros(len(self.rows) * self.length, found.shape[1])
        batch.index_copy_(0, self.places.padded, found)
        return batch.unflatten(0, (len(self.rows), -1))

    def unbatch(self, batch: Tensor) -> Tensor:  # (rows, length, D) -> (n, D)
        """Returns the real tokens of a batch."""
        flat = batch.flatten(0, 1)
        return flat if self.places is None else flat[self.places.padded]


def segments(
    documents: Documents, most: int = SEGMENT_TOKENS, *, packs: bool = False
) -> tuple[Segment, ...]:
    """Returns the segments of a batch, each behind the one whose state it begins with. `packs`:
    its mixers read where documents begin."""
    found: list[Segment] = []
    short: dict[int | None, list[slice]] = {}
    ends: dict[int, int] = {}  # maps prompts to their last segment
    prompts = {parent for parent in documents.parents if parent is not None}
    parents = documents.parents or (None,) * len(documents.lengths)
    for i, (tokens, parent) in enumerate(zip(documents.slices(), parents, strict=True)):
        begins = None if parent is None else ends[parent]
        length = tokens.stop - tokens.start
        if length <= most and i not in prompts:
            short.setdefault(begins, []).append(tokens)
            continue
        for piece in _pieces(tokens, most):
            found.append(_segment((piece,), begins, documents))
            begins = len(found) - 1
        ends[i] = len(found) - 1
    if packs:
        found += _packed(short.pop(None, []), most, documents)
    for begins, alike in short.items():
        found += (_segment(rows, begins, documents) for rows in _batches(alike, most))
    return tuple(found)


def kept_states(cut: Sequence[Segment]) -> list[int]:
    """Returns the numbers of the segments whose last state others begin with."""
    return sorted({segment.begins for segment in cut if segment.begins is not None})


def _pieces(tokens: slice, most: int) -> Iterator[slice]:
    """Yields a document in pieces of nearly equal lengths: none is a token alone, which
    transformers would take for one that is generated."""
    length = tokens.stop - tokens.start
    count = -(-length // most)
    for start, stop in pairwise(tokens.start + length * i // count for i in range(count + 1)):
        yield slice(start, stop)


def _packed(short: Sequence[slice], most: int, documents: Documents) -> Iterator[Segment]:
    """Yields segments of documents that lie behind each other."""
    run: list[slice] = []
    places, room = 0, most_places(min(most, documents.tokens))
    for tokens in short:
        own = places_of(tokens.stop - tokens.start)
        goes_on = run and tokens.start == run[-1].stop and tokens.stop - run[0].start <= most
        if run and not (goes_on and places + own <= room):
            yield _of_run(run, documents)
            run, places = [], 0
        run.append(tokens)
        places += own
    if run:
        yield _of_run(run, documents)


def _of_run(run: Sequence[slice], documents: Documents) -> Segment:
    whole = slice(run[0].start, run[-1].stop)
    if len(run) == 1:
        return _segment((whole,), None, documents)
    bounds = torch.tensor([row.start - whole.start for row in run] + [whole.stop - whole.start])
    device = documents.cu_seqlens.device
    return Segment.of_packed(bounds.int().to(device, non_blocking=True), whole)


def _batches(documents: Sequence[slice], most: int) -> Iterator[tuple[slice, ...]]:
    """Yields documents in batches, the longest ones first."""
    rows: list[slice] = []
    longest = real = 0
    for tokens in sorted(documents, key=lambda x: x.start - x.stop):
        length = tokens.stop - tokens.start
        padded = (len(rows) + 1) * longest
        if rows and (padded > most or padded - real - length > MOST_PADDING * padded):
            yield tuple(rows)
            rows, real = [], 0
        longest = longest if rows else length
        rows.append(tokens)
        real += length
    if rows:
        yield tuple(rows)


def _segment(rows: tuple[slice, ...], begins: int | None, documents: Documents) -> Segment:
    """Makes a segment of rows that begin alike. A state that another segment begins with is behind
    a row without padding: of a piece of a document, which is the only row of its segment."""
    lengths = [row.stop - row.start for row in rows]
    # Rows of one token are padded where transformers would do something else with them: if they
    # begin with a state, they would be taken for tokens that are generated, and of several rows
    # Falcon-H1's norm mixes their gates. A prompt of one token is neither.
    length = max(1 if len(rows) == 1 and begins is None else 2, *lengths)
    places = None
    if len(rows) > 1 or length > lengths[0]:
        of_rows = [torch.arange(n) for n in lengths]
        tokens = torch.cat([row.start + own for row, own in zip(rows, of_rows, strict=True)])
        padded = torch.cat([i * length + own for i, own in enumerate(of_rows)])
        device = documents.cu_seqlens.device
        places = Places(*(x.to(device, non_blocking=True) for x in (tokens, padded)))
    return Segment(rows=rows, length=length, begins=begins, places=places)
