"""The help of `longctx train`, in groups of options: `--help` and `--help_all`.

    --help       the options that most runs need: a line each, with the first sentence of its help
    --help_all   those, the rest of longctx's and all of transformers' that a run can use, in full

An option that a run refuses (NOT_OURS in limits.py) is in neither.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from longctx.train.options.about import About
from longctx.train.options.arguments import OPTIONS
from longctx.train.options.limits import NOT_OURS

GROUPS = "model data task memory adapters training output".split() + ["several processes"]
OTHERS = "others of transformers"
"""The group of options that a newer transformers adds."""

NARROWEST = 40
"""Columns of a text, whatever COLUMNS says: narrower terminals break its lines themselves."""

_NOT_SHOWN: tuple[object, ...] = (None, False, "", [])
"""Defaults that say nothing."""


def help_text(actions: Iterable[argparse.Action], *, prog: str, everything: bool = False) -> str:
    """Returns the help of a parser with these actions."""
    width = max(NARROWEST, shutil.get_terminal_size((100, 0)).columns)
    known: dict[str, argparse.Action] = {}
    for action in actions:
        if action.dest not in NOT_OURS:
            known.setdefault(action.dest, action)  # before --no_*
    lines = [
        f"usage: {prog} [RECIPE] [--OPTION VALUE ...]",
        f"  {'RECIPE or --config RECIPE':31}A file of options; those given here win over its own",
    ]
    for group, names in in_groups(known, everything=everything).items():
        lines += ["", f"{group}:"]
        for name in names:
            lines += _in_full(known[name], width) if everything else [_in_a_line(known[name])]
    if not everything:
        lines += [
            "",
            "--help_all lists all options, in full. `longctx help flags` explains the main ones.",
        ]
    return "\n".join(lines)


def in_groups(names: Iterable[str], *, everything: bool) -> dict[str, list[str]]:
    """Returns, by group, those of the options that it holds, the common ones first; without empty
    groups."""
    groups: dict[str, list[str]] = {group: [] for group in (*GROUPS, OTHERS)}
    known = {name: OPTIONS.get(name, About(group=OTHERS, rare=True)) for name in names}
    for rare in (False, True) if everything else (False,):
        for name in (name for name, option in known.items() if option.rare == rare):
            groups[known[name].group].append(name)
    return {group: held for group, held in groups.items() if held}


def _in_a_line(action: argparse.Action) -> str:
    sentence = re.split(r"(?<!\.)\.( |$)", _says(action))[0]
    return f"  {_flag(action):31}{sentence}{_default(action)}"


def _in_full(action: argparse.Action, width: int) -> Iterator[str]:
    flag = f"{_flag(action)}{_values(action)}{_default(action)}"
    yield from textwrap.wrap(flag, width, initial_indent="  ", subsequent_indent="      ")
    yield from (f"      {line}" for line in textwrap.wrap(_says(action), width - 6))


def _says(action: argparse.Action) -> str:
    return OPTIONS.get(action.dest, About()).says or (action.help or "").replace("%%", "%")


def _flag(action: argparse.Action) -> str:
    return action.option_strings[0]


def _values(action: argparse.Action) -> str:
    if action.choices:
        return f" {{{','.join(map(str, action.choices))}}}"
    many = " ..." if action.nargs == "+" else ""
    return f" VALUE{many}" if action.nargs != "?" else " [true|false]"


def _default(action: argparse.Action) -> str:
    return "" if action.default in _NOT_SHOWN else f" [{action.default}]"
