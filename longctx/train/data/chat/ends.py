"""The token that ends an answer. A model that never learns to write it never stops.

    closing   the template writes it after every answer        Hello<|im_end|>\\n
    next      the next turn begins with it (GLM, Nemotron)     Hello<|user|>\\nBye
    added     the template writes none: the eos token          Hello</s>\\n### Human: Bye

A span that ends without such a token is extended to the one behind it. The last answer of a row has
no turn behind it, so the token is taken from the conversation with one more turn. Where a template
has no token at all, the tokenizer's eos is put behind each trained answer, and the run says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
Rendered = tuple[str, list[Span]]
CLOSES = re.compile(r"</|\[/|<\|/")
"""Beginnings of the names of tokens that close a part of an answer: `</think>`, `</tool_call>`."""
FOUND_CHARS = 8
"""The number of characters at an answer's end by which it is found in a longer conversation."""


@dataclass(frozen=True)
class EndTokens:
    """The texts of the tokens that can end an answer."""

    texts: tuple[str, ...] = ()
    eos: str | None = None

    def ends(self, text: str) -> bool:
        return bool(self.texts) and text.rstrip().endswith(self.texts)

    def next_in(self, text: str) -> str | None:
        """Returns the beginning of a text up to its first token, if only blanks stand before
        that."""
        longest_first = sorted(self.texts, key=len, reverse=True)
        found = re.match(rf"\s*(?:{'|'.join(map(re.escape, longest_first))})", text)
        return found[0] if found and self.texts else None


def end_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> EndTokens:
    """Returns the eos token, and each added token that is special or that the template writes. The
    bos token begins a text, and a closing tag ends a part of an answer, so neither counts."""
    eos = tokenizer.eos_token
    others = {tokenizer.bos_token, tokenizer.unk_token, tokenizer.pad_token} - {eos}
    found = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if (token.special or str(token) in template)
        and str(token) not in others
        and not CLOSES.match(str(token))
    ]
    return EndTokens(tuple(dict.fromkeys([*([eos] if eos else []), *found])), eos)


def with_ends(
    rendered: Rendered,
    words: Sequence[str],
    tokens: EndTokens,
    following: Callable[[], str | None],
) -> Rendered:
    """Returns the text and its spans, each answer with the token that ends it.

    `words` are the texts of the trained turns, in order. `following` renders the conversation with
    one more turn; it returns None if the template refuses that.
    """
    text, spans = rendered[0], [*rendered[1]]
    if not any(text[start:end].strip() for start, end in spans):
        return rendered  # no answer, so no end of one
    added: dict[int, str] = {}
    for words_of_turn, owned in _spans_of_turns(rendered, words):
        ended = [i for i in owned if _is_ended(text[slice(*spans[i])], words_of_turn, tokens)]
        number = ended[-1] if ended else owned[0]
        start, end = spans[number]
        said = _place_behind(text[start:end], "" if ended else words_of_turn)
        # A line break behind the end is not generated; blanks of the turn itself are.
        end = start + max(said, len(text[start:end].rstrip()))
        if not ended:
            limit = spans[owned[-1] + 1][0] if owned[-1] + 1 < len(spans) else len(text)
            if behind := tokens.next_in(text[end:limit]):
                end += len(behind)
            else:
                end, added[end] = _addition(text, end, tokens, following)
        spans[number] = start, end
    return _inserted(text, spans, added)


def _spans_of_turns(rendered: Rendered, words: Sequence[str]) -> Iterator[tuple[str, range]]:
    """Yields the text of each trained turn and the numbers of its spans. The first of them holds
    the text; several turns in one span count as the last of them."""
    text, spans = rendered
    if not spans:
        return
    if len(spans) == len(words):
        yield from ((said, range(i, i + 1)) for i, said in enumerate(words))
        return
    holder: dict[int, str] = {}
    first = 0
    for said in words:
        words_alone = said.strip()
        holds = (i for i in range(first, len(spans)) if words_alone in text[slice(*spans[i])])
        first = next(holds, first)
        holder[first] = said
    starts = [*holder, len(spans)]
    for (number, said), after in zip(holder.items(), starts[1:], strict=True):
        yield said, range(number, after)


def _is_ended(span: str, words: str, tokens: EndTokens) -> bool:
    """Whether a span ends with an end token that the template wrote, or with an eos token."""
    eos = tokens.eos is not None and span.rstrip().endswith(tokens.eos)
    return eos or tokens.ends(span[_place_behind(span, words.strip()) :])


def _place_behind(span: str, words: str) -> int:
    """Returns the place behind the words in a span; 0 if the span does not hold them."""
    return span.find(words) + len(words) if words in span else 0


def _addition(
    text: str, end: int, tokens: EndTokens, following: Callable[[], str | None]
) -> tuple[int, str]:
    """Returns a place and the token to add there, for an answer that ends at `end` without one."""
    rest = text[end:]
    if not rest.strip() and (whole := following()) is not None:
        # Templates may rewrite an answer once another turn follows, so only its end is looked for.
        *_, behind = whole.rpartition(text[max(0, end - FOUND_CHARS) : end])
        if token := tokens.next_in(behind):
            if token.startswith(rest):
                return len(text), token[len(rest) :]
            return end, token
    return end, tokens.eos or ""


def _inserted(text: str, spans: Sequence[Span], added: Mapping[int, str]) -> Rendered:
    """Returns the text with the added tokens; a span that ends where a token is added takes it
    in."""
    pieces, last = [], 0
    for position in sorted(added):
        pieces += [text[last:position], added[position]]
        last = position

    def moved(position: int, inclusive: bool) -> int:
        before = (len(t) for at, t in added.items() if at < position + inclusive)
        return position + sum(before)

    longer = [(moved(start, start < end), moved(end, True)) for start, end in spans]
    return "".join([*pieces, text[last:]]), longer
