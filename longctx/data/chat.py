"""Conversations through the chat template: the text, and which of its characters are trained.

The characters come from the template's `{% generation %}` markers, or, where it has none, from
rendering every prefix: an assistant turn is what it adds to "everything before + generation
prompt". That takes every prefix to be a prefix of the whole, which is checked: a template that
rewrites earlier turns has no exact mask, and is refused.

A template is a stranger's program. It can loop for ever or fill the memory inside one call into C,
where Python handles no signal, so it runs in a child process with limits of its own, which lives as
long as this one and renders while this one tokenises.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from longctx.data.records import Document
from longctx.errors import UserError
from longctx.processes import die_with_parent, fork, limit_memory

RENDER_S = 30.0  # one call of the template; the longest of real ones take a second
RENDER_BYTES = 4 << 30  # of memory, more than the child is born with
# Real templates add at most a few kB of instructions to what they are given.
RENDERED_FACTOR, RENDERED_CHARS = 20, 1_000_000
ALIVE_S = 1.0  # so often the child says that another call has ended
GROUP_CONVERSATIONS, GROUP_CHARS = 32, 1_000_000  # handed over together
REASON_CHARS = 200
Span = tuple[int, int]
Rendered = tuple[str, list[Span]]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that a template sees of a document, and what finds its trained characters."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    template: str
    special_tokens: dict[str, Any]
    ends: tuple[str, ...]
    """Texts of tokens that may end a turn."""
    where: str

    @property
    def chars(self) -> int:
        tools = len(str(self.tools)) if self.tools else 0
        return tools + sum(len(str(value)) for turn in self.messages for value in turn.values())


def rendered(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Rendered]:
    """Each conversation as the chat template renders it, and the [start, end) spans to train.

    Raises UserError for a conversation that the template refuses or that has no exact mask, and for
    a template that does not end.
    """
    ends = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
    for group in _groups(_conversation(document, tokenizer, ends) for document in documents):
        yield from _child().render(group)


def _conversation(
    document: Document, tokenizer: PreTrainedTokenizerBase, ends: tuple[str, ...]
) -> Conversation:
    tools = document.content.get("tools")
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several by name, and none of them the default
        raise UserError(f"{document.where}: {_one_line(error)}") from error
    return Conversation(
        messages=document.content["messages"],
        tools=tools,
        template=template,
        special_tokens=dict(tokenizer.special_tokens_map),
        ends=ends,
        where=document.where,
    )


def _groups(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    group: list[Conversation] = []
    chars = 0
    for conversation in conversations:
        size = conversation.chars
        if group and (len(group) == GROUP_CONVERSATIONS or chars + size > GROUP_CHARS):
            yield group
            group, chars = [], 0
        group.append(conversation)
        chars += size
    if group:
        yield group


class _Child:
    """The process that renders. A request is a list of conversations; it answers each with what is
    rendered or with a line that says what is wrong, and now and then with None: it is alive."""

    def __init__(self) -> None:
        self.owner = _here()
        self.connection, theirs = multiprocessing.Pipe()
        try:
            self.pid = fork()
        except OSError as error:
            raise UserError(
                f"cannot start the process that renders chat templates: {error.strerror or error}"
            ) from error
        if self.pid == 0:
            try:
                self.connection.close()
                _serve(theirs, parent=self.owner[0])
            finally:
                os._exit(0)
        theirs.close()

    def render(self, group: list[Conversation]) -> Iterator[Rendered]:
        try:
            self.connection.send(group)
            for conversation in group:
                answer = self._answer(conversation.where)
                if isinstance(answer, str):
                    raise UserError(answer)
                yield answer
        except BaseException:  # also GeneratorExit: what it still says is for nobody
            self.kill()
            raise

    def _answer(self, where: str) -> Rendered | str:
        try:
            while self.connection.poll(RENDER_S):
                if (answer := self.connection.recv()) is not None:
                    return answer
        except (EOFError, OSError) as error:
            raise UserError(
                f"{where}: the process that renders the chat template was killed, most often "
                "because the memory was full: use another template or more memory"
            ) from error
        raise UserError(
            f"{where}: the chat template does not end within {RENDER_S:.0f} s: use another one"
        )

    def kill(self) -> None:
        global _the_child
        _the_child = None
        self.connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


_the_child: _Child | None = None


def _child() -> _Child:
    """This thread's own: one that was inherited by a fork belongs to the parent, and one of another
    thread ends with that thread."""
    global _the_child
    if _the_child is None or _the_child.owner != _here():
        _the_child = _Child()
    return _the_child


def _here() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _serve(connection: Connection, parent: int) -> None:
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    limit_memory(RENDER_BYTES)
    said = time.monotonic()

    def alive() -> None:
        nonlocal said
        if time.monotonic() - said > ALIVE_S:
            connection.send(None)
            said = time.monotonic()

    while True:
        try:
            group: list[Conversation] = connection.recv()
        except EOFError:
            return
        for conversation in group:
            connection.send(_outcome(conversation, alive))
            said = time.monotonic()


def _outcome(conversation: Conversation, alive: Callable[[], None]) -> Rendered | str:
    try:
        text, spans = trained_characters(conversation, alive)
        if _leaves_out_calls(conversation, text, alive):
            raise UserError(
                f"{conversation.where}: the chat template leaves out `tool_calls`, so no call "
                "would be trained; use a template that shows them, or write calls into `content`"
            )
        return text, spans
    except UserError as error:
        return str(error)


def _one_line(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return " ".join(str(error)[: 2 * REASON_CHARS].split())[:REASON_CHARS] or type(error).__name__


def trained_characters(
    conversation: Conversation, alive: Callable[[], None] = lambda: None
) -> Rendered:
    """The text and the spans of one conversation; `alive` is called after each call of the
    template."""
    messages, where = conversation.messages, conversation.where
    common: dict[str, Any] = {
        "tools": conversation.tools,
        "chat_template": conversation.template,
        **conversation.special_tokens,
    }
    limit_chars = RENDERED_CHARS + RENDERED_FACTOR * conversation.chars

    def render(turns: list[dict[str, Any]], **options: Any) -> Rendered:
        # Not through apply_chat_template: it finds the markers' tokens with `char_to_token`, which
        # is None for a leading space under ByteLevel(trim_offsets=True), and then silently drops
        # the rest of the conversation from the mask.
        try:
            result: Any = render_jinja_template(**common, conversations=[turns], **options)
        except Exception as error:  # a template can raise anything
            raise UserError(
                f"{where}: the chat template refuses this conversation: {_one_line(error)}"
            ) from error
        (text,), spans = result
        if len(text) > limit_chars:
            raise UserError(
                f"{where}: the chat template makes {len(text):,} characters of "
                f"{conversation.chars:,}: use another one"
            )
        alive()
        return text, spans[0] if spans else []

    if re.search(r"\{%-?\s*generation\s*-?%\}", conversation.template):
        return render(messages, return_assistant_tokens_mask=True)

    whole, _ = render(messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn, _ = render(messages[: i + 1])
        if i > 0:
            prompt, _ = render(messages[:i], add_generation_prompt=True)
        else:  # templates need a turn; the generation prompt is what they would add after it
            header = render(messages[:1], add_generation_prompt=True)[0].removeprefix(turn)
            prompt = turn[: turn.find(header) + len(header)] if header and header in turn else ""
        if not (prompt and turn.startswith(prompt) and whole.startswith(turn)):
            raise UserError(
                f"{where}: the chat template rewrites earlier turns (turn {i + 1}), so "
                "the trained tokens cannot be told; use a template with {% generation %} markers"
            )
        # Generation stops at the end-of-turn token: the line break after it is never generated.
        end = len(turn.rstrip()) if turn.rstrip().endswith(conversation.ends) else len(turn)
        spans.append((len(prompt), max(end, len(prompt))))
    return whole, spans


def _leaves_out_calls(conversation: Conversation, text: str, alive: Callable[[], None]) -> bool:
    """Whether a conversation with tool calls is rendered as it is without them."""
    turns = conversation.messages
    if not any(turn.get("tool_calls") for turn in turns):
        return False
    without = [{k: v for k, v in turn.items() if k != "tool_calls"} for turn in turns]
    try:
        return trained_characters(replace(conversation, messages=without), alive)[0] == text
    except UserError:  # the template minds
        return False
