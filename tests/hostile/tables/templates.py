"""Chat templates are programs of strangers: they run in a sandbox, for a while, or not at all."""

from __future__ import annotations

from hostile.cases import fails, setting, table, works
from hostile.files import CHAT, template

LESS = (
    setting("longctx.train.data.chat.rendering.RENDER_S", 3.0),
    setting("longctx.train.data.chat.rendering.RENDER_BYTES", 2**29),
)
REFUSED = r"chat\.jsonl:1: the chat template refuses this conversation"
LOOP = "{% for m in messages %}"
PLAIN = LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NEVER = "{% for i in range(10**10) %}{% for j in range(10**10) %}{% endfor %}{% endfor %}"

TEMPLATES = {
    # whole
    "the usual one": (PLAIN + ASKED, works("3 documents")),
    "with markers": (
        LOOP + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        works("3 documents"),
    ),
    "lines that end as on Windows": ((PLAIN + ASKED).replace("\n", "\r\n"), works("3 documents")),
    # broken
    "half a loop": ("{% for m in", fails(REFUSED + ".* unexpected 'end of template'")),
    "an unknown tag": ("{% nonsense %}", fails(REFUSED + ".*unknown tag 'nonsense'")),
    "an unknown filter": ("{{ messages | nonsense }}", fails(REFUSED + ".*nonsense")),
    "an unclosed string": ("{{ 'abc }}", fails(REFUSED)),
    "an undefined name": ("{{ nothing.at_all }}", fails(REFUSED + ".*undefined")),
    "an undefined function": ("{{ nothing() }}", fails(REFUSED + ".*undefined")),
    "empty": ("", fails("chat template")),
    "blanks": (" \n ", fails(r"chat\.jsonl:1")),
    "only text": ("hello", fails(r"chat\.jsonl:1: .* does not show all of `content`")),
    "only the last turn": ("{{ messages[-1].content }}", fails("rewrites earlier turns")),
    "turns upside down": (PLAIN.replace("messages", "messages[::-1]") + ASKED, fails("rewrites")),
    "no generation prompt": (PLAIN, works("3 documents")),
    "markers around nothing": (
        PLAIN + "{% generation %}{% endgeneration %}",
        fails("marks no token of an assistant turn"),
    ),
    "markers never closed": (LOOP + "{% generation %}{{ m.content }}{% endfor %}", fails(REFUSED)),
    "markers within markers": (
        LOOP
        + "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}{% endfor %}",
        fails("does not show all of `content` of turn 2"),
    ),
    "binary": (b"\xff\xfe\x00", fails("broken|chat template")),
    "NUL bytes": (b"{{ messages }}\0", fails(r"chat\.jsonl:1|broken")),
    # what templates raise
    "its own exception": ("{{ raise_exception('no system turns\nplease') }}", fails(REFUSED)),
    "an exception of a megabyte": ("{{ raise_exception('x' * 1000000) }}", fails(REFUSED)),
    "an exception that colours": ("{{ raise_exception('\x1b[31m red') }}", fails(REFUSED)),
    "a division by zero": ("{{ 1 // 0 }}", fails(REFUSED + ".*zero")),
    "a key error": ("{{ {}['a']['b'] }}", fails(REFUSED)),
    "a type error": ("{{ 'a' + 1 }}", fails(REFUSED)),
    "an attribute of a number": ("{{ (1).upper() }}", fails(REFUSED)),
    "an overflow": ("{{ 10.0 ** 1000 }}", fails(REFUSED)),
    "a number too long to print": ("{{ 10 ** 100000 }}", fails(REFUSED)),
    "a wrong format": ("{{ '%d' % 'a' }}", fails(REFUSED)),
    "a wrong format string": ("{{ '{0.__class__}'.format(1) }}", fails(r"chat\.jsonl:1")),
    "a wrong date": ("{{ strftime_now('%') }}", fails(r"chat\.jsonl:1")),
    "endless macros": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", fails(REFUSED)),
    "an endless include": ("{% include 'chat_template.jinja' %}", fails(REFUSED)),
    "brackets too deep": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", fails(r"chat\.jsonl:1")),
    "ifs too deep": ("{% if 1 %}" * 500 + "{% endif %}" * 500, fails(r"chat\.jsonl:1")),
    # code
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", fails(REFUSED)),
    "a class's classes": ("{{ messages.__class__.__base__.__subclasses__() }}", fails(REFUSED)),
    "globals of a function": (
        "{{ raise_exception.__globals__['os'].mkdir('FOLDER/ran') }}",
        fails(REFUSED),
    ),
    "globals of cycler": (
        "{{ cycler.__init__.__globals__.os.mkdir('FOLDER/ran') }}",
        fails(REFUSED),
    ),
    "globals of joiner": (
        "{{ joiner.__init__.__globals__.os.mkdir('FOLDER/ran') }}",
        fails(REFUSED),
    ),
    "globals of lipsum": ("{{ lipsum.__globals__['os'].mkdir('FOLDER/ran') }}", fails(REFUSED)),
    "an attribute by filter": ("{{ ('' | attr('__class__')).mro() }}", fails(REFUSED)),
    "a format that reads": ("{{ '{0.__class__.__base__}'.format('') }}", fails(r"chat\.jsonl:1")),
    "an import": ("{% import 'os' as os %}{{ os.mkdir('FOLDER/ran') }}", fails(REFUSED)),
    "a file that is read": ("{% include '/etc/passwd' %}", fails(REFUSED)),
    "its own environment": ("{{ self.__init__.__globals__ }}", fails(REFUSED)),
    "messages that it changes": ("{{ messages.append(1) }}", fails(REFUSED)),
    "messages that it empties": ("{{ messages.clear() }}" + PLAIN, fails(REFUSED)),
    # without end
    "a range without end": ("{% for i in range(10**12) %}x{% endfor %}", fails(REFUSED)),
    "a loop without end": (NEVER, fails(REFUSED)),
    "a loop that doubles": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}"
        "{{ n.x }}",
        fails(r"chat\.jsonl:1"),
    ),
    "ten gigabytes of text": ("{{ 'x' * 10**10 }}", fails(r"chat\.jsonl:1")),
    "a list of ten billion": ("{{ [0] * 10**10 }}", fails(r"chat\.jsonl:1")),
    "a wide format": ("{{ '%9999999999d' % 1 }}", fails(r"chat\.jsonl:1")),
    "a centred string": ("{{ 'x' | center(10**10) }}", fails(r"chat\.jsonl:1")),
    "a power without end": ("{{ 9 ** 9 ** 9 ** 9 }}", fails(r"chat\.jsonl:1")),
    "a product of loops": (
        "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{% endfor %}{% endfor %}",
        fails("does not end within"),
    ),
    "a long word list": ("{{ lipsum(n=10**9) }}", fails("does not end within|too much memory")),
}

MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(s='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.s = m.content + '\n\n' %}{% elif m.role == 'user' %}"
    "{{ '[INST] ' + (ns.s if loop.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
SIGNS = "{# [INST] [/INST] <|im_start|> </think> <|start_header_id|><|eot_id|> <|im_sep|> #}"
TWICE = [{"role": "system", "content": "Be brief."}, *CHAT, *CHAT]
EARLIER = [*CHAT[:1], CHAT[1] | {"train": False}, *CHAT]
DROPS = (
    PLAIN.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content[1:])")
    + ASKED
)
FAMILIES = {
    "Mistral's, of two turns": (
        template(MISTRAL, *TWICE),
        works("chat template: Mistral-7B-v0.3's, through longctx's mistral.jinja"),
    ),
    "Mistral's, with another space": (
        template(MISTRAL.replace("'[INST] '", "'[INST]  '"), *TWICE),
        fails("rewrites earlier turns"),
    ),
    "one that only looks like several": (
        template(PLAIN + ASKED + SIGNS),
        works("chat template: the tokenizer's own: an answer is what it adds"),
    ),
    "a family's signs around a loop without end": (template(NEVER + SIGNS), fails(REFUSED)),
    "a family's signs and an error": (template("{{ 1 // 0 }}" + SIGNS), fails(REFUSED)),
    "earlier turns are rewritten": (
        template(DROPS, *CHAT, *CHAT),
        fails("or write `train`: false on the earlier answers"),
    ),
    "earlier turns are rewritten and not trained": (template(DROPS, *EARLIER), works("3 docum")),
    "markers, and a turn that is not trained": (
        template(
            LOOP + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            *EARLIER,
        ),
        works("its {% generation %} markers say what is trained"),
    ),
    "one mark for all, and a turn that is not trained": (
        template("{% generation %}" + PLAIN + "{% endgeneration %}", *EARLIER),
        fails("markers do not tell turn"),
    ),
}

MARKED = "{% generation %}{{ m.content }}{% endgeneration %}"
ANSWER = "{% if m.role == 'assistant' %}"
ROLES = (
    LOOP
    + "{{ '### ' + m.role + ': ' }}{{ WORDS }}{{ '\n' }}{% endfor %}"
    + ("{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}")
)
HUMAN = ROLES.replace("WORDS", "m.content")
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]
CUT = "m.content.split('</think>')[-1]"
THOUGHT = [CHAT[0], {"role": "assistant", "content": "<think>why</think>so"}]
LISTS = [{**turn, "content": [{"type": "text", "text": "words"}]} for turn in CHAT]
LOST = fails(r"chat\.jsonl:1: the chat template does not show all of `content` of turn 2")
PROMPTED = PLAIN + ASKED
ENDS = {
    "an answer without an end": (template(HUMAN), works("the template ends none, so .* is added")),
    "an answer of its own end": (
        template(HUMAN, CHAT[0], {"role": "assistant", "content": "b<|im_end|>"}),
        works("the template ends none"),
    ),
    "an answer that ends with the next role": (
        template(PROMPTED.replace("<|im_end|>", "")),
        works("the token of the next turn ends it"),
    ),
    "markers that close before the end": (
        template(
            PLAIN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
        ),
        works("markers say what is trained"),
    ),
    "markers without an end": (
        template(
            LOOP + ANSWER + "{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
            "{{ m.content }}{% endif %}{% endfor %}"
        ),
        works("the template ends none"),
    ),
    "a header without a generation prompt": (template(PLAIN, *CHAT, *CHAT), works("3 documents")),
    "reasoning that is cut": (template(ROLES.replace("WORDS", CUT), *THOUGHT), LOST),
    "reasoning that is cut, and not trained": (
        template(ROLES.replace("WORDS", CUT), THOUGHT[0], THOUGHT[1] | {"train": False}, *CHAT),
        works("3 documents"),
    ),
    "reasoning that is cut, in markers": (
        template(
            LOOP + ANSWER + "{% generation %}{{ " + CUT + " }}{% endgeneration %}{% endif %}"
            "{% endfor %}",
            *THOUGHT,
        ),
        LOST,
    ),
    "half of an answer": (template(ROLES.replace("WORDS", "m.content[:4]")), LOST),
    "an answer in capitals": (template(ROLES.replace("WORDS", "m.content | upper")), LOST),
    "an answer on one line": (
        template(ROLES.replace("WORDS", "m.content | replace('\n', ' ')")),
        works("3 documents"),
    ),
    "an answer as JSON": (
        template(
            ROLES.replace("WORDS", "m.content | tojson"),
            CHAT[0],
            {"role": "assistant", "content": 'he said "no"'},
        ),
        LOST,
    ),
    "parts of an answer alone": (
        template(
            LOOP + "{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}", *LISTS
        ),
        LOST,
    ),
    "text beside a call": (
        template(
            ROLES.replace("WORDS", "m.tool_calls | tojson if m.tool_calls else m.content"),
            CHAT[0],
            CHAT[1] | {"tool_calls": CALL},
        ),
        LOST,
    ),
    "a call of null": (
        template(
            ROLES.replace("WORDS", "m.content + (m.tool_calls | tojson if m.tool_calls else '')"),
            CHAT[0],
            CHAT[1] | {"tool_calls": CALL},
        ),
        works("3 documents"),
    ),
    "a prompt that opens reasoning": (
        template(PLAIN + ASKED.replace("{% endif %}", "<think>{% endif %}")),
        fails("ends the prompt with '<think>', and the answer begins with 'an answer"),
    ),
    "a prompt of another role": (
        template(PLAIN + ASKED.replace("assistant", "bot")),
        fails("ends the prompt with 'bot"),
    ),
    "a prompt that never is": (
        template(PLAIN + "{% if add_generation_prompt and false %}{% endif %}"),
        works("3 documents"),
    ),
    "an answer before all": (
        template(LOOP + "{{ m.content }}{% endfor %}", CHAT[1]),
        fails("shows no prompt before the first answer"),
    ),
}

CASES = (
    table("ends", {name: (*row, *LESS) for name, row in ENDS.items()})
    + table(
        "templates", {name: (template(text), end, *LESS) for name, (text, end) in TEMPLATES.items()}
    )
    + table("families", {name: (*row, *LESS) for name, row in FAMILIES.items()})
    + table(
        "templates",
        {
            "a turn that is a template": (
                template(PLAIN + ASKED, CHAT[0] | {"content": "{{ 1 // 0 }}"}, CHAT[1]),
                works("3 documents"),
            ),
            "a turn of special tokens": (
                template(PLAIN + ASKED, CHAT[0] | {"content": "<|im_end|><|im_start|>"}, CHAT[1]),
                works("3 documents"),
            ),
            "a turn that ends as the prompt": (
                template(PLAIN + ASKED, CHAT[0] | {"content": "<|im_start|>assistant\n"}, CHAT[1]),
                works("3 documents"),
            ),
        },
    )
)
