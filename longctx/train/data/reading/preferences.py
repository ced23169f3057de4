"""Records of preferences: two answers of which one was chosen, or an answer with a label.

    {"prompt": "...", "chosen": "...", "rejected": "..."}    a pair of strings, or of lists of turns
    {"chosen": [turns], "rejected": [turns]}                 whole conversations: their shared
                                                             beginning is the prompt; also strings
    {"prompt": "...", "completion": "...", "label": true}    a rated answer; also lists of turns
    {"messages": [turns], "label": false}                    the conversation's one answer is rated

`messages`, `conversations` and Alpaca's `instruction` can stand for `prompt`. An answer to turns
may also be a string or a single turn. If both strings of a pair begin with the `prompt` beside
them, the answers are what follows it. A `prompt` that is a string beside whole conversations must
be one of the turns they share. A pair can be read as rated: `chosen` is desirable, `rejected`
undesirable, as in TRL. Where the shared beginning ends is TRL's rule (`extract_prompt` in
trl/data_utils.py).

The content of a document is, of strings (kind "answers") and turns (kind "chat_answers"),

    {"prompt": "..." or [turns], "answers": [one or two of the same], "sides": [0, 1],
     "margin": 0.5, "joined": true, "tools": ..., "documents": ..., "kwargs": ...}

`joined`: the strings were cut at their shared beginning, which may lie within a word, so they are
tokenised as one (encoding_groups.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from longctx.train.data.reading.groups import Rows
from longctx.train.data.reading.turns import REASONING, read_turns
from longctx.train.data.reading.values import excerpt, is_flag, kind

PAIRS = "`chosen` and `rejected` beside a `prompt`, or as whole conversations"
RATED = "`prompt`, `completion` and `label`"
PAIR = ("chosen", "rejected")
LARGEST_MARGIN = 1e30
"""Margins are kept in float32."""
Turns = list[dict[str, Any]]
Read = tuple[Literal["answers", "chat_answers"], dict[str, Any]]


def is_pair(given: Mapping[str, Any]) -> bool:
    return set(PAIR) <= set(given)


def is_rated(given: Mapping[str, Any]) -> bool:
    answered = ("completion", "output", "messages", "conversations")
    return "label" in given and any(key in given for key in answered)


def read_group(given: Mapping[str, Any], rows: Rows, where: str) -> Read | None:
    """Returns the kind and content of a record's document, for rows of groups; None where it has
    not the keys of one. `given` are the record's keys that are not null.

    Raises UserError starting with `where` for anything that is not understood.
    """
    check_choices(given, IN_CONVERSATIONS, where)
    if rows == "rated" and is_rated(given) and ("completion" in given or not is_pair(given)):
        found = _rated(given, where)
        label = given["label"]
        if not is_flag(label):
            raise UserError(
                f"{where}: `label` must be true (a desirable answer) or false, found "
                f"{excerpt(label)}"
            )
        sides = [0 if label else 1]
    elif is_pair(given):
        found, sides = _pair(given, where), [0, 1]
    else:
        return None
    name, content = found
    content["sides"] = sides
    if rows == "pairs" and "margin" in given:
        content["margin"] = _margin(given["margin"], where)
    return name, content


def _pair(given: Mapping[str, Any], where: str) -> Read:
    forms = [_form(given, key, where) for key in PAIR]
    if len(set(forms)) > 1:
        raise UserError(
            f"{where}: `chosen` is {forms[0]} and `rejected` {forms[1]}: write both alike"
        )
    if forms[0] == "a string":
        texts = [_words(given, key, where) for key in PAIR]
        before = _prompt(given, where)
        if before is None:
            return _cut_strings(texts, given, where)
        if isinstance(before, str) and _repeated(before, texts):
            texts = [text[len(before) :] for text in texts]
        return _answers(before, [*texts], PAIR, given, where)
    (chosen, _), (rejected, _) = both = [_turns(given, key, where) for key in PAIR]
    whole = chosen[0]["role"] != "assistant" != rejected[0]["role"]
    shared = _shared_turns(chosen, rejected, given, where) if whole else 0
    for key, (_, untrained) in zip(PAIR, both, strict=True):
        _check_all_count(untrained, shared, key, where)
    if whole:
        return _cut_turns(chosen, rejected, shared, given, where)
    before = _prompt(given, where)
    if before is None:
        raise UserError(
            f"{where}: `chosen` and `rejected` are answers without a `prompt`: write it beside "
            "them or as their first turns"
        )
    return _answers(before, [chosen, rejected], PAIR, given, where)


def _rated(given: Mapping[str, Any], where: str) -> Read:
    key = next((key for key in ("completion", "output") if key in given), None)
    if key is None:
        key = next(key for key in ("messages", "conversations") if key in given)
        turns, untrained = _turns(given, key, where)
        roles = [turn["role"] for turn in turns]
        if roles.count("assistant") != 1 or roles[-1] != "assistant" or len(roles) == 1:
            raise UserError(
                f"{where}: `label` beside `{key}` rates one answer, so the last turn must be the "
                f"only one of an assistant, after a prompt: write {RATED}"
            )
        _check_all_count(untrained, len(turns) - 1, key, where)
        return _answers(turns[:-1], [turns[-1:]], [key], given, where)
    before = _prompt(given, where)
    if before is None:
        raise UserError(f"{where}: `{key}` without a `prompt`: write {RATED}")
    if _form(given, key, where) == "a string":
        return _answers(before, [_words(given, key, where)], [key], given, where)
    answer, untrained = _turns(given, key, where)
    _check_all_count(untrained, 0, key, where)
    return _answers(before, [answer], [key], given, where)


def _answers(
    before: str | Turns,
    answers: Sequence[str | Turns],
    keys: Sequence[str],
    given: Mapping[str, Any],
    where: str,
) -> Read:
    """Returns a prompt and its answers, in turns where one of them is."""
    if isinstance(before, str):
        if all(isinstance(answer, str) for answer in answers):
            no_template_keys(given, where)
            return "answers", {"prompt": before, "answers": [*answers]}
        before = [{"role": "user", "content": before}]
    if before[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the prompt ends with an assistant turn, so there is nothing to answer: move "
            "that turn into the answers"
        )
    turns = []
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if answer[: len(before)] == before and len(answer) > len(before):  # the prompt once more
            answer = answer[len(before) :]
        _check_answer(answer, key, where)
        turns.append(answer)
    prompt = [*system_turn(before, given, where), *before]
    return "chat_answers", {"prompt": prompt, "answers": turns, **template_keys(given, where)}


def _shared_turns(chosen: Turns, rejected: Turns, given: Mapping[str, Any], where: str) -> int:
    """Returns how many turns of two whole conversations are their prompt."""
    shared = _shared(chosen, rejected)
    before = given.get("prompt")
    if isinstance(before, list | Mapping):
        explicit, _ = _turns(given, "prompt", where)
        if not chosen[: len(explicit)] == explicit == rejected[: len(explicit)]:
            raise UserError(f"{where}: {_OTHER_PROMPT}")
        shared = len(explicit)
    elif before is not None:
        asked = string(given, "prompt", where).strip()
        if asked and all(turn["content"].strip() != asked for turn in chosen[:shared]):
            raise UserError(f"{where}: {_OTHER_PROMPT}")
    if not shared:
        raise UserError(
            f"{where}: `chosen` and `rejected` share no first turn before their answers, so there "
            "is no prompt: write it as `prompt`"
        )
    return shared


def _cut_turns(
    chosen: Turns, rejected: Turns, shared: int, given: Mapping[str, Any], where: str
) -> Read:
    """Returns whole conversations as a prompt, their first turns, and two answers."""
    answers = [chosen[shared:], rejected[shared:]]
    for key, answer in zip(PAIR, answers, strict=True):
        if not answer:
            raise UserError(f"{where}: `{key}` has no answer after the prompt: remove the record")
        if answer[0]["role"] != "assistant":
            raise UserError(
                f"{where}: `chosen` and `rejected` differ from turn {shared + 1} on, where "
                f"`{key}` has a {answer[0]['role']} turn: only answers to one prompt are compared"
            )
    return _answers(chosen[:shared], answers, PAIR, given, where)


_OTHER_PROMPT = (
    "`chosen` and `rejected` are whole conversations that do not both begin with `prompt`: leave "
    "`prompt` out or correct it"
)


_PROMPTS = ("question", "query", "input")
"""Names under which datasets keep a prompt that is not read. Such a record is refused: a beginning
that its answers share by chance would be taken for the prompt."""


def _cut_strings(texts: Sequence[str], given: Mapping[str, Any], where: str) -> Read:
    """Returns whole strings, as a prompt and two answers."""
    if named := next((key for key in _PROMPTS if isinstance(given.get(key), str)), None):
        raise UserError(
            f"{where}: `{named}` beside `chosen` and `rejected` is not read: call it `prompt`, or "
            "leave it out if both begin with the prompt"
        )
    no_template_keys(given, where)
    shared = _shared(*texts)
    answers = [text[shared:] for text in texts]
    if not shared:
        raise UserError(
            f"{where}: `chosen` and `rejected` do not begin alike, so there is no prompt: write it "
            "as `prompt`"
        )
    for key, answer in zip(PAIR, answers, strict=True):
        if not answer.strip():
            raise UserError(
                f"{where}: `{key}` has only blanks after the beginning that it shares with the "
                "other: write `prompt` and the answers apart, or remove the record"
            )
    return "answers", {"prompt": texts[0][:shared], "answers": answers, "joined": True}


def _repeated(prompt: str, texts: Sequence[str]) -> bool:
    """Whether both answers begin with the prompt once more and go on. A single word does not
    count: "Hi" is answered by "Hi, how are you?"."""
    several = len(prompt.split()) > 1 or prompt.rstrip()[-1:] in (":", "?")
    return several and all(t.startswith(prompt) and t[len(prompt) :].strip() for t in texts)


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Returns how many turns or characters are the prompt: all before the first difference but a
    space, and all but the last where there is no difference within the shorter one."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i - 1 if i and first[i - 1] == " " else i
    return min(len(first), len(second)) - 1


def _prompt(given: Mapping[str, Any], where: str) -> str | Turns | None:
    """Returns the prompt that a record names, under any of its names."""
    for key in ("prompt", "messages", "conversations"):
        if key in given:
            if key == "prompt" and isinstance(given[key], str):
                return given[key]
            return _turns(given, key, where)[0]
    return alpaca_question(given, where) if "instruction" in given else None


def _form(given: Mapping[str, Any], key: str, where: str) -> str:
    if isinstance(given[key], str):
        return "a string"
    if isinstance(given[key], list | Mapping):
        return "a list of turns"
    raise UserError(f"{where}: `{key}` must be a string or turns, found {kind(given[key])}")


def _words(given: Mapping[str, Any], key: str, where: str) -> str:
    text = string(given, key, where)
    if not text.strip():
        raise UserError(f"{where}: `{key}` is empty, so there is no answer: remove the record")
    return text


def _turns(given: Mapping[str, Any], key: str, where: str) -> tuple[Turns, list[int]]:
    """Returns the messages of a list of turns or of a single one, and the numbers of the assistant
    turns that are not to be trained."""
    value = given[key]
    return read_turns([value] if isinstance(value, Mapping) else value, key, where)


def _check_all_count(untrained: Sequence[int], first: int, key: str, where: str) -> None:
    """Raises UserError for a turn of an answer, from turn number `first` on, that is not to be
    trained; those of a prompt never are."""
    for number in untrained:
        if number >= first:
            raise UserError(
                f"{where}: turn {number + 1} of `{key}` is not to be trained, but all of an answer "
                "counts: leave `train` and `weight` out"
            )


def _check_answer(turns: Turns, key: str, where: str) -> None:
    for number, end in ((0, "begin"), (-1, "end")):
        if turns[number]["role"] != "assistant":
            raise UserError(
                f"{where}: the answer of `{key}` {end}s with a {turns[number]['role']} turn: only "
                "what the assistant says can be compared, after a prompt that is the same"
            )
    said = ("content", "tool_calls", *REASONING)
    if not any(str(turn.get(name) or "").strip() for turn in turns for name in said):
        raise UserError(f"{where}: `{key}` is empty, so there is no answer: remove the record")


def _margin(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -LARGEST_MARGIN <= value <= LARGEST_MARGIN:
        raise UserError(f"{where}: `margin` must be a number, found {excerpt(value)}")
    return float(value)
