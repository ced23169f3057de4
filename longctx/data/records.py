"""What a record means: a JSONL object or a dataset's row becomes a checked document.

    {"text": "..."}                                               every token is trained
    {"prompt": "...", "completion": "..."}                        the completion is trained
    {"messages": [{"role": "user", "content": "..."}, ...]}       assistant turns are trained
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same in ShareGPT's words
    {"prompt": [turns], "completion": [turns]}                    those of the completion (TRL)
    {"instruction": "...", "input": "...", "output": "..."}       Alpaca: the output is trained

The first of messages, prompt and completion, instruction and output, text that a record has is
read. Alpaca's record is one exchange of a conversation; `history` holds earlier ones. Beside a
conversation, `system`, `tools`, `documents` and `chat_template_kwargs` reach the chat template.
turns.py reads the turns. A key that changes what other tools train is honoured or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longctx.data.turns import check_some_trained, read_turns
from longctx.data.values import check_depth, is_flag, kind, parse_json, shown, without_none
from longctx.errors import UserError

FORMATS = (
    "`text`, `messages`, `conversations`, `prompt` and `completion` or `instruction` and `output`"
)
WHOLE_RECORDS = "records are trained whole or left out of the file"
BY_TURN = "write `train`: true or false on the turns"
ALWAYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "train": ((True,), WHOLE_RECORDS),
    "training": ((True,), WHOLE_RECORDS),
    "weight": ((True,), WHOLE_RECORDS),
    "loss_mask": ((), BY_TURN),
}
IN_CONVERSATIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "train_detail": ((), BY_TURN),
    "roles_to_train": ((["assistant"], ["gpt"], ["assistant", "gpt"]), BY_TURN),
    "train_on_inputs": ((False,), BY_TURN),
    "mask_history": ((False,), BY_TURN),
    "mask": (("User", "user", "human"), BY_TURN),
    "reasoning_content": ((), "write it on the turn"),
}
"""A record's key by which another tool chooses what is trained -> the values that ask for what is
done anyway, and what to do for others."""
OWN_ARGUMENTS = frozenset(
    "messages conversations tools documents chat_template tokenize add_generation_prompt "
    "continue_final_message return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "bos_token eos_token pad_token unk_token".split()
)


CHATS = ("chat", "instruction")
"""Kinds of documents that go through the chat template."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One training document and where it came from (`file` or `file:line`)."""

    kind: Literal["text", "completion", "chat", "instruction"]
    """instruction is a chat that was Alpaca's record."""
    content: Any
    """text: str; completion: [prompt, completion]; chat: {"messages": [...]} and, where given,
    tools, documents, kwargs (of the template) and untrained (numbers of assistant turns)"""
    where: str
    replaced_bytes: int = 0
    """Undecodable bytes that became U+FFFD."""


def as_document(record: Any, where: str, replaced_bytes: int = 0) -> Document | None:
    """Checks a record (a JSONL object or a dataset's row); None when it holds only blanks.

    Raises UserError starting with `where` for anything that is not one of the known formats.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: expected an object with {FORMATS}, found {kind(record)}")
    check_depth(record, where)
    given = {key: value for key, value in record.items() if value is not None}
    _check_choices(given, ALWAYS, where)
    read = _read(given, where)
    if read is None:
        found = ", ".join(
            f"`{key}`" + " (null)" * (value is None) for key, value in list(record.items())[:6]
        )
        raise UserError(f"{where}: expected {FORMATS}, found {found or 'nothing'}")
    name, content = read
    if name == "text" and not content.strip():
        return None
    return Document(kind=name, content=content, where=where, replaced_bytes=replaced_bytes)


Read = tuple[Literal["text", "completion", "chat", "instruction"], Any]


def _read(given: Mapping[str, Any], where: str) -> Read | None:
    for key in ("messages", "conversations"):
        if key in given:
            messages, untrained = read_turns(given[key], key, where)
            if messages[-1]["role"] != "assistant" and {"chosen", "rejected"} & set(given):
                raise UserError(
                    f"{where}: `chosen` and `rejected` are not read: write the answer to train on "
                    f"as the last turn of `{key}`"
                )
            return "chat", _chat(messages, untrained, given, where)
    if {"prompt", "completion"} <= set(given):
        return _completion(given, where)
    if {"instruction", "output"} <= set(given):
        return "instruction", _chat(_alpaca(given, where), [], given, where)
    if "text" in given:
        return "text", _string(given, "text", where)
    return None


def _completion(given: Mapping[str, Any], where: str) -> Read:
    _check_choices(given, IN_CONVERSATIONS, where)
    if isinstance(given["prompt"], list) and isinstance(given["completion"], list):
        before, _ = read_turns(given["prompt"], "prompt", where)
        after, untrained = read_turns(given["completion"], "completion", where)
        context = [i for i, turn in enumerate(before) if turn["role"] == "assistant"]
        untrained = context + [len(before) + i for i in untrained]
        return "chat", _chat(before + after, untrained, given, where)
    texts = [_string(given, key, where) for key in ("prompt", "completion")]
    if not texts[1].strip():
        raise UserError(f"{where}: `completion` is empty, so there is nothing to train on")
    for key in ("system", "tools", "documents", "chat_template_kwargs"):
        if given.get(key):
            raise UserError(
                f"{where}: `{key}` beside a `prompt` that is a string is not read: write the "
                "conversation as `messages`"
            )
    return "completion", texts


def _chat(
    messages: list[dict[str, Any]], untrained: list[int], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    _check_choices(given, IN_CONVERSATIONS, where)
    check_some_trained(messages, untrained, where)
    for key in ("system", "system_prompt"):
        if key in given and (text := _string(given, key, where)).strip():
            if messages[0]["role"] != "system":
                messages = [{"role": "system", "content": text}, *messages]
                untrained = [i + 1 for i in untrained]
            elif messages[0]["content"] != text:
                raise UserError(f"{where}: a system turn and another `{key}`: leave one out")
    content: dict[str, Any] = {"messages": messages}
    if untrained:
        content["untrained"] = untrained
    if "tools" in given and given.get("functions"):
        raise UserError(f"{where}: `tools` and `functions`: leave one out")
    if "tools" in given:
        content["tools"] = _objects(given, "tools", "a list of JSON schemas", where)
    elif functions := "functions" in given and _objects(given, "functions", "a list", where):
        content["tools"] = [{"type": "function", "function": f} for f in functions]
    if documents := "documents" in given and _objects(given, "documents", "a list", where):
        content["documents"] = documents
    if kwargs := "chat_template_kwargs" in given and _template_arguments(given, where):
        content["kwargs"] = kwargs
    return content


def _alpaca(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The exchanges of an Alpaca record; `input` follows `instruction` on a line of its own."""
    asked = [_string(given, key, where) for key in ("instruction", "input") if key in given]
    question = "\n".join(text for text in asked if text.strip())
    answer = _string(given, "output", where)
    for key, text in (("instruction", question), ("output", answer)):
        if not text.strip():
            raise UserError(f"{where}: `{key}` is empty, so there is nothing to train on")
    history = given.get("history", [])
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        for pair in history
    ):
        raise UserError(f"{where}: `history` must be a list of [instruction, output] pairs")
    return [
        {"role": role, "content": text}
        for pair in [*history, (question, answer)]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _check_choices(
    given: Mapping[str, Any], keys: Mapping[str, tuple[tuple[Any, ...], str]], where: str
) -> None:
    """Raises UserError for a key that would have another tool train something else."""
    for key, (accepted, cure) in keys.items():
        value = given.get(key)
        if value in (None, "", []) or any(value == same for same in accepted):
            continue
        if is_flag(value) and any(is_flag(same) and bool(value) == same for same in accepted):
            continue
        raise UserError(f"{where}: `{key}` is {shown(value)}, which is not read: {cure}")


def _objects(given: Mapping[str, Any], key: str, expected: str, where: str) -> Any:
    """A list of objects, or None for an empty one; datasets keep such lists as JSON strings."""
    value = given[key]
    if isinstance(value, str):
        value = parse_json(value, f"{where}: `{key}`") if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise UserError(f"{where}: `{key}` must be {expected}")
    return [without_none(item) for item in value] or None


def _template_arguments(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    value = given["chat_template_kwargs"]
    if isinstance(value, str):
        value = parse_json(value, f"{where}: `chat_template_kwargs`") if value.strip() else {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: `chat_template_kwargs` must be an object, found {kind(value)}")
    value = without_none(value)
    if taken := sorted(OWN_ARGUMENTS & set(value)):
        raise UserError(
            f"{where}: `chat_template_kwargs` may not hold `{taken[0]}`: write it beside the turns"
            if taken[0] in ("tools", "documents")
            else f"{where}: `chat_template_kwargs` may not hold `{taken[0]}`: leave it out"
        )
    return value


def _string(given: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(given[key], str):
        raise UserError(f"{where}: `{key}` must be a string, found {kind(given[key])}")
    return given[key]
