"""What is trained of a conversation, for templates of many kinds: words, ends and no headers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longctx.errors import UserError
from longctx.train.data.chat.rendering import lines_of
from longctx.train.data.reading.records import as_document
from longctx.train.data.text.encoding import encode
from longctx.train.data.text.encoding_groups import encode_groups

TOKENS = (
    "<eos> <s> </s> <|im_start|> <|im_end|> <|user|> <|assistant|> <|observation|> [gMASK] <sop> "
    "<extra_id_0> <extra_id_1> <think> </think> <tool_call> </tool_call> <｜User｜> <｜Assistant｜>"
).split()


def tokenizer(template: str, eos: str | None = "<eos>", bos: str | None = None, adds=()):
    """Bytes and TOKENS; `adds` are put before and after a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TOKENS)
    if adds:
        ids = [(token, backend.token_to_id(token)) for token in adds if token]
        single = " ".join(filter(None, [adds[0], "$A", adds[1]]))
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    made.chat_template = template
    return made


def marked(record: dict, made) -> str:
    """The record's text with its trained tokens in brackets."""
    (piece,) = encode([as_document(record, "f:1")], made)
    return bracketed(made, piece.input_ids, piece.trained)


def bracketed(made, ids, trained) -> str:
    text, on = "", False
    for token, counts in zip(ids, trained, strict=True):
        bracket = "" if counts == on else "⟦" if counts else "⟧"
        text, on = text + bracket + made.decode([token]), counts
    return text + "⟧" * bool(on)


def turns(*texts: str, **last) -> dict:
    roles = ("user", "assistant")
    found = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [*found[:-1], found[-1] | last]}


def loop(user: str, assistant: str, prompt: str = "") -> str:
    asked = "{% if add_generation_prompt %}" + prompt + "{% endif %}" if prompt else ""
    return (
        "{% for m in messages %}{% if m.role == 'user' %}"
        + user
        + "{% elif m.role == 'assistant' %}"
        + assistant
        + "{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% endif %}{% endfor %}"
        + asked
    )


C = "{{ m.content }}"
G, E = "{% generation %}", "{% endgeneration %}"
START = "<|im_start|>assistant\n"
CHATML_USER = f"<|im_start|>user\n{C}<|im_end|>\n"
CHATML = loop(CHATML_USER, f"{START}{C}<|im_end|>\n", START)
GLM = "[gMASK]<sop>" + loop(f"<|user|>\n{C}", f"<|assistant|>\n{C}", "<|assistant|>")
GLM_CALLS = GLM.replace(
    f"<|assistant|>\n{C}",
    f"<|assistant|>\n{C}{{% for c in m.tool_calls or [] %}}<tool_call>{{{{ c.function.name }}}}"
    "</tool_call>{% endfor %}",
)
CALL = [{"function": {"name": "f", "arguments": {}}}]
RESULT = {"role": "tool", "content": "r"}
TWO = turns("a", "bb", "c", "dd")
RIGHT = {
    "ChatML": (CHATML, TWO, f"{START}⟦bb<|im_end|>⟧"),
    "ChatML without a prompt": (CHATML[: CHATML.index("{% if add_gen")], TWO, f"{START}⟦bb<|im"),
    "the next role ends it": (
        GLM,
        TWO,
        "⟦\nbb<|user|>⟧\nc<|assistant|>⟦\ndd<|user|>⟧",
    ),
    "a call is ended by its result": (
        GLM_CALLS,
        turns("a", "bb", tool_calls=CALL),
        "⟦\nbb<tool_call>f</tool_call><|observation|>⟧",
    ),
    "a call and its result": (
        GLM_CALLS,
        {
            "messages": [
                *turns("a", "", tool_calls=CALL)["messages"],
                {"role": "tool", "content": "r"},
            ]
        },
        "⟦\n<tool_call>f</tool_call><|observation|>⟧r",
    ),
    "Nemotron": (
        loop(f"<extra_id_1>User\n{C}\n", f"<extra_id_1>A\n{C}\n", "<extra_id_1>A\n"),
        TWO,
        "⟦bb\n<extra_id_1>⟧User\nc\n<extra_id_1>A\n⟦dd\n<extra_id_1>⟧",
    ),
    "no token ends it": (
        loop(f"### Human: {C}\n", f"### Assistant: {C}\n", "### Assistant: "),
        TWO,
        "⟦bb<eos>⟧\n### Human: c\n### Assistant: ⟦dd<eos>⟧\n",
    ),
    "marks close before the end": (
        loop(CHATML_USER, f"{START}{G}{C}{E}<|im_end|>\n", START),
        TWO,
        f"{START}⟦bb<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>\n{START}⟦dd<|im_end|>⟧",
    ),
    "marks around the line break too": (
        loop(CHATML_USER, f"{START}{G}{C}<|im_end|>\n{E}", START),
        TWO,
        "⟦dd<|im_end|>⟧\n",
    ),
    "marks and no end": (loop(C, f"{G}{C}{E}"), TWO, "a⟦bb<eos>⟧c⟦dd<eos>⟧"),
    "a mark for each part": (
        loop(C, f"{G}{C}{E}-{G}<|im_end|>{E}"),
        TWO,
        "⟦bb⟧-⟦<|im_end|>⟧c⟦dd⟧-⟦<|im_end|>⟧",
    ),
    "one mark for all": (f"{G}{CHATML}{E}", TWO, "dd<|im_end|>⟧\n"),
    "its own eos": (
        loop(f"Q {C} ", f"A {C} ", "A "),
        turns("a", "bb<eos>"),
        "⟦bb<eos>⟧",
    ),
    "a closing tag ends nothing": (
        loop(f"Q {C} ", f"A {C} ", "A "),
        turns("a", "b</think>"),
        "⟦b</think><eos>⟧",
    ),
    "another token of its own ends nothing": (
        loop(f"Q {C} ", f"A {C} ", "A "),
        turns("a", "b<|im_start|>"),
        "⟦b<|im_start|><eos>⟧",
    ),
    "an instruction has no header": (
        loop(f"[INST] {C} [/INST]", f" {C}</s>").replace("</s>", "{{ eos_token }}"),
        TWO,
        "[/INST]⟦ bb<eos>⟧[INST] c [/INST]⟦ dd<eos>⟧",
    ),
    "an instruction without an end": (
        loop(f"[INST] {C} [/INST]", f" {C}"),
        TWO,
        "[/INST]⟦ bb<eos>⟧[INST] c [/INST]⟦ dd<eos>⟧",
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_an_answer_is_trained_from_its_first_word_to_its_end(case):
    template, record, expected = RIGHT[case]
    assert expected in marked(record, tokenizer(template))


def test_a_tokenizer_without_eos_and_a_template_without_end():
    made = tokenizer(RIGHT["no token ends it"][0], eos=None)
    assert marked(TWO, made).endswith("⟦dd\n⟧") or marked(TWO, made).endswith("⟦dd⟧\n")
    assert lines_of({"chat"}, made)[0].endswith("the model learns no stop")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, "the prompt before it"),
        (RIGHT["Nemotron"][0], "; the token of the next turn ends it"),
        (RIGHT["no token ends it"][0], "; the template ends none, so <eos> is added to each"),
        (RIGHT["marks and no end"][0], "; the template ends none, so <eos> is added to each"),
        (GLM, "with the answers marked up to the next role's token, which ends them"),
    ],
)
def test_the_run_says_where_ends_come_from(template, said):
    assert lines_of({"chat"}, tokenizer(template))[0].endswith(said)


THINK = "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
CUT = loop(f"Q {C} ", "A {{ m.content.split('</think>')[-1] }}<eos>", "A ")
PARTS = loop(C, "A {% for p in m.content %}{{ p.text }}{% endfor %}<eos>", "A ")
LOST = {
    "cut reasoning": (CUT, turns("a", "<think>why</think>so"), "all of `content` of turn 2, .<th"),
    "cut reasoning, marked": (
        CUT.replace("A {{", f"A {G}{{{{").replace("<eos>", f"<eos>{E}"),
        turns("a", "<think>why</think>so"),
        "all of `content` of turn 2",
    ),
    "of an earlier turn, marked": (
        loop(C, f"A {G}{{{{ m.content if loop.last else m.content.split('>')[-1] }}}}<eos>{E}"),
        turns("a", "<think>why</think>so", "b", "c"),
        "all of `content` of turn 2",
    ),
    "parts alone": (PARTS, turns("a", "words"), "all of `content` of turn 2, .words"),
    "text beside a call": (
        loop(C, "A {{ m.tool_calls[0].function.name if m.tool_calls else m.content }}<eos>", "A "),
        turns("a", "I look.", tool_calls=CALL),
        "all of `content` of turn 2, .I look",
    ),
    "half of the reasoning": (
        loop(C, "A {{ (m.reasoning or '')[:5] }}{{ m.content }}<eos>", "A "),
        turns("a", "b", reasoning="first second"),
        "all of `reasoning` of turn 2, .first second",
    ),
    "a prompt that opens reasoning": (
        loop(C, f"A {C}<eos>", "A <think>"),
        turns("a", "b"),
        "ends the prompt with '<think>', and the answer begins with 'b<eos>' instead .turn 2.",
    ),
}


def test_contents_are_parts_where_a_template_shows_no_others():
    """A template that reads contents as parts, as LLaVA's own does, renders conversations of text
    alone, too."""
    words = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    template = loop(f"Q {words} ", f"A {words}<eos>", "A ")
    found = marked(turns("a", "words"), tokenizer(template))
    assert found == marked(turns("a", "words"), tokenizer(loop(f"Q {C} ", f"A {C}<eos>", "A ")))
    asked, answer = turns("a", "words")["messages"]
    pair = {"prompt": [asked], "chosen": [answer], "rejected": [{**answer, "content": "no"}]}
    (group,) = encode_groups([as_document(pair, "f:1", rows="pairs")], tokenizer(template))
    assert all(map(len, group.answers))


@pytest.mark.parametrize("case", LOST)
def test_words_that_would_vanish_are_refused(case):
    template, record, message = LOST[case]
    with pytest.raises(UserError, match=f"^f:1: .*{message}"):
        marked(record, tokenizer(template))


@pytest.mark.parametrize("case", ["cut reasoning", "parts alone", "text beside a call"])
def test_words_that_would_vanish_of_a_pair_are_refused(case):
    template, record, message = LOST[case]
    asked, answer = record["messages"]
    pair = {"prompt": [asked], "chosen": [answer], "rejected": [{**answer, "content": "no"}]}
    with pytest.raises(UserError, match=f"^f:1: .*{message}"):
        encode_groups([as_document(pair, "f:1", rows="pairs")], tokenizer(template))


@pytest.mark.parametrize(
    ("template", "prompt", "answer"),
    [
        (GLM, "<|assistant|>", "\nbb<|user|>"),
        (RIGHT["no token ends it"][0], "### Assistant: ", "bb<eos>"),
        (RIGHT["ChatML without a prompt"][0], START, "bb<|im_end|>\n"),
        (CHATML, START, "bb<|im_end|>\n"),
    ],
    ids=["next", "added", "no prompt", "ChatML"],
)
def test_answers_that_are_compared_have_the_same_ends(template, prompt, answer):
    record = {"prompt": TWO["messages"][:1], "chosen": TWO["messages"][1:2]}
    record["rejected"] = [{"role": "assistant", "content": "no"}]
    made = tokenizer(template)
    for rows in ("pairs", "rated"):
        (group,) = encode_groups([as_document(record, "f:1", rows=rows)], made)
        assert made.decode(group.prompt).endswith(prompt)
        assert made.decode(group.answers[0]) == answer


@pytest.mark.parametrize(
    ("adds", "record", "expected"),
    [
        (("<s>", None), {"text": "<s>a"}, "<s>⟦a<eos>⟧"),
        (("<s>", None), {"text": "a"}, "<s>⟦a<eos>⟧"),
        (("<s>", "<eos>"), {"text": "<s>a<eos>"}, "<s>⟦a<eos>⟧"),
        (("<s>", None), {"text": "<s><s>a"}, "<s>⟦<s>a<eos>⟧"),
        ((), {"text": "<s><s>a"}, "<s>⟦<s>a<eos>⟧"),
        (("<s>", None), {"prompt": "<s>a", "completion": "b"}, "<s>a⟦b<eos>⟧"),
        (("<s>", "<eos>"), {"prompt": "<s>a", "completion": "b<eos>"}, "<s>a⟦b<eos>⟧"),
    ],
)
def test_a_text_with_its_own_start_has_one(adds, record, expected):
    made = tokenizer(CHATML, bos="<s>", adds=adds)
    assert marked(record, made) == expected
    several = encode([as_document(record, "f:1"), as_document({"text": "z"}, "f:2")], made)
    assert bracketed(made, several[0].input_ids, several[0].trained) == expected


def test_joined_strings_with_their_own_start_have_one():
    record = {"chosen": "<s>a question: yes", "rejected": "<s>a question: no"}
    made = tokenizer(CHATML, bos="<s>", adds=("<s>", None))
    (group,) = encode_groups([as_document(record, "f:1", rows="pairs")], made)
    assert made.decode(group.prompt) == "<s>a question:"
