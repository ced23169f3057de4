"""A group: one prompt and the answers that are compared or rated, tokenised with the prompt once.

    --task dpo, orpo, simpo, cpo, reward   rows of "pairs"    sides chosen 0, rejected 1
    --task kto                             rows of "rated"    sides desirable 0, undesirable 1,
                                                              mismatched 2

A mismatched answer is another record's, put behind this prompt: KTO estimates the KL divergence
from the reference model on such answers (packing_groups.py says which). The tasks that read "text"
have no groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Features, List, Value

Rows = Literal["text", "pairs", "rated"]
"""The kinds of packed rows: independent documents (text), or prompts with a pair of answers or with
rated answers."""
MISMATCHED = 2
"""The side of an answer that belongs to another prompt."""
SIDE_NAMES: dict[str, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected"),
    "rated": ("desirable", "undesirable", "mismatched"),
}
TASKS: dict[str, str] = {
    "text": "--task sft",
    "pairs": "--task dpo",
    "rated": "--task kto",
}
"""The task that a message proposes for rows of a kind; others read the same records."""
IMAGE_TASKS = "--task sft, dpo, orpo, cpo, simpo and kto"
"""The tasks whose records may have images (train/tasks/protocol.py, `with_images`)."""
READERS = {"pairs": "a task of pairs", "rated": "--task kto"}
"""Who reads rows of a kind, whichever task a run has."""


@dataclass(frozen=True)
class Group:
    """A prompt and its answers. A prompt has at least one token: it predicts each answer's first
    one. `len(group)` is the tokens of all of them."""

    prompt: np.ndarray  # (P,) int32
    answers: tuple[np.ndarray, ...]  # (A_i,) int32 each
    sides: tuple[int, ...]
    """The side of each answer, an index into SIDE_NAMES."""
    record: int = -1
    """The number of the record in the data, so that a bad row can name its records."""
    margin: float | None = None
    """How much better the chosen answer is, where the record says so (reward models)."""
    dropped: int = 0
    """Tokens at the prompt's end that the chat template renders for the prompt alone and not before
    an answer."""
    images: int = 0
    """Images in the prompt, which is never cut then."""
    pixels: int = 0
    """63 bits that tell them from others; 0 if there are none."""

    def __len__(self) -> int:
        return len(self.prompt) + sum(map(len, self.answers))

    @property
    def separate_tokens(self) -> int:
        """The tokens where each answer stands behind a copy of the prompt."""
        return len(self) + (len(self.answers) - 1) * len(self.prompt)


GROUP_TOKEN_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),  # the prompt's, then each answer's
        "lengths": List(Value("int32")),  # of the prompt and of each answer
        "sides": List(Value("int32")),
        "margin": Value("float32"),  # NaN: the record names none
        "dropped": Value("int32"),
    }
)
"""The columns in which tokenised groups are kept on disk, 4 bytes a token."""
IMAGE_COUNTS = {"pictures": Value("int32"), "pixels": Value("int64")}
"""The columns of tokens for a model that sees images: how many, and their hash."""
GROUP_IMAGE_FEATURES = Features({**GROUP_TOKEN_FEATURES, **IMAGE_COUNTS})


def columns_of(group: Group) -> dict[str, Any]:
    """A row of GROUP_IMAGE_FEATURES."""
    parts = [group.prompt, *group.answers]
    return {
        "input_ids": np.concatenate(parts).astype(np.int32, copy=False),
        "lengths": np.array([len(part) for part in parts], np.int32),
        "sides": np.array(group.sides, np.int32),
        "margin": np.float32(np.nan if group.margin is None else group.margin),
        "dropped": group.dropped,
        "pictures": group.images,
        "pixels": group.pixels,
    }


def group_of(
    input_ids: np.ndarray,  # (P + A_1 + ...,) int32
    lengths: Sequence[int],
    sides: Sequence[int],
    margin: float | None,
    dropped: int,
    record: int,
    images: int = 0,
    pixels: int = 0,
) -> Group:
    """The group that `columns_of` wrote."""
    prompt, *answers = np.split(input_ids, np.cumsum(lengths)[:-1])
    return Group(
        prompt,
        tuple(answers),
        tuple(map(int, sides)),
        record,
        None if margin is None or np.isnan(margin) else float(margin),
        int(dropped),
        images,
        pixels,
    )
