"""Tests on rows of two documents whether a model keeps the documents of a packed row apart.

Our packing marks where documents begin by `position_ids` that restart. Not every model heeds them:
a recurrence passes its state on, a convolution reaches three tokens back, a mask is made without
positions, learned positions are counted along the row. Each of these breaks one of three facts:

    later      the second document's states do not depend on the first document
    earlier    the first document's states do not depend on the second
    alone      both are the states of the document in a row without the other

The first two compare rows of one batch that differ in the other document alone, which leaves no
rounding between them: separate documents have equal bits, so that a leak of any size shows, also
that of a recurrence which forgets soon. The third compares batches of different shapes. The
rounding is measured: between equal rows of one batch, and between the row's first document and the
document alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.any_model.specimen import Specimen

FIRST, SECOND = 75, 70
"""Tokens of the documents: together more than two of the chunks of 64 in which kernels run
recurrences, and multiples of nothing."""
NEAR = 8
"""Tokens after the border, some of which a leak reaches: a convolution's leak only the first
ones."""
SLACK = 4.0
"""The multiple of the measured rounding that still counts as rounding, since another draw may
exceed it."""
SHORT = 16
"""Tokens to which windows are shortened, so that rows are longer than windows."""
_REACHES = ("window", "chunk", "block_size", "index_topk")
"""Parts of the names under which a configuration gives reaches in tokens."""


def why_joined(specimen: Specimen, rounding: torch.dtype) -> str | None:
    """Returns a short reason that shows that documents of a row are not apart; None if they are.
    Training and evaluation are tried, which compute in the dtype `rounding`. Raises any error of
    the model."""
    for training in (True, False):
        specimen.model.train(training)
        if reason := _why_joined(specimen, torch.finfo(rounding).eps):
            return reason
    return None


def with_short_windows(config: Any) -> bool:
    """Shortens windows and the like in a configuration to SHORT tokens. Returns whether there are
    any: a probe's rows are too short for them as they are."""
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
        # Special tokens, those of images for instance, are at either end of the vocabulary.
        low, high = vocabulary // 4, vocabulary // 2
        ids = torch.randint(low, high, (count, tokens), generator=draw)
        return ids.to(specimen.device)

    others, own = documents(4, FIRST), documents(2, SECOND).repeat_interleave(2, 0)
    second = _hidden(specimen, others, own)[:, FIRST:]  # (4, SECOND, D)
    first = _hidden(specimen, own, others)[:, :SECOND]
    alone = _hidden(specimen, own)
    # The smaller of two pairs: rounding may make a router send a token elsewhere in one of them.
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
        if not error <= most:  # also if the error is not a number
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
    """Returns how far the tokens near the border, which are the first ones, differ in each pair of
    rows."""
    return _errors(states[::2], states[1::2])[:, :NEAR].amax(1)


def _typical(states: Tensor, others: Tensor) -> Tensor:  # (B, S, D) each -> (B,)
    return _errors(states, others).median(1).values


def _errors(states: Tensor, others: Tensor) -> Tensor:  # (B, S, D) each -> (B, S)
    return (states - others).norm(dim=-1) / others.norm(dim=-1).clamp(min=1e-30)
