"""Records of preferences: every format is the same group, and everything else is one line."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import UserError
from longctx.train.data.reading.records import as_document

SYSTEM = {"role": "system", "content": "s"}
U, U2 = ({"role": "user", "content": text} for text in ("q", "q2"))
A, B, EARLIER = ({"role": "assistant", "content": text} for text in ("a", "b", "e"))
TURNS = {"prompt": [U], "answers": [[A], [B]], "sides": [0, 1]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "42"}


def read(record, rows="pairs"):
    document = as_document(record, "f:1", rows=rows)
    assert document is not None and document.where == "f:1"
    return document.kind, document.content


PAIRS = {
    "TRL": {"prompt": [U], "chosen": [A], "rejected": [B]},
    "implicit": {"chosen": [U, A], "rejected": [U, B]},
    "UltraFeedback": {
        "prompt": "q",
        "prompt_id": "x",
        "chosen": [U, A],
        "rejected": [U, B],
        "messages": [U, A],
        "score_chosen": 9.0,
        "score_rejected": 1,
    },
    "a question alone": {"prompt": "q", "chosen": [A], "rejected": [B]},
    "the prompt again": {"prompt": [U], "chosen": [U, A], "rejected": [U, B]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    "messages": {"messages": [U], "chosen": A, "rejected": B},
    "texts": {"prompt": [U], "chosen": "a", "rejected": "b"},
    "Alpaca": {"instruction": "q", "chosen": "a", "rejected": "b"},
    "nulls of Arrow": {
        "prompt": [U | {"name": None}],
        "chosen": [A | {"tool_calls": None}],
        "rejected": [B],
        "margin": None,
        "label": None,
    },
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_pairs_of_turns(record):
    assert read(record) == ("chat_answers", TURNS)


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_a_pair_is_two_rated_answers(record):
    assert read(record, "rated") == ("chat_answers", TURNS)


RATED = {
    "TRL": {"prompt": [U], "completion": [A], "label": True},
    "a flag": {"prompt": [U], "completion": [A], "label": 1.0},
    "a turn": {"prompt": "q", "completion": A, "label": True},
    "a text": {"prompt": [U], "completion": "a", "label": True},
    "the prompt again": {"prompt": "q", "completion": [U, A], "label": True},
    "a conversation": {"messages": [U, A], "label": True},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "label": True,
    },
    "Alpaca": {"instruction": "q", "output": "a", "label": True},
}


@pytest.mark.parametrize("record", RATED.values(), ids=RATED)
def test_rated_answers(record):
    expected = {"prompt": [U], "answers": [[A]], "sides": [0]}
    assert read(record, "rated") == ("chat_answers", expected)
    assert read({**record, "label": False}, "rated")[1]["sides"] == [1]


def test_a_pair_beside_its_conversation_is_a_pair():
    record = {**PAIRS["UltraFeedback"], "messages": [U, A, U2, B], "label": 3}
    assert read(record, "rated") == ("chat_answers", TURNS)


def test_strings_stay_strings():
    record = {"prompt": "p ", "chosen": "a", "rejected": "b", "extra": 1}
    expected = {"prompt": "p ", "answers": ["a", "b"], "sides": [0, 1]}
    assert read(record) == ("answers", expected)
    record = {"prompt": "", "completion": "a", "label": 0}
    assert read(record, "rated") == ("answers", {"prompt": "", "answers": ["a"], "sides": [1]})


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: x A: yes", "Q: x A: no", "Q: x A:"),  # the space before the first difference
        ("Q: x A:yes", "Q: x A:no", "Q: x A:"),
        ("the cat", "the car", "the ca"),  # within a word, which TRL cuts, too
        ("the cat", "the cats", "the ca"),  # one is the other's beginning
        ("same", "same", "sam"),
    ],
)
def test_whole_strings_are_cut_as_trl_does(chosen, rejected, prompt):
    kind, content = read({"chosen": chosen, "rejected": rejected})
    answers = [chosen[len(prompt) :], rejected[len(prompt) :]]
    assert kind == "answers" and content.pop("joined") is True
    assert content == {"prompt": prompt, "answers": answers, "sides": [0, 1]}


@pytest.mark.parametrize(
    ("chosen", "rejected", "turns"),
    [
        ([SYSTEM, U, A], [SYSTEM, U, B], 2),
        ([U, EARLIER, U2, A], [U, EARLIER, U2, B], 3),
        ([U, A], [U, A], 1),  # equal: left out when they are packed
        ([U, A, U2, B], [U, A], 1),  # one is the other's beginning
        ([U, CALL, RESULT, A], [U, CALL, RESULT, B], 3),
        ([U, CALL, RESULT, A], [U, B], 1),
    ],
)
def test_whole_conversations_are_cut_as_trl_does(chosen, rejected, turns):
    kind, content = read({"chosen": chosen, "rejected": rejected})
    assert kind == "chat_answers"
    assert content["prompt"] == chosen[:turns]
    assert content["answers"] == [chosen[turns:], rejected[turns:]]


def test_an_explicit_prompt_says_where_answers_begin():
    record = {"prompt": [U], "chosen": [U, EARLIER, U2, A], "rejected": [U, EARLIER, U2, B]}
    assert read(record)[1]["answers"] == [[EARLIER, U2, A], [EARLIER, U2, B]]


def test_turns_of_the_prompt_are_never_trained_anyway():
    read_only = {**EARLIER, "train": False}
    for record in (
        {"chosen": [U, read_only, U2, A], "rejected": [U, read_only, U2, B]},
        {"prompt": [U, read_only, U2], "chosen": [A], "rejected": [B]},
    ):
        assert read(record)[1]["prompt"] == [U, EARLIER, U2]


def test_what_the_template_takes_is_kept():
    beside = {"tools": json.dumps(TOOLS), "documents": [{"text": "d"}], "system": "s"}
    record = {"prompt": [U], "chosen": [A], "rejected": [B], "chat_template_kwargs": {"x": 1}}
    kind, content = read({**record, **beside})
    assert content["prompt"] == [SYSTEM, U] and content["tools"] == TOOLS
    assert content["documents"] == [{"text": "d"}] and content["kwargs"] == {"x": 1}
    record = {"chosen": [SYSTEM, U, A], "rejected": [SYSTEM, U, B], "system": "s"}
    assert read(record)[1]["prompt"] == [SYSTEM, U]


@pytest.mark.parametrize(("margin", "kept"), [(1, 1.0), (-0.5, -0.5), (0, 0.0)])
def test_margins(margin, kept):
    record = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": margin}
    assert read(record)[1]["margin"] == kept
    assert "margin" not in read(record, "rated")[1]


P = {"prompt": "p", "chosen": "a", "rejected": "b"}
T = {"prompt": [U], "chosen": [A], "rejected": [B]}
R = {"prompt": "p", "completion": "c", "label": True}
NEEDS = "expected `chosen` and `rejected` beside a `prompt`, or as whole conversations for a task"
REFUSED_PAIRS = {
    "nothing": ({}, NEEDS + " of pairs, found nothing"),
    "a list": ([P], "expected an object with `chosen` and `rejected`.* found a list"),
    "a question": (
        {"system": "s", "question": "q", "chosen": "The sun", "rejected": "The moon"},
        "`question` beside `chosen` and `rejected` is not read: call it `prompt`",
    ),
    "text": ({"text": "t"}, NEEDS + " of pairs, found `text`: --task sft reads such records"),
    "a conversation": ({"messages": [U, A]}, "found `messages`: --task sft reads"),
    "a completion": ({"prompt": "p", "completion": "c"}, ": --task sft reads"),
    "a rated answer": (R, "found .*`label`: --task kto reads rated answers"),
    "no rejected": ({"prompt": "p", "chosen": "a"}, "found `prompt`, `chosen`$"),
    "rejected is null": ({**P, "rejected": None}, r"found .*`rejected` \(null\)$"),
    "chosen is a number": ({**P, "chosen": 1}, "`chosen` must be a string or turns, found a num"),
    "rejected is true": ({**P, "rejected": True}, "`rejected` must be a string or turns"),
    "two forms": ({**P, "chosen": [A]}, "`chosen` is a list of turns and `rejected` a string"),
    "prompt is a number": ({**P, "prompt": 3}, "`prompt` must be a list of turns, found a number"),
    "prompt is a flag": ({**T, "prompt": False}, "`prompt` must be a list of turns"),
    "no prompt turns": ({**T, "prompt": []}, "`prompt` must be a list of turns, found an empty"),
    "no chosen turns": ({**T, "chosen": []}, "`chosen` must be a list of turns, found an empty"),
    "a turn is null": ({**T, "chosen": [None]}, "turn 1 of `chosen` must be an object"),
    "a turn is a word": ({**T, "rejected": ["b"]}, "turn 1 of `rejected` must be an object"),
    "an empty turn object": ({**T, "chosen": {}}, "turn 1 of `chosen` has the unknown role None"),
    "an unknown role": ({**T, "chosen": [{"role": "x", "content": ""}]}, "unknown role 'x'"),
    "content is a number": ({**T, "chosen": [{**A, "content": 3}]}, "needs a string as `content`"),
    "an image": ({**T, "chosen": [{**A, "content": [{"type": "image"}]}]}, "it has images"),
    "an empty chosen": ({**P, "chosen": " \n"}, "`chosen` is empty, so there is no answer: remove"),
    "an empty rejected": ({**T, "rejected": [{**B, "content": " "}]}, "`rejected` is empty"),
    "an empty whole": ({"chosen": "", "rejected": "b"}, "`chosen` is empty"),
    "only blanks differ": ({"chosen": "a  ", "rejected": "a b"}, "`chosen` has only blanks after"),
    "strings begin otherwise": ({"chosen": "a", "rejected": "b"}, "do not begin alike"),
    "strings share a space": ({"chosen": " a", "rejected": " b"}, "do not begin alike"),
    "other questions": ({"chosen": [U, A], "rejected": [U2, B]}, "share no first turn"),
    "other systems": ({"chosen": [SYSTEM, U, A], "rejected": [U, B]}, "share no first turn"),
    "they differ in a question": (
        {"chosen": [U, A, U, B], "rejected": [U, A, U2, B]},
        "differ from turn 3 on, where `chosen` has a user turn",
    ),
    "one is whole": ({"prompt": [U2], "chosen": [U, A], "rejected": [B]}, "begins with a user tu"),
    "answers without a prompt": ({"chosen": [A], "rejected": [B]}, "answers without a `prompt`"),
    "prompt is another one": ({**T, "prompt": "?", "chosen": [U, A], "rejected": [U, B]}, "whole"),
    "prompt turns are others": (
        {"prompt": [U2], "chosen": [U, A], "rejected": [U, B]},
        "whole conversations that do not both begin with `prompt`",
    ),
    "the prompt alone": (
        {"prompt": [U], "chosen": [U], "rejected": [U, B]},
        "`chosen` has no answer after the prompt: remove the record",
    ),
    "the prompt is answered": ({**T, "prompt": [U, A]}, "the prompt ends with an assistant turn"),
    "the user answers": ({**T, "chosen": [A, U]}, "the answer of `chosen` ends with a user turn"),
    "a tool answers": ({**T, "rejected": [RESULT]}, "begins with a tool turn"),
    "a turn is not trained": (
        {**T, "chosen": [{**A, "train": False}]},
        "turn 1 of `chosen` is not to be trained, but all of an answer counts",
    ),
    "a turn of a whole is not trained": (
        {"chosen": [U, {**A, "train": False}], "rejected": [U, B]},
        "turn 2 of `chosen` is not to be trained, but all of an answer counts",
    ),
    "weight 0": ({**T, "rejected": [{**B, "weight": 0}]}, "turn 1 of `rejected` is not to be"),
    "half a weight": ({**T, "rejected": [{**B, "weight": 0.5}]}, "`weight` must be 0 or 1"),
    "a mask": ({**T, "mask_history": True}, "`mask_history` is true, which is not read"),
    "a record of weight 0": ({**P, "weight": 0}, "`weight` is 0, which is not read"),
    "margin is a word": ({**P, "margin": "1"}, '`margin` must be a number, found "1"'),
    "margin is true": ({**P, "margin": True}, "`margin` must be a number, found true"),
    "margin is NaN": ({**P, "margin": math.nan}, "`margin` must be a number, found NaN"),
    "margin is infinite": ({**P, "margin": math.inf}, "`margin` must be a number, found Infinity"),
    "margin is huge": ({**P, "margin": 10**400}, "`margin` must be a number, found 1000"),
    "margin is a list": ({**P, "margin": [1]}, "`margin` must be a number"),
    "system beside strings": ({**P, "system": "s"}, "`system` beside a `prompt` that is a string"),
    "tools beside whole strings": (
        {"chosen": "x a", "rejected": "x b", "tools": TOOLS},
        "`tools` beside a `prompt` that is a string",
    ),
    "tools are a number": ({**T, "tools": 3}, "`tools` must be a list of JSON schemas"),
    "tools are no JSON": ({**T, "tools": "{"}, "`tools` is not JSON"),
    "tools and functions": ({**T, "tools": TOOLS, "functions": TOOLS}, "leave one out"),
    "two systems": ({**T, "prompt": [SYSTEM, U], "system": "x"}, "another `system`"),
    "a variable of ours": ({**T, "chat_template_kwargs": {"tokenize": 1}}, "may not hold"),
    "no instruction": ({"instruction": " ", "chosen": "a", "rejected": "b"}, "`instruction` is em"),
    "nested too deeply": ({**P, "x": json.loads("[" * 300 + "]" * 300)}, "nested more than 100"),
}


@pytest.mark.parametrize(("record", "message"), REFUSED_PAIRS.values(), ids=REFUSED_PAIRS)
def test_what_is_no_pair_is_one_line(record, message):
    with pytest.raises(UserError, match=rf"^f:1: .*({message})") as error:
        as_document(record, "f:1", rows="pairs")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


CHATS = [U, A, U, B]
REFUSED_RATED = {
    "text": ({"text": "t"}, "expected `prompt`, `completion` and `label` for --task kto, found"),
    "no label": ({"prompt": "p", "completion": "c"}, "found `prompt`, `completion`: --task sft"),
    "label is null": ({**R, "label": None}, r"`label` \(null\): --task sft reads"),
    "label is a word": ({**R, "label": "true"}, '`label` must be true .* or false, found "true"'),
    "label is a score": ({**R, "label": 0.5}, "`label` must be true .* found 0.5"),
    "label is two": ({**R, "label": 2}, "`label` must be true .* found 2"),
    "label is minus one": ({**R, "label": -1}, "`label` must be true .* found -1"),
    "label is NaN": ({**R, "label": math.nan}, "`label` must be true .* found NaN"),
    "label is a list": ({**R, "label": [True]}, r"`label` must be true .* found \[true\]"),
    "label is an object": ({**R, "label": {}}, "`label` must be true .* found {}"),
    "label alone": ({"label": True}, "found `label`$"),
    "no prompt": ({"completion": "c", "label": True}, "`completion` without a `prompt`"),
    "an empty completion": ({**R, "completion": " "}, "`completion` is empty"),
    "completion is a number": ({**R, "completion": 1}, "`completion` must be a string or turns"),
    "no turns": ({**R, "completion": []}, "`completion` must be a list of turns, found an empty"),
    "the user completes": ({**R, "completion": [U]}, "begins with a user turn"),
    "a turn is not trained": ({**R, "completion": {**A, "train": 0}}, "is not to be trained"),
    "the answer is not trained": (
        {"messages": [U, {**A, "train": False}], "label": True},
        "turn 2 of `messages` is not to be trained",
    ),
    "two answers": ({"messages": CHATS, "label": True}, "rates one answer, so the last turn"),
    "an answer before": ({"messages": [U, A, U], "label": True}, "rates one answer"),
    "an answer alone": ({"messages": [A], "label": True}, "rates one answer"),
    "no answer": ({"messages": [U], "label": True}, "rates one answer"),
    "messages is a word": ({"messages": "hi", "label": True}, "`messages` must be a list"),
    "a pair's half": ({"prompt": "p", "chosen": "a", "label": True}, "found `prompt`, `chosen`, "),
}


@pytest.mark.parametrize(("record", "message"), REFUSED_RATED.values(), ids=REFUSED_RATED)
def test_what_is_not_rated_is_one_line(record, message):
    with pytest.raises(UserError, match=rf"^f:1: .*({message})") as error:
        as_document(record, "f:1", rows="rated")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (P, "found `prompt`, `chosen`, `rejected`: --task dpo reads pairs"),
        ({"chosen": [U, A], "rejected": [U, B]}, ": --task dpo reads pairs"),
        ({"messages": [U], "chosen": "a", "rejected": "b"}, "pairs, which --task dpo reads: here"),
        (R, "`label` rates the completion, as --task kto reads it: leave `label` out"),
        ({**R, "label": False}, "`label` rates the completion"),
    ],
)
def test_preferences_are_no_text(record, message):
    with pytest.raises(UserError, match=rf"^f:1: .*{message}"):
        as_document(record, "f:1")


def test_labels_that_rate_nothing_are_ignored_in_text():
    for record in ({"text": "t", "label": True}, {"prompt": "p", "completion": "c", "label": 3}):
        assert as_document(record, "f:1") is not None


TURN_KEYS = ["role", "content", "from", "value", "train", "weight", "tool_calls", "reasoning"]
KEYS = [
    *("prompt", "chosen", "rejected", "completion", "label", "margin", "messages", "instruction"),
    *("conversations", "output", "history", "system", "tools", "documents", "input", "x"),
]
words = st.sampled_from(["", " ", "a", "b", "user", "assistant", "human", "gpt", "{}", "[1]"])
plain = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(), words)
turns = st.dictionaries(st.sampled_from(TURN_KEYS), plain, max_size=4)
good_turns = st.sampled_from([SYSTEM, U, U2, A, B, CALL, RESULT])
values = st.recursive(
    st.one_of(plain, turns, good_turns),
    lambda inner: st.one_of(
        st.lists(st.one_of(inner, good_turns), max_size=4),
        st.dictionaries(st.sampled_from(TURN_KEYS), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(
    record=st.dictionaries(st.sampled_from(KEYS), values, max_size=7),
    rows=st.sampled_from(["pairs", "rated"]),
)
def test_garbage_is_read_or_refused_in_one_line(record, rows):
    try:
        document = as_document(record, "f:1", rows=rows)
    except UserError as error:
        assert str(error).startswith("f:1") and "\n" not in str(error)
        return
    assert document is not None
    content = document.content
    assert len(content["answers"]) == len(content["sides"]) and all(content["answers"])
    json.dumps(content, allow_nan=False)
    if document.kind == "chat_answers":
        assert content["prompt"] and content["prompt"][-1]["role"] != "assistant"
        assert all(answer[0]["role"] == "assistant" for answer in content["answers"])


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "answers"),
    [
        ("Why so? ", "Why so? Yes.", "Why so? No.", ["Yes.", "No."]),
        ("Why?", "Why? Yes.", "Why? No.", [" Yes.", " No."]),
        ("Hi", "Hi you", "Hi there", ["Hi you", "Hi there"]),
        ("Why so? ", "Why so? Yes.", "No.", ["Why so? Yes.", "No."]),
        ("Why so? ", "Why so? ", "Why so? No.", ["Why so? ", "Why so? No."]),
    ],
    ids=["both", "a question", "a greeting", "one", "nothing else"],
)
@pytest.mark.parametrize("rows", ["pairs", "rated"])
def test_a_prompt_that_both_answers_repeat_is_cut(rows, prompt, chosen, rejected, answers):
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    document = as_document(record, "f:1", rows=rows)
    assert document and document.content["prompt"] == prompt
    assert document.content["answers"] == answers
