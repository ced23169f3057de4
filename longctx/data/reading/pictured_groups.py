"""Records of preferences whose prompt has pictures, in the forms of preferences.py and places.py.

    {"images": ["a.png"], "prompt": [turns with places], "chosen": [turns], "rejected": [turns]}
    {"images": ["a.png"], "prompt": "What is this?", "chosen": "A heron.", "rejected": "A cat."}
    {"chosen": [turns with places], "rejected": [turns with places]}     as whole conversations

Places become marks, the marked record is read as any other one, and the prompt that comes out must
have all of the marks. Strings become turns: pictures stand in conversations alone. Where both
answers are whole conversations, both show the pictures of their prompt, which must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longctx.data.reading.groups import Rows
from longctx.data.reading.places import (
    MARK,
    TURNS,
    column_of,
    marked_text,
    marked_turns,
    pictures_of_places,
)
from longctx.data.reading.preferences import PAIR, is_pair, read_group
from longctx.errors import UserError

_TEXTS = (*TURNS, "instruction", "input", "output")
"""The keys of texts and turns that may have places."""


def read_pictured_group(
    given: Mapping[str, Any], rows: Rows, where: str
) -> tuple[dict[str, Any], list[Any]] | None:
    """Returns the content of a record's document, in turns whose prompt has a mark at each place,
    and what describes the picture of each; None where the record has not the keys of a group.

    Raises UserError starting with `where` as `read_group` and `read_conversation` do.
    """
    column = column_of(given, where)
    marked, named = dict(given), dict[str, list[Any]]()
    for key in _TEXTS:
        if key in given:
            marked[key], named[key] = _marked(given[key], key, column is not None, where)
    found = read_group(marked, rows, where)
    if found is None:
        return None
    _, content = found
    if content.get("joined"):
        raise UserError(
            f"{where}: pictures stand in a prompt, and `chosen` and `rejected` are whole strings: "
            "write `prompt` and the answers apart"
        )
    content = content | {"prompt": _turns(content["prompt"], "user")}
    content["answers"] = [_turns(answer, "assistant") for answer in content["answers"]]
    for number, answer in enumerate(content["answers"]):
        if any(MARK in turn["content"] for turn in answer):
            name = f"`{PAIR[number]}`" if is_pair(given) else "the completion"
            raise UserError(
                f"{where}: {name} is an answer with a picture: models that are trained here write "
                "text alone"
            )
    own = _own(named, where)
    return content, pictures_of_places(content["prompt"], own, column, where)


def _marked(value: Any, key: str, has_column: bool, where: str) -> tuple[Any, list[Any]]:
    if isinstance(value, str):
        return marked_text(value, has_column, f"{where}: `{key}`"), []
    if isinstance(value, Mapping):
        value = [value]
    return marked_turns(value, key, has_column, where)


def _turns(text: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _own(named: Mapping[str, list[Any]], where: str) -> list[Any]:
    """Returns the pictures that parts name, once where several keys repeat the prompt."""
    found = {key: pictures for key, pictures in named.items() if pictures}
    keys = [*found]
    for key in keys[1:]:
        if found[key] != found[keys[0]]:
            raise UserError(
                f"{where}: `{keys[0]}` and `{key}` show other pictures: only answers to one prompt "
                "are compared"
            )
    return found[keys[0]] if keys else []
