"""Which characters of a conversation are trained, and its text as the chat template renders it.

The characters come from the template's `{% generation %}` markers, or, where it has none, from
rendering every prefix: an assistant turn is what it adds to "everything before + generation
prompt". That takes every prefix to be a prefix of the whole, which is checked: a template that
rewrites earlier turns has no exact mask, and is refused. Where the template is one of a family that
templates.py knows, our training template of that family marks the turns, and what it renders is
compared with the tokenizer's own: the prompt of the last trained turn must be the one that a user's
conversation would end with, and the answer the one that the tokenizer's template makes of it.

What a template leaves out cannot be learned. Calls, reasoning, tools and documents are taken out of
the conversation, one at a time; where the text stays as it was, the conversation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from longctx.data.turns import REASONING
from longctx.errors import UserError

# Real templates add at most a few kB of instructions to what they are given.
RENDERED_FACTOR, RENDERED_CHARS = 20, 1_000_000
REASON_CHARS = 200
MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MUST_SHOW = (*REASONING, "tool_calls", "tools", "functions", "documents")
"""Keys of a turn that a template has to show."""
Span = tuple[int, int]
Rendered = tuple[str, list[Span]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Our template of a family, with generation markers around the turns whose `trained` is
    true."""

    template: str
    options: dict[str, Any]
    """Variables that tell the family's versions apart."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that a template sees of a document, and what finds its trained characters."""

    messages: list[dict[str, Any]]
    untrained: tuple[int, ...] = ()
    """Numbers of the assistant turns that are read only."""
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    template: str
    training: Training | None = None
    special_tokens: dict[str, Any] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    """Texts of tokens that may end a turn."""
    where: str

    @property
    def chars(self) -> int:
        beside = [part for part in (self.tools, self.documents, self.kwargs) if part]
        turns = sum(len(str(value)) for turn in self.messages for value in turn.values())
        return sum(map(len, map(str, beside))) + turns

    @property
    def trained(self) -> list[int]:
        """Numbers of the turns to train."""
        return [
            i
            for i, turn in enumerate(self.messages)
            if turn["role"] == "assistant" and i not in self.untrained
        ]

    def run(self, alive: Callable[[], None]) -> Rendered:
        """The text and the [start, end) spans to train; `alive` is called after each call of the
        template. Raises UserError for a conversation that the template refuses, that has no exact
        mask, or of which the template leaves something out."""
        render = Renderer(self, alive)

        def ours(changed: Conversation) -> str:
            assert changed.training is not None
            return render.training(changed, changed.training, changed.trained)[0]

        def own(changed: Conversation) -> str:
            return render.call(changed, changed.messages, changed.template)[0]

        found, text = by_training_template(self, render), ours
        if found is None:
            marked = MARKERS.search(self.template)
            found, text = by_markers(self, render) if marked else by_prefixes(self, render), own
        check_shown(self, found[0], text)
        return found


class Renderer:
    """Calls templates for one conversation."""

    def __init__(self, conversation: Conversation, alive: Callable[[], None]) -> None:
        self.conversation, self.alive = conversation, alive
        self.limit_chars = RENDERED_CHARS + RENDERED_FACTOR * conversation.chars

    def own(self, turns: list[dict[str, Any]], **options: Any) -> Rendered:
        """The tokenizer's own template."""
        return self.call(self.conversation, turns, self.conversation.template, **options)

    def training(
        self, conversation: Conversation, training: Training, trained: Sequence[int]
    ) -> Rendered:
        """Our template, which marks the turns of these numbers."""
        turns = [{**m, "trained": i in trained} for i, m in enumerate(conversation.messages)]
        options = {"return_assistant_tokens_mask": True, **training.options}
        return self.call(conversation, turns, training.template, **options)

    def call(
        self, conversation: Conversation, turns: list[dict[str, Any]], template: str, **options: Any
    ) -> Rendered:
        # Not through apply_chat_template: it finds the markers' tokens with `char_to_token`, which
        # is None for a leading space under ByteLevel(trim_offsets=True), and then silently drops
        # the rest of the conversation from the mask.
        where = conversation.where
        variables = {**conversation.kwargs, **conversation.special_tokens, **options}
        try:
            result: Any = render_jinja_template(
                conversations=[turns],
                tools=conversation.tools,
                documents=conversation.documents,
                chat_template=template,
                **variables,
            )
        except Exception as error:  # a template can raise anything
            raise UserError(
                f"{where}: the chat template refuses this conversation: {reason(error)}"
            ) from error
        (text,), spans = result
        if len(text) > self.limit_chars:
            raise UserError(
                f"{where}: the chat template makes {len(text):,} characters of "
                f"{conversation.chars:,}: use another one"
            )
        self.alive()
        return text, [tuple(span) for span in spans[0]] if spans else []


def by_training_template(conversation: Conversation, render: Renderer) -> Rendered | None:
    """What our template makes of the conversation; None where that is not what the tokenizer's own
    makes of it."""
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
    """The conversation up to the turn of this number, which alone is trained, in our template; None
    where the tokenizer's own has another prompt before that turn, or makes another answer of it
    while it is the last one."""
    assert conversation.training is not None
    turns = conversation.messages[: number + 1]
    try:
        prompt, _ = render.own(turns[:-1], add_generation_prompt=True)
        upto = replace(conversation, messages=turns)
        text, spans = render.training(upto, conversation.training, [number])
        if len(spans) != 1 or spans[0][0] != len(prompt) or not text.startswith(prompt):
            return None
        answer = text[len(prompt) :]
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
    """The spans of the template's own markers, without those of turns that are not trained."""
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
    """The turn with other words, so that what is rendered of it changes."""
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
    """The spans of a template without markers: what each trained turn adds to its prompt."""
    messages = conversation.messages
    whole, _ = render.own(messages)
    spans = []
    for i in conversation.trained:
        turn, _ = render.own(messages[: i + 1])
        if i > 0:
            prompt, _ = render.own(messages[:i], add_generation_prompt=True)
        else:  # templates need a turn; the generation prompt is what they would add after it
            header = render.own(messages[:1], add_generation_prompt=True)[0].removeprefix(turn)
            prompt = turn[: turn.find(header) + len(header)] if header and header in turn else ""
        if not (prompt and turn.startswith(prompt) and whole.startswith(turn)):
            raise UserError(
                f"{conversation.where}: the chat template rewrites earlier turns (turn {i + 1}), "
                "so the trained tokens cannot be told; use a template with {% generation %} "
                "markers, or write `train`: false on the earlier answers"
            )
        # Generation stops at the end-of-turn token: the line break after it is never generated.
        end = len(turn.rstrip()) if turn.rstrip().endswith(conversation.ends) else len(turn)
        spans.append((len(prompt), max(end, len(prompt))))
    return whole, spans


def check_shown(
    conversation: Conversation, whole: str, text: Callable[[Conversation], str]
) -> None:
    """Raises UserError where the text is the same without a call, reasoning, tools or documents, or
    where the template has no such variable. `text` renders a changed conversation as `whole`
    was."""
    for name, changed in _without_one(conversation):
        try:
            shown = text(changed) != whole
        except UserError:  # the template minds
            shown = True
        if not shown:
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


def _without_one(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """The conversation without one thing that a template has to show, and the name of that."""
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


def reason(error: BaseException) -> str:
    """What a template raised, shortened."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return " ".join(str(error)[: 2 * REASON_CHARS].split())[:REASON_CHARS] or type(error).__name__
