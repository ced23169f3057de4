"""Text, JSONL and datasets from strangers: read whole, or refused by file and line."""

from __future__ import annotations

import gzip

from hostile.cases import IO as IO_ERROR
from hostile.cases import Make, at, before, fails, prints, refuse, table, works
from hostile.files import (
    GOOD_LINE,
    arrow,
    both,
    chat,
    dataset,
    empty,
    file,
    flip,
    folder_of,
    given,
    halve,
    line,
    plain_dataset,
    record,
    remove,
    texts,
    write,
)

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
EXPECTED = r"f\.jsonl:2: expected"

LINES = {
    "truncated JSON": (line('{"text": "cut of'), fails(r":2 is not JSON \(Unterminated string")),
    "a word": (line("hello"), fails(r":2 is not JSON \(Expecting value")),
    "two objects": (line('{"text": "a"}{"text": "b"}'), fails(r":2 is not JSON \(Extra data")),
    "single quotes": (line("{'text': 'a'}"), fails(r":2 is not JSON \(Expecting property name")),
    "a trailing comma": (line('{"text": "a",}'), fails(r":2 is not JSON")),
    "a comment": (line('{"text": "a"} // why'), fails(r":2 is not JSON \(Extra data")),
    "a Python literal": (line('{"text": True}'), fails(r":2 is not JSON")),
    "a list": (line('["a"]'), fails(EXPECTED + " an object .* found a list")),
    "a number": (line("17"), fails(EXPECTED + " an object .* found a number")),
    "a string": (line('"text"'), fails(EXPECTED + " an object .* found a string")),
    "null": (line("null"), fails(EXPECTED + " an object .* found nothing")),
    "an empty object": (line("{}"), fails(EXPECTED + " `text`.* found nothing")),
    "nested too deeply": (line("[" * 200_000), fails(r":2 is not JSON \(nested too deeply")),
    "objects nested too deeply": (line('{"a":' * 200_000), fails(r"nested too deeply")),
    "a huge broken line": (line('{"text": "' + "x" * 9_000_000), fails("Unterminated string")),
    "a huge number": (line('{"text": ' + "9" * 10_000 + "}"), fails(r":2 is not JSON \(Exceeds")),
    "an exponent": (line('{"text": 1e999999999}'), fails("`text` must be a string")),
    "a NUL byte": (line(b'{"text": "a\0b"}'), fails(r"f\.jsonl")),
    "a NUL far in": (line(GOOD_LINE * 300 + b'{"text": "a\0b"}'), fails(":302 is not JSON")),
    "an escaped NUL": (line('{"text": "a\\u0000b"}'), works("2 documents")),
    "a bare tab": (line(b'{"text": "a\tb"}'), fails(r":2 is not JSON \(Invalid control")),
    "half a surrogate pair": (line('{"text": "a \\ud800 b"}'), works("undecodable|replaced")),
    "a whole surrogate pair": (line('{"text": "a \\ud83d\\ude00 b"}'), works("2 documents")),
    "a wrong escape": (line('{"text": "\\x41"}'), fails(r":2 is not JSON \(Invalid .*escape")),
    "keys twice": (line('{"text": 1, "text": "the second wins"}'), works("2 documents")),
    "a byte order mark within": (line(b'\xef\xbb\xbf{"text": "marked"}'), works("2 documents")),
    "carriage returns": (line('{"text": "a"}\r\n{"text": "b"}\r\n'), works("3 documents")),
    "old Mac line ends": (file("m.jsonl", GOOD_LINE.replace(b"\n", b"\r") * 2), fails(":1 is not")),
    "line separators in strings": (line('{"text": "a\u2028b\u0085c"}'), works("2 documents")),
    "no last line end": (line('{"text": "the end"}'), works("2 documents")),
    "blank lines between": (line("\n \n\t\n" + GOOD_LINE.decode()), works("2 documents")),
    "Latin-1": (line('{"text": "né né né né"}'.encode("latin-1")), fails(r"f\.jsonl.*UTF-8")),
    "error names line 100000": (line(GOOD_LINE * 99_998 + b"{"), fails(r"f\.jsonl:100000 is not")),
}

RECORDS = {
    "unknown keys": (record(body="x"), fails(EXPECTED + " `text`.* found `body`")),
    "a thousand keys": (record(**{f"k{i}": 1 for i in range(1000)}), fails(EXPECTED)),
    "a key of a megabyte": (record(**{"k" * 1_000_000: 1}), fails(EXPECTED)),
    "a key of two lines": (record(**{"a\nerror: b": 1}), fails(EXPECTED)),
    "a key that colours": (record(**{"\x1b[31m": 1}), fails(EXPECTED)),
    "an unknown key of markup": (record(**{"[bold]": "[/x]"}), fails(EXPECTED)),
    "text is a number": (record(text=1), fails("`text` must be a string, found a number")),
    "text is a list": (record(text=["a"]), fails("`text` must be a string, found a list")),
    "text is an object": (record(text={"a": 1}), fails("`text` must be a string, found an object")),
    "text is null": (record(text=None), fails(EXPECTED + " `text`.* found `text`")),
    "text is NaN": (line('{"text": NaN}'), fails("`text` must be a string, found a number")),
    "text is true": (record(text=True), fails("`text` must be a string, found a boolean")),
    "text is empty": (record(text=""), works("1 document")),
    "text is blanks": (record(text=" \n\t\u00a0"), works("1 document,")),
    "text of one character": (record(text="x"), works("2 documents")),
    "text of a zero width space": (record(text="\u200b"), works("document")),
    "text of special tokens": (record(text="<|bos|><|im_end|><|pad|>" * 9), works("2 documents")),
    "text of a million a": (record(text="a" * 1_000_000), works("2 documents")),
    "text of a million brackets": (record(text="(" * 1_000_000), works("2 documents")),
    "text of emoji": (record(text="\N{PILE OF POO}" * 5000), works("2 documents")),
    "text right to left": (record(text="\u202eabc\u202c" * 99), works("2 documents")),
    "a prompt alone": (record(prompt="p"), fails(EXPECTED + " `text`.* found `prompt`")),
    "a completion alone": (record(completion="c"), fails(EXPECTED + ".* found `completion`")),
    "an empty completion": (record(prompt="p", completion=" "), fails("`completion` is empty")),
    "an empty prompt": (record(prompt="", completion="the answer"), works("2 documents")),
    "a completion of objects": (record(prompt="p", completion={}), fails("found an empty object")),
    "a completion of null": (record(prompt="p", completion=None), fails(EXPECTED)),
    "a prompt longer than a row": (record(prompt="p " * 999, completion="c"), works("left out")),
    "messages is a string": (record(messages="hi"), fails("`messages` must .* is not JSON")),
    "messages is an object": (record(messages={"a": 1}), fails("`messages` must be a list")),
    "messages is a number": (record(messages=3), fails("`messages` must be a list")),
    "no messages": (record(messages=[]), fails("`messages` must be .* found an empty list")),
    "a turn is a string": (record(messages=["hi"]), fails("turn 1 .* found a string")),
    "a turn is null": (record(messages=[None]), fails("turn 1 .* found nothing")),
    "a turn is a list": (record(messages=[[1]]), fails("turn 1 .* found a list")),
    "an unknown role": (chat({"role": "robot", "content": "x"}), fails("unknown role 'robot'")),
    "a role of a megabyte": (chat({"role": "r" * 10**6, "content": ""}), fails("unknown role")),
    "a role of two lines": (chat({"role": "a\nb", "content": ""}), fails("unknown role")),
    "a role is a list": (chat({"role": [], "content": "x"}), fails(r"the unknown role \[\]")),
    "a role is an object": (chat({"role": {"a": 1}, "content": "x"}), fails("unknown role")),
    "a role in capitals": (chat({"role": "User", "content": "x"}, ANSWER), works("2 documents")),
    "no role": (chat({"content": "x"}), fails("turn 1 .* unknown role None")),
    "no assistant": (chat(USER), fails("no assistant turn")),
    "an assistant alone": (chat(ANSWER), works("2 documents")),
    "two assistants in a row": (chat(USER, ANSWER, ANSWER), works("2 documents")),
    "a thousand turns": (chat(*[USER, ANSWER] * 500), works("2 documents")),
    "content is a number": (chat(USER, {"role": "assistant", "content": 3}), fails("turn 2")),
    "content is null": (chat(USER, {"role": "assistant", "content": None}), fails("turn 2")),
    "content is missing": (chat(USER, {"role": "assistant"}), fails("turn 2 .* found nothing")),
    "content is an object": (chat(USER, {"role": "assistant", "content": {}}), fails("turn 2")),
    "content is empty": (chat(USER, {"role": "assistant", "content": ""}), works("2 documents")),
    "an image": (
        chat({"role": "user", "content": [{"type": "image"}]}, ANSWER),
        fails(":1: it has images"),
    ),
    "a part of null": (chat({"role": "user", "content": [None]}, ANSWER), fails("not text")),
    "tools are a number": (chat(USER, ANSWER, tools=3), fails("`tools` must be a list")),
    "tools of numbers": (chat(USER, ANSWER, tools=[1]), fails("`tools` must be a list")),
    "tools are no JSON": (chat(USER, ANSWER, tools="{"), fails("`tools` is not JSON")),
    "tools nested too deeply": (chat(USER, ANSWER, tools="[" * 99_999), fails("nested too deeply")),
    "calls the template leaves out": (
        chat(USER, {"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}),
        fails("the chat template leaves out `tool_calls`"),
    ),
    "ShareGPT without value": (
        record(conversations=[{"from": "human"}, {"from": "gpt", "value": "a"}]),
        fails("turn 1 of `conversations` needs a string as `value`, found nothing"),
    ),
    "ShareGPT with its own roles": (
        record(conversations=[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]),
        works("2 documents"),
    ),
    "every format at once": (
        record(text="t", messages=[USER, ANSWER], prompt="p", completion="c"),
        works("2 documents"),
    ),
}

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def answer(**keys: object) -> Make:
    """A conversation whose second answer has these keys."""
    return chat(USER, ANSWER, USER, ANSWER | keys)


TURNS = {
    "a turn that is not trained": (answer(train=False), works("2 documents")),
    "a turn of weight 0": (answer(weight=0), works("2 documents")),
    "a turn of weight 1.0": (answer(weight=1.0), works("2 documents")),
    "a turn without loss": (answer(loss=False), works("2 documents")),
    "train is a word": (answer(train="false"), fails("turn 4 .*`train` must be true or false")),
    "train is two": (answer(train=2), fails("turn 4 .*`train` must be true or false, found 2")),
    "train is a list": (answer(train=[]), fails("turn 4 .*`train` must be true or false")),
    "half a weight": (answer(weight=0.5), fails("turn 4 .*`weight` must be 0 or 1, found 0.5")),
    "a weight of a word": (answer(weight="0"), fails('`weight` must be 0 or 1, found "0"')),
    "a weight beyond all": (answer(weight=10**400), fails("`weight` must be 0 or 1, found 10+")),
    "train against weight": (answer(train=True, weight=0), fails("contradict each other")),
    "no turn is trained": (
        chat(USER, ANSWER | {"train": False}),
        fails("leaves no assistant turn to train on: remove the record"),
    ),
    "a question to train": (
        chat(USER | {"train": True}, ANSWER),
        fails("only assistant turns"),
    ),
    "parts of a turn to train": (answer(train_detail=[{"train": 1}]), fails("split the turn")),
    "a mask": (answer(mask=True), fails("write `train`: true or false instead")),
    "roles to train": (chat(USER, ANSWER, roles_to_train=["user"]), fails("`roles_to_train` is")),
    "a record of weight 0": (record(text="t", weight=0), fails("`weight` is 0, which is not read")),
    "a record that is not trained": (record(text="t", train="no"), fails('`train` is "no"')),
    "reasoning the template leaves out": (
        answer(reasoning_content="hm"),
        fails("the chat template leaves out `reasoning_content` of turn 4"),
    ),
    "reasoning of another name": (answer(thinking="hm"), fails("leaves out `thinking` of turn 4")),
    "reasoning in a list": (answer(reasoning_content=["hm"]), fails("must be a string, found a l")),
    "tools the template leaves out": (
        chat(USER, ANSWER, tools=[CALL]),
        fails("the chat template leaves out `tools`"),
    ),
    "functions the template leaves out": (
        chat(USER, ANSWER, functions=[CALL["function"]]),
        fails("the chat template leaves out `tools`"),
    ),
    "one call the template leaves out": (
        answer(function_call=CALL["function"]),
        fails("leaves out `tool_calls` of turn 4"),
    ),
    "arguments that are no JSON": (
        answer(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        fails("turn 4 .*`arguments` of a call is not JSON"),
    ),
    "documents the template leaves out": (
        chat(USER, ANSWER, documents=[{"text": "x"}]),
        fails("the chat template leaves out `documents`"),
    ),
    "a variable the template lacks": (
        chat(USER, ANSWER, chat_template_kwargs={"enable_thinking": False}),
        fails("does not know `enable_thinking` of `chat_template_kwargs`"),
    ),
    "a variable that is ours": (
        chat(USER, ANSWER, chat_template_kwargs={"chat_template": "{{ 1 // 0 }}"}),
        fails("may not hold `chat_template`: leave it out"),
    ),
    "a system prompt beside": (chat(USER, ANSWER, system="Be brief."), works("2 documents")),
    "two system prompts": (
        chat({"role": "system", "content": "a"}, USER, ANSWER, system="b"),
        fails("a system turn and another `system`"),
    ),
    "preferences": (
        chat(USER, ANSWER, USER, chosen="a", rejected="b"),
        fails("`chosen` and `rejected` are pairs, which --task dpo reads"),
    ),
    "a pair": (
        record(prompt="p", chosen="a", rejected="b"),
        fails("found `prompt`, `chosen`, `rejected`: --task dpo reads pairs"),
    ),
    "a pair of conversations": (
        record(chosen=[USER, ANSWER], rejected=[USER, ANSWER]),
        fails(": --task dpo reads pairs"),
    ),
    "a rated answer": (
        record(prompt="p", completion="c", label=False),
        fails("`label` rates the completion, as --task kto reads it: leave `label` out"),
    ),
    "a label of a class": (record(text="a text of class 3", label=3), works("2 documents")),
    "Alpaca": (record(instruction="i", input="x", output="o"), works("instruction, input and out")),
    "Alpaca without output": (record(instruction="i", output=""), fails("`output` is empty")),
    "Alpaca of numbers": (record(instruction=1, output="o"), fails("`instruction` must be a str")),
    "Alpaca with a torn history": (
        record(instruction="i", output="o", history=[["p"]]),
        fails("`history` must be a list of"),
    ),
    "TRL's prompt of turns": (record(prompt=[USER], completion=[ANSWER]), works("2 documents")),
    "a prompt of turns, a string after it": (
        record(prompt=[USER], completion="a"),
        fails("`prompt` must be a string, found a list"),
    ),
    "mixed names of turns": (
        chat({"from": "human", "value": "u"}, ANSWER, {"role": "user", "value": "v"}, ANSWER),
        works("2 documents"),
    ),
    "a turn of two roles": (answer(**{"from": "human"}), fails("a `role` and another `from`")),
}


def said(*parts: object) -> Make:
    """A conversation whose second answer is a list of parts."""
    return answer(content=list(parts))


TEXT_PART = {"type": "text", "text": "an answer"}
CLIENTS = {
    "Anthropic's text": (said(TEXT_PART), works("2 documents")),
    "Anthropic's cached text": (
        said(TEXT_PART | {"cache_control": {"type": "ephemeral"}}),
        works("2 documents"),
    ),
    "Anthropic's thinking": (
        said({"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT_PART),
        fails("turn 4 .* a part that is not text"),
    ),
    "Anthropic's call": (
        said(TEXT_PART, {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        fails("turn 4 .* a part that is not text"),
    ),
    "Anthropic's result": (
        chat({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}, ANSWER),
        fails("turn 1 .* a part that is not text"),
    ),
    "Anthropic's old text": (
        record(prompt="\n\nHuman: q\n\nAssistant:"),
        fails(EXPECTED + ".* found `prompt`"),
    ),
    "OpenAI's text of responses": (
        said({"type": "output_text", "text": "a"}),
        works("2 documents"),
    ),
    "OpenAI's responses": (
        record(input=[USER], output=[ANSWER]),
        fails(EXPECTED + ".* found `input`, `output`"),
    ),
    "OpenAI's batch": (
        record(custom_id="1", body={"messages": [USER, ANSWER]}),
        fails(EXPECTED + ".* found `custom_id`, `body`"),
    ),
    "OpenAI's refusal": (
        answer(content=None, refusal="I can't."),
        fails("turn 4 .* needs a string"),
    ),
    "OpenAI's refusal beside": (
        answer(refusal="I can't."),
        fails("leaves out `refusal` of turn 4"),
    ),
    "OpenAI's refusal of null": (answer(refusal=None, annotations=[]), works("2 documents")),
    "OpenAI's audio": (answer(content=None, audio={"id": "a"}), fails("turn 4 .* needs a string")),
    "OpenAI's developer": (
        chat({"role": "developer", "content": "x"}, USER, ANSWER),
        works("2 documents"),
    ),
    "OpenAI's name": (chat(USER | {"name": "bob"}, ANSWER), works("2 documents")),
    "ChatGPT's export": (
        record(title="t", mapping={"a": {"message": None}}),
        fails(EXPECTED + ".* found `title`, `mapping`"),
    ),
    "Gemini's contents": (
        record(contents=[{"role": "user", "parts": [{"text": "q"}]}]),
        fails(EXPECTED + ".* found `contents`"),
    ),
    "Gemini's role": (
        chat(USER, {"role": "model", "content": "a"}),
        works("2 documents"),
    ),
    "Gemini's parts": (
        chat(USER, {"role": "assistant", "parts": ["a"]}),
        fails("turn 2 .* needs a string as `content`, found nothing"),
    ),
    "Mistral's prefix": (answer(prefix=True), works("2 documents")),
    "LangChain's turns": (
        chat({"type": "human", "data": {"content": "q"}}, {"type": "ai", "data": {}}),
        fails("turn 1 .* unknown role None"),
    ),
    "LangChain's types": (
        chat({"type": "human", "content": "q"}, {"type": "ai", "content": "a"}),
        fails("turn 1 .* unknown role None"),
    ),
    "LLaMA-Factory's calls": (
        record(
            conversations=[
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "a"},
            ]
        ),
        fails("the chat template leaves out `tool_calls` of turn 2"),
    ),
    "Axolotl's segments": (
        record(segments=[{"label": True, "text": "a"}]),
        fails(EXPECTED + ".* found `segments`"),
    ),
    "OpenAssistant's tree": (
        record(prompt={"text": "q", "replies": []}),
        fails(EXPECTED + ".* found `prompt`"),
    ),
    "UltraChat's data": (
        record(id="1", data=["q", "a"]),
        fails(EXPECTED + ".* found `id`, `data`"),
    ),
    "Dolly": (
        record(instruction="i", context="c", response="r"),
        fails(EXPECTED + ".* found `instruction`, `context`, `response`"),
    ),
    "SQuAD": (
        record(question="q", answers={"text": ["a"]}, context="c"),
        fails(EXPECTED + ".* found `question`, `answers`"),
    ),
    "questions and answers": (
        record(question="q", answer="a"),
        fails(EXPECTED + ".* found `question`, `answer`"),
    ),
    "messages in a string": (
        record(messages='[{"role": "user", "content": "q"}]'),
        fails("no assistant turn"),
    ),
    "a conversation in a string": (
        record(conversation="USER: q ASSISTANT: a"),
        fails(EXPECTED + ".* found `conversation`"),
    ),
    "a list of conversations": (
        record(messages=[[USER, ANSWER], [USER, ANSWER]]),
        fails("turn 1 .* must be an object, found a list"),
    ),
    "a tool that answers nobody": (
        chat(USER, {"role": "tool", "content": "3", "tool_call_id": "1"}, ANSWER),
        works("2 documents"),
    ),
    "a header of Llama in an answer": (
        answer(content="a<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq"),
        works("2 documents"),
    ),
    "a turn of ChatML in an answer": (
        answer(content="a<|im_end|>\n<|im_start|>user\nq"),
        works("2 documents"),
    ),
    "both names of the turns": (
        record(messages=[USER, ANSWER], conversations=[]),
        works("2 documents"),
    ),
}
"""Records as other programs write them."""

ASCII = b"plain text of ordinary words that is long enough. " * 40
FILES = {
    "an empty file": (file("e.txt", b""), fails(r"e\.txt is empty")),
    "an empty document": (
        file("b.txt", b" \n\t\n"),
        fails(r"no readable text in .*b\.txt: .* blank"),
    ),
    "blank lines": (
        file("b.jsonl", b"\n\n \n"),
        fails(r"no readable text in .*b\.jsonl: .* blank"),
    ),
    "one character": (file("o.txt", b"x"), works("1 document, 3 tokens -> 1 row")),
    "a byte order mark alone": (
        file("b.txt", b"\xef\xbb\xbf"),
        fails(r"no readable text in .*b\.txt"),
    ),
    "a byte order mark": (file("b.txt", b"\xef\xbb\xbf" + ASCII), works("1 document")),
    "two byte order marks": (file("b.txt", b"\xef\xbb\xbf" * 2 + ASCII), works("1 document")),
    "binary": (file("b.txt", bytes(range(256))), fails(r"b\.txt is binary")),
    "binary after a page of text": (file("b.txt", ASCII * 9 + bytes(999)), fails(r"b\.txt")),
    "random bytes without NUL": (file("b.txt", bytes(range(1, 256)) * 40), fails(r"b\.txt")),
    "a PNG": (
        file("p.txt", b"\x89PNG\r\n\x1a\n" + bytes(99)),
        fails("p.txt is no text but a PNG image: convert it to text"),
    ),
    "a ZIP": (
        file("z.txt", b"PK\x03\x04" + bytes(99)),
        fails("z.txt is no text but a zip archive: unpack it"),
    ),
    "gzip": (file("z.txt", gzip.compress(ASCII)), fails(r"z\.txt is no text but gzip-comp")),
    "a torn gzip": (file("z.jsonl.gz", b"\x1f\x8b\x08" + bytes(99)), fails(r"z\.jsonl\.gz")),
    "a gzipped JSONL": (file("z.jsonl.gz", gzip.compress(GOOD_LINE * 9)), works("9 documents")),
    "a pickle": (
        file("p.txt", b"\x80\x04\x95" + bytes(99)),
        fails("is no text but a Python pickle: write its text as .jsonl"),
    ),
    "UTF-16 with its mark": (
        file("u.txt", (ASCII.decode()).encode("utf-16")),
        works("1 document"),
    ),
    "UTF-16 without": (file("u.txt", ASCII.decode().encode("utf-16-le")), fails(r"u\.txt")),
    "UTF-16 cut in half": (file("u.txt", "hé".encode("utf-16")[:-1]), fails(r"u\.txt")),
    "UTF-16 JSONL": (
        file("u.jsonl", '{"text": "hello you"}\n'.encode("utf-16")),
        works("1 document"),
    ),
    "UTF-32": (file("u.txt", ASCII.decode().encode("utf-32")), works("1 document")),
    "Latin-1 here and there": (file("l.txt", ASCII + b"caf\xe9"), works("replaced 1 undecodable")),
    "Latin-1 all over": (file("l.txt", "né".encode("latin-1") * 500), fails(r"l\.txt.*UTF-8")),
    "mixed encodings": (
        file("m.txt", ASCII + b"n\xe9 " * 5),
        works(r"m\.txt: replaced 5 undecodable bytes"),
    ),
    "overlong UTF-8": (file("o.txt", ASCII + b"\xc0\xaf"), works("replaced 2 undecodable bytes")),
    "half a character at the end": (file("h.txt", ASCII + "é".encode()[:1]), works("replaced 1")),
    "escape codes of a terminal": (file("t.txt", b"\x1b]0;owned\x07" * 99), works("1 document")),
    "one line of five megabytes": (file("l.txt", b"word " * 1_000_000), works("1 document")),
    "ten thousand blank lines": (file("b.txt", b"\n" * 10_000 + ASCII), works("1 document")),
    "an empty list": (file("a.json", b"[]"), fails(r"no readable text in .*a\.json")),
    "a list of records": (file("a.json", b'[{"text": "hello"}]'), works("1 document")),
    "a list that breaks off": (file("a.json", b'[{"text": "he'), fails(r"a\.json:1 is not JSON")),
    "a list nested too deeply": (file("a.json", b"[" * 200_000), fails("nested too deeply")),
    "CSV": (file("a.csv", b"text\nhello\nyou\n"), works("2 documents")),
    "CSV of other columns": (
        file("a.csv", b"a,b\n1,2\n"),
        fails("no columns of records.*`a`, `b`"),
    ),
    "a torn Parquet file": (file("a.parquet", b"PAR1" + bytes(99)), fails(r"a\.parquet broke")),
    "a bomb of gzip": (
        file("z.jsonl.gz", gzip.compress(b'{"text": "' + bytes(99 << 20))),
        fails(r"z\.jsonl\.gz unpacks to more than 200 times its size"),
    ),
    "an unknown ending": (file("a.xyz", ASCII), works("1 document")),
    "no ending": (file("README", ASCII), works("1 document")),
    "JSONL named txt": (file("a.txt", GOOD_LINE * 9), works("1 document")),
    "text named jsonl": (file("a.jsonl", ASCII), fails(r"a\.jsonl:1 is not JSON")),
    "an ending in capitals": (file("a.JSONL", GOOD_LINE * 9), works("9 documents")),
    "a template in the text": (file("t.txt", b"{{ ''.__class__ }} {% for %}" * 50), works("1 doc")),
    "Rich markup in the text": (
        both(file("t.txt", b"[bold red] [/nothing] [link=x]" * 50), given("--class_type vanilla")),
        works("1 document"),
    ),
    "a name that is no UTF-8": (folder_of(b"caf\xe9.txt", ASCII), works("1 document")),
    "a folder that is no UTF-8": (folder_of(b"\xff\xfe/a.txt", ASCII), works("1 document")),
    "a bad line in a name that is no UTF-8": (
        folder_of(b"\xe9.jsonl", b"{"),
        fails(r"\\udce9\.jsonl:1 is not JSON"),
    ),
    "a name that is no UTF-8, shown": (
        both(folder_of(b"caf\xe9.txt", ASCII), given("--show_example")),
        prints(r"1 of 1: .*caf\\udce9\.txt"),
    ),
    "a name of terminal codes, shown": (
        both(folder_of(b"\x1b[31m\nred.txt", ASCII), given("--show_example")),
        prints(r"1 of 1: .*\\x1b\[31m\\nred\.txt"),
    ),
    "a file that fails while it is read": (
        file("a.txt", ASCII),
        fails("cannot read .*Input/output error"),
        at(before("longctx.train.data.reading.sources._read_text"), refuse(IO_ERROR)),
    ),
}

DATASETS = {
    "whole": (dataset(texts()), works("9 documents")),
    "streamed": (dataset(texts(), words="--streaming"), works()),
    "half of it": (dataset(texts(), arrow(halve)), fails("cannot load the dataset .*saved")),
    "an empty Arrow file": (dataset(texts(), arrow(empty)), fails("cannot load the dataset")),
    "no Arrow file": (dataset(texts(), arrow(lambda p: p.unlink())), fails("cannot load the")),
    "a flipped header": (dataset(texts(), arrow(lambda p: flip(p, 0.01))), fails("dataset")),
    "half of it, streamed": (dataset(texts(), arrow(halve), "--streaming"), fails("dataset")),
    "a broken state": (dataset(texts(), write("state.json", "{")), fails("JSONDecodeError")),
    "a state that is a list": (dataset(texts(), write("state.json", "[]")), fails("cannot load")),
    "a state of other files": (
        dataset(texts(), write("state.json", '{"_data_files": [{"filename": "../../x"}]}')),
        fails("cannot load the dataset"),
    ),
    "a broken info": (dataset(texts(), write("dataset_info.json", "{")), fails("cannot load the")),
    "no info": (dataset(texts(), remove("dataset_info.json")), fails("cannot load the dataset")),
    "no state": (dataset(texts(), remove("state.json")), works("9 documents")),
    "no rows": (dataset({"text": []}), fails("no readable text|no rows")),
    "no rows, streamed": (dataset({"text": []}, words="--streaming"), fails("no rows")),
    "blank rows": (dataset({"text": [" "] * 9}), fails("no readable text in .*blank")),
    "null rows": (
        dataset({"text": ["a b c " * 9, None, "d e f"]}),
        fails(r"row 1: .*found `text` .null."),
    ),
    "only null rows": (dataset({"text": [None] * 9}), fails("saved")),
    "null rows, streamed": (
        dataset({"text": ["a b " * 99, None]}, words="--streaming"),
        fails(r"found `text` .null."),
    ),
    "no known column": (dataset({"body": ["a"]}), fails("row 0: expected `text`.* found `body`")),
    "no known column, streamed": (dataset({"b": ["a"]}, words="--streaming"), fails("row 0")),
    "a column of numbers": (dataset({"text": [1, 2]}), fails("row 0: `text` must be a string")),
    "a column of lists": (dataset({"text": [["a"]]}), fails("row 0: `text` must be a string")),
    "a column of bytes": (dataset({"text": [b"a"]}), fails("row 0: `text` must be a string")),
    "a bad row, streamed": (
        dataset({"text": ["a b " * 9] * 300 + [""], "messages": [None] * 300 + [[]]}, words=""),
        fails("row 300|messages"),
    ),
    "a split of one without splits": (
        dataset(texts(), words="--dataset_split gone"),
        fails("has no splits: leave out --dataset_split gone"),
    ),
    "a configuration of one without": (
        dataset(texts(), words="--dataset_config gone"),
        fails("--dataset_config"),
    ),
    "columns too many": (dataset(texts() | {f"c{i}": [0] * 9 for i in range(500)}), works("9 doc")),
    "a CSV": (plain_dataset("a.csv", "text\n" + "hello you all\n" * 99), works("99 documents")),
    "a CSV of other columns": (plain_dataset("a.csv", "a,b\n1,2\n"), fails("expected `text`")),
    "a ragged CSV": (plain_dataset("a.csv", 'text,b\n"a\nb,c,d,e\n'), fails("cannot load")),
    "a broken parquet": (plain_dataset("a.parquet", b"PAR1" + bytes(99)), fails("cannot load the")),
    "a broken JSONL": (plain_dataset("a.jsonl", '{"text": "a"}\n{"te'), fails("cannot load the")),
    "a broken JSONL, streamed": (
        plain_dataset("a.jsonl", GOOD_LINE * 400 + b'{"te', "--streaming"),
        fails("plain"),
    ),
    "lines of unlike types": (
        plain_dataset("a.jsonl", '{"text": "a"}\n{"text": 1}\n'),
        fails("plain"),
    ),
    "a script": (
        plain_dataset("plain.py", "open('FOLDER/ran', 'w')\n"),
        fails("cannot load the dataset|plain"),
    ),
    "a pickle": (
        plain_dataset("a.pkl", b"\x80\x04cos\nmkdir\n."),
        fails("cannot load the dataset"),
    ),
    "a text file as a dataset": (
        both(file("a.txt", ASCII, "--dataset_name")),
        fails("cannot load the dataset"),
    ),
    "an empty folder": (given("--dataset_name FOLDER/tmp"), fails("the dataset")),
    "a model as a dataset": (
        given("--dataset_name BASE/model"),
        fails("the dataset .*model|row 0"),
    ),
    "an endless name": (given("--dataset_name " + "x" * 5000), fails("dataset")),
    "a name of two lines": (given("--dataset_name 'a\nb'"), fails("dataset")),
}

CASES = [
    *table("lines", LINES),
    *table("records", RECORDS),
    *table("turns", TURNS),
    *table("clients", CLIENTS),
    *table("files", FILES),
    *table("datasets", DATASETS),
]
