"""Decides whether hidden states of padding are computed, and whether the schedule can do so.

Real tokens never attend to padding, so a loss that masks padding does not depend on its states:
then padding is left out of all work, and its states are zero. This holds for our loss, for sequence
classifiers, for labels of a token classifier, and for TRL's trainers, which mask padding. Any other
caller may read them (a loss over all logits, `mean(1)`, a question answering head), and gets those
of Hugging Face's model: computed by the schedule (attention/padding.py), or by its layers.

The output of a token without any key to attend to depends on Hugging Face's attention:

    sdpa, flex      0
    flash           0, which all padding gets, also padding after real tokens
    eager           the mean of all values of its row, those of later tokens and padding included
    sdpa by cuDNN   0, but in torch 2.11 its output without a mask, from all tokens of its row
                    (pytorch #177842)

Torch takes cuDNN for 16 bits on H100, H200 and B200. Which kernel runs depends on the GPU, the
dtype, torch and the caller's `sdpa_kernel`, so it is tried: if it does not return 0, and a batch
has such a token, Hugging Face's layers run.

Padding between real tokens counts in the sliding windows of sdpa, flex and eager, but not in those
of flash and the schedule. Hugging Face's mixers take such padding for zeros, over which a state
decays and a convolution reaches. Hugging Face's layers run then, for any caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longctx.attention.padding import Row, rows_of
from longctx.errors import UserError
from longctx.families.families import mixes, windows

COMPUTED = (
    "padding is computed, since its hidden states may be read by who calls: Hugging Face's are "
    "theirs. With labels, and in TRL's trainers, padding is left out of all work"
)
_UNMASKED = (
    "a loss reads logits of padding, which a call with labels leaves out of all work: mask them, "
    "or call the model without labels"
)

_TRIED = 64
"""Tokens of the row on which sdpa is tried."""


class ComputedPadding(NamedTuple):
    """Padding that the schedule computes."""

    rows: list[Row]
    blind: bool
    """Whether padding attends to nothing, before and after real tokens."""


def padding_of(
    base: Any,
    mask: Tensor,  # (B, S)
    *,
    read: bool,
) -> tuple[ComputedPadding | None, str | None]:
    """Returns a batch's padding if the schedule has to compute it, since it may be `read`, and a
    short reason if the schedule cannot run this batch. One synchronisation, or none."""
    attention, length = base.config._attn_implementation, mask.shape[1]
    flash = "flash" in attention
    shorter = [] if flash else [w for w in windows(base.config) if w is not None and w < length]
    mixed = mixes(base.config)
    if not (read or shorter or mixed):
        return None, None
    rows = rows_of(mask)
    if rows is None and mixed:
        return None, "padding between real tokens, which mixers take for zeros"
    if rows is None and shorter:
        return None, "padding between real tokens, which counts in sliding windows"
    if not read or rows is not None and all(row.real == length for row in rows):
        return None, None
    if rows is None or not any(row.real for row in rows):
        return None, "padding between real tokens, or no real token, where padding may be read"
    if any(_sees_nothing(row, shorter) for row in rows):
        if attention == "eager":
            return None, "padding that may be read and that eager attention lets see all tokens"
        if attention == "sdpa" and not _gives_zero(base, mask.device):
            return None, "padding that may be read and that torch's sdpa lets see all tokens here"
    return ComputedPadding(rows, blind=flash), None


def with_means(hidden: Tensor, mask: Tensor) -> Tensor:  # (B, S, D), (B, S) -> (B, S, D)
    """Returns hidden states in which padding has the mean of the real tokens, without a gradient,
    so that a mean of logits over whole rows is that over real tokens: `logits/chosen` and
    `logits/rejected` of TRL's ORPO and CPO, whose chosen answers are the first half of the rows."""
    real = mask.to(hidden.device) != 0
    parts = 2 if len(hidden) % 2 == 0 else 1
    with torch.no_grad():
        sums = hidden.sum(1, dtype=torch.float32).view(parts, -1, hidden.shape[-1]).sum(1)
        count = real.view(parts, -1).sum(1, keepdim=True).clamp(min=1)
        means = (sums / count).to(hidden.dtype).repeat_interleave(len(hidden) // parts, 0)
    return torch.where(real[..., None], hidden, means[:, None])


def refuse_gradient(logits: Tensor, mask: Tensor) -> None:  # (B, S, V), (B, S)
    """Makes backward raise UserError if a loss reads logits of padding that was left out."""

    def check(grad: Tensor) -> None:
        if grad[(mask == 0).to(grad.device)].any():
            raise UserError(_UNMASKED)

    if logits.requires_grad:
        logits.register_hook(check)


def _sees_nothing(row: Row, windows: list[int]) -> bool:
    """Whether some padding of a row has no real token before it, in the window of some layer."""
    return row.left > 0 or any(row.right >= window for window in windows)


@torch.no_grad()
def _gives_zero(base: Any, device: torch.device) -> bool:
    """Whether the kernel that torch takes for a model's sdpa returns 0 for a token without any key
    to attend to. One synchronisation."""
    config, dtype = base.config, base.dtype
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    qkv = torch.ones(1, 1, _TRIED, head, dtype=dtype, device=device)
    mask = torch.ones(1, 1, _TRIED, _TRIED, dtype=torch.bool, device=device).tril()
    mask[..., 0, :] = False
    return not scaled_dot_product_attention(qkv, qkv, qkv, attn_mask=mask)[..., 0, :].any().item()
