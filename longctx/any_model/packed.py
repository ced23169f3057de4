"""Does a model keep the documents of a packed row apart? Rows of two documents are tried on it.

Our packing says where documents begin by `position_ids` that restart. Not every model hears it: a
recurrence hands its state on, a convolution reaches three tokens back, a mask is made without
positions, learned positions are counted along the row. Three facts are looked at, each of which
one of these breaks:

    later      the second document's states do not depend on the first document
    earlier    nor the first one's on the second
    alone      and they are those of the document in a row of its own

For the first two, rows of one batch that differ in the other document alone are compared, which
leaves no rounding between them: bits are equal where documents are apart, so that a leak of any
size shows, also that of a recurrence which forgets soon. The third compares batches of other
shapes. What counts as rounding is measured: equal rows of one batch, and the row's first document
beside the document alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.any_model.specimen import Specimen

FIRST, SECOND = 75, 70
"""Tokens of the documents: together more than two of the chunks of 64 in which kernels run
recurrences, and no multiple of anything."""
NEAR = 8
"""Tokens from the border on, some of which a leak reaches: a convolution's the first ones."""
SLACK = 4.0
"""Times the rounding, which another draw may exceed."""
SHORT = 16
"""Tokens to which windows are shortened, so that rows are longer."""
_REACHES = ("window", "chunk", "block_size", "index_topk")
"""Parts of the names under which a configuration says how far something reaches, in tokens."""


def why_joined(specimen: Specimen, rounding: torch.dtype) -> str | None:
    """Returns what shows that documents of a row are not apart, in a few words; None if they are.
    Training and evaluation are tried, which compute in the dtype `rounding`. Raises whatever the
    model raises."""
    for training in (True, False):
        specimen.model.train(training)
        if reason := _why_joined(specimen, torch.finfo(rounding).eps):
            return reason
    return None


def with_short_windows(config: Any) -> bool:
    """Shortens to SHORT tokens what a configuration says of windows and the like. Returns whether
    there is any: rows of a probe are too short for them as they are."""
    text, found = config.get_text_config(), False
    for name, value in vars(text).items():
        if any(part in name for part in _REACHES) and type(value) is int and value > SHORT:
            setattr(text, name, SHORT)
            found = True
    return found


def _why_joined(specimen: Specimen, eps: float) -> str | None:
    draw = torch.Generator().manual_seed(0)
    vocabulary = specimen.model.config.get_text_config().vocab_size

    def documents(count: int, tokens: int) -> Tensor:
        # Special tokens, of images for instance, stand at either end.
        low, high = vocabulary // 4, vocabulary // 2
        ids = torch.randint(low, high, (count, tokens), generator=draw)
        return ids.to(specimen.device)

    others, own = documents(4, FIRST), documents(2, SECOND).repeat_interleave(2, 0)
    second = _hidden(specimen, others, own)[:, FIRST:]  # (4, SECOND, D)
    first = _hidden(specimen, own, others)[:, :SECOND]
    alone = _hidden(specimen, own)
    # Of two pairs the smaller: a router may send a token elsewhere for a rounding's sake.
    equal = SLACK * _apart(alone).max() + eps / 2
    found = {
        "with the first of two documents the second changes": (_apart(second).min(), equal),
        "with the second of two documents the first changes": (_apart(first.flip(1)).min(), equal),
        "the second of two documents is another than alone": (
            _typical(second, alone).min(),
            SLACK * (_typical(first, alone).max() + eps),
        ),
    }
    for what, (error, most) in found.items():
        if not error <= most:  # not a number is no answer
            return f"{what}, by {100 * error:.3g}%"
    return None


def _hidden(specimen: Specimen, *documents: Tensor) -> Tensor:  # (B, S) each -> (B, sum of S, D)
    positions = [
        torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) for ids in documents
    ]
    return specimen.hidden(
        input_ids=torch.cat(documents, 1), position_ids=torch.cat(positions, 1).contiguous()
    )


def _apart(states: Tensor) -> Tensor:  # (2 P, S, D) -> (P,)
    """Returns how far tokens near the border, the first ones, are apart in each pair of rows."""
    return _errors(states[::2], states[1::2])[:, :NEAR].amax(1)


def _typical(states: Tensor, others: Tensor) -> Tensor:  # (B, S, D) each -> (B,)
    return _errors(states, others).median(1).values


def _errors(states: Tensor, others: Tensor) -> Tensor:  # (B, S, D) each -> (B, S)
    return (states - others).norm(dim=-1) / others.norm(dim=-1).clamp(min=1e-30)
