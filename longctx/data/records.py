"""What a record means: a JSONL object or a dataset's row becomes a checked document.

    {"text": "..."}                                               every token is trained
    {"prompt": "...", "completion": "..."}                        the completion is trained
    {"messages": [{"role": "user", "content": "..."}, ...]}       assistant turns are trained
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same in ShareGPT's words

Roles of other exports are translated (`human`, `gpt`, `observation`, ...). `tools` beside a
conversation, and a turn's further fields such as `tool_calls`, reach the chat template as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longctx.errors import UserError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
MAX_DEPTH = 100
"""Levels of a record: json and chat templates go down by recursion, and the stack is finite."""
FORMATS = "`text`, `messages`, `conversations` or `prompt` and `completion`"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One training document and where it came from (`file` or `file:line`)."""

    kind: Literal["text", "completion", "chat"]
    content: Any
    """text: str; completion: [prompt, completion]; chat: {"messages": [...], "tools": ...}"""
    where: str
    replaced_bytes: int = 0
    """Undecodable bytes that became U+FFFD."""


def as_document(record: Any, where: str, replaced_bytes: int = 0) -> Document | None:
    """Checks a record (a JSONL object or a dataset's row); None when it holds only blanks.

    Raises UserError starting with `where` for anything that is not one of the known formats.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with {FORMATS}, found {_kind(record)}")
    _check_depth(record, where)
    given = {key for key, value in record.items() if value is not None}
    content: Any
    if "messages" in given or "conversations" in given:
        key = "messages" if "messages" in given else "conversations"
        content = {"messages": _messages(record[key], key, where)}
        if "tools" in given:
            content["tools"] = _tools(record["tools"], where)
        return Document(kind="chat", content=content, where=where, replaced_bytes=replaced_bytes)
    if {"prompt", "completion"} <= given:
        content = [_string(record[key], key, where) for key in ("prompt", "completion")]
        if not content[1].strip():
            raise UserError(f"{where}: `completion` is empty, so there is nothing to train on")
        return Document(
            kind="completion", content=content, where=where, replaced_bytes=replaced_bytes
        )
    if "text" in given:
        content = _string(record["text"], "text", where)
        if not content.strip():
            return None
        return Document(kind="text", content=content, where=where, replaced_bytes=replaced_bytes)
    found = ", ".join(
        f"`{key}`" + " (null)" * (value is None) for key, value in list(record.items())[:6]
    )
    raise UserError(f"{where}: expected {FORMATS}, found {found or 'nothing'}")


def _check_depth(value: Any, where: str) -> None:
    """Goes down level by level, not by recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        items = (
            item
            for value in level
            for item in (value.values() if isinstance(value, Mapping) else value)
        )
        level = [item for item in items if isinstance(item, (Mapping, list))]
        if not level:
            return
    raise UserError(f"{where}: nested more than {MAX_DEPTH} levels deep: flatten or remove it")


def _messages(turns: Any, key: str, where: str) -> list[dict[str, Any]]:
    role_key, content_key = ("role", "content") if key == "messages" else ("from", "value")
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise UserError(f"{where}: `{key}` must be a list of turns, found {_kind(turns)}")
    messages = []
    for number, turn in enumerate(turns, 1):
        at = f"{where}: turn {number} of `{key}`"
        if not isinstance(turn, Mapping):
            raise UserError(f"{at} must be an object, found {_kind(turn)}")
        # The usual names are accepted under both keys: exports mix them.
        if role_key not in turn and "role" in turn:
            role_key, content_key = "role", "content"
        name = turn.get(role_key)
        if not isinstance(name, str) or name not in ROLES:
            raise UserError(
                f"{at} has the unknown {role_key} {name!r}; known: {', '.join(sorted(ROLES))}"
            )
        content = turn.get(content_key)
        if isinstance(content, list):
            content = "".join(_text_part(part, at) for part in content)
        if content is None and turn.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            found = _kind(content) if content_key in turn else "nothing"
            raise UserError(f"{at} needs a string as `{content_key}`, found {found}")
        # Arrow fills absent fields with None, which templates would print.
        extra = {k: _without_none(v) for k, v in turn.items() if v is not None}
        extra = {k: v for k, v in extra.items() if k not in (role_key, content_key)}
        messages.append({"role": ROLES[name], "content": content, **extra})
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: no assistant turn, so there is nothing to train on")
    return messages


def _text_part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    raise UserError(f"{at} has a part that is not text: only text can be trained on")


def _tools(tools: Any, where: str) -> Any:
    if isinstance(tools, str):  # datasets keep JSON schemas as strings
        tools = parse_json(tools, f"{where}: `tools`") if tools.strip() else []
        _check_depth([tools], f"{where}: `tools`")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{where}: `tools` must be a list of JSON schemas")
    return [_without_none(tool) for tool in tools] or None


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _string(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: `{key}` must be a string, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    name = names.get(type(value), "a number")
    return f"an empty {name.split()[1]}" if value in ({}, [], "") else name


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else "nested too deeply"
            if isinstance(error, RecursionError)
            else str(error)
        )
        raise UserError(f"{where} is not JSON ({reason}): one object a line is expected") from error
