"""Records that show images, in the forms of texts.py, preferences.py and places.py.

    {"images": ["a.png"], "messages": [turns with places]}
    {"images": ["a.png"], "prompt": [turns with places], "completion": [turns]}
    {"images": ["a.png"], "prompt": [turns with places], "chosen": [turns], "rejected": [turns]}
    {"images": ["a.png"], "prompt": "What is this?", "chosen": "A heron.", "rejected": "A cat."}
    {"chosen": [turns with places], "rejected": [turns with places]}     as whole conversations

Places become marks and the marked record is read as any other one. Strings become turns: images
stand in conversations alone. Images are seen, never written: an answer has none. Where both
answers of a pair are whole conversations, both show the images of their prompt, which must be the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longctx.errors import UserError
from longctx.train.data.reading.groups import Rows
from longctx.train.data.reading.places import (
    MARK,
    column_of,
    images_of_places,
    marked_text,
    marked_turns,
)
from longctx.train.data.reading.preferences import PAIR, is_pair, read_group
from longctx.train.data.reading.texts import read_text
from longctx.train.data.reading.turns import TURNS

_TEXTS = (*TURNS, "instruction", "input", "output", "system", "system_prompt", "history")
"""The keys of texts and turns that may have places."""
_READ = (("messages",), ("conversations",), ("prompt", "completion"))
"""The keys of turns that texts.py reads: the first that a record has."""
_NO_ANSWER = "models that are trained here write text alone"
WithImages = tuple[dict[str, Any], list[Any]]


def read_with_images(given: Mapping[str, Any], rows: Rows, where: str) -> WithImages | None:
    """Returns the content of a record's document, in turns with a mark at each place, and what
    describes the image of each; None where the record has the keys of no document.

    Raises UserError starting with `where` as `read_text` and `read_group` do, and for images
    without a place, places without an image, images in an answer, and parts that are neither
    text nor images.
    """
    column = column_of(given, where)
    marked, named = dict(given), dict[str, list[Any]]()
    for key in _TEXTS:
        if key in given:
            marked[key], named[key] = _marked(given[key], key, column is not None, where)
    if rows == "text":
        return _conversation(marked, named, column, where)
    return _group(marked, named, rows, column, where)


def _conversation(
    marked: Mapping[str, Any], named: Mapping[str, list[Any]], column: list[Any] | None, where: str
) -> WithImages | None:
    found = read_text(marked, where)
    if found is None:
        return None
    kind, content = found
    if kind == "text":
        raise UserError(
            f"{where}: images stand in conversations: write `messages`, or `prompt` and "
            "`completion`, in place of `text`"
        )
    if kind == "completion":
        prompt, completion = content
        content = {"messages": [*_turns(prompt, "user"), *_turns(completion, "assistant")]}
    keys = next((keys for keys in _READ if {*keys} <= {*marked}), ())
    own = [image for key in keys for image in named[key]]
    images = images_of_places(content["messages"], own, column, where)
    answers = (m["content"] for m in content["messages"] if m["role"] == "assistant")
    for number, answer in enumerate(answers, 1):
        if MARK in answer:
            raise UserError(f"{where}: answer {number} has an image: {_NO_ANSWER}")
    return content, images


def _group(
    marked: Mapping[str, Any],
    named: Mapping[str, list[Any]],
    rows: Rows,
    column: list[Any] | None,
    where: str,
) -> WithImages | None:
    found = read_group(marked, rows, where)
    if found is None:
        return None
    _, content = found
    if content.get("joined"):
        raise UserError(
            f"{where}: images stand in a prompt, and `chosen` and `rejected` are whole strings: "
            "write `prompt` and the answers apart"
        )
    content = content | {"prompt": _turns(content["prompt"], "user")}
    content["answers"] = [_turns(answer, "assistant") for answer in content["answers"]]
    for number, answer in enumerate(content["answers"]):
        if any(MARK in turn["content"] for turn in answer):
            name = f"`{PAIR[number]}`" if is_pair(marked) else "the completion"
            raise UserError(f"{where}: {name} is an answer with an image: {_NO_ANSWER}")
    return content, images_of_places(content["prompt"], _own(named, where), column, where)


def _marked(value: Any, key: str, has_column: bool, where: str) -> tuple[Any, list[Any]]:
    if isinstance(value, str):
        return marked_text(value, has_column, f"{where}: `{key}`"), []
    if isinstance(value, Mapping):
        value = [value]
    if key == "history" and isinstance(value, list):
        at = f"{where}: `{key}`"
        return [[_marked_string(x, has_column, at) for x in _pair(pair)] for pair in value], []
    return marked_turns(value, key, has_column, where)


def _pair(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]  # which alpaca_question refuses


def _marked_string(value: Any, has_column: bool, at: str) -> Any:
    return marked_text(value, has_column, at) if isinstance(value, str) else value


def _turns(text: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _own(named: Mapping[str, list[Any]], where: str) -> list[Any]:
    """Returns the images that parts name, once where several keys repeat the prompt."""
    found = {key: images for key, images in named.items() if images}
    keys = [*found]
    for key in keys[1:]:
        if found[key] != found[keys[0]]:
            raise UserError(
                f"{where}: `{keys[0]}` and `{key}` show other images: only answers to one prompt "
                "are compared"
            )
    return found[keys[0]] if keys else []
