"""Reads conversations with pictures, in the forms in which TRL, LLaVA, LLaMA-Factory and OpenAI
write where a picture stands.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "heron.jpg"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}
    ... {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}} ...       OpenAI
    {"messages": [... {"type": "image"} ...], "images": ["heron.jpg"]}                     TRL
    {"messages": [{"role": "user", "content": "What is this?"}, ...], "images": [...]}     TRL
    {"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, ...],
     "image": "heron.jpg"}                                                 LLaVA, LLaMA-Factory

All become messages with a mark in their text at each place, and one list of pictures in the order
of the places; `in_parts` makes lists of text and places of such messages. Without a place pictures
stand before the first question, as TRL has them. Roles, names and what is trained are read as those
of any conversation (reading/turns.py). Pictures are seen, never written: an answer has none.
pictured_groups.py reads prompts with pictures, whose answers are compared or rated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longctx.data.reading.turns import NAMES, check_some_trained, read_turns
from longctx.errors import UserError, many

MARK = "\x00image\x00"
WRITTEN = "<image>"
"""The text by which LLaVA and LLaMA-Factory mark where a picture stands. It is read so only in a
record that has a column of pictures."""
COLUMNS = ("images", "image")
TURNS = (*NAMES, "prompt", "completion", "chosen", "rejected")
"""The keys under which a record may have turns with places."""
_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True)
class Conversation:
    """A record's messages, with MARK at each place of their texts, and what describes the picture
    of each (picture.py)."""

    messages: list[dict[str, Any]]
    untrained: list[int]
    """The numbers of the assistant turns that are not trained."""
    pictures: list[Any]


def has_pictures(record: Mapping[str, Any]) -> bool:
    """Whether a record names pictures, in a column or in parts of its turns."""
    if any(record.get(name) for name in COLUMNS):
        return True
    turns = [turn for name in TURNS for turn in _as_list(record.get(name))]
    turns = [turn for turn in turns if isinstance(turn, Mapping)]
    contents = (turn.get(name) for turn in turns for name in ("content", "value"))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in _TYPES for part in parts)


def read_conversation(record: Mapping[str, Any], where: str) -> Conversation:
    """Raises UserError starting with `where` for turns that are not understood, pictures without a
    place, places without a picture, pictures in an answer, and parts that are neither text nor
    images."""
    key = next((name for name in NAMES if record.get(name) is not None), None)
    if key is None:
        raise UserError(f"{where}: expected `messages` or `conversations` beside pictures")
    column = column_of(record, where)
    marked, own = marked_turns(record[key], key, column is not None, where)
    messages, untrained = read_turns(marked, key, where)
    check_some_trained(messages, untrained, where)
    pictures = pictures_of_places(messages, own, column, where)
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and MARK in message["content"]:
            raise UserError(
                f"{where}: turn {number + 1} of `{key}` is an answer with a picture: models that "
                "are trained here write text alone"
            )
    return Conversation(messages, untrained, pictures)


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of `{"type": "text", "text": ...}` and
    `{"type": "image"}`, as processors' chat templates read it."""
    return {**message, "content": _parts(message["content"])}


def column_of(record: Mapping[str, Any], where: str) -> list[Any] | None:
    """Returns a record's column of pictures; None if it has none. Raises UserError starting with
    `where` for two of them, and for videos and sounds."""
    given = [name for name in COLUMNS if record.get(name) is not None]
    if len(given) > 1:
        raise UserError(f"{where} has `images` and `image`: leave one out")
    for name in ("videos", "video", "audios", "audio"):
        if record.get(name):
            raise UserError(f"{where} has `{name}`: text and images are read")
    if not given:
        return None
    found = record[given[0]]
    return found if isinstance(found, list) else [found]


def marked_turns(turns: Any, key: str, has_column: bool, where: str) -> tuple[Any, list[Any]]:
    """Returns the turns with a mark for each picture, and the pictures that parts name. Raises
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
    """Returns a text with MARK where it has WRITTEN, beside a column of pictures. Raises UserError
    starting with `at` for a MARK of its own."""
    if MARK in text:
        raise UserError(f"{at} has {MARK!r} in its text, which stands for a picture here")
    return text.replace(WRITTEN, MARK) if has_column else text


def _part(part: Any, own: list[Any], has_column: bool, at: str) -> Any:
    if isinstance(part, str):
        return marked_text(part, has_column, at)
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in _TYPES:
        named = (part.get(name) for name in ("image", "image_url", "path", "url", "base64"))
        found = next((source for source in named if source is not None), None)
        if found is not None:
            own.append(_whole(found, part))
        return MARK
    if part.get("type") in ("video", "audio", "input_audio", "video_url"):
        raise UserError(f"{at} has a part of type {part['type']}: text and images are read")
    if isinstance(part.get("text"), str):
        return {**part, "text": marked_text(part["text"], has_column, at)}
    return part


def _whole(found: Any, part: Mapping[str, Any]) -> Any:
    return f"data:image;base64,{found}" if found is part.get("base64") else found


def pictures_of_places(
    messages: list[dict[str, Any]], own: list[Any], column: list[Any] | None, where: str
) -> list[Any]:
    """Returns the pictures of marked messages in their order, those of parts or of the column. If
    nobody says where they stand, the first question gets their marks. Raises UserError starting
    with `where` if there are not as many places as pictures."""
    places = sum(message["content"].count(MARK) for message in messages)
    if own and column:
        raise UserError(f"{where} has pictures in turns and in a column: leave one out")
    pictures = own or column or []
    if len(pictures) != places and (places or not column):
        written = "image parts" if own else f"image parts or {WRITTEN}"
        raise UserError(f"{where} has {places} {written} and {many(len(pictures), 'picture')}")
    if len(pictures) > places:  # a column, and nobody says where
        _before_first_question(messages, len(pictures), where)
    return pictures


def _before_first_question(messages: list[dict[str, Any]], count: int, where: str) -> None:
    question = next((message for message in messages if message["role"] == "user"), None)
    if question is None:
        raise UserError(f"{where} has pictures and no turn of a user, before which they stand")
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
