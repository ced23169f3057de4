"""What a record means: a JSONL object or a dataset's row becomes a checked document.

texts.py reads records whose text is trained, preferences.py those of preferences, for the tasks
that ask for them, image_records.py both where they show images, and turns.py the turns of all. A
key that changes what other tools train is honoured or refused (fields.py), and so is a column of
media (unread_media.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longctx.errors import UserError
from longctx.train.data.reading.fields import ALWAYS, check_choices
from longctx.train.data.reading.groups import IMAGE_TASKS, READERS, TASKS, Rows
from longctx.train.data.reading.image_records import read_with_images
from longctx.train.data.reading.image_sources import named_source
from longctx.train.data.reading.places import has_images
from longctx.train.data.reading.preferences import PAIRS, RATED, is_pair, is_rated, read_group
from longctx.train.data.reading.texts import read_text
from longctx.train.data.reading.turns import TURNS, listed_turns
from longctx.train.data.reading.unread_media import unread_media
from longctx.train.data.reading.values import check_depth, kind

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
WITH_IMAGES: tuple[Kind, ...] = ("chat_with_pictures", "answers_with_pictures")
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
    images, a file's path, a data URL or what a dataset holds for each mark in the turns' texts;
    of groups: what preferences.py says, and images as a chat has them"""
    where: str
    replaced_bytes: int = 0
    """Undecodable bytes that became U+FFFD."""
    unread: list[str] = field(default_factory=list)
    """The columns of the record that have a medium's name, hold none and are not read."""


def as_document(
    record: Any,
    where: str,
    replaced_bytes: int = 0,
    rows: Rows = "text",
    folder: Path | None = None,
    *,
    with_images: bool = False,
) -> Document | None:
    """Checks a record (a JSONL object or a dataset's row); None when it holds only blanks.
    `folder` is where its paths begin (None: it has none); `with_images` it may name images.

    Raises UserError starting with `where` for anything that is not one of the formats that rows of
    this kind are made of.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with {FORMATS[rows]}, found {kind(record)}")
    check_depth(record, where)
    given = {key: value for key, value in record.items() if value is not None}
    given |= {key: listed_turns(given[key], key, where) for key in TURNS if key in given}
    check_choices(given, ALWAYS, where)
    unread = unread_media({**record, **given}, where, folder)
    given = {key: value for key, value in given.items() if key not in unread}
    read: tuple[Kind, Any] | None
    if has_images(given):
        read = _with_images(given, where, rows, folder if with_images else None)
    else:
        read = read_text(given, where) if rows == "text" else read_group(given, rows, where)
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
    return Document(
        kind=name, content=content, where=where, replaced_bytes=replaced_bytes, unread=unread
    )


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


def _with_images(
    given: Mapping[str, Any], where: str, rows: Rows, folder: Path | None
) -> tuple[Kind, Any] | None:
    if folder is None:
        raise UserError(
            f"{where}: it has images, which {IMAGE_TASKS} of a vision-language model read, without "
            "--streaming: elsewhere leave them out of the record"
        )
    found = read_with_images(given, rows, where)
    if found is None:
        return None
    content, images = found
    name: Kind = "chat_with_pictures" if rows == "text" else "answers_with_pictures"
    return name, content | _named(images, folder, where)


def _named(images: Sequence[Any], folder: Path, where: str) -> dict[str, Any]:
    numbered = enumerate(images, 1)
    return {"pictures": [named_source(x, folder, f"{where}: image {n}") for n, x in numbered]}
