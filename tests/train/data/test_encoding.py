from __future__ import annotations

import numpy as np
import pytest
from small_tokenizer import PLAIN_CHATML, small_tokenizer
from tokenizers import pre_tokenizers, processors

from longctx.errors import UserError
from longctx.train.data.reading.records import Document
from longctx.train.data.text import encoding
from longctx.train.data.text.encoding import encode

LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start|>' + m['role'] + '<|stop|>\n\n' + m['content'] "
    "| trim + '<|im_end|>' %}{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}"
    "{{ c }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set sys = messages[0]['content'] + '\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set sys = '' %}{% set turns = messages %}"
    "{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (sys if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Like SmolLM2: a system turn appears where none is given, but not before an empty conversation.
DEFAULT_SYSTEM = (
    "{% if messages and messages[0]['role'] != 'system' %}<|im_start|>system\nI help.<|im_end|>\n"
    "{% endif %}" + PLAIN_CHATML.replace("{{ bos_token }}", "")
)
# Like reasoning models: earlier turns lose what stands before </think>.
REWRITES_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
LONG = "x" * 5000
CONVERSATIONS = {
    "one turn": [("user", "hi"), ("assistant", "hello there")],
    "system and several turns": [
        ("system", "Be brief."),
        ("user", "value?"),
        ("assistant", "query @ key"),
        ("user", "why"),
        ("assistant", "softmax\n\n  indented é \U0001f600"),
    ],
    "ends with the user": [("user", "a"), ("assistant", "b"), ("user", "unanswered")],
    "long": [("user", LONG), ("assistant", LONG + "y"), ("user", "?"), ("assistant", "z")],
    "an answer that looks like a question": [("user", "hi"), ("assistant", "user\nhi")],
}
TOOLS = [("user", "t"), ("assistant", "call"), ("tool", "42"), ("assistant", "It is 42.")]


def chat(turns) -> Document:
    messages = [{"role": role, "content": content} for role, content in turns]
    return Document(kind="chat", content={"messages": messages}, where="chats.jsonl:3")


def trained_runs(piece, tokenizer) -> list[str]:
    """The decoded stretches of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], piece.trained.astype(int), [0]])))
    return [
        tokenizer.decode(piece.input_ids[a:b].tolist())
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def answers(turns) -> list[str]:
    return [content + "<|im_end|>" for role, content in turns if role == "assistant"]


@pytest.mark.parametrize("turns", [*CONVERSATIONS.values(), TOOLS], ids=[*CONVERSATIONS, "tools"])
@pytest.mark.parametrize(
    "template", ["default", PLAIN_CHATML, LLAMA3], ids=["marked", "plain", "3"]
)
def test_exactly_the_answers_and_their_end_are_trained(turns, template):
    tokenizer = small_tokenizer(template)
    (piece,) = encode([chat(turns)], tokenizer)
    rendered = tokenizer.apply_chat_template(chat(turns).content["messages"], tokenize=False)
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert piece.input_ids.tolist() == whole
    assert trained_runs(piece, tokenizer) == answers(turns)


@pytest.mark.parametrize("turns", [*CONVERSATIONS.values(), TOOLS])
def test_markers_prefixes_and_hugging_face_agree_token_by_token(turns):
    marked, plain = small_tokenizer(), small_tokenizer(PLAIN_CHATML)
    (with_markers,), (with_prefixes,) = encode([chat(turns)], marked), encode([chat(turns)], plain)
    theirs = marked.apply_chat_template(
        chat(turns).content["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert (
        with_markers.input_ids.tolist() == with_prefixes.input_ids.tolist() == theirs["input_ids"]
    )
    assert with_markers.trained.tolist() == with_prefixes.trained.tolist()
    assert with_markers.trained.tolist() == [bool(mask) for mask in theirs["assistant_masks"]]


def test_several_answers_in_a_row_and_an_answer_first():
    turns = [("assistant", "first"), ("user", "u"), ("assistant", "a"), ("assistant", "b")]
    for template in ("default", PLAIN_CHATML, DEFAULT_SYSTEM):
        tokenizer = small_tokenizer(template)
        (piece,) = encode([chat(turns)], tokenizer)
        assert trained_runs(piece, tokenizer) == answers(turns)


def test_a_template_without_a_generation_prompt():
    tokenizer = small_tokenizer(LLAMA2)
    turns = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")]
    (piece,) = encode([chat(turns)], tokenizer)
    assert trained_runs(piece, tokenizer) == [" a <|im_end|>", " b <|im_end|>"]


def test_offsets_that_leave_out_spaces():
    """Llama 3's tokenizer trims offsets: HF's own mask then loses an answer that starts with a
    space, and every later one."""
    tokenizer = small_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    turns = [("user", "u"), ("assistant", "  key"), ("user", "v"), ("assistant", " \n value ")]
    (piece,) = encode([chat(turns)], tokenizer)
    assert trained_runs(piece, tokenizer) == answers(turns)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (piece,) = encode([chat([("user", "u"), ("assistant", "ends with  ")])], tokenizer)
    assert trained_runs(piece, tokenizer) == ["ends with  <|im_end|>"]


@pytest.mark.parametrize(
    ("turns", "template", "message"),
    [
        (CONVERSATIONS["one turn"], None, "no chat template; .*--tokenizer_name"),
        (
            [("user", "u"), ("assistant", "hm</think>a"), ("user", "v"), ("assistant", "b")],
            REWRITES_HISTORY,
            r"rewrites earlier turns \(turn 2\)",
        ),
        ([("user", "u"), ("user", "v"), ("assistant", "b")], LLAMA2, "refuses .*must alternate"),
        (
            [("assistant", "a")],
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            r"shows no prompt before the first answer \(turn 1\)",
        ),
        (
            [("assistant", "a")],
            PLAIN_CHATML.replace("assistant\n{% endif", "bot\n{% endif"),
            r"shows no prompt before the first answer \(turn 1\)",
        ),
        (CONVERSATIONS["one turn"], "{{ messages[7]['content'] }}", "refuses this conversation"),
        (
            CONVERSATIONS["one turn"],
            "{% if false %}{% generation %}{% endgeneration %}{% endif %}some text",
            "marks no token of an assistant turn",
        ),
        (CONVERSATIONS["one turn"], "{% broken", "refuses this conversation"),
    ],
    ids=[
        "no template",
        "rewrites",
        "order",
        "no prompt",
        "odd prompt",
        "undefined",
        "marks nothing",
        "syntax",
    ],
)
def test_a_conversation_without_an_exact_mask_is_refused(turns, template, message):
    with pytest.raises(UserError, match=f"^chats.jsonl:3: .*{message}") as error:
        encode([chat(turns)], small_tokenizer(template))
    assert "\n" not in str(error.value)


def test_history_that_was_not_rewritten_is_accepted():
    tokenizer = small_tokenizer(REWRITES_HISTORY)
    turns = [("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "hm</think>b")]
    (piece,) = encode([chat(turns)], tokenizer)
    assert trained_runs(piece, tokenizer) == answers(turns)


def test_text_is_trained_after_its_first_token():
    tokenizer = small_tokenizer()
    documents = [Document(kind="text", content=t, where="f") for t in ("key value", "query")]
    pieces = encode(documents, tokenizer)
    for document, piece in zip(documents, pieces, strict=True):
        ids = piece.input_ids.tolist()
        assert ids == [*tokenizer(document.content)["input_ids"], tokenizer.eos_token_id]
        assert ids[0] == tokenizer.bos_token_id
        assert piece.trained.tolist() == [False] + [True] * (len(ids) - 1)
        assert piece.input_ids.dtype == np.int32


def test_completions_are_trained_with_their_end():
    tokenizer = small_tokenizer()
    document = Document(kind="completion", content=["def f(x):", " return x"], where="f")
    (piece,) = encode([document], tokenizer)
    assert trained_runs(piece, tokenizer) == [" return x<|im_end|>"]
    assert tokenizer.decode(piece.input_ids.tolist()) == "<|bos|>def f(x): return x<|im_end|>"


def test_order_is_kept_across_kinds_and_groups(monkeypatch):
    monkeypatch.setattr(encoding, "ENCODE_CHARS", 6)
    tokenizer = small_tokenizer()
    documents = [Document(kind="text", content=f"text {i}", where="f") for i in range(5)]
    documents.insert(2, chat(CONVERSATIONS["one turn"]))
    documents.insert(0, Document(kind="completion", content=["p", "c"], where="f"))
    together = encode(documents, tokenizer)
    apart = [encode([document], tokenizer)[0] for document in documents]
    assert [p.input_ids.tolist() for p in together] == [p.input_ids.tolist() for p in apart]
    assert encode([], tokenizer) == []


def test_no_bos_where_the_tokenizer_adds_none():
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    (piece,) = encode([Document(kind="text", content="key", where="f")], tokenizer)
    assert tokenizer.decode(piece.input_ids.tolist()) == "key<|im_end|>"
    assert not piece.trained[0]


# As Hermes and Qwen write calls: JSON inside the assistant's turn, a tool's answer in a turn of its
# own. `{g}` and `{e}` are generation markers or nothing.
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{g}"
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}"
    "</call>{% endfor %}<|im_end|>{e}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = WITH_CALLS.replace("{g}", "{% generation %}").replace("{e}", "{% endgeneration %}")
UNMARKED = WITH_CALLS.replace("{g}", "").replace("{e}", "")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
AGENT = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Still 3."},
]


def test_calls_are_trained_and_their_results_are_not():
    pieces = {}
    for template in (MARKED, UNMARKED):
        tokenizer = small_tokenizer(template)
        document = Document(kind="chat", content={"messages": AGENT}, where="f")
        (pieces[template],) = encode([document], tokenizer)
        call = '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
        assert trained_runs(pieces[template], tokenizer) == [
            f"{call}<|im_end|>",
            "It is 3.<|im_end|>",
            f"Yes.{call}{call}<|im_end|>",
            "Still 3.<|im_end|>",
        ]
    assert pieces[MARKED].input_ids.tolist() == pieces[UNMARKED].input_ids.tolist()
    assert pieces[MARKED].trained.tolist() == pieces[UNMARKED].trained.tolist()


@pytest.mark.parametrize("template", ["default", PLAIN_CHATML])
def test_calls_that_a_template_leaves_out_are_refused(template):
    document = Document(kind="chat", content={"messages": AGENT}, where="f:1")
    with pytest.raises(UserError, match="f:1: the chat template leaves out `tool_calls`"):
        encode([document], small_tokenizer(template))


def test_an_empty_list_of_calls_is_no_call():
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with_list = [*turns[:1], {**turns[1], "tool_calls": []}]
    plain, listed = encode(
        [Document(kind="chat", content={"messages": m}, where="f") for m in (turns, with_list)],
        small_tokenizer(PLAIN_CHATML),
    )
    assert plain.input_ids.tolist() == listed.input_ids.tolist()


def test_a_conversation_of_more_than_32768_tokens():
    """150 exchanges; both ways of finding the answers agree on every token."""
    turns = []
    for i in range(150):
        turns += [("user", f"question {i} " + "why " * 60), ("assistant", f"answer {i} " * 12)]
    for marked, plain in ((None, PLAIN_CHATML), (MARKED, UNMARKED)):
        pieces = []
        for template in (marked or "default", plain):
            tokenizer = small_tokenizer(template)
            (piece,) = encode([chat(turns)], tokenizer)
            assert len(piece) > 32768
            assert trained_runs(piece, tokenizer) == answers(turns)
            pieces.append(piece)
        assert pieces[0].trained.tolist() == pieces[1].trained.tolist()
