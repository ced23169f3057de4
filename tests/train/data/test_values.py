from __future__ import annotations

import pytest
from datasets import Json, List, Value

from longctx.errors import UserError
from longctx.train.data.reading.values import (
    check_depth,
    excerpt,
    is_flag,
    kind,
    parse_json,
    without_padding,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"', r"f:2 is not JSON \(Expecting ',' delimiter at column 13\)"),
        ("hello", "Expecting value at column 1"),
        ('{"text": "a"} {"text": "b"}', "Extra data"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 10_000, r"f:2 is not JSON \(Exceeds the limit"),
    ],
)
def test_what_is_not_json(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse_json(text, "f:2")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [True, False, 0, 1, 0.0, 1.0])
def test_flags(value):
    assert is_flag(value)


@pytest.mark.parametrize("value", [2, -1, 0.5, float("nan"), "1", "true", None, [], {}, [1]])
def test_what_is_no_flag(value):
    assert not is_flag(value)


def test_depth():
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    check_depth(deep, "f:1")
    check_depth("a string is not gone through", "f:1")
    check_depth(3, "f:1")
    for deeper in ([deep], {"a": deep}):
        with pytest.raises(UserError, match="^f:1: nested more than 100 levels deep"):
            check_depth(deeper, "f:1")


def test_a_string_of_json_is_bounded_too():
    assert parse_json("[" * 100 + "]" * 100, "f:1")
    with pytest.raises(UserError, match="^f:1: nested more than 100 levels deep"):
        parse_json("[" * 101 + "]" * 101, "f:1")


def test_words():
    assert (
        kind([]) == "an empty list" and kind(None) == "nothing (null)" and kind(0.5) == "a number"
    )
    assert excerpt("x" * 99) == '"' + "x" * 56 + "..." and excerpt({1, 2}) == "{1, 2}"


def test_only_padding_of_arrow_goes():
    found = {"a": None, "b": [{"c": None}, None], "d": {"e": None, "f": 1}}
    assert without_padding(found, None) == {"b": [{}, None], "d": {"f": 1}}
    known = {"a": Value("int64"), "b": List({"c": Value("string")}), "d": Json()}
    assert without_padding(found, known) == {"b": [{}, None], "d": {"e": None, "f": 1}}
