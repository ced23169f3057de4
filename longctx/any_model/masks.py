"""The documents and the window that a mask of transformers means, found without the (S, S) mask.

transformers describes a mask by a function of (batch, head, query, key), and a function that is
registered in its AttentionMaskInterface makes the mask. Ours makes none. It asks the function

    whether each token sees the one before it      S answers: a document begins where one is no
    which tokens of the row a few tokens see       SAMPLED S answers, compared with those that
                                                   documents and the window give

and returns `Seen`, which goes through the layers instead of the mask, and through autograd's graph.
A chunk of chunked attention (Llama 4) is a document of its layers. A mask of another kind, with
bidirectional images or a cache, is made as transformers' sdpa takes it.

Cost: two waits for the GPU per mask, once per batch and kind of layer; S (1 + SAMPLED) booleans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from longctx.attention.documents import Documents

SAMPLED = 16
"""Tokens of a batch whose whole row of the mask is checked."""
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Says whether, in a row of the batch and a head, a query sees a key; indices broadcast."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A causal mask without its (S, S) tensor: each token attends to the tokens before it in its
    document, or in the window. A model that computes with its masks raises an error when it gets
    this object, and keeps its own attention."""

    dense: Callable[[], Tensor]
    """Makes the mask as sdpa takes it."""
    theirs: Callable[[], Tensor | None]
    """Makes the mask that transformers passes to sdpa: None where sdpa is told that it is
    causal."""
    length: int
    """S, the tokens of a row with padding: the number of the mask's queries and of its keys."""
    documents: Documents
    """The bounds of the batch's documents, without padding."""
    kept: Tensor | None
    """(T,): the indices of the tokens that are not padding in the flattened batch; None: all."""
    window: int | None

    def __getitem__(self, index: Any) -> Any:
        """Returns a part of the mask. Gemma 4 takes the queries whose logits it needs, which in
        training are all."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, slice) and part in _WHOLE for part in parts):
            return self
        return self.dense()[index]


_WHOLE = (slice(None), slice(0, None))


def longctx_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Mask | None = None,
    attention_mask: Tensor | None = None,  # (B, S) bool, False at padding
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> Seen | Tensor | None:
    """Returns what transformers passes on as the mask, for our attention: `Seen`, or a mask for
    sdpa. `use_vmap` says that the caller wrote the function, which may not broadcast."""
    described: dict[str, Any] = {} if mask_function is None else {"mask_function": mask_function}
    theirs = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        **described,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        device=device,
        **options,
    )
    dense = partial(theirs, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    plain = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if plain and mask_function is not None and not use_vmap:
        whole = attention_mask is None or attention_mask.shape == (batch_size, q_length)
        starts, sampled = _read(mask_function, batch_size, q_length, torch.device(device))
        for window in (None, local_size) if whole else ():
            if sampled.agrees(starts, window):
                documents, kept = _documents(starts, attention_mask, torch.device(device))
                masks: dict[str, Any] = dict(dense=dense, theirs=theirs, length=q_length)
                return Seen(**masks, documents=documents, kept=kept, window=window)
    return dense()


class _Sampled:
    """The rows of a mask that belong to a few tokens of the batch."""

    def __init__(self, rows: Tensor, tokens: Tensor, seen: Tensor) -> None:
        self.rows, self.tokens, self.seen = rows, tokens, seen  # (N,), (N,), (N, S) on the host

    def agrees(self, starts: Tensor, window: int | None) -> bool:  # (B, S) bool
        """Whether these tokens see exactly the tokens that documents with these starts and the
        window give."""
        keys = torch.arange(starts.shape[1])
        first = torch.where(starts, keys, 0).cummax(1).values[self.rows, self.tokens]
        if window is not None:
            first = torch.maximum(first, self.tokens - window + 1)
        expected = (keys >= first[:, None]) & (keys <= self.tokens[:, None])
        return torch.equal(expected, self.seen)


def _read(mask: Mask, rows: int, length: int, device: torch.device) -> tuple[Tensor, _Sampled]:
    """Returns where documents begin, (B, S) on the host, and the tokens that a few tokens see."""
    row = torch.arange(rows, device=device)[:, None]
    token = torch.arange(length, device=device)[None]
    head = row[:1]
    starts = torch.ones(rows, length, dtype=torch.bool, device=device)
    starts[:, 1:] = ~mask(row, head, token[:, 1:], token[:, :-1])
    # Tokens spread over all rows; the last one is among them, since it sees the most.
    at = torch.linspace(rows * length - 1, 0, min(SAMPLED, rows * length), device=device).long()
    rows_at, tokens_at = at // length, at % length
    seen = mask(rows_at[:, None], head, tokens_at[:, None], token).expand(len(at), length)
    return starts.cpu(), _Sampled(rows_at.cpu(), tokens_at.cpu(), seen.cpu())


def _documents(
    starts: Tensor,  # (B, S) bool, on the host
    attention_mask: Tensor | None,  # (B, S)
    device: torch.device,
) -> tuple[Documents, Tensor | None]:
    """Returns the documents of the tokens that are not padding, and the indices of these tokens."""
    real = None if attention_mask is None else attention_mask.cpu() != 0
    numbers, kept = starts.flatten().cumsum(0), None  # the number of each token's document
    if real is not None and not real.all():
        kept = real.flatten().nonzero().squeeze(1)
        numbers = numbers[kept]
    lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    return Documents.of(lengths, device=device), None if kept is None else kept.to(device)
