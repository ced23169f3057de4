"""Needle in a haystack: a number told once in a long text, asked for at its end.

    text ... One of the special magic numbers is: 48213. ... text
    What is the special magic number? The special magic number is: _____

Scored without generating: the answer's tokens follow the question, and a needle is found if every
one of them is the most likely token after what stands before it, which is what greedy decoding
would write. Haystacks are real text, needles lie at fixed depths, numbers depend on a seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError
from longctx.train.data.text.windows import tokenise

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Needle:
    """One test: `input_ids` ends with the answer."""

    tokens: int
    depth: float
    input_ids: np.ndarray  # (tokens,) int32
    answer_tokens: int


def needles(
    haystacks: Sequence[np.ndarray],  # (n,) int32 each, n >= the longest length
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    repeats: int,
    seed: int = 0,
) -> Iterator[Needle]:
    """Yields `repeats` needles for every length and depth. Raises UserError for a length too
    short."""
    rng = np.random.default_rng(seed)
    for tokens in lengths:
        for depth in DEPTHS:
            for repeat in range(repeats):
                number = "".join(map(str, rng.integers(0, 10, DIGITS)))
                told = f"\nOne of the special magic numbers is: {number}.\n"
                asked = "\nWhat is the special magic number?\nThe special magic number is:"
                haystack = haystacks[repeat % len(haystacks)]
                yield _hide(haystack, tokenizer, told, asked, f" {number}", tokens, depth)


def _hide(
    haystack: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    told: str,
    asked: str,
    answer: str,
    tokens: int,
    depth: float,
) -> Needle:
    needle, question, reply = (
        tokenise(tokenizer, text, add_special_tokens=False).ids for text in (told, asked, answer)
    )
    room = tokens - len(needle) - len(question) - len(reply)
    if room < 2:
        raise UserError(
            f"{tokens} tokens are too few for a needle and its question, which take "
            f"{tokens - room}: needles lie in texts of an eighth of --seq_len and more"
        )
    place = max(1, int(depth * room))  # not before a beginning-of-text token
    input_ids = np.concatenate([haystack[:place], needle, haystack[place:room], question, reply])
    return Needle(tokens=tokens, depth=depth, input_ids=input_ids, answer_tokens=len(reply))
