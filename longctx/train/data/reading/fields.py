"""Keys that a record has besides its text or turns: what reaches the chat template, and what is
refused.

A key by which another tool chooses what is trained is refused where it asks for something that is
not done, so that no record is trained in a way that its author did not mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longctx.errors import UserError
from longctx.train.data.reading.values import excerpt, is_flag, kind, parse_json

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


def string(given: Mapping[str, Any], key: str, where: str) -> str:
    """Raises UserError for a value that is not a string."""
    if not isinstance(given[key], str):
        raise UserError(f"{where}: `{key}` must be a string, found {kind(given[key])}")
    return given[key]


def check_choices(
    given: Mapping[str, Any], keys: Mapping[str, tuple[tuple[Any, ...], str]], where: str
) -> None:
    """Raises UserError for a key that would have another tool train something else; `keys` is
    ALWAYS or IN_CONVERSATIONS."""
    for key, (accepted, cure) in keys.items():
        value = given.get(key)
        if value in (None, "", []) or any(value == same for same in accepted):
            continue
        if is_flag(value) and any(is_flag(same) and bool(value) == same for same in accepted):
            continue
        raise UserError(f"{where}: `{key}` is {excerpt(value)}, which is not read: {cure}")


def system_turn(
    messages: list[dict[str, Any]], given: Mapping[str, Any], where: str
) -> list[dict[str, Any]]:
    """Returns the turn to put before the conversation: that of `system` or `system_prompt`, where
    the conversation does not begin with it."""
    found: list[dict[str, Any]] = []
    for key in ("system", "system_prompt"):
        if key in given and (text := string(given, key, where)).strip():
            first = (found or messages)[0]
            if first["role"] != "system":
                found = [{"role": "system", "content": text}]
            elif first["content"] != text:
                raise UserError(f"{where}: a system turn and another `{key}`: leave one out")
    return found


def template_keys(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what a record hands the chat template besides its turns: `tools`, `documents` and
    `kwargs`, each only if it is not empty."""
    content: dict[str, Any] = {}
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


def no_template_keys(given: Mapping[str, Any], where: str) -> None:
    """Raises UserError for keys that only a chat template can use, in a record of strings."""
    for key in ("system", "tools", "documents", "chat_template_kwargs"):
        if given.get(key):
            raise UserError(
                f"{where}: `{key}` beside a `prompt` that is a string is not read: write the "
                "conversation as `messages`"
            )


def alpaca_question(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the turns of an Alpaca record before its last answer: the exchanges of `history`,
    then `instruction`, with `input` on a line of its own."""
    asked = [string(given, key, where) for key in ("instruction", "input") if key in given]
    question = "\n".join(text for text in asked if text.strip())
    if not question.strip():
        raise UserError(f"{where}: `instruction` is empty, so there is nothing to train on")
    history = given.get("history", [])
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        for pair in history
    ):
        raise UserError(f"{where}: `history` must be a list of [instruction, output] pairs")
    earlier = [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*earlier, {"role": "user", "content": question}]


def _objects(given: Mapping[str, Any], key: str, expected: str, where: str) -> Any:
    """Returns a list of objects, or None for an empty one; datasets keep such lists as JSON
    strings."""
    value = given[key]
    if isinstance(value, str):
        value = parse_json(value, f"{where}: `{key}`") if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise UserError(f"{where}: `{key}` must be {expected}")
    return value or None


def _template_arguments(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    value = given["chat_template_kwargs"]
    if isinstance(value, str):
        value = parse_json(value, f"{where}: `chat_template_kwargs`") if value.strip() else {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: `chat_template_kwargs` must be an object, found {kind(value)}")
    value = {key: given for key, given in value.items() if given is not None}
    if taken := sorted(OWN_ARGUMENTS & set(value)):
        raise UserError(
            f"{where}: `chat_template_kwargs` may not hold `{taken[0]}`: write it beside the turns"
            if taken[0] in ("tools", "documents")
            else f"{where}: `chat_template_kwargs` may not hold `{taken[0]}`: leave it out"
        )
    return value
