"""A tokenizer is a stranger's program: it is tried in a process with limits before it sees data.

Its normalizer may make a thousand characters of one and its patterns may search for ever, within
one call into Rust, where Python hears no signal. The trial tokenises a sample of several scripts,
and what each pattern of the normalizer looks for, twice: in at most TRIAL_S, in TRIAL_BYTES more
memory, and to a length that no real one reaches. What fails on a text is said where the data have
such a text (windows.py): a tokenizer of proteins knows twenty letters.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError, print_rank0
from longctx.train.data.text.windows import call
from longctx.train.safety.processes import Unbounded, in_child

TRIAL_S, TRIAL_BYTES = 30.0, 1 << 30
GROWTH, GROWTH_CHARS = 64, 10_000
"""NFKD makes 18 characters of one, and a template adds a few tokens: the most of real ones."""
REPEATS = 50
SAMPLE = 4 * (
    "The quick brown fox, it's naïve (see [7]): 12 3456 — don’t… \n\n\tdef f(x):  return x**2\r\n"
    "日本語のテキスト 한국어 العربية हिन्दी ไทย עברית Ελληνικά 😀👩‍👧 ﬁ Å é"
    f" {string.printable} {'w' * 64}{' ' * 32}"
)


def try_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, remedy: str) -> None:
    """Says that a tokenizer makes other tokens each time. Raises UserError for one that does not
    end, or that makes a text many times as long."""
    try:
        same = in_child(lambda: _trial(tokenizer), seconds=TRIAL_S, more_bytes=TRIAL_BYTES)
    except (Unbounded, UserError) as error:
        raise UserError(f"the tokenizer of {name} {error}: {remedy}") from error
    except RuntimeError:  # a pattern that gives up, parts that do not fit each other
        return
    if not same:
        dropout = tokenizer.is_fast and getattr(tokenizer.backend_tokenizer.model, "dropout", None)
        why = f"it drops merges at random, dropout {dropout:g}" if dropout else "tried twice"
        print_rank0(
            f"the tokenizer of {name} makes other tokens of a text each time ({why}): a run that "
            "is resumed needs the rows of its first start, which are in --cache_dir"
        )


def varies(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer, which has been tried, makes other tokens of a text each time."""
    with suppress(UserError):
        once, again = (call(tokenizer, SAMPLE)["input_ids"] for _ in range(2))
        return once != again
    return False


def _trial(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Runs in the child, and returns whether all texts have the same tokens twice."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads did not survive the fork
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    same, tokens = True, 0
    for text in _texts(normalizer):
        if normalizer is not None:
            _check_growth(text, len(normalizer.normalize_str(text)), "characters")
        with suppress(UserError):
            once, again = (call(tokenizer, text)["input_ids"] for _ in range(2))
            same = same and once == again
            tokens = len(once)
        _check_growth(text, tokens, "tokens")
    return same


def _texts(normalizer: Any) -> Iterator[str]:
    yield SAMPLE
    parts: list[Any] = []
    with suppress(Exception):  # tokenizers' own, for a component written in Python
        parts.append(json.loads(normalizer.__getstate__()))
    while parts:
        part = parts.pop()
        parts += part.get("normalizers", [])
        for words in (part.get("pattern") or {}).values():
            yield REPEATS * words[:200]


def _check_growth(text: str, length: int, what: str) -> None:
    if length > GROWTH * len(text) + GROWTH_CHARS:
        raise UserError(
            f"makes {length:,} {what} of {len(text):,} characters, {text[:20]!r} and so on"
        )
