"""Conversations with pictures: a place in the rendered text becomes as many tokens as the picture
needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from longctx.errors import UserError
from longctx.train.data.pictures.picture import held, pixels_hash
from longctx.train.data.pictures.processor import Pictures
from longctx.train.data.reading.picture_sources import source_named

Span = tuple[int, int]


def strange(where: str, word: str) -> str:
    """Returns what is said of a text with a token that stands for a part of a picture."""
    return f"{where}: a text has {word!r}, which stands for a part of a picture: leave it out"


def texts_of(named: Sequence[Any], pictures: Pictures, where: str) -> tuple[list[str], int]:
    """Returns the text that stands for each picture of a record, and the hash of them all
    (`pixels_hash`). Each is read and opened once. Raises UserError starting with `where` for one
    that is none."""
    texts, read = [], []
    for number, name in enumerate(named, 1):
        at = f"{where}: picture {number}"
        read.append(held(source_named(name, at), at))
        texts.append(pictures.text_of(pictures.opened(read[-1], at).size, at))
    return texts, pixels_hash(read)


def expanded(
    text: str, spans: Sequence[Span], inserted: Sequence[str], pictures: Pictures, where: str
) -> tuple[str, list[Span]]:
    """Returns a conversation's text with what stands for each picture (`texts_of`) in its place,
    and the [start, end) spans of trained characters there.

    Raises UserError starting with `where` if the text has not as many places as there are pictures,
    or a token of theirs besides.
    """
    parts = text.split(pictures.token)
    if len(parts) - 1 != len(inserted):
        raise UserError(
            f"{where}: the chat template shows {len(parts) - 1} of {len(inserted)} pictures: "
            f"use one that shows each, and no {pictures.token!r} in the texts"
        )
    for word in pictures.words:
        if any(word in part for part in parts):
            raise UserError(strange(where, word))
    longer = [len(words) - len(pictures.token) for words in inserted]
    # A place begins where the texts before it and the places among them end.
    places = [n + i * len(pictures.token) for i, n in enumerate(accumulate(map(len, parts[:-1])))]

    def moved(character: int) -> int:
        before = (more for place, more in zip(places, longer, strict=True) if place < character)
        return character + sum(before)

    whole = "".join(x for pair in zip(parts, [*inserted, ""], strict=True) for x in pair)
    return whole, [(moved(start), moved(end)) for start, end in spans]
