"""The positions of a call of a base model: those of RoPE, and those that tell documents apart.

Most models take one row of positions for each row of tokens, (B, S), and both are that. The text
models of vision-language models rotate each head by three rows, of time, height and width, and take

    (B, S)       the same for all three. Qwen3-VL tells documents apart by them; Qwen2-VL and
                 Qwen2.5-VL do not, so that all tokens of a row attend to each other
    (3, B, S)    the three. No documents: a row of tokens is one
    (4, B, S)    the three after one that tells documents apart

The three are equal for text, and their RoPE is the ordinary one. Where they differ, as for an
image, Hugging Face's layers run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Positions(NamedTuple):
    """What a call says of its tokens' positions. None stands for 0 to S - 1 in each row."""

    rope: Tensor | None  # (B, S)
    documents: Tensor | None  # (B, S)


def positions_of(position_ids: Tensor | None, rows: int) -> Positions | None:
    """Returns the positions of a call; None if its three rows differ, or if they have another
    shape than the model takes. `rows` are those to which the model expands (B, S): 1, 3 or 4.

    Rows that `expand` has made are not read. To compare others waits for the GPU once."""
    if position_ids is None or position_ids.dim() < 3:
        return Positions(position_ids, None if rows == 3 else position_ids)
    if rows == 1 or position_ids.dim() > 3 or len(position_ids) not in (1, 3, 4):
        return None
    text = position_ids[0] if len(position_ids) == 4 else None
    first, *others = position_ids[-3:]
    if position_ids.stride(0) != 0 and not all(torch.equal(first, other) for other in others):
        return None
    return Positions(first, text)
