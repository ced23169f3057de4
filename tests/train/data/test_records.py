from __future__ import annotations

import json

import pytest

from longctx.errors import UserError
from longctx.train.data.reading.records import as_document


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


def test_tools_and_tool_calls_reach_the_template_with_their_nulls():
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
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1, "y": None}
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
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "it has images"),
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


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"instruction": "i", "output": "o"}, ["i", "o"]),
        ({"instruction": "i", "input": "x", "output": "o"}, ["i\nx", "o"]),
        ({"instruction": "i", "input": "", "output": "o"}, ["i", "o"]),
        ({"instruction": "i", "input": None, "output": "o"}, ["i", "o"]),
        ({"instruction": "", "input": "x", "output": "o"}, ["x", "o"]),
        ({"instruction": "i", "output": "o", "text": "### Instruction: i"}, ["i", "o"]),
        ({"instruction": "i", "output": "o", "history": []}, ["i", "o"]),
        ({"instruction": "i", "output": "o", "history": [["p", "q"]]}, ["p", "q", "i", "o"]),
        ({"instruction": "i", "output": "o", "system": "s"}, ["s", "i", "o"]),
        ({"instruction": "i", "output": "o", "system": ""}, ["i", "o"]),
    ],
)
def test_alpaca_is_one_exchange(record, turns):
    document = as_document(record, "f:1")
    assert document and document.kind == "instruction"
    roles = ["user", "assistant"] * 2
    roles = ["system", *roles] if record.get("system") else roles
    expected = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    assert document.content == {"messages": expected}


PROMPT = [TURNS[0], TURNS[1], {"role": "user", "content": "v"}]


def test_a_prompt_of_turns_is_read_and_not_trained():
    document = as_document({"prompt": PROMPT, "completion": [ASSISTANT]}, "f:1")
    assert document and document.kind == "chat"
    assert document.content == {"messages": [*PROMPT, ASSISTANT], "untrained": [1]}


def test_what_is_beside_a_conversation_reaches_the_template():
    record = {
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
        "system": "Be brief.",
        "functions": [{"name": "f", "parameters": None}],
        "documents": '[{"title": "t", "text": "x"}]',
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
        "id": 7,
    }
    document = as_document(record, "f:1")
    assert document and document.content == {
        "messages": [{"role": "system", "content": "Be brief."}, *TURNS],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}],
        "documents": [{"title": "t", "text": "x"}],
        "kwargs": {"enable_thinking": False},
    }


def test_numbers_of_untrained_turns_follow_a_system_prompt():
    turns = [TURNS[0], {**TURNS[1], "train": False}, *TURNS]
    document = as_document({"messages": turns, "system": "s"}, "f:1")
    assert document and document.content["untrained"] == [2]
    assert document.content["messages"][2] == TURNS[1]


@pytest.mark.parametrize(
    "beside",
    [
        {"train": True},
        {"weight": 1},
        {"weight": 1.0},
        {"weight": None},
        {"loss_mask": None},
        {"roles_to_train": ["assistant"]},
        {"roles_to_train": []},
        {"train_on_inputs": False},
        {"mask": "User"},
        {"system": " "},
        {"tools": "[]"},
        {"functions": []},
        {"documents": []},
        {"chat_template_kwargs": {}},
        {"chosen": "a", "rejected": "b"},
        {"label": 3, "labels": [1], "source": "x", "quality": 0.2},
    ],
    ids=str,
)
def test_what_asks_for_what_is_done_anyway_is_no_matter(beside):
    document = as_document({"messages": TURNS, **beside}, "f:1")
    assert document and document.content.get("untrained") is None
    assert document.content["messages"] == TURNS


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "t", "train": False}, "`train` is false, which is not read: records are trained"),
        ({"text": "t", "weight": 0}, "`weight` is 0, which is not read: records are trained whole"),
        ({"text": "t", "weight": 0.5}, "`weight` is 0.5"),
        ({"text": "t", "weight": "1"}, '`weight` is "1"'),
        ({"text": "t", "loss_mask": [1, 0]}, "`loss_mask` is .* on the turns"),
        ({"prompt": "p", "completion": "c", "train": "false"}, '`train` is "false"'),
        ({"prompt": "p", "completion": "c", "train_on_inputs": True}, "`train_on_inputs` is true"),
        ({"messages": TURNS, "train": False}, "`train` is false"),
        ({"messages": TURNS, "roles_to_train": ["user"]}, r'`roles_to_train` is \["user"\]'),
        ({"messages": TURNS, "roles_to_train": "all"}, '`roles_to_train` is "all"'),
        ({"messages": TURNS, "mask_history": True}, "`mask_history` is true"),
        ({"messages": TURNS, "mask": "Assistant"}, '`mask` is "Assistant"'),
        ({"messages": TURNS, "train_detail": [1]}, "`train_detail`"),
        ({"messages": TURNS, "reasoning_content": "hm"}, "write it on the turn"),
        (
            {"messages": [*TURNS, TURNS[0]], "chosen": "x"},
            "`chosen` and `rejected` are pairs, which --task dpo reads",
        ),
        ({"messages": TURNS, "system": 3}, "`system` must be a string, found a number"),
        (
            {"messages": [{"role": "system", "content": "a"}, *TURNS], "system": "b"},
            "a system turn and another `system`: leave one out",
        ),
        ({"messages": TURNS, "system": "a", "system_prompt": "b"}, "another `system_prompt`"),
        ({"messages": TURNS, "tools": [{}], "functions": [{}]}, "`tools` and `functions`: leave"),
        ({"messages": TURNS, "functions": "f"}, "`functions` is not JSON"),
        ({"messages": TURNS, "documents": ["d"]}, "`documents` must be a list"),
        ({"messages": TURNS, "chat_template_kwargs": [1]}, "must be an object, found a list"),
        ({"messages": TURNS, "chat_template_kwargs": "{"}, "`chat_template_kwargs` is not JSON"),
        (
            {"messages": TURNS, "chat_template_kwargs": {"tools": [1]}},
            "may not hold `tools`: write it beside the turns",
        ),
        (
            {"messages": TURNS, "chat_template_kwargs": {"add_generation_prompt": True}},
            "may not hold `add_generation_prompt`: leave it out",
        ),
        ({"messages": TURNS, "chat_template_kwargs": {"bos_token": "x"}}, "hold `bos_token`"),
        ({"messages": [{**TURNS[1], "train": False}]}, "leaves no assistant turn to train on"),
        ({"prompt": PROMPT, "completion": [USER]}, "leaves no assistant turn to train on"),
        ({"prompt": PROMPT, "completion": "c"}, "`prompt` must be a string, found a list"),
        ({"prompt": "p", "completion": [ASSISTANT]}, "`completion` must be a string, found a list"),
        ({"prompt": "p", "completion": "c", "system": "s"}, "`system` beside a `prompt`"),
        ({"prompt": "p", "completion": "c", "tools": [{}]}, "`tools` beside a `prompt`"),
        ({"instruction": "i"}, "expected .*`instruction` and `output`, found `instruction`"),
        ({"instruction": "i", "output": ""}, "`output` is empty"),
        ({"instruction": " ", "input": "", "output": "o"}, "`instruction` is empty"),
        ({"instruction": 1, "output": "o"}, "`instruction` must be a string"),
        ({"instruction": "i", "input": [], "output": "o"}, "`input` must be a string, found an"),
        ({"instruction": "i", "output": "o", "history": ["p"]}, "`history` must be a list of"),
        ({"instruction": "i", "output": "o", "weight": 0}, "`weight` is 0"),
    ],
)
def test_what_would_be_trained_otherwise_is_refused(record, message):
    with pytest.raises(UserError, match=f"^f:1: .*{message}") as error:
        as_document(record, "f:1")
    assert "\n" not in str(error.value)
