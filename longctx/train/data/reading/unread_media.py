"""Columns of media: each is read, refused, or said to be left out. None is dropped in silence,
since the place of an image that is not read would be trained as a word.

    {"videos": ["clip.mp4"], ...}                    its value is a file of a medium
    {"video": "a title", "text": "<video> ..."}      the text has the medium's place
    {"video": "a title", "messages": [...]}          the record is a conversation
    {"file_name": "a.png", "text": "..."}            metadata of an imagefolder
    {"images": null, "prompt": "<image> ...", ...}   a place and no image
    {"video": "a title", "text": "..."}              no medium: not read, which one line says

All but the last are media: images in `images` or `image` go on to be read, others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.errors import UserError
from longctx.train.data.reading.media import (
    COLUMNS,
    CURES,
    FILE_NAME,
    IMAGE_COLUMNS,
    NOUNS,
    ONE,
    Medium,
    media_held,
    medium_named,
    strings_of,
    words_of,
)
from longctx.train.data.reading.turns import TURNS

_TEXTS = ("text", "instruction", "input", "output", "system", "system_prompt", "history", *TURNS)
_OTHERS = frozenset((*_TEXTS, "tools", "functions", "documents", "chat_template_kwargs"))
"""Columns that are read as something else."""


def unread_media(record: Mapping[str, Any], where: str, folder: Path | None) -> list[str]:
    """Returns the columns of a record that have a medium's name and hold none. `folder` is where
    paths begin; None where there is none.

    Raises UserError starting with `where` for media that are not read, and for a place of a medium
    whose column is empty.
    """
    chat = any(isinstance(record.get(name), (list, dict)) for name in TURNS)
    unread = []
    for name, value in record.items():
        medium = COLUMNS.get(name)
        if medium is None:
            if name not in _OTHERS and (found := _held(record, name, folder)):
                raise UserError(f"{where} has {ONE[found]} in `{name}`, {_not_read(found)}")
            continue
        place = _place(record, medium)
        if not value and not isinstance(value, bytes):
            if place:
                raise UserError(
                    f"{where} has {place} in its text and no {NOUNS[medium]}: `{name}` is empty: "
                    f"give the {NOUNS[medium]}, or leave {place} out"
                )
        elif not (chat or place or medium_named(value)):
            unread.append(name)
        elif name not in IMAGE_COLUMNS:
            raise UserError(f"{where} has `{name}`, {_not_read(medium)}")
    return unread


def unread_line(where: str, names: list[str]) -> str:
    """Returns the line that says which columns are not read, for the first record that has some."""
    listed = " and ".join(f"`{name}`" for name in names)
    return (
        f"{where}: {listed} names no file and its text has no place for one: it is not read, here "
        "and in records like this one"
    )


def _not_read(medium: Medium) -> str:
    return f"which is not read: {CURES[medium]}"


def _held(record: Mapping[str, Any], name: str, folder: Path | None) -> Medium | None:
    """Returns the medium that a column of another name holds, if it is not among the images that
    are read: `"id": "a.png"` beside `"image": "a.png"` adds none."""
    files = FILE_NAME.fullmatch(name) is not None
    for medium, one in media_held(
        record[name], folder, lambda medium: files or _place(record, medium) is not None
    ):
        read = (record.get(key) for key in (*IMAGE_COLUMNS, *TURNS))
        if not any(one in strings_of(value) for value in read):
            return medium
    return None


def _place(record: Mapping[str, Any], medium: Medium) -> str | None:
    """Returns the first word in a record's texts that marks a place of a medium."""
    for name in _TEXTS:
        for text in strings_of(record.get(name)):
            if found := words_of(medium).search(text):
                return found[0]
    return None
