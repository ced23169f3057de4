"""Recipes: YAML files of options, read as they are written.

YAML turns `no` into false, 1:30 into 90 and 1e-4 into a word. Here a value stays as it is written,
and the command line's parser takes it, so that a line in a recipe means what the flag means.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import yaml

from longctx.errors import UserError

Written = str | list[str] | dict[str, Any]

_LARGEST_FILE_BYTES = 2**20


def read_text(option: str, path: Path) -> str:
    """The text of a small file that an option names. Raises UserError for one that is missing, is
    no file (a pipe or device may never end), is large or is not UTF-8."""
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
        raise UserError(f"--{option} {path} is not UTF-8 text: {error}") from error
    except ValueError as error:  # a NUL in the name
        raise UserError(f"--{option} {path}: {error}") from error


def read_recipe(path: Path) -> dict[str, Written]:
    """Option -> a word, a list of words, or a dict for options of settings. What is null is left
    out. Raises UserError for what is no recipe."""
    try:
        loader = _Loader(read_text("config", path))
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path} must hold `key: value` lines")
        found: dict[str, Written] = {}
        for key_node, node in root.value:
            key, value = (
                str(loader.construct_object(key_node, True)),
                loader.construct_object(node, True),
            )
            if key in found:
                raise UserError(f"{path} has {key} twice")
            if value is not None:
                found[key] = value if isinstance(node, yaml.MappingNode) else _as_written(node, key)
        return found
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply for a recipe") from error


def _as_written(node: Any, key: str) -> str | list[str]:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if not node.value or not all(isinstance(word, yaml.ScalarNode) for word in node.value):
        raise yaml.YAMLError(f"{key} must be a list of words")
    return [word.value for word in node.value]


class _Loader(yaml.SafeLoader):
    """Only JSON's words and numbers mean something, and only within settings. No value is used
    twice: an alias of aliases of aliases fills the memory."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"line {line} has an alias: write the value out")
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"-?(?:0|[1-9][0-9]*)", list("-0123456789")),
    ("float", r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", list("-.0123456789")),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
    )
