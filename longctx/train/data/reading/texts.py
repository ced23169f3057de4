"""Records whose text is trained, for the tasks of language modelling: their forms.

    {"text": "..."}                                               every token is trained
    {"prompt": "...", "completion": "..."}                        the completion is trained
    {"messages": [{"role": "user", "content": "..."}, ...]}       assistant turns are trained
    {"conversations": [{"from": "human", "value": "..."}, ...]}   the same in ShareGPT's words
    {"prompt": [turns], "completion": [turns]}                    those of the completion (TRL)
    {"instruction": "...", "input": "...", "output": "..."}       Alpaca: the output is trained

The first of messages, prompt and completion, instruction and output, text that a record has is
read. Alpaca's record is one exchange of a conversation; `history` holds earlier ones. Beside a
conversation, `system`, `tools`, `documents` and `chat_template_kwargs` reach the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from longctx.errors import UserError
from longctx.train.data.reading.fields import (
    IN_CONVERSATIONS,
    alpaca_question,
    check_choices,
    no_template_keys,
    string,
    system_turn,
    template_keys,
)
from longctx.train.data.reading.groups import TASKS
from longctx.train.data.reading.turns import check_some_trained, read_turns

Read = tuple[Literal["text", "completion", "chat", "instruction"], Any]


def read_text(given: Mapping[str, Any], where: str) -> Read | None:
    """Returns the kind and content of a record's document; None if it has the keys of none. `given`
    are the record's keys that are not null.

    Raises UserError starting with `where` for anything that is not understood.
    """
    for key in ("messages", "conversations"):
        if key in given:
            messages, untrained = read_turns(given[key], key, where)
            if messages[-1]["role"] != "assistant" and {"chosen", "rejected"} & set(given):
                raise UserError(
                    f"{where}: `chosen` and `rejected` are pairs, which {TASKS['pairs']} reads: "
                    f"here, write the answer to train on as the last turn of `{key}`"
                )
            return "chat", _chat(messages, untrained, given, where)
    if {"prompt", "completion"} <= set(given):
        return _completion(given, where)
    if {"instruction", "output"} <= set(given):
        return "instruction", _chat(_alpaca(given, where), [], given, where)
    if "text" in given:
        return "text", string(given, "text", where)
    return None


def _completion(given: Mapping[str, Any], where: str) -> Read:
    check_choices(given, IN_CONVERSATIONS, where)
    if isinstance(given.get("label"), bool):
        raise UserError(
            f"{where}: `label` rates the completion, as {TASKS['rated']} reads it: leave `label` "
            "out to train on every completion"
        )
    if isinstance(given["prompt"], list) and isinstance(given["completion"], list):
        before, _ = read_turns(given["prompt"], "prompt", where)
        after, untrained = read_turns(given["completion"], "completion", where)
        context = [i for i, turn in enumerate(before) if turn["role"] == "assistant"]
        untrained = context + [len(before) + i for i in untrained]
        return "chat", _chat(before + after, untrained, given, where)
    texts = [string(given, key, where) for key in ("prompt", "completion")]
    if not texts[1].strip():
        raise UserError(f"{where}: `completion` is empty, so there is nothing to train on")
    no_template_keys(given, where)
    return "completion", texts


def _chat(
    messages: list[dict[str, Any]], untrained: list[int], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    check_choices(given, IN_CONVERSATIONS, where)
    check_some_trained(messages, untrained, where)
    system = system_turn(messages, given, where)
    messages, untrained = [*system, *messages], [i + len(system) for i in untrained]
    content: dict[str, Any] = {"messages": messages}
    if untrained:
        content["untrained"] = untrained
    return content | template_keys(given, where)


def _alpaca(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the exchanges of an Alpaca record."""
    asked, answer = alpaca_question(given, where), string(given, "output", where)
    if not answer.strip():
        raise UserError(f"{where}: `output` is empty, so there is nothing to train on")
    return [*asked, {"role": "assistant", "content": answer}]
