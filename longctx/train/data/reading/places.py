"""Reads conversations with images, in the forms in which TRL, LLaVA, LLaMA-Factory and OpenAI
write where an image stands.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "heron.jpg"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}
    ... {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}} ...       OpenAI
    {"messages": [... {"type": "image"} ...], "images": ["heron.jpg"]}                     TRL
    {"messages": [{"role": "user", "content": "What is this?"}, ...], "images": [...]}     TRL
    {"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, ...],
     "image": "heron.jpg"}                                                 LLaVA, LLaMA-Factory

All become turns with a mark in their text at each place, and one list of images in the order of
the places; `in_parts` makes lists of text and places of such messages. Without a place images
stand before the first question, as TRL has them. image_records.py reads the marked records. An
image is shown as the processor has it: a part that asks for a size of its own is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from longctx.errors import UserError, many
from longctx.train.data.reading.media import IMAGE_COLUMNS, part_medium
from longctx.train.data.reading.turns import TURNS

MARK = "\x00image\x00"
WRITTEN = "<image>"
"""The text by which LLaVA and LLaMA-Factory mark where an image stands. It is read so only in a
record that has a column of images."""
_SOURCES = ("image", "image_url", "path", "url", "base64")
_OWN_SIZE = re.compile(r"pixels|resize|resolution|crop|detail|(^|_)size$|_edge$|tiles|patches")
"""Keys that ask for an image in a size of its own: `resized_height`, `max_pixels`, `detail`."""
_AS_IT_IS = {"detail": ("auto",)}
"""Values of such keys that ask for what is done anyway."""


def has_images(record: Mapping[str, Any]) -> bool:
    """Whether a record names images, in a column or in parts of its turns."""
    if any(record.get(name) for name in IMAGE_COLUMNS):
        return True
    turns = [turn for name in TURNS for turn in _as_list(record.get(name))]
    turns = [turn for turn in turns if isinstance(turn, Mapping)]
    contents = (turn.get(name) for turn in turns for name in ("content", "value"))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and _is_image(part) for part in parts)


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of `{"type": "text", "text": ...}` and
    `{"type": "image"}`, as processors' chat templates read it."""
    return {**message, "content": _parts(message["content"])}


def column_of(record: Mapping[str, Any], where: str) -> list[Any] | None:
    """Returns a record's column of images; None if it has none. Raises UserError starting with
    `where` for two of them, and for an image that asks for a size of its own."""
    given = [name for name in IMAGE_COLUMNS if record.get(name) is not None]
    if len(given) > 1:
        raise UserError(f"{where} has `images` and `image`: leave one out")
    if not given:
        return None
    found = record[given[0]]
    found = found if isinstance(found, list) else [found]
    for image in found:
        _check_size(image, f"{where}: `{given[0]}`")
    return found


def marked_turns(turns: Any, key: str, has_column: bool, where: str) -> tuple[Any, list[Any]]:
    """Returns the turns with a mark for each image, and the images that parts name. Raises
    UserError starting with `where` for a mark in a text, and for videos and sounds."""
    if not isinstance(turns, list):
        return turns, []  # which read_turns refuses
    own: list[Any] = []
    marked = []
    for number, turn in enumerate(turns):
        at = f"{where}: turn {number + 1} of `{key}`"
        if not isinstance(turn, Mapping):
            marked.append(turn)
            continue
        turn = dict(turn)
        for name in ("content", "value"):
            if isinstance(turn.get(name), str):
                turn[name] = marked_text(turn[name], has_column, at)
            elif isinstance(turn.get(name), list):
                turn[name] = [_part(part, own, has_column, at) for part in turn[name]]
        marked.append(turn)
    return marked, own


def marked_text(text: str, has_column: bool, at: str) -> str:
    """Returns a text with MARK where it has WRITTEN, beside a column of images. Raises UserError
    starting with `at` for a MARK of its own."""
    if MARK in text:
        raise UserError(f"{at} has {MARK!r} in its text, which stands for an image here")
    return text.replace(WRITTEN, MARK) if has_column else text


def _part(part: Any, own: list[Any], has_column: bool, at: str) -> Any:
    if isinstance(part, str):
        return marked_text(part, has_column, at)
    if not isinstance(part, Mapping):
        return part
    if _is_image(part):
        found = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
        for asked in (part, found):
            _check_size(asked, at)
        if part.get("text"):
            raise UserError(f"{at} has a part with an image and `text`: write a part of each")
        if found is not None:
            own.append(_whole(found, part))
        return MARK
    if isinstance(part.get("text"), str):
        return {**part, "text": marked_text(part["text"], has_column, at)}
    return part


def _is_image(part: Mapping[str, Any]) -> bool:
    untyped = part.get("type") is None and isinstance(part.get("text"), str)
    return part_medium(part) == "image" and not untyped


def _check_size(image: Any, at: str) -> None:
    for key, value in image.items() if isinstance(image, Mapping) else ():
        if value is None or value in _AS_IT_IS.get(key, ()):
            continue
        if isinstance(key, str) and _OWN_SIZE.search(key):
            raise UserError(
                f"{at} has an image with `{key}`, which is not read: write the image in that "
                "size, or limit all of them with --image_pixels"
            )


def _whole(found: Any, part: Mapping[str, Any]) -> Any:
    return f"data:image;base64,{found}" if found is part.get("base64") else found


def images_of_places(
    messages: list[dict[str, Any]], own: list[Any], column: list[Any] | None, where: str
) -> list[Any]:
    """Returns the images of marked messages in their order, those of parts or of the column. If
    nobody says where they stand, the first question gets their marks. Raises UserError starting
    with `where` if there are not as many places as images."""
    places = sum(message["content"].count(MARK) for message in messages)
    if own and column:
        raise UserError(f"{where} has images in turns and in a column: leave one out")
    images = own or column or []
    if len(images) != places and (places or not column):
        written = "image parts" if own else f"image parts or {WRITTEN}"
        raise UserError(f"{where} has {places} {written} and {many(len(images), 'image')}")
    if len(images) > places:  # a column, and nobody says where
        _before_first_question(messages, len(images), where)
    return images


def _before_first_question(messages: list[dict[str, Any]], count: int, where: str) -> None:
    question = next((message for message in messages if message["role"] == "user"), None)
    if question is None:
        raise UserError(f"{where} has images and no turn of a user, before which they stand")
    question["content"] = MARK * count + question["content"]


def _as_list(turns: Any) -> list[Any]:
    """Returns a list of turns, of which there may be a single one."""
    if isinstance(turns, Mapping):
        return [turns]
    return turns if isinstance(turns, list) else []


def _parts(content: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts or [{"type": "text", "text": ""}]
