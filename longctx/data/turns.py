"""One turn of a conversation: its role, its text, and whether it is trained.

    {"role": "assistant", "content": "..."}     {"from": "gpt", "value": "..."}     both names work
    "train": false, "weight": 0                 the turn is read and not trained

`train` is axolotl's, `training` its other name, `loss` ms-swift's, `weight` OpenAI's. Other keys by
which a tool chooses what is trained are refused. All further keys reach the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longctx.data.values import is_flag, kind, parse_json, shown, without_none
from longctx.errors import UserError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
NAMES = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""How a turn's role and text are called in a list of this name; both pairs are read in either."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
TRAINED = ("train", "training", "loss", "weight")
WRITE_TRAIN = "write `train`: true or false instead"
PARTS = "parts of a turn are not trained apart: split the turn, or write `train` for all of it"
REFUSED = {
    "train_detail": PARTS,
    "training_detail": PARTS,
    "loss_mask": PARTS,
    "mask": WRITE_TRAIN,
    "masked": WRITE_TRAIN,
    "loss_scale": WRITE_TRAIN,
    "loss_weight": WRITE_TRAIN,
}
"""Keys of a turn that choose what other tools train -> what to do."""
REASONING = ("reasoning_content", "reasoning", "thinking")


def read_turns(turns: Any, key: str, where: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages for the chat template, and the numbers of the assistant turns that are not
    trained (from 0).

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
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(
            f"{at} has the unknown {role_key} {role!r}; known: {', '.join(sorted(ROLES))}"
        )
    # Arrow fills absent fields with None, which templates would print.
    extra = {k: without_none(v) for k, v in turn.items() if v is not None}
    for key in ("role", "content", "from", "value", *TRAINED):
        extra.pop(key, None)
    for key, cure in REFUSED.items():
        if extra.pop(key, []) not in ([], {}):
            raise UserError(f"{at} has `{key}`, which is not read: {cure}")
    for key in REASONING:
        if not isinstance(extra.get(key, ""), str):
            raise UserError(f"{at}: `{key}` must be a string, found {kind(extra[key])}")
    reasoning = {key: extra[key] for key in REASONING if key in extra}
    if len(set(reasoning.values())) > 1:
        names_given = " and ".join(f"`{key}`" for key in reasoning)
        raise UserError(f"{at}: {names_given} differ: leave one out")
    if "function_call" in extra:  # OpenAI's name of one call, before there were several
        if extra.get("tool_calls"):
            raise UserError(f"{at} has `function_call` and `tool_calls`: leave one out")
        call = extra.pop("function_call")
        extra["tool_calls"] = [{"type": "function", "function": call}]
    if "tool_calls" in extra:
        extra["tool_calls"] = _calls(extra["tool_calls"], at)
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
    """The value under one of two names, and that name: exports mix them."""
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
            raise UserError(f"{at}: `{key}` must be {wanted}, found {shown(value)}")
        if value and role != "assistant":
            raise UserError(
                f"{at}: `{key}` is {shown(value)} on a {role} turn, but only assistant turns are "
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
                raise UserError(f"{at} has a part with `{key}`: {PARTS}")
        return part["text"]
    raise UserError(f"{at} has a part that is not text: only text can be trained on")


def _calls(calls: Any, at: str) -> Any:
    """Calls with their arguments as objects. OpenAI's API keeps them as JSON in a string, which
    most templates would quote a second time."""
    if isinstance(calls, str):
        calls = parse_json(calls, f"{at}: `tool_calls`") if calls.strip() else []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{at}: `tool_calls` must be a list of objects")
    return [_call(call, at) for call in calls]


def _call(call: Mapping[str, Any], at: str) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], at)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    parsed = parse_json(arguments, f"{at}: `arguments` of a call") if arguments.strip() else {}
    if not isinstance(parsed, Mapping):
        raise UserError(f"{at}: `arguments` of a call must be an object, found {kind(parsed)}")
    return {**call, "arguments": parsed}
