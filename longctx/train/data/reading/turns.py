"""One turn of a conversation: its role, its text, and whether it is trained.

    {"role": "assistant", "content": "..."}     {"from": "gpt", "value": "..."}     both names work
    "train": false, "weight": 0                 the turn is read and not trained

`train` is axolotl's, `training` its other name, `loss` ms-swift's, `weight` OpenAI's. Other keys by
which a tool chooses what is trained are refused. All further keys reach the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from longctx.errors import UserError
from longctx.train.data.reading.media import COLUMNS, CURES, ONE, PARTS, part_medium
from longctx.train.data.reading.values import check_depth, excerpt, fault, is_flag, kind, parse_json

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""A role in small letters -> what chat templates call it."""
NAMES = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Maps the name of a list of turns to the keys of a turn's role and text; both pairs of keys are
read in either list."""
TURNS = (*NAMES, "prompt", "completion", "chosen", "rejected")
"""The keys under which a record may have turns."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
TRAINED = ("train", "training", "loss", "weight")
WRITE_TRAIN = "write `train`: true or false instead"
WHOLE_TURNS = (
    "parts of a turn are not trained apart: split the turn, or write `train` for all of it"
)
REFUSED = {
    "train_detail": WHOLE_TURNS,
    "training_detail": WHOLE_TURNS,
    "loss_mask": WHOLE_TURNS,
    "mask": WRITE_TRAIN,
    "masked": WRITE_TRAIN,
    "loss_scale": WRITE_TRAIN,
    "loss_weight": WRITE_TRAIN,
}
"""Keys of a turn that choose what other tools train -> what to do."""
REASONING = ("reasoning_content", "reasoning", "thinking")


def listed_turns(value: Any, key: str, where: str) -> Any:
    """Turns as a list, from the other forms in which tables hold them: JSON in a string (of
    `messages` and `conversations`, which are no texts), or an object of lists.

        {"role": ["user", "assistant"], "content": ["q", "a"]}

    Raises UserError starting with `where` for a string that is not JSON and for lists of unlike
    lengths."""
    if isinstance(value, str) and key in NAMES:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{where}: `{key}` must be a list of turns, found a string that is not JSON "
                f"({fault(error)}): write it with json.dumps"
            ) from error
        check_depth(value, f"{where}: `{key}`")
    if not isinstance(value, Mapping) or not any(
        isinstance(value.get(name), list) for name in ("role", "from")
    ):
        return value
    lists = {name: items for name, items in value.items() if isinstance(items, list)}
    if len(lists) < len(value) or len({*map(len, lists.values())}) > 1:
        raise UserError(
            f"{where}: `{key}` is an object of lists, which must all be as long: write a list of "
            "turns"
        )
    return [dict(zip(lists, turn, strict=True)) for turn in zip(*lists.values(), strict=True)]


def read_turns(turns: Any, key: str, where: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the messages for the chat template, and the numbers of the assistant turns that are
    not trained (from 0).

    Raises UserError starting with `where` for a turn that is not understood.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise UserError(f"{where}: `{key}` must be a list of turns, found {kind(turns)}")
    messages: list[dict[str, Any]] = []
    untrained = []
    for number, turn in enumerate(turns):
        at = f"{where}: turn {number + 1} of `{key}`"
        if not isinstance(turn, Mapping):
            raise UserError(f"{at} must be an object, found {kind(turn)}")
        messages.append(_message(turn, NAMES.get(key, NAMES["messages"]), at))
        if not _is_trained(turn, messages[-1]["role"], at):
            untrained.append(number)
    return messages, [i for i in untrained if messages[i]["role"] == "assistant"]


def check_some_trained(
    messages: Sequence[Mapping[str, Any]], untrained: Sequence[int], where: str
) -> None:
    """Raises UserError for a conversation without a turn to train on."""
    answers = sum(message["role"] == "assistant" for message in messages)
    if not answers:
        raise UserError(f"{where}: no assistant turn, so there is nothing to train on")
    if answers == len(untrained):
        raise UserError(
            f"{where}: `train` or `weight` leaves no assistant turn to train on: remove the record"
        )


def _message(turn: Mapping[str, Any], names: tuple[str, str], at: str) -> dict[str, Any]:
    (role_key, role), (content_key, content) = (
        _either(turn, name, other, at) for name, other in zip(names, _others(names), strict=True)
    )
    named, role = role, role.strip().lower() if isinstance(role, str) else ""
    if role not in ROLES:
        raise UserError(
            f"{at} has the unknown {role_key} {named!r}; known: {', '.join(sorted(ROLES))}"
        )
    extra = {k: v for k, v in turn.items() if v is not None}  # which templates would print
    for key in ("role", "content", "from", "value", *TRAINED):
        extra.pop(key, None)
    for key, cure in REFUSED.items():
        if extra.pop(key, []) not in ([], {}):
            raise UserError(f"{at} has `{key}`, which is not read: {cure}")
    for key, medium in COLUMNS.items():
        if extra.pop(key, None):
            raise UserError(
                f"{at} has `{key}`, which is not read there: write a part of type {medium} in its "
                "content, or the record's own `images`"
                if medium == "image"
                else f"{at} has `{key}`, which is not read: {CURES[medium]}"
            )
    _check_reasoning(extra, at)
    if calls := _all_calls(extra, role, content, at):
        extra["tool_calls"] = calls
        content = None if role == "function_call" else content
    if isinstance(content, list):
        content = "".join(_text_part(part, at) for part in content)
    if content is None and extra.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        found = kind(content) if content_key in turn else "nothing"
        raise UserError(f"{at} needs a string as `{content_key}`, found {found}")
    return {"role": ROLES[role], "content": content, **extra}


def _others(names: tuple[str, str]) -> tuple[str, str]:
    return next(pair for pair in NAMES.values() if pair != names)


def _either(turn: Mapping[str, Any], name: str, other: str, at: str) -> tuple[str, Any]:
    """Returns the value under one of two names, and that name: exports mix them."""
    if turn.get(other) is None:
        return name, turn.get(name)
    if turn.get(name) not in (None, turn[other]):
        raise UserError(f"{at} has a `{name}` and another `{other}`: leave one out")
    return other, turn[other]


def _is_trained(turn: Mapping[str, Any], role: str, at: str) -> bool:
    said = {key: turn[key] for key in TRAINED if turn.get(key) is not None}
    for key, value in said.items():
        if not is_flag(value):
            wanted = "0 or 1" if key == "weight" else "true or false"
            raise UserError(f"{at}: `{key}` must be {wanted}, found {excerpt(value)}")
        if value and role != "assistant":
            raise UserError(
                f"{at}: `{key}` is {excerpt(value)} on a {role} turn, but only assistant turns are "
                "trained: leave it out there"
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise UserError(f"{at}: {' and '.join(f'`{key}`' for key in said)} contradict each other")
    return all(said.values())


def _text_part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, Mapping)
        and part.get("type") in TEXT_PARTS
        and isinstance(part.get("text"), str)
    ):
        for key in (*TRAINED, *REFUSED):
            if part.get(key) is not None:
                raise UserError(f"{at} has a part with `{key}`: {WHOLE_TURNS}")
        for key in PARTS:
            if part.get(key) is not None:
                raise UserError(f"{at} has a part with a text and `{key}`: write a part of each")
        return part["text"]
    medium = part_medium(part) if isinstance(part, Mapping) else None
    if medium is not None:
        raise UserError(f"{at} has {ONE[medium]} in a part, which is not read: {CURES[medium]}")
    raise UserError(f"{at} has a part that is not text: only text can be trained on")


def _check_reasoning(keys: Mapping[str, Any], at: str) -> None:
    for key in REASONING:
        if not isinstance(keys.get(key, ""), str):
            raise UserError(f"{at}: `{key}` must be a string, found {kind(keys[key])}")
    given = {key: keys[key] for key in REASONING if key in keys}
    if len(set(given.values())) > 1:
        names = " and ".join(f"`{key}`" for key in given)
        raise UserError(f"{at}: {names} differ: leave one out")


def _all_calls(keys: dict[str, Any], role: str, content: Any, at: str) -> list[dict[str, Any]]:
    """Returns the calls of a turn, under whichever name, which are taken out of `keys`; arguments
    become objects. OpenAI's API keeps them as JSON in a string, which most templates would quote
    again."""
    found: dict[str, Any] = {}
    if one := keys.pop("function_call", None):  # OpenAI's, before there could be several
        if not isinstance(one, Mapping):
            raise UserError(f"{at}: `function_call` must be an object, found {kind(one)}")
        found["function_call"] = [_function(one)]
    if several := keys.pop("tool_calls", None):
        found["tool_calls"] = _parsed(several, f"{at}: `tool_calls`")
    if role == "function_call" and isinstance(content, str):
        found["role"] = _share_gpt_calls(content, at)
    if len(found) > 1:
        raise UserError(
            f"{at} has calls as {' and '.join(f'`{key}`' for key in found)}: leave one out"
        )
    calls: Any = next(iter(found.values()), [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{at}: `tool_calls` must be a list of objects")
    return [_call(call, at) for call in calls]


def _share_gpt_calls(text: str, at: str) -> list[Any]:
    """Returns one call, or a list of them, that is the text of a turn."""
    try:
        (calls,) = _parsed(f"[{text}]", at)
    except (UserError, ValueError) as error:
        raise UserError(
            f"{at} is a function_call that is not JSON: give it the role of the assistant to train "
            "it as text"
        ) from error
    return [
        call if not isinstance(call, Mapping) or "function" in call else _function(call)
        for call in (calls if isinstance(calls, list) else [calls])
    ]


def _parsed(value: Any, where: str) -> Any:
    """Datasets keep lists as JSON in a string."""
    if not isinstance(value, str):
        return value
    return parse_json(value, where) if value.strip() else []


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": call}


def _call(call: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Returns a call with its arguments as an object, in which nulls are values."""
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], at)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    parsed = parse_json(arguments, f"{at}: `arguments` of a call") if arguments.strip() else {}
    if not isinstance(parsed, Mapping):
        raise UserError(f"{at}: `arguments` of a call must be an object, found {kind(parsed)}")
    return {**call, "arguments": parsed}
