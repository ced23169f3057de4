"""Which characters are trained, and that nothing of a conversation is left out unsaid."""

from __future__ import annotations

import pytest
from small_tokenizer import PLAIN_CHATML

from longctx.errors import UserError
from longctx.train.data.chat.assistant_masks import Conversation
from longctx.train.data.chat.ends import EndTokens
from longctx.train.data.text.tokenizer import CHAT_TEMPLATE

TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "s"},
    {"role": "assistant", "content": "c"},
]
TEMPLATES = {"markers": CHAT_TEMPLATE, "prefixes": PLAIN_CHATML}


def trained(template: str, messages=TURNS, **more) -> list[str]:
    conversation = Conversation(
        messages=messages,
        template=template,
        special_tokens={"bos_token": "<s>"},
        tokens=EndTokens(("<|im_end|>",)),
        where="f:1",
        **more,
    )
    text, spans = conversation.run(lambda: None)
    return [text[start:end].removesuffix("<|im_end|>") for start, end in spans]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    ("untrained", "expected"),
    [
        ((), "abc"),
        ((1,), "bc"),
        ((3,), "ac"),
        ((5,), "ab"),
        ((1, 3), "c"),
        ((1, 5), "b"),
        ((3, 5), "a"),
    ],
)
def test_turns_that_are_not_trained(template, untrained, expected):
    assert trained(template, untrained=untrained) == list(expected)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_answer_in_the_users_words_is_told_apart(template):
    turns = [{**turn, "content": "same"} for turn in TURNS]
    assert trained(template, turns, untrained=(3,)) == ["same", "same"]


def test_several_marks_in_a_turn_belong_to_it():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}-{% generation %}<|im_end|>"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    assert trained(template, untrained=(3,)) == ["a", "", "c", ""]


def test_calls_of_a_turn_belong_to_it():
    """As in Llama's template, where a call stands instead of the text."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    turns = with_key(3, content="", tool_calls=CALLS)
    assert trained(template, turns, untrained=(3,)) == ["a", "c"]
    assert trained(template, turns, untrained=(1,)) == ["f", "c"]


def test_markers_of_the_last_turn_alone():
    template = (
        "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert trained(template, untrained=(3,)) == ["c"]
    assert trained(template, untrained=(5,)) == []


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ messages[1].content }}{% endgeneration %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{% generation %}{{ c }}{% endgeneration %}"
        "{% endfor %}{% endfor %}",
    ],
    ids=["one for all", "one in the others", "by character"],
)
def test_markers_that_do_not_tell_turns_apart(template):
    with pytest.raises(UserError, match=r"^f:1: `train` is false .* do not tell turn \d from"):
        trained(template, untrained=(3,))


REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content[1:]"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_turns_trains_the_last_alone():
    turns = [TURNS[0], {"role": "assistant", "content": "?a"}, *TURNS[:2]]
    with pytest.raises(UserError, match=r"turn 2\).* or write `train`: false on the earlier"):
        trained(REWRITES, turns)
    turns[2] = {"role": "user", "content": ""}
    assert trained(REWRITES, turns, untrained=(1,)) == ["a"]


# --- what a template leaves out --------------------------------------------------------------

CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
SHOWS = (
    "{{ tools | tojson if tools else '' }}{{ documents | tojson if documents else '' }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.reasoning_content or '' }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ m.documents or '' }}"
    "{{ m.tools or '' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}{{ mood }}"
)


def with_key(number: int, **keys) -> list[dict]:
    return [{**turn, **keys} if i == number else turn for i, turn in enumerate(TURNS)]


KEYS = {
    "tool_calls": CALLS,
    "reasoning_content": "hm",
    "reasoning": "hm",
    "thinking": "hm",
    "tools": [{"name": "f"}],
    "documents": [{"text": "d"}],
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_key_that_is_left_out_is_refused(key, template):
    with pytest.raises(UserError, match=f"^f:1: .* leaves out `{key}` of turn 4, so the model"):
        trained(template, with_key(3, **{key: KEYS[key]}))


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content", "tools", "documents"])
def test_a_key_that_is_shown_is_trained(key):
    assert trained(SHOWS, with_key(3, **{key: KEYS[key]}))[1] != "b"


def test_every_turn_must_show_its_own():
    """A template that shows reasoning of the last turn alone would lose that of the others."""
    template = SHOWS.replace(
        "m.reasoning_content or ''", "m.reasoning_content if loop.last else ''"
    )
    turns = [{**t, "reasoning_content": "hm"} if t["role"] == "assistant" else t for t in TURNS]
    with pytest.raises(UserError, match="leaves out `reasoning_content` of turn 2"):
        trained(template, turns)
    assert trained(template, turns, untrained=(1, 3)) == ["hmc"]  # as when the model answers


def test_names_that_transformers_copies_are_one():
    turns = with_key(3, reasoning="hm", reasoning_content="hm")
    assert trained(SHOWS, turns) == ["a", "hmb", "c"]


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_is_beside_the_turns_must_be_shown(name):
    with pytest.raises(UserError, match=f"^f:1: the chat template leaves out `{name}`, so"):
        trained(CHAT_TEMPLATE, **{name: [{"name": "f"}]})
    assert trained(SHOWS, **{name: [{"name": "f"}]}) == ["a", "b", "c"]


@pytest.mark.parametrize("empty", [None, "", " \n", [], {}])
def test_what_is_empty_is_no_matter(empty):
    for key in ("tool_calls", "reasoning_content", "documents"):
        if isinstance(empty, str) == (key == "reasoning_content"):
            assert trained(CHAT_TEMPLATE, with_key(3, **{key: empty})) == ["a", "b", "c"]


def test_variables_of_the_template():
    assert trained(SHOWS, kwargs={"mood": "calm"}) == ["a", "b", "c"]
    for template in (CHAT_TEMPLATE, SHOWS.replace("mood", "moody")):
        with pytest.raises(UserError, match="^f:1: .* does not know `mood` of `chat_template_kwar"):
            trained(template, kwargs={"mood": "calm"})


def test_a_template_that_minds_what_is_taken_away_shows_it():
    template = "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}" + (
        "{{ raise_exception('a call, please') }}{% endif %}{% endfor %}" + SHOWS
    )
    turns = [{**t, "tool_calls": CALLS} if t["role"] == "assistant" else t for t in TURNS]
    assert len(trained(template, turns)) == 3


def test_other_keys_need_not_be_shown():
    turns = with_key(2, name="Ada", tool_call_id="1", id=7, timestamp="now")
    assert trained(CHAT_TEMPLATE, turns) == ["a", "b", "c"]
