"""Recipes: YAML files of options, read as they are written.

YAML turns `no` into false, 1:30 into 90 and 1e-4 into a word. Here a value stays as it is written,
and the command line's parser takes it, so that a line in a recipe means what the flag means.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from longctx.errors import UserError

Written = str | list[Any] | dict[str, Any]

_LARGEST_FILE_BYTES = 2**20  # a recipe has some kilobytes: a larger file is another one
_NO_TAG = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_JSON = {"": None, "~": None, "null": None, "true": True, "false": False}
"""Meanings of unquoted words: null everywhere, the others within settings."""


def read_text(option: str, path: Path) -> str:
    """Returns the text of a small file that an option names. Raises UserError for one that is
    missing, is no file (a pipe or device may never end), is large or is not UTF-8."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"--{option} {path} is not a regular file")
        if status.st_size > _LARGEST_FILE_BYTES:
            raise UserError(f"--{option} {path} is a file of {status.st_size / 2**20:.0f} MiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--{option}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--{option} {path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    except ValueError as error:  # a NUL in the name
        raise UserError(f"--{option} {path}: {error}") from error


class _Refused(Exception):
    """Valid YAML that is no recipe: the message says why."""


def read_recipe(path: Path) -> dict[str, Written]:
    """Returns, by option, a word, a list, or a dict for options of settings. Lists of other things
    than words are for other trainers' keys, which have answers of their own. Options that are null
    are left out. Raises UserError for a file that is no recipe."""
    try:
        root = _Loader(read_text("config", path)).get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} must hold `key: value` lines")
        found = _mapping(root, "", _option)
        return {key: value for key, value in found.items() if value is not None}
    except _Refused as error:
        raise UserError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {_what_is_wrong(error)}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply for a recipe") from error


def _what_is_wrong(error: yaml.YAMLError) -> str:
    """Returns what is wrong with a recipe. PyYAML's message begins with what it was doing and
    quotes the text: here are the line and the problem."""
    if not isinstance(error, yaml.MarkedYAMLError) or not (error.problem and error.problem_mark):
        return " ".join(str(error).split())
    mark, problem = error.problem_mark, error.problem
    if mark.buffer and mark.buffer[mark.pointer : mark.pointer + 1] == "\t":
        problem = "a tab where YAML takes spaces alone"
    elif problem.startswith("but "):
        problem = f"{error.context} {problem}"
    return f"line {mark.line + 1}: {' '.join(problem.split())}"


def _mapping(node: Any, option: str, value: Callable[[Any, str], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in node.value:
        name = _word(key, option)
        if name in found:
            raise _Refused(f"line {key.start_mark.line + 1} has {name} for the second time")
        _refuse_tag(item, option or name)
        found[name] = value(item, option or name)
    return found


def _option(node: Any, option: str) -> Written | None:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, option, _setting)
    if isinstance(node, yaml.ScalarNode):
        word = _word(node, option)
        return None if not node.style and _JSON.get(word.lower(), word) is None else word
    if all(isinstance(word, yaml.ScalarNode) for word in node.value):
        return [_word(word, option) for word in node.value]
    return [_setting(item, option) for item in node.value]


def _setting(node: Any, option: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, option, _setting)
    if isinstance(node, yaml.SequenceNode):
        return [_setting(item, option) for item in node.value]
    word = _word(node, option)
    if node.style:  # in quotes
        return word
    for read in (lambda w: _JSON[w.lower()], int, float):
        with suppress(KeyError, ValueError):
            return read(word)
    return word


def _word(node: Any, option: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Refused(f"line {node.start_mark.line + 1} must hold a word")
    _refuse_tag(node, option)
    return str(node.value)


def _refuse_tag(node: Any, option: str) -> None:
    """Raises UserError for a tag, which would make a value another thing than what is written."""
    if node.tag not in _NO_TAG:
        raise _Refused(f"--{option}: the tag {node.tag!r} cannot be used")


class _Loader(yaml.BaseLoader):
    """Keeps scalars as they are written. No value is used twice: an alias of aliases of aliases
    fills the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise _Refused(f"line {line} has an alias, which recipes do not: write the value out")
        return super().compose_node(parent, index)
