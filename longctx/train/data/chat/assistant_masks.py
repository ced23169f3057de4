"""Which characters of a conversation are trained, and its text as the chat template renders it.

The characters come from the template's `{% generation %}` markers, or, where it has none, from
rendering every prefix: an assistant turn is what it adds to "everything before + generation
prompt". That takes every prefix to be a prefix of the whole, which is checked: a template that
rewrites earlier turns has no exact mask, and is refused. Where the template is one of a family that
training_templates.py knows, our training template of that family marks the turns, and what it
renders is compared with the tokenizer's own: the prompt of the last trained turn must be the one
that a user's conversation would end with, and the answer the one that the tokenizer's template
makes of it.

What a template leaves out cannot be learned (shown_content.py), and neither is an end that is not
trained (ends.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from longctx.errors import UserError
from longctx.train.data.chat.conversation import Asked, Renderer, unless_refused
from longctx.train.data.chat.ends import Rendered, Span, with_ends
from longctx.train.data.chat.shown_content import check_shown, check_words
from longctx.train.data.reading.turns import REASONING

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
DIFFERENCE_CHARS = 30
"""The number of characters of two texts that a message quotes from where they differ."""


@dataclass(frozen=True, kw_only=True)
class Conversation(Asked):
    """A conversation whose trained characters are asked for."""

    def run(self, alive: Callable[[], None]) -> Rendered:
        """Returns the text and the [start, end) spans to train; `alive` is called after each call
        of the template. Raises UserError for a conversation that the template refuses, that has no
        exact mask, or of which the template leaves something out."""
        render = Renderer(self, alive)

        def ours(changed: Asked) -> str:
            assert changed.training is not None
            return render.training(changed, changed.training, changed.trained)[0]

        def own(changed: Asked) -> str:
            return render.call(changed, changed.messages, changed.template)[0]

        found, text = by_training_template(self, render), ours
        marked = found is None and MARKERS.search(self.template)
        if found is None:
            found, text = by_markers(self, render) if marked else by_prefixes(self, render), own
        check_shown(self, found[0], text)
        # Markers may leave out a part of a turn, as its reasoning.
        whole = [(0, len(found[0]))] * len(self.trained)
        if found[1]:
            check_words(self, found[0], whole if marked else found[1])
        return with_ends(found, self.words, self.tokens, lambda: unless_refused(text, self))


Ending = Literal["closing", "next", "added"]
"""The names of the sources of the token that ends an answer (ends.py)."""


@dataclass(frozen=True, kw_only=True)
class EndingOf(Asked):
    """The question how a template ends the last answer of a conversation."""

    def run(self, alive: Callable[[], None]) -> Ending | None:
        render = Renderer(self, alive)
        try:
            text, _ = render.own(self.messages)
        except UserError:  # what it is will be said of a conversation of the data
            return None
        if self.tokens.ends(text):
            return "closing"
        whole = unless_refused(lambda asked: render.own(asked.messages)[0], self) or ""
        *_, behind = whole.rpartition(text.rstrip())
        return "next" if self.tokens.next_in(behind) else "added"


@dataclass(frozen=True, kw_only=True)
class PartsOf(Asked):
    """The question whether a template shows contents only as lists of parts, as LLaVA's does."""

    def run(self, alive: Callable[[], None]) -> bool:
        return not self._shows(alive, parts=False) and self._shows(alive, parts=True)

    def _shows(self, alive: Callable[[], None], *, parts: bool) -> bool:
        try:
            text, _ = Renderer(replace(self, parts=parts), alive).own(self.messages)
        except UserError:
            return False
        return all(message["content"] in text for message in self.messages)


def by_training_template(conversation: Conversation, render: Renderer) -> Rendered | None:
    """Returns what longctx's template makes of the conversation; None if the tokenizer's own
    template makes something else of it."""
    if conversation.training is None:
        return None
    *earlier, last = conversation.trained
    as_own = same_at(conversation, render, last)
    if as_own is None:
        return None
    found = render.training(conversation, conversation.training, conversation.trained)
    if not found[0].startswith(as_own) and not all(
        same_at(conversation, render, i) for i in earlier
    ):
        return None
    return found


def same_at(conversation: Conversation, render: Renderer, number: int) -> str | None:
    """Returns the conversation up to the turn of this number, which alone is trained, in our
    template; None where the tokenizer's own has another prompt before that turn, or makes another
    answer of it while it is the last one."""
    assert conversation.training is not None
    turns = conversation.messages[: number + 1]
    try:
        prompt, _ = render.own(turns[:-1], add_generation_prompt=True)
        upto = replace(conversation, messages=turns)
        text, spans = render.training(upto, conversation.training, [number])
        if len(spans) != 1 or spans[0][0] != len(prompt) or not text.startswith(prompt):
            return None
        answer = text[len(prompt) :]
        if conversation.training.rewrites:
            read, _ = render.training(upto, conversation.training, [])
            return text if render.own(turns)[0] == read else None
        if render.own(turns)[0] == prompt + answer:
            return text
        # Mistral's shows a system prompt only while the user's turn is the last: the answer is
        # compared without one.
        if turns[0]["role"] != "system":
            return None
        prompt, _ = render.own(turns[1:-1], add_generation_prompt=True)
        return text if render.own(turns[1:])[0] == prompt + answer else None
    except UserError:  # what it is will be said when the tokenizer's own template is used
        return None


def by_markers(conversation: Conversation, render: Renderer) -> Rendered:
    """Returns the spans of the template's own markers, without those of turns that are not
    trained."""
    text, spans = render.own(conversation.messages, return_assistant_tokens_mask=True)
    if not conversation.untrained:
        return text, spans
    before = _texts(text, spans)
    owners: dict[int, int] = {}
    for i, turn in enumerate(conversation.messages):
        changed = [*conversation.messages]
        changed[i] = _changed(turn)
        answers = _texts(*render.own(changed, return_assistant_tokens_mask=True))
        touched = [k for k, (a, b) in enumerate(zip(before, answers, strict=False)) if a != b]
        if len(answers) != len(before) or owners.keys() & set(touched):
            raise UserError(
                f"{conversation.where}: `train` is false on a turn, but the chat template's "
                f"{{% generation %}} markers do not tell turn {i + 1} from others: use another one"
            )
        owners |= dict.fromkeys(touched, i)
    kept, owner = [], min(owners.values(), default=-1)
    for number, span in enumerate(spans):  # one without words of its own follows the one before
        owner = owners.get(number, owner)
        if owner not in conversation.untrained:
            kept.append(span)
    return text, kept


def _changed(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns the turn with other words, so that what is rendered of it changes."""
    texts = {key: turn[key] + "x" for key in ("content", *REASONING) if turn.get(key) is not None}
    calls = [_renamed(call) for call in turn.get("tool_calls") or []]
    return {**turn, **texts, **({"tool_calls": calls} if calls else {})}


def _renamed(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _renamed(call["function"])}
    return {key: value + "x" if key == "name" else value for key, value in call.items()}


def _texts(text: str, spans: Sequence[Span]) -> list[str]:
    return [text[start:end] for start, end in spans]


def by_prefixes(conversation: Conversation, render: Renderer) -> Rendered:
    """Returns the spans of a template without markers: what each trained turn adds to its
    prompt."""
    messages = conversation.messages
    whole, _ = render.own(messages)
    spans = []
    for i in conversation.trained:
        turn, _ = render.own(messages[: i + 1])
        prompt = prompt_before(conversation, i, turn, render)
        if not (prompt and turn.startswith(prompt)):
            earlier = render.own(messages[:i])[0] if i else ""
            rewritten = not turn.startswith(earlier)
            raise _unlike(conversation, i, prompt, turn, rewritten=rewritten)
        if not whole.startswith(turn):
            raise _unlike(conversation, i, turn, whole, rewritten=True)
        spans.append((len(prompt), len(turn)))
    return whole, spans


def prompt_before(conversation: Conversation, number: int, turn: str, render: Renderer) -> str:
    """Returns the text from which the turn of this number is generated; `turn` is the conversation
    up to and with that turn. "" where the template shows none."""
    earlier = conversation.messages[:number]
    if not earlier:  # templates need a turn; the generation prompt is what they add after one
        header = render.own(conversation.messages[:1], add_generation_prompt=True)[0]
        header = header.removeprefix(turn)
        return turn[: turn.find(header) + len(header)] if header and header in turn else ""
    return render.prompt(earlier, turn)


def _unlike(
    conversation: Conversation, number: int, expected: str, found: str, *, rewritten: bool
) -> UserError:
    """Returns the error of a turn whose tokens cannot be told, with what differs."""
    same = len(os.path.commonprefix([expected, found]))
    first, second = (repr(text[same : same + DIFFERENCE_CHARS]) for text in (expected, found))
    turn, cure = f"(turn {number + 1})", ""
    if not expected:
        why = f"shows no prompt before the first answer {turn}"
    elif rewritten:
        why = f"rewrites earlier turns {turn}: {first} becomes {second}"
        cure = ", or write `train`: false on the earlier answers"
    else:
        why = f"ends the prompt with {first}, and the answer begins with {second} instead {turn}"
    return UserError(
        f"{conversation.where}: the chat template {why}, so the trained tokens cannot be told; use "
        f"a template with {{% generation %}} markers{cure}"
    )
