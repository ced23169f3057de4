"""Conversations through the chat template, in a process with limits.

A template is a stranger's program. It can loop for ever or fill the memory inside one call into C,
where Python handles no signal, so it runs in a child process with limits of its own, which lives as
long as this one and renders while this one tokenises. assistant_masks.py says what the child does.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError
from longctx.train.data.chat.assistant_masks import MARKERS, Conversation, Ending, EndingOf, PartsOf
from longctx.train.data.chat.continuations import Continuations, Continued
from longctx.train.data.chat.conversation import Asked, reason
from longctx.train.data.chat.ends import EndTokens, Rendered, end_tokens
from longctx.train.data.chat.training_templates import Recognition, TemplateFamily, candidates
from longctx.train.data.reading.records import CHAT_ANSWERS, CHATS, Document
from longctx.train.safety.processes import die_with_parent, fork, limit_memory

Ends = Callable[[str], EndTokens]
"""The end tokens of a template."""
RENDER_S = 30.0  # one call of the template; the longest of real ones take a second
RENDER_BYTES = 4 << 30  # of memory, more than the child is born with
ALIVE_S = 1.0  # so often the child says that another call has ended
GROUP_CONVERSATIONS, GROUP_CHARS = 32, 1_000_000  # handed over together


def rendered(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, parts: bool = False
) -> Iterator[Rendered]:
    """Yields each conversation as the chat template renders it, and the [start, end) spans to
    train. With `parts` the template gets contents as lists, as those of vision-language models read
    them.

    Raises UserError for a conversation that the template refuses or that has no exact mask, and for
    a template that does not end.
    """
    ends = functools.cache(functools.partial(end_tokens, tokenizer))
    asked = (_conversation(document, tokenizer, ends, parts) for document in documents)
    for batch in _batches(asked):
        yield from _answers(batch)


def continued(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, parts: bool = False
) -> Iterator[Continued]:
    """Yields each prompt, and the prompt with each of its answers, as the chat template renders
    them (documents of CHAT_ANSWERS); `parts` as for `rendered`.

    Raises UserError as `rendered` does, but for a mask: answers need none.
    """
    ends = functools.cache(functools.partial(end_tokens, tokenizer))
    asked = (_continuations(document, tokenizer, ends, parts) for document in documents)
    for batch in _batches(asked):
        yield from _answers(batch)


def family_of(
    tokenizer: PreTrainedTokenizerBase, template: str, where: str = ""
) -> TemplateFamily | None:
    """Returns the family whose chat template this is, by what it renders; None where it is
    another's."""
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    key = template, tuple(sorted(tokens.items()))
    if key not in _families:
        if found := candidates(template):
            asked = Recognition(
                candidates=found, template=template, special_tokens=tokens, where=where
            )
            (_families[key],) = _answers([asked])
        else:
            _families[key] = None
    return _families[key]


def ending_of(tokenizer: PreTrainedTokenizerBase) -> Ending | None:
    """Returns how the tokenizer's template ends an answer; None if it refuses the shortest
    exchange."""
    template = tokenizer.get_chat_template()
    asked = EndingOf(
        messages=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
        template=template,
        special_tokens=dict(tokenizer.special_tokens_map),
        tokens=end_tokens(tokenizer, template),
        parts=takes_parts(tokenizer, template, "the tokenizer's chat template"),
        where="the tokenizer's chat template",
    )
    (ending,) = _answers([asked])
    return ending


def takes_parts(tokenizer: PreTrainedTokenizerBase, template: str, where: str) -> bool:
    """Whether a template shows contents only as lists of parts, whose `type` it asks for."""
    if "type" not in template:
        return False
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    key = template, tuple(sorted(tokens.items()))
    if key not in _takes_parts:
        asked = PartsOf(
            messages=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
            template=template,
            special_tokens=dict(tokenizer.special_tokens_map),
            where=where,
        )
        (_takes_parts[key],) = _answers([asked])
    return _takes_parts[key]


def lines_of(kinds: Collection[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the lines that a run prints of conversations, for the kinds of documents that were
    read: how their answers are found, and how Alpaca's records became conversations."""
    lines = [_template_line(tokenizer)] if set(CHATS) & set(kinds) else []
    if set(CHAT_ANSWERS) & set(kinds):
        lines.append(
            "chat template: the tokenizer's own: an answer is all that it adds to a prompt"
            f"{_end_line(tokenizer)}"
        )
    if "instruction" in kinds:
        lines.append(
            "records of instruction, input and output are exchanges of the chat template: "
            "instruction and input the user's turn, output the assistant's, which is trained"
        )
    return lines


def _template_line(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the line that says which chat template conversations go through, and what of them is
    trained."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # several by name, none of them the default: one for tools
        return "chat template: the tokenizer's own, by name"
    if family := family_of(tokenizer, template):
        return str(family)
    how = (
        "its {% generation %} markers say what is trained"
        if MARKERS.search(template)
        else "an answer is what it adds to the prompt before it"
    )
    return f"chat template: the tokenizer's own: {how}{_end_line(tokenizer)}"


def _end_line(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the end of a line that says what ends an answer, if the template does not."""
    if not isinstance(tokenizer.chat_template, str):
        return ""
    ending = ending_of(tokenizer)
    if ending == "next":
        return "; the token of the next turn ends it"
    if ending != "added":
        return ""
    if tokenizer.eos_token is None:
        return "; nothing ends it, as the tokenizer has no eos token: the model learns no stop"
    return f"; the template ends none, so {tokenizer.eos_token} is added to each"


_families: dict[tuple[str, tuple[tuple[str, str], ...]], TemplateFamily | None] = {}
_takes_parts: dict[tuple[str, tuple[tuple[str, str], ...]], bool] = {}


def _conversation(
    document: Document, tokenizer: PreTrainedTokenizerBase, ends: Ends, parts: bool
) -> Conversation:
    content = document.content
    template = _template(document, tokenizer)
    family = family_of(tokenizer, template, document.where)
    return Conversation(
        messages=content["messages"],
        untrained=tuple(content.get("untrained", ())),
        tools=content.get("tools"),
        documents=content.get("documents"),
        kwargs=content.get("kwargs", {}),
        template=template,
        training=family.training if family else None,
        special_tokens=dict(tokenizer.special_tokens_map),
        tokens=ends(template),
        parts=parts or takes_parts(tokenizer, template, document.where),
        where=document.where,
    )


def _continuations(
    document: Document, tokenizer: PreTrainedTokenizerBase, ends: Ends, parts: bool
) -> Continuations:
    content, template = document.content, _template(document, tokenizer)
    prompt = content["prompt"]
    parts = parts or takes_parts(tokenizer, template, document.where)
    return Continuations(
        conversations=tuple(
            Asked(
                messages=[*prompt, *answer],
                # Templates may drop the reasoning of the turns before the answer.
                untrained=tuple(i for i, m in enumerate(prompt) if m["role"] == "assistant"),
                tools=content.get("tools"),
                documents=content.get("documents"),
                kwargs=content.get("kwargs", {}),
                template=template,
                special_tokens=dict(tokenizer.special_tokens_map),
                tokens=ends(template),
                parts=parts,
                where=document.where,
            )
            for answer in content["answers"]
        ),
        prompt_turns=len(prompt),
        where=document.where,
    )


def _template(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template(tools=document.content.get("tools"))
    except ValueError as error:  # several by name, and none of them the default
        raise UserError(f"{document.where}: {reason(error)}") from error


AnyConversation = TypeVar("AnyConversation", Conversation, Continuations)


def _batches(conversations: Iterable[AnyConversation]) -> Iterator[list[AnyConversation]]:
    """Conversations that are handed over together."""
    batch: list[AnyConversation] = []
    chars = 0
    for conversation in conversations:
        size = conversation.chars
        if batch and (len(batch) == GROUP_CONVERSATIONS or chars + size > GROUP_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(conversation)
        chars += size
    if batch:
        yield batch


class Job(Protocol):
    """A request to the child process: `run` gives the answer or raises UserError, and calls `alive`
    after each call of a template."""

    @property
    def where(self) -> str: ...

    def run(self, alive: Callable[[], None]) -> Any: ...


class _Refusal(str):
    """The line of a UserError that a job raised."""


class _Child:
    """The process that renders. A request is a list of jobs; it answers each with its result or
    with a _Refusal, and now and then with None: it is alive."""

    def __init__(self) -> None:
        self.owner = _here()
        self.busy = False  # not all answers to a request are read
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

    def answers(self, jobs: Sequence[Job]) -> Iterator[Any]:
        unread, self.busy = len(jobs), True
        try:
            with self._explained(jobs[0].where):
                self.connection.send(jobs)
            for job in jobs:
                with self._explained(job.where):
                    (answer,) = self._answer(job.where)
                if isinstance(answer, _Refusal):
                    raise UserError(answer)
                unread -= 1
                self.busy = unread > 0
                yield answer
        finally:  # also of a generator that is collected where it stopped, however late
            if unread or not (self.busy or self is _the_child):
                self.kill()

    def _answer(self, where: str) -> tuple[Any]:
        while self.connection.poll(RENDER_S):
            if (answer := self.connection.recv()) is not None:
                return answer
        raise UserError(
            f"{where}: the chat template does not end within {RENDER_S:.0f} s: use another one"
        )

    @contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise UserError(
                f"{where}: the process that renders the chat template was killed, most often "
                "because the memory was full: use another template or more memory"
            ) from error

    def kill(self) -> None:
        global _the_child
        if self is _the_child:
            _the_child = None
        self.connection.close()
        if self.owner[0] == os.getpid():  # a fork of its parent only forgets it
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


_the_child: _Child | None = None


def _answers(jobs: Sequence[Job]) -> Iterator[Any]:
    """Yields each job's answer, from this thread's own child."""
    yield from _child().answers(jobs)


def _child() -> _Child:
    """Returns a child that is free: one that was inherited by a fork belongs to the parent, one of
    another thread ends with that thread, and one whose answers are not all read belongs to who
    reads them."""
    global _the_child
    if _the_child is None or _the_child.owner != _here() or _the_child.busy:
        _the_child = _Child()
    return _the_child


def _here() -> tuple[int, threading.Thread]:
    """Returns the process and the thread, whose number another one gets when it has ended."""
    return os.getpid(), threading.current_thread()


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
            jobs: Sequence[Job] = connection.recv()
        except EOFError:
            return
        for job in jobs:
            connection.send(_result(job, alive))
            said = time.monotonic()


def _result(job: Job, alive: Callable[[], None]) -> tuple[Any]:
    try:
        return (job.run(alive),)
    except UserError as error:
        return (_Refusal(error),)
