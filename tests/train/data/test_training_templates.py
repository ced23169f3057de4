"""longctx's templates give the prompts and answers of the families' own, and are used only there.

The originals come with TRL where it is installed. Of the other families there are stand-ins, which
render as the family's own template does what conversations without tools need.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT

from longctx.errors import UserError
from longctx.train.data.chat.assistant_masks import Conversation, by_prefixes, by_training_template
from longctx.train.data.chat.conversation import Renderer
from longctx.train.data.chat.ends import EndTokens, with_ends
from longctx.train.data.chat.training_templates import (
    BATTERY,
    FAMILIES,
    FOLDER,
    Recognition,
    TemplateFamily,
    candidates,
    identity,
)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "<|end_of_text|>", "<seed:eos>"),
    *("<|user|>", "<extra_id_1>", "<｜end▁of▁sentence｜>"),
)
BY_NAME = {family.name: family for family in FAMILIES}


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant by turns."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]


def conversation(
    messages, template: str = "", family: TemplateFamily | None = None, **more
) -> Conversation:
    return Conversation(
        messages=messages,
        template=template,
        training=family.training if family else None,
        special_tokens=TOKENS,
        tokens=EndTokens(ENDS, "</s>"),
        where="f:1",
        **more,
    )


def renderer(asked: Conversation) -> Renderer:
    return Renderer(asked, lambda: None)


def ended(asked: Conversation, rendered):
    """What is trained up to its end, as in `Conversation.run`."""
    return with_ends(rendered, asked.words, asked.tokens, lambda: None)


def marked(text: str, spans) -> str:
    """The text with trained characters between « and »."""
    out, end = "", 0
    for start, stop in spans:
        out, end = f"{out}{text[end:start]}«{text[start:stop]}»", stop
    return out + text[end:]


# --- what the templates make of one conversation ---------------------------------------------

CHAT = turns("Hi", " Yes ", "So?", "No", system="Be kind.")
QWEN = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"
    "\n« Yes <|im_end|>»\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n«No<|im_end|>»\n"
)
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n".format
LLAMA = (
    f"{HEAD('user')}Hi<|eot_id|>{HEAD('assistant')}«Yes<|eot_id|>»"
    f"{HEAD('user')}So?<|eot_id|>{HEAD('assistant')}«No<|eot_id|>»"
)
PHI = (
    "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n« Yes <|end|>»\n<|user|>\nSo?"
    "<|end|>\n<|assistant|>\n«No<|end|>»\n</s>"
)
ROLE = "<|start_of_role|>{}<|end_of_role|>".format
GRANITE = (
    f"{ROLE('system')}Be kind.<|end_of_text|>\n{ROLE('user')}Hi<|end_of_text|>\n"
    f"{ROLE('assistant')}« Yes <|end_of_text|>»\n{ROLE('user')}So?<|end_of_text|>\n"
    f"{ROLE('assistant')}«No<|end_of_text|>»\n"
)
RENDERED = {
    "Llama 3": f"<s>{HEAD('system')}Be kind.<|eot_id|>{LLAMA}",
    "Llama 3.1": f"<s>{HEAD('system')}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul "
    f"2024\n\nBe kind.<|eot_id|>{LLAMA}",
    "Qwen2": QWEN,
    "Qwen2.5": QWEN,
    "Qwen3-Instruct-2507": QWEN,
    "Qwen3": QWEN.replace("«", "«<think>\n\n</think>\n\n"),
    "Mistral-7B-v0.2": "<s> [INST] Be kind.\n\nHi [/INST]«  Yes </s>» [INST] So? [/INST]« No</s>»",
    "Mistral-7B-v0.3": "<s>[INST] Hi[/INST]« Yes</s>»[INST] Be kind.\n\nSo?[/INST]« No</s>»",
    "Mistral-Nemo and Ministral": "<s>[INST]Hi[/INST]« Yes </s>»[INST]Be kind.\n\nSo?[/INST]"
    "«No</s>»",
    "Phi-3": PHI,
    "Phi-3.5": PHI,
    "Phi-4": "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>« Yes <|im_end|>»<|im_start|>user<|im_sep|>So?<|im_end|>"
    "<|im_start|>assistant<|im_sep|>«No<|im_end|>»",
    "Granite 3.0": GRANITE,
    "Granite 3.1": GRANITE,
    "Granite 3.3": GRANITE,
    "Granite 4": GRANITE,
    "GLM-4": "[gMASK]<sop><|system|>\nBe kind.<|user|>\nHi<|assistant|>«\n Yes »<|user|>\nSo?"
    "<|assistant|>«\nNo»",
    "GLM-4.5": "[gMASK]<sop><|system|>\nBe kind.<|user|>\nHi<|assistant|>«\n<think></think>\nYes»"
    "<|user|>\nSo?<|assistant|>«\n<think></think>\nNo»",
    "Nemotron-4": "<extra_id_0>System\nBe kind.\n<extra_id_1>User\nHi\n<extra_id_1>Assistant\n"
    "« Yes \n»<extra_id_1>User\nSo?\n<extra_id_1>Assistant\n«No\n»",
    "Nemotron-Mini": "<extra_id_0>System\nBe kind.\n\n<extra_id_1>User\nHi\n<extra_id_1>Assistant\n"
    "«Yes\n»<extra_id_1>User\nSo?\n<extra_id_1>Assistant\n«No\n»",
    "DeepSeek-R1-Distill": "<s>Be kind.<｜User｜>Hi<｜Assistant｜><think>\n"
    "«\n</think>\n\n Yes <｜end▁of▁sentence｜>»<｜User｜>So?<｜Assistant｜><think>\n"
    "«\n</think>\n\nNo<｜end▁of▁sentence｜>»",
    "Seed-OSS": "<seed:bos>system\nBe kind.<seed:eos><seed:bos>user\nHi<seed:eos><seed:bos>"
    "assistant\n«Yes<seed:eos>»<seed:bos>user\nSo?<seed:eos><seed:bos>assistant\n«No<seed:eos>»",
}


@pytest.mark.parametrize("name", RENDERED)
def test_what_a_family_reads(name):
    asked = conversation(CHAT, family=BY_NAME[name])
    training = BY_NAME[name].training
    assert marked(*renderer(asked).training(asked, training, asked.trained)) == RENDERED[name]


def test_llama_32_reads_todays_date():
    (text, _), (older, _) = (
        renderer(asked).training(asked, BY_NAME[name].training, [])
        for name in ("Llama 3.2", "Llama 3.1")
        for asked in [conversation(CHAT, family=BY_NAME[name])]
    )
    assert text.split("\n")[:4] != older.split("\n")[:4]
    assert text.split("\n")[4:] == older.split("\n")[4:]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("untrained", [(), (2,), (4,)], ids=["all", "the last", "the first"])
def test_only_trained_turns_are_marked(family, untrained):
    asked = conversation(CHAT, family=family, untrained=untrained)
    text, spans = renderer(asked).training(asked, family.training, asked.trained)
    found = [text[start:end] for start, end in spans]
    assert len(found) == 2 - len(untrained)
    assert all(("Yes" in answer) != ("No" in answer) for answer in found)


# --- the families' own -----------------------------------------------------------------------

LOOP = "{% for m in messages %}"


def prompted(loop: str, prompt: str) -> str:
    """A loop over messages, and the generation prompt."""
    return LOOP + loop + "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"


def mistral(opening: str, prefix: str, text: str) -> str:
    """The system prompt is there only while the conversation ends with a user's turn."""
    return (
        (
            "{{ bos_token }}{% set ns = namespace(s=none) %}{% for m in messages %}"
            "{% if m.role == 'system' %}{% set ns.s = m.content %}{% elif m.role == 'user' %}"
            "{{ 'OPENING' }}{{ ns.s + '\n\n' if loop.last and ns.s is not none else '' }}"
            "{{ m.content + '[/INST]' }}{% else %}{{ 'PREFIX' + TEXT + eos_token }}{% endif %}"
            "{% endfor %}"
        )
        .replace("OPENING", opening)
        .replace("PREFIX", prefix)
        .replace("TEXT", text)
    )


NEMOTRON = (
    "<extra_id_0>System{% if messages[0].role == 'system' %}{{ '\n' + messages[0].content TRIM }}"
    "{{ GAP }}{% else %}{{ '\n\n' }}{% endif %}{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<extra_id_1>' + m.role.title() + '\n' + m.content TRIM + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<extra_id_1>Assistant\n' }}{% endif %}"
)
STAND_INS = {
    "GLM-4": "[gMASK]<sop>" + prompted("<|{{ m.role }}|>\n{{ m.content }}", "<|assistant|>"),
    "Nemotron-4": NEMOTRON.replace("TRIM", "").replace("GAP", "'\n'"),
    "Nemotron-Mini": NEMOTRON.replace(" TRIM", " | trim").replace("GAP", "'\n\n'"),
    "Mistral-7B-v0.3": mistral("[INST] ", " ", "(m.content | trim)"),
    "Mistral-Nemo and Ministral": mistral("[INST]", "", "m.content"),
    "Mistral-7B-v0.2": "{{ bos_token }}{% set s = messages[0].content + '\n\n' if "
    "messages[0].role == 'system' else '' %}{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ ' [INST] ' + (s if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "Phi-4": prompted(
        "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}",
        "<|im_start|>assistant<|im_sep|>",
    ),
    "Granite 3.0": prompted(
        "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "Seed-OSS": prompted(
        "{{ '<seed:bos>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>\n' }}"
        "{% endif %}{{ m.content | trim }}{% else %}{{ m.content }}{% endif %}{{ '<seed:eos>' }}",
        "<seed:bos>assistant\n",
    ),
}
for _name, _gap in (("3.1", "\n"), ("3.3", " ")):
    STAND_INS[f"Granite {_name}"] = (
        "{% if messages[0].role != 'system' %}{{ '<|start_of_role|>system<|end_of_role|>Knowledge "
        "Cutoff Date: April 2024.GAP' }}{{ \"Today's Date: \" + strftime_now('%B %d, %Y') }}"
        "{{ '.GAPYou are Granite, developed by IBM. You are a helpful AI assistant.' }}"
        "{{ '<|end_of_text|>\n' }}{% endif %}"
    ).replace("GAP", _gap) + STAND_INS["Granite 3.0"]
ORIGINALS = {
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1",
    "llama3_2": "Llama 3.2",
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_instruct_2507": "Qwen3-Instruct-2507",
    "phi3": "Phi-3",
    "phi3_5": "Phi-3.5",
    "glm4moe": "GLM-4.5",
    "deepseek_r1_distill": "DeepSeek-R1-Distill",
}


def own(name: str) -> str:
    """The template of a family's tokenizers, or its stand-in."""
    if name in STAND_INS:
        return STAND_INS[name]
    trl = pytest.importorskip("trl", reason="TRL has the families' own templates")
    file = next(file for file, family in ORIGINALS.items() if family == name)
    folder = Path(trl.__file__).with_name("chat_templates")
    return (folder / f"{file}.jinja").read_text(encoding="utf-8")


def recognised(template: str) -> TemplateFamily | None:
    asked = Recognition(
        candidates=candidates(template), template=template, special_tokens=TOKENS, where="f:1"
    )
    return asked.run(lambda: None)


KNOWN = [*STAND_INS, *ORIGINALS.values()]


@pytest.mark.parametrize("name", KNOWN)
def test_a_familys_own_template_is_recognised(name):
    family = recognised(own(name))
    assert family is not None and family.name == name


@pytest.mark.parametrize("name", [name for name in KNOWN if "R1" not in name])
def test_where_the_own_template_has_exact_prefixes_ours_marks_the_same(name):
    """Phi's end token at the end of all apart: nothing is generated after <|end|>."""
    template, family = own(name), BY_NAME[name]
    compared = 0
    for messages in (*BATTERY, CHAT, turns("a", "b", "c", "d", "e", "f")):
        asked = conversation(messages, template, family)
        ours = by_training_template(asked, renderer(asked))
        try:
            theirs = by_prefixes(asked, renderer(asked))
        except UserError:
            continue
        assert ours is not None
        if name.startswith("Phi-3"):
            assert [ours[0][a:b] for a, b in ours[1]] == [
                theirs[0][a:b].removesuffix("\n</s>") for a, b in theirs[1]
            ]
        else:
            assert ended(asked, ours) == ended(asked, theirs)
        compared += 1
    assert compared >= 2


REFUSED_BEFORE = {
    "Qwen3": turns("a", "b", "c", "d"),
    "DeepSeek-R1-Distill": turns("a", "b", "c", "d"),
    "Mistral-7B-v0.3": CHAT,
    "Mistral-Nemo and Ministral": CHAT,
    "Phi-3": turns("a", "b", "c", "d"),
    "Phi-3.5": CHAT,
}


@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_ordinary_chats_of_templates_that_rewrite_turns_are_trained(name):
    asked = conversation(REFUSED_BEFORE[name], own(name), BY_NAME[name])
    with pytest.raises(UserError, match="rewrites earlier turns|ends the prompt with '<think>"):
        by_prefixes(asked, renderer(asked))
    text, spans = asked.run(lambda: None)
    assert len(spans) == 2
    prompt, _ = renderer(asked).own(asked.messages[:-1], add_generation_prompt=True)
    if "</think>" not in text:  # which earlier answers have lost there
        assert text[: spans[-1][0]] == prompt


REASONED = [
    *turns("q"),
    {"role": "assistant", "content": "a", "reasoning_content": "first"},
    *turns("r"),
    {"role": "assistant", "content": "b", "reasoning_content": "second"},
]


def test_qwen3_keeps_the_reasoning_of_every_trained_turn():
    asked = conversation(REASONED, own("Qwen3"), BY_NAME["Qwen3"])
    assert marked(*asked.run(lambda: None)) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«<think>\nfirst\n</think>\n\na<|im_end|>»"
        "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n«<think>\nsecond\n</think>\n\nb"
        "<|im_end|>»\n"
    )


def test_r1_keeps_the_reasoning_that_its_own_template_cuts():
    """In `content` or apart; TRL's training template renders the same text for the first."""
    family, stop = BY_NAME["DeepSeek-R1-Distill"], "<｜end▁of▁sentence｜>"
    head = f"<｜Assistant｜><think>\n«first\n</think>\n\na{stop}»"
    within = turns("q", "<think>\nfirst\n</think>\n\na", "r", "<think>\nsecond\n</think>\n\nb")
    for messages in (REASONED, within):
        asked = conversation(messages, own("DeepSeek-R1-Distill"), family)
        text = marked(*asked.run(lambda: None))
        assert text.startswith(f"<s><｜User｜>q{head}<｜User｜>r<｜Assistant｜><think>\n«second\n")
    asked = conversation(within, own("DeepSeek-R1-Distill"), family, untrained=(1,))
    assert f"q<｜Assistant｜>\n\na{stop}<｜User｜>r" in asked.run(lambda: None)[0]


def test_glm_is_trained_as_by_trl():
    trl = pytest.importorskip("trl", reason="TRL has a training template for GLM-4.5")
    folder = Path(trl.__file__).with_name("chat_templates")
    template = (folder / "glm4moe_training.jinja").read_text(encoding="utf-8")
    for messages in (CHAT, turns("q", "<think>hm</think>a"), AGENT[:2], AGENT[:4]):
        tools = [TOOL] if messages[0] == AGENT[0] else None
        asked = conversation(messages, own("GLM-4.5"), BY_NAME["GLM-4.5"], tools=tools)
        asked = replace(asked, tokens=EndTokens(("<|user|>", "<|observation|>")))
        render = renderer(asked)
        theirs = render.call(asked, messages, template, return_assistant_tokens_mask=True)
        assert asked.run(lambda: None) == theirs


def test_qwen3_trains_the_last_turn_alone_in_its_own_words():
    template = own("Qwen3")
    asked = conversation(REASONED, template, BY_NAME["Qwen3"], untrained=(1,))
    text, spans = asked.run(lambda: None)
    assert text == renderer(asked).own(REASONED)[0] and "first" not in text
    assert text[slice(*spans[0])] == "<think>\nsecond\n</think>\n\nb<|im_end|>" and len(spans) == 1


def test_qwen3_without_thinking_trains_what_follows_the_empty_reasoning():
    kwargs = {"enable_thinking": False}
    messages = turns("q", "a", "r", "b")
    asked = conversation(messages, own("Qwen3"), BY_NAME["Qwen3"], kwargs=kwargs)
    text, spans = asked.run(lambda: None)
    assert [text[a:b] for a, b in spans] == ["a<|im_end|>", "b<|im_end|>"]
    assert text.count("<think>\n\n</think>\n\n") == 2
    asked = conversation(REASONED, own("Qwen3"), BY_NAME["Qwen3"], kwargs=kwargs)
    with pytest.raises(UserError, match="ends the prompt with .*</think>"):  # reasoning, none asked
        asked.run(lambda: None)


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
AGENT = [
    *turns("q"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 2."},
    *turns("sure?", "yes"),
]


@pytest.mark.parametrize("name", ["Llama 3.1", "Llama 3.2", "Qwen2.5", "Qwen3-Instruct-2507"])
def test_calls_are_marked_as_by_prefixes(name):
    asked = conversation(AGENT, own(name), BY_NAME[name], tools=[TOOL])
    ours = by_training_template(asked, renderer(asked))
    assert ours is not None and ours[0] == by_prefixes(asked, renderer(asked))[0]
    assert ended(asked, ours) == ended(asked, by_prefixes(asked, renderer(asked)))
    assert asked.run(lambda: None) == ended(asked, ours)
    assert '"add"' in ours[0][slice(*ours[1][0])] and len(ours[1]) == 3


def test_calls_of_qwen3():
    asked = conversation(AGENT, own("Qwen3"), BY_NAME["Qwen3"], tools=[TOOL])
    text, spans = asked.run(lambda: None)
    assert [text[a:b].split("</think>\n\n")[1] for a, b in spans] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 2.<|im_end|>",
        "yes<|im_end|>",
    ]


# --- only where it is known ------------------------------------------------------------------


CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>END' }}"
SIGN = "{# <tool_call> #}"
STRANGERS = {
    "another line end": prompted(CHATML.replace("END", ""), "<|im_start|>assistant\n") + SIGN,
    "another prompt": prompted(CHATML.replace("END", "\n"), "<|im_start|>bot\n") + SIGN,
    "a space": STAND_INS["Phi-4"].replace("m.content", "' ' + m.content"),
    "another date": STAND_INS["Granite 3.3"].replace("April 2024", "May 2025"),
    "nothing of Mistral": LOOP + "{{ m.content }}{% endfor %}{# [INST] [/INST] #}",
    "only errors": "{{ raise_exception('no') }}{# [INST] [/INST] #}",
    "markers of its own": STAND_INS["Phi-4"] + "{% generation %}{% endgeneration %}",
}


@pytest.mark.parametrize("template", STRANGERS.values(), ids=STRANGERS)
def test_another_template_is_not_taken_for_a_familys(template):
    assert recognised(template) is None


def test_what_ours_renders_otherwise_goes_through_the_tokenizers_own():
    """A revision that prints a key which ours does not know."""
    template = STAND_INS["Phi-4"].replace("m.content", "(m.mood or '') + m.content")
    assert recognised(template) is BY_NAME["Phi-4"]
    messages = turns("a", "b")
    messages[1] |= {"mood": "calm: "}
    text, spans = conversation(messages, template, BY_NAME["Phi-4"]).run(lambda: None)
    assert text[slice(*spans[0])] == "calm: b<|im_end|>"


def test_the_package_holds_every_template():
    project = (ROOT / "pyproject.toml").read_text()
    (pattern,) = re.findall(r'"longctx\.train\.data\.chat" = \["(.*)"\]', project)
    assert {path.name for path in FOLDER.parent.glob(pattern)} == {f.file for f in FAMILIES}
    assert {path.name for path in FOLDER.iterdir()} == {f.file for f in FAMILIES}


def test_a_changed_template_or_option_is_another_identity(monkeypatch):
    from longctx.train.data.chat import training_templates

    before = identity()
    monkeypatch.setattr(training_templates, "_read", lambda file: "other")
    assert identity.__wrapped__() != before
    monkeypatch.undo()
    monkeypatch.setattr(training_templates, "FAMILIES", FAMILIES[1:])
    assert identity.__wrapped__() != before
