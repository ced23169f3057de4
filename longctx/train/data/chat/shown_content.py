"""Nothing of a conversation is left out of its text unsaid: what a template drops is not learned.

Calls, reasoning, tools and documents are taken out of the conversation, one at a time; where the
text stays as it was, the conversation is refused. The words of each trained turn must stand in the
text, but for blanks: templates cut reasoning out of `content`, or show no `content` beside calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from longctx.errors import UserError
from longctx.train.data.chat.conversation import Asked
from longctx.train.data.chat.ends import Span
from longctx.train.data.reading.turns import REASONING
from longctx.train.data.reading.values import excerpt

MUST_SHOW = (*REASONING, "refusal", "audio", "tool_calls", "tools", "functions", "documents")
"""Keys of a turn that a template has to show."""


def check_shown(conversation: Asked, whole: str, text: Callable[[Asked], str]) -> None:
    """Raises UserError where the text is the same without a call, reasoning, tools or documents, or
    where the template has no such variable. `text` renders a changed conversation as `whole`
    was."""
    for name, changed in _without_one(conversation):
        try:
            excerpt = text(changed) != whole
        except UserError:  # the template minds
            excerpt = True
        if not excerpt:
            raise UserError(
                f"{conversation.where}: the chat template leaves out {name}, so the model would "
                "not see it: use a template that shows it, or write it into `content`"
            )
    for key in conversation.kwargs:
        if not re.search(rf"\b{re.escape(key)}\b", conversation.template):
            raise UserError(
                f"{conversation.where}: the chat template does not know `{key}` of "
                "`chat_template_kwargs`: leave it out"
            )


def _without_one(conversation: Asked) -> Iterator[tuple[str, Asked]]:
    """Yields the conversation without one thing that a template has to show, and the name of
    that."""
    if conversation.tools:
        yield "`tools`", replace(conversation, tools=None)
    if conversation.documents:
        yield "`documents`", replace(conversation, documents=None)
    for i, turn in enumerate(conversation.messages):
        for key in MUST_SHOW:
            if not turn.get(key) or (key in REASONING and not turn[key].strip()):
                continue
            if key in REASONING and i in conversation.untrained:
                continue  # templates drop the reasoning of earlier turns
            gone = REASONING if key in REASONING else (key,)  # transformers copies one to another
            without = {k: v for k, v in turn.items() if k not in gone}
            messages = [*conversation.messages[:i], without, *conversation.messages[i + 1 :]]
            yield f"`{key}` of turn {i + 1}", replace(conversation, messages=messages)
            if key in REASONING:
                break


def check_words(conversation: Asked, text: str, spans: Sequence[Span]) -> None:
    """Raises UserError where the content or the reasoning of a trained turn does not stand in the
    text. `spans` has one for each trained turn, in which its words have to end: the prompt before
    may hold the first of them, as `<think>`."""
    cuts = sorted({0, len(text), *(place for span in spans for place in span)})
    parts = [_squeezed(text[a:b]) for a, b in pairwise(cuts)]
    places = dict(zip(cuts, accumulate(map(len, parts), initial=0), strict=True))
    squeezed = "".join(parts)
    for number, (start, end) in zip(conversation.trained, spans, strict=True):
        for key, words in _words(conversation.messages[number]):
            first = max(0, places[start] - len(words) + 1)
            if squeezed.find(words, first, places[end]) < 0:
                raise UserError(
                    f"{conversation.where}: the chat template does not show all of `{key}` of turn "
                    f"{number + 1}, {excerpt(conversation.messages[number][key])}, so the model "
                    "would not learn it: use a template that shows it, or write `train`: false "
                    "there"
                )


def _words(turn: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the content and the reasoning of a trained turn by their keys, without blanks."""
    reasoning = next((key for key in REASONING if turn.get(key)), None)  # copies of one another
    for key in ("content", *([reasoning] if reasoning else [])):
        if words := _squeezed(turn[key]):
            yield key, words


def _squeezed(text: str) -> str:
    return "".join(text.split())
