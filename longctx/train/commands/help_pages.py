"""Shows the documentation; `longctx help` lists its pages, `longctx help lora` shows one.

The pages are the files of docs/, which come with longctx. On a terminal a page that is longer than
the screen goes through the pager ($PAGER, else less); elsewhere it is printed as plain text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from longctx.errors import UserError, did_you_mean, on_terminal
from longctx.train import cli
from longctx.train.options.shipped import files
from longctx.train.program import Parser

PAGES = {file.stem.lower(): file for file in files("docs", ".md")}
"""Topic -> its page. `readme` is the list of all others, with the words that longctx uses."""
WIDEST = 100
"""Columns of a page: longer lines are hard to read."""
LESS = "-FRX"
"""Options of less where the user has set none: colours pass, and a short page stays on screen."""


def main(argv: Sequence[str]) -> None:
    """Raises UserError for a topic that is neither a page nor a command."""
    parser = Parser(prog="longctx help", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("topic", nargs="?", help="a page or a command; without one all are listed")
    written = parser.parse_args(argv).topic
    if written is None:
        print(cli.usage())
        Console().print("\nPages, `longctx help TOPIC`", topics(), sep="\n")
        return
    name = Path(written).name.lower().removesuffix(".md").replace("-", "_").replace(" ", "_")
    if name in PAGES:
        show(PAGES[name])
    elif name in cli.COMMANDS:
        cli.run([name, "--help"])
    else:
        guess = did_you_mean(name, [*PAGES, *cli.COMMANDS], "longctx help ")
        raise UserError(f"no page {written!r}; {guess}`longctx help` lists all")


def topics() -> Table:
    """Returns the names of all pages, with the line that docs/README.md has on each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    index = PAGES["readme"].read_text(encoding="utf-8")
    for name, line in re.findall(r"^\| \[(\w+)\.md\]\(\1\.md\) \| (.*) \|$", index, flags=re.M):
        table.add_row(f"  {name}", escape(line))
    table.add_row("  readme", "the words that longctx uses, and the projects that it builds on")
    return table


def show(page: Path) -> None:
    """Prints a page, as wide as the terminal is, up to `WIDEST` columns."""
    console = Console()
    console.width = min(console.width, WIDEST)
    text = Markdown(without_links(page.read_text(encoding="utf-8")), hyperlinks=False)
    end = f"`longctx {page.stem} --help` lists the options of the command."
    said = [text, Markdown(end)] if page.stem in cli.COMMANDS else [text]
    if not on_terminal() or len(console.render_lines(text)) < console.height:
        console.print(*said)
        return
    os.environ.setdefault("LESS", LESS)
    with console.pager(styles=True):
        console.print(*said)


LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")
CODE = re.compile(r"(^ *```.*?^ *```$|``.*?``|`[^`\n]*`(?!\]))", flags=re.M | re.S)


def without_links(text: str) -> str:
    """Returns Markdown whose links say where they lead: another page is `longctx help PAGE`, an
    address stands in brackets, a file of the repository or a place on the page is its text
    alone."""

    def plain(match: re.Match[str]) -> str:
        mark, said, target = match.groups()
        page = Path(target.partition("#")[0])
        if mark:
            return f"*(image: {said})*"
        if re.match(r"https?:", target):
            return f"{said} ({target})"
        if page.suffix == ".md" and page.parent == Path() and page.stem.lower() in PAGES:
            shown = f"`longctx help {page.stem.lower()}`"
            return shown if said.strip("`") == page.name else f"{said} ({shown})"
        return said

    parts = CODE.split(text)
    return "".join(p if n % 2 else LINK.sub(plain, p) for n, p in enumerate(parts))
