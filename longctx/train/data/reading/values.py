"""JSON values of strangers: parsed, named in messages, and bounded in depth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from datasets import Json

from longctx.errors import UserError

MAX_DEPTH = 100
"""Levels of a value: json and chat templates go down by recursion, and the stack is finite."""


def is_flag(value: Any) -> bool:
    """Whether it is true, false, 1 or 0 (1.0 and 0.0 too: Arrow makes floats of a column)."""
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def excerpt(value: Any) -> str:
    """Returns a value as JSON writes it, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def without_padding(value: Any, feature: Any) -> Any:
    """Returns the value of an Arrow column without the nulls by which Arrow fills a struct's absent
    keys. Columns of JSON hold what was written, nulls too. `feature` is the column's type in
    datasets; where it is None, each null of an object is taken for padding."""
    if isinstance(feature, Json):
        return value
    if isinstance(value, Mapping):
        inner = feature if isinstance(feature, Mapping) else {}
        kept = ((key, item) for key, item in value.items() if item is not None)
        return {key: without_padding(item, inner.get(key)) for key, item in kept}
    if isinstance(value, list):
        item_feature = getattr(feature, "feature", None)
        return [without_padding(item, item_feature) for item in value]
    return value


def read_row(row: Mapping[str, Any], features: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a dataset's row as a record of its own: columns stay, null or not."""
    return {key: without_padding(value, (features or {}).get(key)) for key, value in row.items()}


def kind(value: Any) -> str:
    """Names the kind of a JSON value, for a message."""
    if value is None:
        return "nothing (null)"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    name = names.get(type(value), "a number")
    return f"an empty {name.split()[1]}" if value in ({}, [], "") else name


def check_depth(value: Any, where: str) -> None:
    """Raises UserError for a value of too many levels; goes down by level, not by recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [value for value in level if isinstance(value, (Mapping, list))]
        if not inner:
            return
        items = (value.values() if isinstance(value, Mapping) else value for value in inner)
        level = [item for some in items for item in some]
    raise UserError(f"{where}: nested more than {MAX_DEPTH} levels deep: flatten or remove it")


def fault(error: Exception) -> str:
    """Returns why a text is not JSON, from the error of its parser."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' starting at')} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def parse_json(text: str, where: str) -> Any:
    """Raises UserError for a text that is not JSON, or of too many levels."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} is not JSON ({fault(error)}): one object a line is expected"
        ) from error
    check_depth(value, where)
    return value
