"""Conversations with images: a place in the rendered text becomes as many tokens as the image
needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from longctx.errors import UserError
from longctx.train.data.images.image import held, pixels_hash
from longctx.train.data.images.processor import ImageProcessor
from longctx.train.data.reading.image_sources import source_named

Span = tuple[int, int]


def strange(where: str, word: str) -> str:
    """Returns what is said of a text with a token that stands for a part of an image."""
    return f"{where}: a text has {word!r}, which stands for a part of an image: leave it out"


def texts_of(named: Sequence[Any], images: ImageProcessor, where: str) -> tuple[list[str], int]:
    """Returns the text that stands for each image of a record, and the hash of them all
    (`pixels_hash`). Each is read and opened once. Raises UserError starting with `where` for one
    that is none."""
    texts, read = [], []
    for number, name in enumerate(named, 1):
        at = f"{where}: image {number}"
        read.append(held(source_named(name, at), at))
        texts.append(images.text_of(images.opened(read[-1], at).size, at))
    return texts, pixels_hash(read)


def expanded(
    text: str, spans: Sequence[Span], inserted: Sequence[str], images: ImageProcessor, where: str
) -> tuple[str, list[Span]]:
    """Returns a conversation's text with what stands for each image (`texts_of`) in its place,
    and the [start, end) spans of trained characters there.

    Raises UserError starting with `where` if the text has not as many places as there are images,
    or a token of theirs besides.
    """
    parts = text.split(images.token)
    if len(parts) - 1 != len(inserted):
        raise UserError(
            f"{where}: the chat template shows {len(parts) - 1} of {len(inserted)} images: "
            f"use one that shows each, and no {images.token!r} in the texts"
        )
    for word in images.words:
        if any(word in part for part in parts):
            raise UserError(strange(where, word))
    longer = [len(words) - len(images.token) for words in inserted]
    # A place begins where the texts before it and the places among them end.
    places = [n + i * len(images.token) for i, n in enumerate(accumulate(map(len, parts[:-1])))]

    def moved(character: int) -> int:
        before = (more for place, more in zip(places, longer, strict=True) if place < character)
        return character + sum(before)

    whole = "".join(x for pair in zip(parts, [*inserted, ""], strict=True) for x in pair)
    return whole, [(moved(start), moved(end)) for start, end in spans]
