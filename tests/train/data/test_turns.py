"""What the keys of a turn mean: honoured as other tools do, or refused by file and line."""

from __future__ import annotations

import pytest

from longctx.errors import UserError
from longctx.train.data.reading.turns import check_some_trained, read_turns

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}


def read(*turns: dict, key: str = "messages") -> tuple[list[dict], list[int]]:
    return read_turns(list(turns), key, "f:1")


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ({}, True),
        ({"train": True}, True),
        ({"train": False}, False),
        ({"train": None}, True),
        ({"train": 1}, True),
        ({"train": 0}, False),
        ({"training": False}, False),
        ({"loss": False}, False),
        ({"loss": True}, True),
        ({"weight": 0}, False),
        ({"weight": 1}, True),
        ({"weight": 0.0}, False),
        ({"weight": 1.0}, True),
        ({"weight": None, "train": False}, False),
        ({"weight": 0, "train": False}, False),
        ({"train_detail": None}, True),
        ({"train_detail": []}, True),
        ({"mask": None}, True),
    ],
)
def test_who_is_trained(keys, trained):
    messages, untrained = read(USER, {**ANSWER, **keys}, USER, ANSWER)
    assert untrained == ([] if trained else [1])
    assert messages == [USER, ANSWER, USER, ANSWER]  # no template sees the keys


@pytest.mark.parametrize("keys", [{"train": False}, {"weight": 0}, {"weight": None}])
def test_a_users_turn_may_say_that_it_is_not_trained(keys):
    assert read({**USER, **keys}, ANSWER) == ([USER, ANSWER], [])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": "false"}, '`train` must be true or false, found "false"'),
        ({"train": "true"}, '`train` must be true or false, found "true"'),
        ({"train": ""}, '`train` must be true or false, found ""'),
        ({"train": 2}, "`train` must be true or false, found 2"),
        ({"train": [True]}, r"`train` must be true or false, found \[true\]"),
        ({"weight": 0.5}, "`weight` must be 0 or 1, found 0.5"),
        ({"weight": -1}, "`weight` must be 0 or 1, found -1"),
        ({"weight": "0"}, '`weight` must be 0 or 1, found "0"'),
        ({"weight": float("nan")}, "`weight` must be 0 or 1, found NaN"),
        ({"weight": 10**400}, "`weight` must be 0 or 1, found 10+"),
        ({"loss": 0.31}, "`loss` must be true or false, found 0.31"),
        ({"train": True, "weight": 0}, "`train` and `weight` contradict each other"),
        ({"train": False, "training": True}, "`train` and `training` contradict"),
        ({"train_detail": [{"begin_offset": 0}]}, "`train_detail`, which is not read: parts of"),
        ({"loss_mask": [0, 1]}, "`loss_mask`, which is not read: parts of a turn"),
        ({"mask": True}, "`mask`, which is not read: write `train`: true or false instead"),
        ({"mask": 0}, "`mask`, which is not read: write `train`"),
        ({"masked": False}, "`masked`, which is not read: write `train`"),
        ({"loss_scale": 2.0}, "`loss_scale`, which is not read: write `train`"),
        ({"content": [{"type": "text", "text": "a", "train": False}]}, "a part with `train`"),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, "a part with `weight`"),
        ({"content": [{"type": "thinking", "text": "hm"}]}, "a part that is not text"),
        (
            {"content": [{"type": "image", "text": "a cat"}]},
            "an image in a part, which is not read",
        ),
        ({"reasoning_content": ["hm"]}, "`reasoning_content` must be a string, found a list"),
        ({"thinking": True}, "`thinking` must be a string, found a boolean"),
        ({"reasoning": "a", "reasoning_content": "b"}, "differ: leave one out"),
        ({"tool_calls": {"name": "f"}}, "`tool_calls` must be a list of objects"),
        ({"tool_calls": ["f()"]}, "`tool_calls` must be a list of objects"),
        ({"tool_calls": "[{"}, "`tool_calls` is not JSON"),
        ({"tool_calls": [{"function": {"arguments": "{"}}]}, "`arguments` of a call is not JSON"),
        ({"tool_calls": [{"function": {"arguments": "[1]"}}]}, "must be an object, found a list"),
        ({"tool_calls": [{"arguments": "[" * 200 + "]" * 200}]}, "nested more than 100 levels"),
        ({"function_call": {"name": "f"}, "tool_calls": [{"name": "f"}]}, "calls as .*: leave one"),
        ({"function_call": "auto"}, "`function_call` must be an object, found a string"),
        ({"role": "assistant", "from": "human"}, "a `role` and another `from`"),
        ({"content": "a", "value": "b"}, "a `content` and another `value`"),
    ],
)
def test_what_cannot_be_honoured_is_refused(keys, message):
    with pytest.raises(UserError, match=f"^f:1: turn 2 of `messages`.*{message}") as error:
        read(USER, {**ANSWER, **keys})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("role", ["user", "system", "tool", "human", "observation"])
def test_only_answers_are_trained(role):
    turn = {"role": role, "content": "x", "train": True}
    with pytest.raises(UserError, match="turn 1 .* but only assistant turns are trained: leave"):
        read(turn, ANSWER)


def test_nothing_left_to_train():
    with pytest.raises(UserError, match="^f:1: `train` or `weight` leaves no assistant turn"):
        check_some_trained([USER, ANSWER], [1], "f:1")
    with pytest.raises(UserError, match="^f:1: no assistant turn, so there is nothing"):
        check_some_trained([USER], [], "f:1")


def test_both_pairs_of_names_are_read_under_either_key_and_may_be_mixed():
    turns = [
        {"from": "human", "value": "u"},
        {"role": "assistant", "content": "a"},
        {"from": "human", "content": "v"},
        {"from": "gpt", "value": "b", "role": None},
    ]
    for key in ("messages", "conversations"):
        messages, _ = read(*turns, key=key)
        assert [(m["role"], m["content"]) for m in messages] == [
            ("user", "u"),
            ("assistant", "a"),
            ("user", "v"),
            ("assistant", "b"),
        ]


CALL = {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    "keys",
    [
        {"tool_calls": [{"type": "function", "function": CALL}]},
        {"tool_calls": [{"type": "function", "function": {**CALL, "arguments": '{"x": 1}'}}]},
        {"tool_calls": '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]'},
        {"function_call": CALL},
        {"function_call": {**CALL, "arguments": '{"x": 1}'}},
    ],
    ids=["objects", "OpenAI's strings", "a column of strings", "one call", "one, as a string"],
)
def test_calls_are_objects_for_the_template(keys):
    """Most templates write arguments as JSON, and a string would be quoted twice."""
    messages, _ = read(USER, {"role": "assistant", "content": None, **keys})
    expected = [{"type": "function", "function": CALL}]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": expected}


@pytest.mark.parametrize(
    "value",
    [
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]',
    ],
)
def test_a_turn_of_calls(value):
    turns = [{"from": "human", "value": "u"}, {"from": "function_call", "value": value}]
    messages, _ = read(*turns, key="conversations")
    expected = [{"type": "function", "function": CALL}]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": expected}


@pytest.mark.parametrize("value", ["f(1)", "", "{", "<think>so</think>{}"])
def test_a_turn_of_calls_that_is_text(value):
    with pytest.raises(UserError, match="turn 2 .* is a function_call that is not JSON: give it"):
        read(USER, {"role": "function_call", "content": value})


def test_other_keys_reach_the_template():
    turn = {**ANSWER, "name": "Ada", "tool_call_id": "1", "mood": "calm", "reasoning": "hm"}
    assert read(USER, turn)[0][1] == turn
