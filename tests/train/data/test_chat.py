"""A chat template is a stranger's program: whatever it does ends in one line, and soon."""

from __future__ import annotations

import os
import signal

import pytest
from small_tokenizer import PLAIN_CHATML, small_tokenizer

from longctx.errors import UserError
from longctx.train.data.chat import rendering as chat
from longctx.train.data.chat.rendering import rendered
from longctx.train.data.reading.records import Document

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
DOCUMENT = Document(kind="chat", content={"messages": TURNS}, where="f:1")
CHATS = [
    Document(
        kind="chat",
        content={"messages": [TURNS[0], {"role": "assistant", "content": answer}]},
        where=f"f:{line}",
    )
    for line, answer in enumerate(("one", "two", "three"), 1)
]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RAISES = {
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "overflow": ("{{ 2.0 ** 100000 }}", "Result too large|out of range"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", "unsafe|__class__"),
    "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
    "memory": ("{{ 'a' * 10 ** 11 }}", "too much memory"),
    "huge padding": ("{{ 'a' | center(10 ** 11) }}", "too much memory"),
    "huge format": ("{{ '%99999999999d' % 1 }}", "too much memory|too big"),
    "deep": ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "."),
    "assertion": ("{{ raise_exception('no\n\nsuch role') }}", "no such role$"),
    "long error": ("{{ raise_exception('x' * 10 ** 6) }}", "x{100}"),
    "unknown filter": ("{{ 1 | nothing }}", "nothing"),
    "import": ("{% import 'os' as os %}", "."),
}


def render(template: str) -> list:
    return list(rendered([DOCUMENT], small_tokenizer(template)))


@pytest.mark.parametrize(("template", "message"), RAISES.values(), ids=RAISES)
def test_whatever_a_template_raises_is_one_line(template, message):
    with pytest.raises(UserError, match=f"^f:1: the chat template refuses .*: .*({message})") as e:
        render(template)
    assert "\n" not in str(e.value) and len(str(e.value)) < 300


@pytest.mark.parametrize(
    "template",
    [
        LOOPS,
        "{{ 10 ** (10 ** 8) > 0 }}",
        "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 3) | length }}" * 99,
    ],
    ids=["loops", "in C", "work"],
)
def test_a_template_that_does_not_end_is_stopped(monkeypatch, template):
    monkeypatch.setattr(chat, "RENDER_S", 0.2)
    with pytest.raises(UserError, match=r"^f:1: the chat template does not end within 0 s"):
        render(template)
    monkeypatch.undo()
    assert render(PLAIN_CHATML)[0][1]  # another child


def test_what_is_absurdly_long_is_refused():
    message = "f:1: the chat template makes 2,000,000 characters of 20: use another one"
    with pytest.raises(UserError, match=message):
        render("{{ 'ab' * 10 ** 6 }}")


def test_a_long_conversation_may_take_longer_than_one_call(monkeypatch):
    """Every call of the template has the time that a template has."""
    monkeypatch.setattr(chat, "ALIVE_S", 0.0)
    monkeypatch.setattr(chat, "RENDER_S", 30.0)
    answers = []
    answer = chat.Connection.recv
    monkeypatch.setattr(
        chat.Connection, "recv", lambda self: answers.append(answer(self)) or answers[-1]
    )
    render(PLAIN_CHATML)
    assert answers[:-1] == [None] * 4 and answers[-1][0][0].startswith("<|bos|>")


def test_a_child_that_is_killed_is_said(monkeypatch):
    os.kill(chat._child().pid, signal.SIGKILL)
    with pytest.raises(UserError, match="^f:1: the process that renders .* was killed"):
        render(PLAIN_CHATML)
    assert render(PLAIN_CHATML)[0][1]


@pytest.mark.parametrize("read", [1, 2, 3])
def test_who_stops_reading_takes_no_one_s_answers_or_child(read):
    """A generator that an error left alone is collected whenever Python comes to it."""
    stopped = rendered(CHATS, small_tokenizer(PLAIN_CHATML))
    for _ in range(read):
        next(stopped)
    others = rendered(CHATS[::-1], small_tokenizer(PLAIN_CHATML))
    texts = [next(others)[0]]
    stopped.close()
    texts += [text for text, _ in others]
    assert ["three" in texts[0], "two" in texts[1], "one" in texts[2]] == [True] * 3


def test_who_reads_on_gets_what_was_asked_for():
    first = rendered(CHATS, small_tokenizer(PLAIN_CHATML))
    texts = [next(first)[0]]
    between = [text for text, _ in rendered(CHATS, small_tokenizer(PLAIN_CHATML))]
    assert texts + [text for text, _ in first] == between


def test_one_child_renders_everything_and_only_for_its_parent():
    first = chat._child()
    render(PLAIN_CHATML)
    render("default")
    assert chat._child() is first
    if (pid := os.fork()) == 0:
        os._exit(chat._child() is first)
    assert os.waitpid(pid, 0)[1] == 0
    render(PLAIN_CHATML)


def test_after_an_error_nothing_of_it_is_taken_for_the_next_conversation():
    documents = [DOCUMENT] * 9
    for given_up_after in (1, 3):
        answers = rendered(documents, small_tokenizer(PLAIN_CHATML))
        for _ in range(given_up_after):
            next(answers)
        answers.close()
        other = Document(kind="chat", content={"messages": TURNS[:1] + TURNS}, where="f:2")
        ((text, _),) = rendered([other], small_tokenizer(PLAIN_CHATML))
        assert text.count("user") == 2


def test_conversations_are_handed_over_in_groups(monkeypatch):
    monkeypatch.setattr(chat, "GROUP_CONVERSATIONS", 2)
    monkeypatch.setattr(chat, "GROUP_CHARS", 100)
    contents = ["a", "b", "c", "d" * 500, "e", "f" * 90, "g"]
    documents = [
        Document(kind="chat", content={"messages": [{**TURNS[1], "content": c}]}, where="f")
        for c in contents
    ]
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    found = list(rendered(documents, small_tokenizer(template)))
    assert found == [(f"{c}<|im_end|>", [(0, len(c) + 10)]) for c in contents]


PHI = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)


def test_a_familys_template_is_recognised_once(monkeypatch):
    tokenizer = small_tokenizer(PHI)
    monkeypatch.setattr(chat, "_families", {})
    asked = []
    answers = chat._Child.answers
    monkeypatch.setattr(
        chat._Child, "answers", lambda self, jobs: asked.extend(jobs) or answers(self, jobs)
    )
    for _ in range(2):
        list(rendered([DOCUMENT] * 3, tokenizer))
    assert [type(job).__name__ for job in asked].count("Recognition") == 1
    family = chat.family_of(tokenizer, PHI)
    assert family is not None and family.name == "Phi-4"
    assert all(job.training == family.training for job in asked if hasattr(job, "training"))


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            PHI,
            "chat template: Phi-4's, through longctx's turns.jinja: its tokens, with the answers",
        ),
        ("default", "chat template: the tokenizer's own: its {% generation %} markers say"),
        (PLAIN_CHATML, "chat template: the tokenizer's own: an answer is what it adds to the"),
        ({"tool_use": PHI}, "chat template: the tokenizer's own, by name"),
    ],
)
def test_the_way_is_said(template, line):
    (said,) = chat.lines_of({"chat", "text"}, small_tokenizer(template))
    assert said.startswith(line)
    assert chat.lines_of({"text", "completion"}, small_tokenizer(template)) == []
    assert len(chat.lines_of({"instruction"}, small_tokenizer(template))) == 2


def test_a_template_that_never_ends_is_not_waited_for_when_it_is_recognised(monkeypatch):
    monkeypatch.setattr(chat, "RENDER_S", 0.2)
    with pytest.raises(UserError, match=r"^f:1: the chat template does not end within 0 s"):
        render(LOOPS + "{# [INST] [/INST] #}")


def test_what_a_document_says_reaches_the_template():
    template = (
        "{{ tools | length }}{{ documents | length }}{{ mood }}{% for m in messages %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    content = {
        "messages": [TURNS[0], TURNS[1], *TURNS],
        "untrained": [1],
        "tools": [{}],
        "documents": [{}, {}],
        "kwargs": {"mood": "calm"},
    }
    document = Document(kind="instruction", content=content, where="f:1")
    ((text, spans),) = rendered([document], small_tokenizer(template))
    assert text == "12calmhihellohihello<|im_end|>"
    assert spans == [(6, 8), (13, 15), (15, 30)]


def test_templates_by_name():
    tokenizer = small_tokenizer()
    tokenizer.chat_template = {"rag": PLAIN_CHATML}
    with pytest.raises(UserError, match="^f:1: .*template"):
        list(rendered([DOCUMENT], tokenizer))
