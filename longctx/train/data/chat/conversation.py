"""A conversation as a chat template is asked for it, and the calls of the template."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from longctx.errors import UserError
from longctx.train.data.chat.ends import EndTokens, Rendered
from longctx.train.data.reading.places import in_parts

# Real templates add at most a few kB of instructions to what they are given.
RENDERED_FACTOR, RENDERED_CHARS = 20, 1_000_000
REASON_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Training:
    """Our template of a family, with generation markers around the turns whose `trained` is
    true."""

    template: str
    options: dict[str, Any]
    """Variables that tell the family's versions apart."""
    rewrites: bool = False
    """Whether the family's own template rewrites even the last answer, as R1's: then its text is
    compared with what ours makes of an answer that is only read."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All that a template sees of a document, and what tells its trained characters."""

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
    tokens: EndTokens = EndTokens()
    parts: bool = False
    """Whether the template gets contents as lists of text and places of images (places.py)."""
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

    @property
    def words(self) -> list[str]:
        """The texts of the turns to train."""
        return [self.messages[i]["content"] for i in self.trained]

    def followed(self) -> Asked:
        """The conversation with one more turn, of the role that answers the last one."""
        answer = "tool" if self.messages[-1].get("tool_calls") else "user"
        return replace(self, messages=[*self.messages, {"role": answer, "content": "x"}])


class Renderer:
    """Calls templates for one conversation."""

    def __init__(self, conversation: Asked, alive: Callable[[], None]) -> None:
        self.conversation, self.alive = conversation, alive
        self.has_prompt: bool | None = None
        self.limit_chars = RENDERED_CHARS + RENDERED_FACTOR * conversation.chars

    def prompt(self, turns: list[dict[str, Any]], *texts: str) -> str:
        """The prompt from which the next turn is generated, whose conversations `texts` are. Where
        the template has no generation prompt, what stands before any answer belongs to it."""
        prompt, _ = self.own(turns, add_generation_prompt=True)
        if self.has_prompt is None:
            self.has_prompt = prompt != self.own(turns)[0]
        if self.has_prompt:
            return prompt
        others = [{"role": "assistant", "content": word} for word in ("one", "two")]
        begun = os.path.commonprefix([*texts, *(self.own([*turns, o])[0] for o in others)])
        # Blanks are no header: [INST] Why? [/INST] because
        return begun if begun.startswith(prompt) and begun[len(prompt) :].strip() else prompt

    def own(self, turns: list[dict[str, Any]], **options: Any) -> Rendered:
        """The tokenizer's own template."""
        return self.call(self.conversation, turns, self.conversation.template, **options)

    def training(self, conversation: Asked, training: Training, trained: Sequence[int]) -> Rendered:
        """Our template, which marks the turns of these numbers."""
        turns = [{**m, "trained": i in trained} for i, m in enumerate(conversation.messages)]
        options = {"return_assistant_tokens_mask": True, **training.options}
        return self.call(conversation, turns, training.template, **options)

    def call(
        self, conversation: Asked, turns: list[dict[str, Any]], template: str, **options: Any
    ) -> Rendered:
        # Not through apply_chat_template: it finds the markers' tokens with `char_to_token`, which
        # is None for a leading space under ByteLevel(trim_offsets=True), and then silently drops
        # the rest of the conversation from the mask.
        where = conversation.where
        variables = {**conversation.kwargs, **conversation.special_tokens, **options}
        if conversation.parts:
            turns = [*map(in_parts, turns)]
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


def unless_refused(text: Callable[[Asked], str], asked: Asked) -> str | None:
    """The conversation with one more turn; None if the template takes none."""
    try:
        return text(asked.followed())
    except UserError:
        return None


def reason(error: BaseException) -> str:
    """Returns the message of the error that a template raised, shortened."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return " ".join(str(error)[: 2 * REASON_CHARS].split())[:REASON_CHARS] or type(error).__name__
