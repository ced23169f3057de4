"""The boundaries of a packed batch's documents, found once per batch and used by every layer."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The boundaries of a batch's documents in its T flattened tokens, made once per batch.

    An example with two rows, the first packed from documents of 3 and 5 tokens:

        position_ids [[0 1 2 0 1 2 3 4], [0 1 2 3 4 5 6 7]]  ->  lengths (3, 5, 8)
                                                                 cu_seqlens [0 3 8 16]
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (documents + 1,) int32, on the device of the tokens

    @classmethod
    def of_batch(
        cls,
        position_ids: Tensor,  # (B, S)
        attention_mask: Tensor | None = None,  # (B, S), 0 at padding
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
    ) -> tuple[Documents, Tensor | None]:
        """Returns the documents and the indices of the tokens that are not padding (None: all).

        As in Hugging Face's models, a mask overrides the rest, and the real tokens of each row are
        one document. Without a mask `cu_seqlens` decides, or else positions: a document starts
        where they do not increase by 1. The boundaries are read back from the GPU: one
        synchronisation, two with a mask. Raises ValueError for bounds that do not fit the batch.
        """
        device = position_ids.device
        if attention_mask is not None:
            real = attention_mask != 0
            lengths = real.sum(1).tolist()
            whole = sum(lengths) in (0, real.numel())
            kept = None if whole else real.flatten().nonzero().squeeze(1)
            rows, length = real.shape
            return cls.of(rows * [length] if whole else [n for n in lengths if n], device), kept
        if cu_seqlens is not None:
            return cls.from_bounds(cu_seqlens.tolist(), position_ids.numel(), device), None
        return cls.from_position_ids(position_ids), None

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> Documents:  # (B, S)
        """A document starts at each row's start and wherever positions do not increase by 1."""
        if not position_ids.numel():
            return cls.of([], position_ids.device)
        steps = position_ids.flatten().diff() != 1
        # Read back before nonzero: to find the starts on the GPU takes as long, and waits twice.
        starts = steps.cpu().nonzero().squeeze(1) + 1
        bounds = sorted({*starts.tolist(), *range(0, steps.numel() + 2, position_ids.shape[1])})
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        return cls.of(lengths, position_ids.device)

    @classmethod
    def from_bounds(cls, bounds: list[int], tokens: int, device: torch.device) -> Documents:
        """Makes documents from boundaries: [0, 3, 8] gives documents of 3 and 5 tokens. Raises
        ValueError for bounds that do not rise from 0 to `tokens`."""
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        if bounds[:1] != [0] or bounds[-1] != tokens or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the {tokens} tokens of the batch, "
                f"got {reprlib.repr(bounds)}"
            )
        return cls.of([n for n in lengths if n], device)

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Documents:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths=tuple(lengths), cu_seqlens=bounds.to(device, non_blocking=True))

    def slices(self) -> Iterator[slice]:
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length
