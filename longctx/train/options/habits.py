"""Options of other trainers that are written out of habit, and what to write here instead.

TRL, PEFT, axolotl, Unsloth, LLaMA-Factory and torchtune have many names for what a run is; where
longctx has the same name, it means the same and is not in this table. Some of their values of such
an option have other names here, and are in it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import yaml

from longctx.train.options.limits import NOT_OURS

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
HABITS: dict[str, str] = {name: says for says, names in _TABLE.items() for name in names.split()}
"""Option of another trainer, or OPTION=VALUE -> what to write instead (habits.yaml)."""


def unknown(name: str, valid: Iterable[str], *, dashes: str = "") -> str:
    """Returns how a line about an unknown option goes on: a habit's answer, else the nearest option
    that a run takes, if one is near."""
    if name in HABITS:
        return f": {HABITS[name]}"
    near = difflib.get_close_matches(name, {*valid} - NOT_OURS.keys(), n=1)
    if near:
        return f"; did you mean {dashes}{near[0]}?"
    return "; --help_all lists all options"
