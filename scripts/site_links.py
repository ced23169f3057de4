"""A hook of mkdocs: links from docs/ into the rest of the repository.

On the site `../recipes/trl_sft.py` would lead nowhere. It becomes an address in the repository,
which CITATION.cff names; until it does, the link becomes its text. A picture outside docs/ becomes
its description. Links to a file that is not there stay, so that `mkdocs build --strict` fails
(without -q, which hides warnings from --strict, too).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((\.\./[^()\s]+)\)")


def on_page_markdown(markdown: str, config: Any, **others: Any) -> str:
    """Called by mkdocs with each page's text."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return linked(markdown, citation.get("repository-code", ""))


def linked(markdown: str, address: str) -> str:
    """The text with its links out of docs/ as addresses, or without them."""

    def absolute(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path = target.removeprefix("../")
        if not (ROOT / path.partition("#")[0]).exists():
            return match[0]
        if not address:
            return text
        return f"{mark}[{text}]({address}/{'raw' if mark else 'blob'}/main/{path})"

    return LINK.sub(absolute, markdown)
