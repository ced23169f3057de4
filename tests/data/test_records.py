from __future__ import annotations

import json

import pytest

from longctx.data.records import as_document
from longctx.data.values import parse_json
from longctx.errors import UserError


def test_text_and_completion():
    document = as_document({"text": "a", "id": 3}, "f:1")
    assert document and (document.kind, document.content, document.where) == ("text", "a", "f:1")
    document = as_document({"prompt": "p", "completion": "c"}, "f:1")
    assert document and (document.kind, document.content) == ("completion", ["p", "c"])
    assert as_document({"text": " \n"}, "f:1") is None


def test_sharegpt_is_translated():
    turns = [("system", "s"), ("human", "h"), ("gpt", "g"), ("observation", "t"), ("gpt", "g2")]
    record = {"conversations": [{"from": role, "value": value} for role, value in turns]}
    document = as_document(record, "f:1")
    assert document and document.kind == "chat"
    assert document.content["messages"] == [
        {"role": role, "content": value}
        for role, value in [
            ("system", "s"),
            ("user", "h"),
            ("assistant", "g"),
            ("tool", "t"),
            ("assistant", "g2"),
        ]
    ]


def test_tools_and_tool_calls_reach_the_template_without_arrow_nulls():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
        "text": None,
    }
    document = as_document(record, "f:1")
    assert document
    user, assistant = document.content["messages"]
    assert user == {"role": "user", "content": "a"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert document.content["tools"] == [{"type": "function", "function": {"name": "f"}}]


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "ho"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "expected an object with `text`"),
        ("text", "found a string"),
        (None, "found nothing"),
        (3, "found a number"),
        ({}, "found nothing"),
        ({"body": "x", "url": "y"}, "found `body`, `url`"),
        ({"text": None}, "found `text`"),
        ({"text": 3}, "`text` must be a string, found a number"),
        ({"text": True}, "`text` must be a string, found a boolean"),
        ({"text": ["a"]}, "`text` must be a string, found a list"),
        ({"prompt": "p"}, "found `prompt`"),
        ({"prompt": 1, "completion": "c"}, "`prompt` must be a string"),
        ({"prompt": "p", "completion": {}}, "`completion` must be a string, found an empty object"),
        ({"prompt": "p", "completion": " "}, "`completion` is empty"),
        ({"messages": []}, "must be a list of turns, found an empty list"),
        ({"messages": "hi"}, "must be a list of turns, found a string"),
        ({"messages": {"role": "user"}}, "must be a list of turns, found an object"),
        ({"messages": ["hi"]}, "turn 1 of `messages` must be an object"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [USER, {**ASSISTANT, "role": "bot"}]}, "turn 2 .* unknown role 'bot'"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [USER, {"role": "assistant"}]}, "needs a string as `content`, found nothing"),
        ({"messages": [{"role": "user", "content": 5}, ASSISTANT]}, "found a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]}, "not text"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown from 'alien'"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "no assistant turn"),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, "`tools` is not JSON"),
        ({"messages": [USER, ASSISTANT], "tools": 3}, "`tools` must be a list"),
    ],
)
def test_a_bad_record_says_where_and_what(record, message):
    with pytest.raises(UserError, match=f"^data.jsonl:7: .*{message}") as error:
        as_document(record, "data.jsonl:7")
    assert "\n" not in str(error.value)


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


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


TURNS = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("levels", [60, 2_000])
@pytest.mark.parametrize(
    "place",
    [
        lambda deep: {"text": "t", "meta": deep},
        lambda deep: {"messages": TURNS, "tools": [deep]},
        lambda deep: {"messages": [{**TURNS[0], "content": [deep]}, TURNS[1]]},
        lambda deep: {"messages": [TURNS[0], {**TURNS[1], "tool_calls": [deep]}]},
    ],
    ids=["beside", "tools", "content", "calls"],
)
def test_what_is_nested_too_deeply_is_refused(levels, place):
    with pytest.raises(UserError, match="^f:1: nested more than 100 levels deep: flatten"):
        as_document(place(nested(levels)), "f:1")


@pytest.mark.parametrize("levels", [60, 20_000])
def test_tools_as_a_string_are_refused_too(levels):
    text = '[{"a":' * levels + "1" + "}]" * levels
    with pytest.raises(UserError, match=r"^f:1: `tools`.*nested (more than 100|too deeply)"):
        as_document({"messages": TURNS, "tools": text}, "f:1")


def test_a_hundred_levels_are_allowed():
    document = as_document({"messages": TURNS, "tools": [nested(48)]}, "f:1")
    assert json.dumps(document.content["tools"][0]) == json.dumps(nested(48))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": None}, r"found `text` \(null\)$"),
        ({"text": None, "id": 3}, r"found `text` \(null\), `id`$"),
        ({"messages": [None]}, r"turn 1 of `messages` must be an object, found nothing \(null\)"),
        (
            {"messages": [{"role": "user", "content": None}]},
            r"turn 1 of `messages` needs a string as `content`, found nothing \(null\)",
        ),
        (
            {"messages": [{"role": "user"}]},
            "turn 1 of `messages` needs a string as `content`, found nothing$",
        ),
        ({"prompt": "p", "completion": None}, r"found `prompt`, `completion` \(null\)$"),
    ],
)
def test_null_is_called_null(record, message):
    with pytest.raises(UserError, match=f"^f:1: .*{message}"):
        as_document(record, "f:1")
