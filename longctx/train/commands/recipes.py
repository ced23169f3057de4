"""Lists the recipes that come with longctx; `longctx recipes NAME > mine.yaml` copies one."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longctx.errors import UserError, did_you_mean
from longctx.train.options.shipped import LISTED, files
from longctx.train.program import Parser

RECIPES, SCRIPTS = files("recipes", ".yaml"), files("recipes", ".py")
DEEPSPEED, FSDP2 = files("ds_configs", ".json"), files("fsdp_configs", ".json")
LAUNCHED = [*files("ds_configs", ".yaml"), *files("fsdp_configs", ".yaml")]


def main(argv: Sequence[str]) -> None:
    """Raises UserError for an unknown name."""
    parser = Parser(prog="longctx recipes", description=__doc__)
    parser.add_argument("name", nargs="?", help="prints this file; without a name all are listed")
    name = parser.parse_args(argv).name
    if name is None:
        show()
        return
    known = {file.name: file for file in (*RECIPES, *SCRIPTS, *DEEPSPEED, *FSDP2, *LAUNCHED)}
    known |= {file.stem: file for file in RECIPES}
    if name not in known:
        raise UserError(f"no recipe {name!r}; {did_you_mean(name, known)}{LISTED}")
    sys.stdout.write(known[name].read_text(encoding="utf-8"))


def show() -> None:
    """Prints the names of all files, with the first sentence of those that say what they are."""
    described = Table.grid(padding=(0, 2))
    described.add_column(no_wrap=True)
    described.add_row("Recipes", "`longctx train NAME`", style="bold")
    for file in RECIPES:
        described.add_row(file.stem, escape(first_sentence(file)))
    described.add_row("Scripts", "`longctx recipes NAME > mine.py`", style="bold")
    for file in SCRIPTS:
        described.add_row(file.name, escape(first_sentence(file)))
    names = Table.grid(padding=(0, 2))
    names.add_row("`--deepspeed NAME`", "  ".join(file.stem for file in DEEPSPEED))
    names.add_row("`--fsdp true --fsdp_config NAME`", "  ".join(file.stem for file in FSDP2))
    names.add_row("`accelerate launch --config_file`", "  ".join(file.name for file in LAUNCHED))
    Console().print(described, "\nSettings of engines, for several GPUs or host memory", names)


def first_sentence(file: Path) -> str:
    """Returns what a file says of itself: the first sentence of a script's docstring, or of the
    comment that a recipe begins with."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        said = "\n".join(line.removeprefix("#").strip() for line in comment)
    return " ".join(re.split(r"(?<=\.)\s|\n\n", said)[0].split())
