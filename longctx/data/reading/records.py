"""What a record means: a JSONL object or a dataset's row becomes a checked document.

    {"text": "..."}                                               every token is trained
    {"prompt": "...", "completion": "..."}                        the completion is trained
    {"messages": [{"role": "user", "content": "..."}, ...]}       assistant turns are trained
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same in ShareGPT's words
    {"prompt": [turns], "completion": [turns]}                    those of the completion (TRL)
    {"instruction": "...", "input": "...", "output": "..."}       Alpaca: the output is trained

The first of messages, prompt and completion, instruction and output, text that a record has is
read. Alpaca's record is one exchange of a conversation; `history` holds earlier ones. Beside a
conversation, `system`, `tools`, `documents` and `chat_template_kwargs` reach the chat template.
turns.py reads the turns. A key that changes what other tools train is honoured or refused
(fields.py). Records of preferences are read by preferences.py, for the tasks that ask for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longctx.data.reading.fields import (
    ALWAYS,
    IN_CONVERSATIONS,
    alpaca_question,
    check_choices,
    no_template_keys,
    string,
    system_turn,
    template_keys,
)
from longctx.data.reading.groups import READERS, SEEN_BY, TASKS, Rows
from longctx.data.reading.picture_sources import named_source
from longctx.data.reading.pictured_groups import read_pictured_group
from longctx.data.reading.places import TURNS, has_pictures, read_conversation
from longctx.data.reading.preferences import PAIRS, RATED, is_pair, is_rated, read_group
from longctx.data.reading.turns import check_some_trained, listed_turns, read_turns
from longctx.data.reading.values import check_depth, kind
from longctx.errors import UserError

FORMATS: dict[Rows, str] = {
    "text": "`text`, `messages`, `conversations`, `prompt` and `completion` or `instruction` and "
    "`output`",
    "pairs": PAIRS,
    "rated": RATED,
}
Kind = Literal[
    "text",
    "completion",
    "chat",
    "chat_with_pictures",
    "instruction",
    "answers",
    "chat_answers",
    "answers_with_pictures",
]
WITH_PICTURES: tuple[Kind, ...] = ("chat_with_pictures", "answers_with_pictures")
CHATS = ("chat", "chat_with_pictures", "instruction")
"""Kinds of documents whose assistant turns are trained, through the chat template."""
CHAT_ANSWERS = ("chat_answers", "answers_with_pictures")
"""Kinds of documents of a prompt and its answers that go through the chat template."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One training document and where it came from (`file` or `file:line`)."""

    kind: Kind
    """instruction is a chat that was Alpaca's record; those of answers are groups."""
    content: Any
    """text: str; completion: [prompt, completion]; chat: {"messages": [...]} and, where given,
    tools, documents, kwargs (of the template) and untrained (numbers of assistant turns), and
    pictures, a file's path, a data URL or what a dataset holds for each mark in the turns' texts;
    of groups: what preferences.py says, and pictures as a chat has them"""
    where: str
    replaced_bytes: int = 0
    """Undecodable bytes that became U+FFFD."""


def as_document(
    record: Any,
    where: str,
    replaced_bytes: int = 0,
    rows: Rows = "text",
    pictures: Path | None = None,
) -> Document | None:
    """Checks a record (a JSONL object or a dataset's row); None when it holds only blanks.
    `pictures` is the folder in which it may name some; None where nobody would see them.

    Raises UserError starting with `where` for anything that is not one of the formats that rows of
    this kind are made of.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with {FORMATS[rows]}, found {kind(record)}")
    check_depth(record, where)
    given = {key: value for key, value in record.items() if value is not None}
    given |= {key: listed_turns(given[key], key, where) for key in TURNS if key in given}
    check_choices(given, ALWAYS, where)
    read: Read | None
    if has_pictures(given):
        read = _with_pictures(given, where, rows, pictures)
    else:
        read = _read(given, where) if rows == "text" else read_group(given, rows, where)
    if read is None:
        found = ", ".join(
            f"`{key}`" + " (null)" * (value is None) for key, value in list(record.items())[:6]
        )
        raise UserError(
            f"{where}: expected {FORMATS[rows]}{_needed_by(rows)}, found {found or 'nothing'}"
            f"{_read_by(given, rows)}"
        )
    name, content = read
    if name == "text" and not str(content).strip():
        return None
    return Document(kind=name, content=content, where=where, replaced_bytes=replaced_bytes)


Read = tuple[Kind, Any]


def _needed_by(rows: Rows) -> str:
    return "" if rows == "text" else f" for {READERS[rows]}"


def _read_by(given: Mapping[str, Any], rows: Rows) -> str:
    """The task that reads such a record, as the end of a message."""
    if is_pair(given):
        return f": {TASKS['pairs']} reads pairs"
    if rows != "text" and is_rated(given):
        return f": {TASKS['rated']} reads rated answers"
    written = ({"text"}, {"messages"}, {"conversations"}, {"prompt", "completion"}, {"output"})
    if rows != "text" and any(keys <= set(given) for keys in written):
        return f": {TASKS['text']} reads such records"
    return ""


def _read(given: Mapping[str, Any], where: str) -> Read | None:
    for key in ("messages", "conversations"):
        if key in given:
            messages, untrained = read_turns(given[key], key, where)
            if messages[-1]["role"] != "assistant" and {"chosen", "rejected"} & set(given):
                raise UserError(
                    f"{where}: `chosen` and `rejected` are pairs, which {TASKS['pairs']} reads: "
                    f"here, write the answer to train on as the last turn of `{key}`"
                )
            return "chat", _chat(messages, untrained, given, where)
    if {"prompt", "completion"} <= set(given):
        return _completion(given, where)
    if {"instruction", "output"} <= set(given):
        return "instruction", _chat(_alpaca(given, where), [], given, where)
    if "text" in given:
        return "text", string(given, "text", where)
    return None


def _with_pictures(
    given: Mapping[str, Any], where: str, rows: Rows, folder: Path | None
) -> Read | None:
    if folder is None:
        raise UserError(
            f"{where}: it has pictures, which {SEEN_BY} of a vision-language model read, without "
            "--streaming: elsewhere leave them out of the record"
        )
    if rows == "text":
        found = read_conversation(given, where)
        content = _chat(found.messages, found.untrained, given, where)
        return "chat_with_pictures", content | _named(found.pictures, folder, where)
    group = read_pictured_group(given, rows, where)
    if group is None:
        return None
    content, pictures = group
    return "answers_with_pictures", content | _named(pictures, folder, where)


def _named(pictures: Sequence[Any], folder: Path, where: str) -> dict[str, Any]:
    numbered = enumerate(pictures, 1)
    return {"pictures": [named_source(x, folder, f"{where}: picture {n}") for n, x in numbered]}


def _completion(given: Mapping[str, Any], where: str) -> Read:
    check_choices(given, IN_CONVERSATIONS, where)
    if isinstance(given.get("label"), bool):
        raise UserError(
            f"{where}: `label` rates the completion, as {TASKS['rated']} reads it: leave `label` "
            "out to train on every completion"
        )
    if isinstance(given["prompt"], list) and isinstance(given["completion"], list):
        before, _ = read_turns(given["prompt"], "prompt", where)
        after, untrained = read_turns(given["completion"], "completion", where)
        context = [i for i, turn in enumerate(before) if turn["role"] == "assistant"]
        untrained = context + [len(before) + i for i in untrained]
        return "chat", _chat(before + after, untrained, given, where)
    texts = [string(given, key, where) for key in ("prompt", "completion")]
    if not texts[1].strip():
        raise UserError(f"{where}: `completion` is empty, so there is nothing to train on")
    no_template_keys(given, where)
    return "completion", texts


def _chat(
    messages: list[dict[str, Any]], untrained: list[int], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    check_choices(given, IN_CONVERSATIONS, where)
    check_some_trained(messages, untrained, where)
    system = system_turn(messages, given, where)
    messages, untrained = [*system, *messages], [i + len(system) for i in untrained]
    content: dict[str, Any] = {"messages": messages}
    if untrained:
        content["untrained"] = untrained
    return content | template_keys(given, where)


def _alpaca(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The exchanges of an Alpaca record."""
    asked, answer = alpaca_question(given, where), string(given, "output", where)
    if not answer.strip():
        raise UserError(f"{where}: `output` is empty, so there is nothing to train on")
    return [*asked, {"role": "assistant", "content": answer}]
