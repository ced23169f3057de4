"""The parser of a run's options: strict, but any word for yes and no is understood, as in YAML."""

from __future__ import annotations

from argparse import ArgumentError, ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from longctx.errors import did_you_mean
from longctx.train.options.habits import HABITS
from longctx.train.options.written import PARSERS
from longctx.train.program import Parser

_NO = ("false", "no", "none", "0", "off")
_YES = ("true", "yes", "1", "on", "t", "y")


def means_no(value: Any) -> bool:
    """Whether an option's value switches it off, also as a word (`deepspeed: no` in a recipe)."""
    return not value or str(value).lower() in _NO


class OptionParser(HfArgumentParser, Parser):
    """Parses options, whose names must be whole and whose values must be of their type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in self._actions:
            action.type = PARSERS.get(action.dest, action.type)
            if action.type is string_to_bool:
                action.type = partial(_yes_or_no, words=_WORDS_BESIDE.get(action.dest, ()))
                action.nargs, action.const = "?", True
            elif action.choices and (no := {"no", "none"} & set(map(str, action.choices))):
                action.type = _choice(action.type, no.pop())

    def add_argument(self, *names: Any, about: Any = None, **rest: Any) -> Any:
        """Takes a field's metadata, of which `about` is not for argparse."""
        return super().add_argument(*names, **rest)

    def _check_value(self, action: Any, value: Any) -> None:
        """Raises ArgumentError for a value that is not among an option's choices: with the answer
        to another trainer's word, or else with the nearest choice."""
        if says := HABITS.get(f"{action.dest}={value}"):
            raise ArgumentError(action, f"{value}: {says}")
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            guess = did_you_mean(str(value).lower(), known)
            raise ArgumentError(
                action, f"invalid choice: {value!r}; {guess}Choose from {', '.join(known)}"
            )


_WORDS_BESIDE = {"include_num_input_tokens_seen": ("all", "non_padding")}
"""Option -> what it may be instead of true or false."""


def _yes_or_no(word: str, words: Sequence[str] = ()) -> bool | str:
    if word in words:
        return word
    if word.lower() in (*_YES, "n", "f", *_NO):
        return word.lower() in _YES
    expected = ", ".join([*words, "true or false"])
    raise ArgumentTypeError(f"{expected} is expected, got {word!r}")


def _choice(parse: Any, no: str) -> Callable[[str], Any]:
    """Returns a parser of words in which any word for no means `no`."""
    return lambda word: parse(no if word.lower() in _NO else word)
