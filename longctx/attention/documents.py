"""The boundaries of a packed batch's documents, found once per batch and used by every layer, and
which documents continue another one (prefixes.py)."""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.errors import UserError, many


class Padding(NamedTuple):
    """Consecutive tokens of padding whose outputs are read (padding.py)."""

    tokens: slice
    """Their indices after the tokens of all documents."""
    seen: slice
    """The tokens of the document right before them in their row, to which they attend; empty if
    they see none, as on the left of a row."""


class Keys(NamedTuple):
    """The keys of documents for one call, in which a prompt's keys are repeated before those of
    each answer (copied.py)."""

    tokens: Tensor  # (M,) int64: the token whose key is at each place
    bounds: Tensor  # (documents + 1,) int32: of each document's keys
    places: Tensor  # (T, n) int32: the places of each token's key, and -1 behind them
    longest: int
    """The most keys of a document, or more."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The boundaries of a batch's documents in its T flattened tokens, made once per batch.

    An example with two rows, the first packed from documents of 3 and 5 tokens:

        position_ids [[0 1 2 0 1 2 3 4], [0 1 2 3 4 5 6 7]]  ->  lengths (3, 5, 8)
                                                                 cu_seqlens [0 3 8 16]

    A document with a parent continues it: its positions go on from the parent's, and its tokens
    attend to all of the parent's tokens before their own. A prompt of 4 tokens and two answers:

        lengths (4, 2, 3), parents (None, 0, 0)              ->  positions 0 1 2 3  4 5  4 5 6

    Make them with `Documents.of`, and hand a patched model what `arguments` returns.

    Example:
        >>> from longctx import Documents
        >>> documents = Documents.of([4, 2, 3], parents=[None, 0, 0])
        >>> documents.cu_seqlens
        tensor([0, 4, 6, 9], dtype=torch.int32)
        >>> {name: x.tolist() for name, x in documents.arguments().items() if name != "parents"}
        {'position_ids': [[0, 1, 2, 3, 4, 5, 4, 5, 6]], 'cu_seq_lens_q': [0, 4, 6, 9]}
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (documents + 1,) int32, on the device of the tokens
    parents: tuple[int | None, ...] = ()
    """The number of each document's parent, or None; empty if no document has a parent."""
    padding: tuple[Padding, ...] = ()
    """The padding that is computed, which follows the tokens of all documents."""
    images: tuple[slice, ...] = ()
    """The tokens of each image that is seen both ways (images.py)."""
    keys: Keys | None = None
    """The keys of a batch in which a prompt's are repeated before those of each answer (copied.py);
    None if attention reads each key once, in its place."""

    @classmethod
    def of_batch(
        cls,
        position_ids: Tensor,  # (B, S)
        attention_mask: Tensor | None = None,  # (B, S), 0 at padding
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        parents: Parents = None,  # (documents,)
    ) -> tuple[Documents, Tensor | None]:
        """Returns the documents and the indices of the tokens that are not padding (None: all).

        As in Hugging Face's models, a mask overrides the rest, and the real tokens of each row are
        one document. Without a mask `cu_seqlens` decides, or else positions: a document starts
        where they do not increase by 1. The boundaries are read back from the GPU: one
        synchronisation, two with a mask. `parents` goes with `cu_seqlens` and is described at `of`.
        Raises ValueError for bounds or a mask that do not fit the batch, UserError for parents that
        cannot be, or that come with a mask or without bounds.
        """
        device = position_ids.device
        if attention_mask is not None and attention_mask.shape != position_ids.shape:
            raise ValueError(
                f"attention_mask must have shape {tuple(position_ids.shape)} as position_ids has, "
                f"got {tuple(attention_mask.shape)}"
            )
        if parents is not None and (cu_seqlens is None or attention_mask is not None):
            raise UserError(
                "parents number the documents of cu_seq_lens_q: give both, and no attention_mask"
            )
        if attention_mask is not None:
            real = attention_mask != 0
            lengths = real.sum(1).tolist()
            whole = sum(lengths) in (0, real.numel())
            kept = None if whole else real.flatten().nonzero().squeeze(1)
            rows, length = real.shape
            return cls.of(rows * [length] if whole else lengths, device=device), kept
        if cu_seqlens is not None:
            bounds = cu_seqlens.tolist()
            return cls.from_bounds(bounds, position_ids.numel(), device, parents), None
        return cls.from_position_ids(position_ids), None

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> Documents:  # (B, S)
        """Makes documents from positions (B, S): one starts at each row's start and wherever
        positions do not increase by 1. Raises ValueError for another shape."""
        if position_ids.dim() != 2:
            raise ValueError(
                f"position_ids must have shape (B, S), got {tuple(position_ids.shape)}"
            )
        if not position_ids.numel():
            return cls.of([], device=position_ids.device)
        steps = position_ids.flatten().diff() != 1
        # Read back before nonzero: to find the starts on the GPU takes as long, and waits twice.
        starts = steps.cpu().nonzero().squeeze(1) + 1
        bounds = sorted({*starts.tolist(), *range(0, steps.numel() + 2, position_ids.shape[1])})
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        return cls.of(lengths, device=position_ids.device)

    @classmethod
    def from_bounds(
        cls, bounds: list[int], tokens: int, device: torch.device, parents: Parents = None
    ) -> Documents:
        """Makes documents from boundaries: [0, 3, 8] gives documents of 3 and 5 tokens. Raises
        ValueError for bounds that do not rise from 0 to `tokens`."""
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        if bounds[:1] != [0] or bounds[-1] != tokens or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the {tokens} tokens of the batch, "
                f"got {reprlib.repr(bounds)}"
            )
        return cls.of(lengths, parents, device=device)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        parents: Parents = None,
        *,
        device: torch.device | str = "cpu",
    ) -> Documents:
        """Makes documents of these lengths, in tokens; empty ones are left out.

        `parents` has an entry per document: the number of the document that it continues, or None
        (or -1). A document must follow its parent or another document of that parent. Raises
        UserError for lengths that are no sequence of integers from 0 on, for a number that is no
        earlier document, for another order, and for a parent that has a parent itself.
        """
        if not isinstance(lengths, Iterable):
            raise UserError(f"lengths is a sequence with an entry per document, got {lengths!r}")
        lengths = [_whole(n) for n in lengths]
        if min(lengths, default=0) < 0:
            raise UserError(f"documents have no negative length, got {reprlib.repr(lengths)}")
        kept = [n for n in lengths if n]
        bounds = torch.tensor([0, *accumulate(kept)], dtype=torch.int32)
        return cls(
            lengths=tuple(kept),
            cu_seqlens=bounds.to(device, non_blocking=True),
            parents=_checked(lengths, parents),
        )

    def slices(self) -> Iterator[slice]:
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length

    # --- documents that continue others ----------------------------------------------------

    @property
    def before(self) -> tuple[int, ...]:
        """The number of tokens of each document's parent: 0 for a document without one."""
        parents = self.parents or (None,) * len(self.lengths)
        return tuple(0 if p is None else self.lengths[p] for p in parents)

    @cached_property
    def longest(self) -> int:
        """The most tokens that a token attends to, itself counted, without windows."""
        of_padding = (
            p.seen.stop - p.seen.start + p.tokens.stop - p.tokens.start for p in self.padding
        )
        own = (a + b for a, b in zip(self.lengths, self.before, strict=True))
        return max((*own, *of_padding))

    @property
    def tokens(self) -> int:
        """The tokens of all documents, without padding."""
        return sum(self.lengths)

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """The bounds of documents for a call of attention that reads them on the GPU: those of
        queries and those of keys, (documents + 1,) each, then the most queries and the most keys of
        a document."""
        longest = max(self.lengths)
        if self.keys is None:
            return self.cu_seqlens, self.cu_seqlens, longest, longest
        return self.cu_seqlens, self.keys.bounds, longest, self.keys.longest

    @cached_property
    def prompts(self) -> list[tuple[slice, list[slice]]]:
        """The tokens of each document that others continue, with the tokens of each of these."""
        tokens = list(self.slices())
        answers: dict[int, list[slice]] = {}
        for own, parent in zip(tokens, self.parents, strict=False):
            if parent is not None:
                answers.setdefault(parent, []).append(own)
        return [(tokens[parent], found) for parent, found in answers.items()]

    def position_ids(self) -> Tensor:  # (T,) int64, on the device of the tokens
        """Returns positions that start at 0, or continue the parent's, in each document."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths - torch.tensor(self.before, dtype=torch.int64)
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        return positions.to(self.cu_seqlens.device, non_blocking=True)

    def times(self) -> Tensor:  # (T,) fp32, on the device of the tokens
        """Returns how often each token counts if every document had a copy of its prompt: a
        prompt's tokens as often as documents continue it."""
        continued = Counter(parent for parent in self.parents if parent is not None)
        counts = torch.tensor([continued[i] or 1 for i in range(len(self.lengths))])
        times = counts.float().repeat_interleave(torch.tensor(self.lengths))
        return times.to(self.cu_seqlens.device, non_blocking=True)

    def arguments(self) -> dict[str, Tensor]:
        """Returns the arguments of a patched model besides `input_ids` (1, T): `position_ids` (1,
        T), `cu_seq_lens_q` (documents + 1,) and, if a document has a parent, `parents`
        (documents,)."""
        found = dict(position_ids=self.position_ids()[None], cu_seq_lens_q=self.cu_seqlens)
        if self.parents:
            numbers = torch.tensor([-1 if p is None else p for p in self.parents])
            found["parents"] = numbers.to(self.cu_seqlens.device, non_blocking=True)
        return found


Parents = Sequence[int | None] | Tensor | None


def _checked(lengths: Sequence[int], parents: Parents) -> tuple[int | None, ...]:
    """Returns the parents of the documents that are not empty, by their numbers among these, or
    nothing if no document has a parent. Raises UserError as `Documents.of` does."""
    if parents is None:
        return ()
    if not isinstance(parents, Iterable):
        raise UserError(f"parents is a sequence with an entry per document, got {parents!r}")
    entries = parents.flatten().tolist() if isinstance(parents, Tensor) else list(parents)
    if len(entries) != len(lengths):
        raise UserError(
            f"parents has {many(len(entries), 'value')} for {many(len(lengths), 'document')}"
        )
    given = [None if entry is None or _whole(entry) == -1 else _whole(entry) for entry in entries]
    numbers: dict[int, int] = {}  # of the documents that are not empty
    found: list[int | None] = []
    for i, length in enumerate(lengths):
        parent = given[i]
        if parent is not None:
            _check_parent(i, parent, given)
        if length:
            number = None if parent is None else numbers.get(parent)
            last = len(found) - 1
            if number is not None and number != last and number != found[last]:
                raise UserError(
                    f"document {i} must follow its parent, document {parent}, or another document "
                    "of that parent"
                )
            numbers[i] = len(found)
            found.append(number)
    return tuple(found) if any(parent is not None for parent in found) else ()


def _check_parent(document: int, parent: int, parents: list[int | None]) -> None:
    if not 0 <= parent < document:
        raise UserError(
            f"the parent of document {document} must be the number of an earlier document, or None "
            f"or -1 for none, got {parent}"
        )
    if parents[parent] is not None:
        raise UserError(
            f"document {document} continues document {parent}, which continues document "
            f"{parents[parent]}: prompts are shared over one level"
        )


def _whole(number: Any) -> int:
    """Returns an integer of Python, NumPy or torch as Python's. Raises UserError for anything
    else."""
    try:
        return operator.index(number)
    except TypeError:
        raise UserError(
            f"lengths and parents of documents are integers, got {reprlib.repr(number)}"
        ) from None
