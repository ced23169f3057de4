"""The tokens of a text of any length, in little memory and exactly those of the whole text.

The tokenizers library needs 600 bytes a token while it works. A long text is therefore tokenised in
windows that overlap, and a window's tokens are kept as 4 bytes each:

    window 1    ------------------------|==|
    window 2                        |==|------------------------
                                     |
                                    cut: up to here window 1, from here window 2

A window's tokens are wrong near its ends, where a word may be cut. So the middle of the overlap is
compared: ids, offsets and beginnings of words must all be the same in both windows. Then

    BPE       the text may be cut between any two tokens that both windows have: merges are applied
              in order of rank and place, so which tokens arise left and right of a boundary that no
              merge crosses does not depend on the other side, and whether a merge crosses it only
              depends on the two tokens beside it
    others    the text may be cut where a word begins in both: models see one word at a time

Where the windows disagree (one character a million times) both become one of at least twice the
size, in the end the whole text: it takes memory, and that is said. Tokenizers with parts that look
arbitrarily far (`_sees_near`) take the whole text at once.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, models
from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError, one_line, print_rank0

WINDOW_CHARS = 1 << 18  # a longer text is tokenised in windows of this size
OVERLAP_CHARS = 1 << 13  # that neighbouring windows share
MARGIN_CHARS = 1 << 11  # at either end of an overlap, where windows may disagree
BATCH_WINDOWS = 4  # tokenised together, on as many cores
LARGE_CHARS = 1 << 24
"""A window of this size is worth a word to the user: 16M characters need 3 GiB."""
BYTES_A_TOKEN = 600
"""Memory that the tokenizers library takes: 588 measured on Python sources of 3.9 characters a
token."""

_NORMALIZERS = frozenset(
    "NFC NFD NFKC NFKD Nmt Lowercase StripAccents BertNormalizer Strip Prepend Replace Precompiled"
    " ByteLevel Sequence".split()
)
_PRE_TOKENIZERS = frozenset(
    "ByteLevel BertPreTokenizer CharDelimiterSplit Digits Metaspace Punctuation Split"
    " UnicodeScripts Whitespace WhitespaceSplit Sequence".split()
)
# An atom of a regular expression, and whether it may repeat without end.
_ATOM = re.compile(r"(\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])+\]|.)([*+]|\{\d*,\})?", re.DOTALL)


@dataclass(frozen=True)
class TextTokens:
    ids: np.ndarray  # (n,) int32
    offsets: np.ndarray | None = None  # (n, 2) int64: each token's [start, end) in the text


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    add_special_tokens: bool = True,
    offsets: bool = False,
) -> TextTokens:
    """Returns what `tokenizer(text)` gives, as arrays. Offsets need a fast tokenizer and no special
    tokens."""
    ends = _special_tokens(tokenizer, text) if add_special_tokens else ([], [])
    if len(text) <= WINDOW_CHARS or ends is None or not _sees_near(tokenizer):
        if len(text) > LARGE_CHARS:
            _say_large()
        return _whole(tokenizer, text, add_special_tokens, offsets)
    spliced = _Spliced(tokenizer, text, offsets)
    before, after = (np.array(ids, dtype=np.int32) for ids in ends)
    ids = np.concatenate([before, *spliced.take("ids"), after])
    return TextTokens(ids, np.concatenate(list(spliced.take("offsets"))) if offsets else None)


def call(tokenizer: PreTrainedTokenizerBase, texts: str | list[str], **options: Any) -> Any:
    """Returns what a tokenizer makes of texts, or of one. Raises UserError for all that it raises,
    Rust's panics among it, which are no Exception."""
    try:
        return tokenizer(
            texts,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UserError):
        raise
    except BaseException as error:
        raise UserError(
            f"the tokenizer is damaged ({one_line(error, 160)}): give another --tokenizer_name"
        ) from error


def _whole(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool, offsets: bool
) -> TextTokens:
    encoded = call(
        tokenizer, text, add_special_tokens=add_special_tokens, return_offsets_mapping=offsets
    )
    spans = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2) if offsets else None
    return TextTokens(np.array(encoded["input_ids"], np.int32), spans)


@dataclass
class _Window:
    """The tokens of text[start:end]."""

    start: int
    end: int
    ids: np.ndarray  # (n,) int32
    offsets: np.ndarray | None  # (n, 2) int64, in the text
    head: _Stretch
    tail: _Stretch
    first: int = 0
    """Tokens before this one are taken from the window before."""


@dataclass
class _Stretch:
    """Tokens in the middle of an overlap."""

    first: int
    tokens: np.ndarray  # (n, 4) int64: id, start, end, whether a word begins


class _Spliced:
    """Windows over a text, each agreeing with the next."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, offsets: bool) -> None:
        self.tokenizer, self.text, self.offsets = tokenizer, text, offsets
        self.inside_words = isinstance(tokenizer.backend_tokenizer.model, models.BPE)
        step = WINDOW_CHARS - OVERLAP_CHARS
        starts = range(0, len(text) - OVERLAP_CHARS, step)
        self.bounds = [(start, min(start + WINDOW_CHARS, len(text))) for start in starts]
        self.windows: list[_Window] = []
        self.lasts: list[int] = []  # of each window but the last, where the next one takes over
        while left := [bound for bound in self.bounds if bound[1] > self.end]:
            for window in self._encode(left[:BATCH_WINDOWS]):
                if window.end > self.end:
                    self._append(window)

    @property
    def end(self) -> int:
        return self.windows[-1].end if self.windows else 0

    def take(self, name: str) -> Iterator[np.ndarray]:
        for window, last in zip(self.windows, [*self.lasts, None], strict=True):
            yield getattr(window, name)[window.first : last]

    def _append(self, window: _Window) -> None:
        while self.windows:
            cut = _cut(self.windows[-1].tail, window.head, self.inside_words)
            if cut is not None:
                self.lasts.append(cut[0])
                window.first = cut[1]
                break
            before = self.windows.pop()
            del self.lasts[-1:]
            start, twice = before.start, 2 * before.end - before.start
            wanted = max(window.end, twice)
            end = next((end for _, end in self.bounds if end >= wanted), len(self.text))
            if end - start > LARGE_CHARS:
                _say_large()
            (window,) = self._encode([(start, end)])
        self.windows.append(window)

    def _encode(self, bounds: Sequence[tuple[int, int]]) -> Iterator[_Window]:
        texts = [self.text[start:end] for start, end in bounds]
        encoded = call(self.tokenizer, texts, add_special_tokens=False)
        for (start, end), encoding in zip(bounds, encoded.encodings, strict=True):
            spans = None
            if self.offsets:
                spans = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
            yield _Window(
                start=start,
                end=end,
                ids=np.array(encoding.ids, dtype=np.int32),
                offsets=spans,
                head=_stretch(encoding, start, start, start + OVERLAP_CHARS),
                tail=_stretch(encoding, start, end - OVERLAP_CHARS, end),
            )


def _stretch(encoding: Encoding, shift: int, start: int, end: int) -> _Stretch:
    """Returns the tokens in text[start:end] without its margins; `shift` is where the encoding's
    text begins."""

    def span(token: int) -> tuple[int, int]:
        return encoding.token_to_chars(token) or (0, 0)  # None: a token that is not of the text

    first, last = (
        bisect_left(range(len(encoding)), place - shift, key=lambda token: span(token)[0])
        for place in (start + MARGIN_CHARS, end - MARGIN_CHARS)
    )
    ids, word = encoding.ids, encoding.token_to_word
    tokens = []
    for i in range(first, last):
        span_start, span_end = span(i)
        begins = i == 0 or word(i) != word(i - 1)
        tokens.append((ids[i], span_start + shift, span_end + shift, begins))
    return _Stretch(first, np.array(tokens, dtype=np.int64).reshape(-1, 4))


def _cut(left: _Stretch, right: _Stretch, inside_words: bool) -> tuple[int, int] | None:
    """Returns the number of a token in both windows, where the second takes over; None if they
    disagree."""
    if not np.array_equal(left.tokens, right.tokens):
        return None
    places = np.arange(len(left.tokens)) if inside_words else np.flatnonzero(left.tokens[:, 3])
    places = places[places > 0]  # the token before is the same, too
    if not len(places):
        return None
    place = int(places[len(places) // 2])
    return left.first + place, right.first + place


def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[int]] | None:
    """Returns what the tokenizer puts before and after a text; None where that cannot be told."""
    if not tokenizer.is_fast:
        return None
    encoding: Any = call(tokenizer, text[:1000]).encodings
    ids, mask = encoding[0].ids, encoding[0].special_tokens_mask
    if all(mask):
        return None if ids else ([], [])
    before, after = mask.index(0), mask[::-1].index(0)
    return ids[:before], ids[len(ids) - after :]


def _sees_near(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether what happens to a character depends on the text around it only: no dropout, no code
    of one's own, no pattern that needs a character arbitrarily far away."""
    if not tokenizer.is_fast:
        return False
    backend: Tokenizer = tokenizer.backend_tokenizer
    known = (models.BPE, models.Unigram, models.WordPiece, models.WordLevel)
    return (
        isinstance(backend.model, known)
        and not getattr(backend.model, "dropout", None)
        and _all_near(backend.normalizer, _NORMALIZERS)
        and _all_near(backend.pre_tokenizer, _PRE_TOKENIZERS)
    )


def _all_near(component: Any, known: frozenset[str]) -> bool:
    if component is None:
        return True
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # tokenizers' own, for a component written in Python
        return False
    parts = [state]
    while parts:
        part = parts.pop()
        if part["type"] not in known:
            return False
        parts += part.get("normalizers", []) + part.get("pretokenizers", [])
        pattern = part.get("pattern")
        if isinstance(pattern, dict) and _reads_on(pattern.get("Regex", "")):
            return False
    return True


def _reads_on(regex: str) -> bool:
    """Whether a pattern may run on over any text, as `".*"` does. Runs of letters, digits, spaces
    or of anything but spaces end soon."""
    for atom, repeats in _ATOM.findall(regex):
        anything = atom == "." or atom[:2] in (r"\P", r"\D", r"\W", r"\N", r"\O")
        negated = atom.startswith("[^") and r"\s" not in atom
        both = atom.startswith("[") and r"\s" in atom and r"\S" in atom
        if repeats and (anything or negated or both):
            return True
    return False


@functools.cache
def _say_large() -> None:
    print_rank0(
        "a document has long stretches without a place to cut it, so much of it is tokenised at "
        f"once: that takes about {BYTES_A_TOKEN} bytes of memory a token"
    )
