"""Names and texts as strangers see them: without this machine's paths, and safe in Markdown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from longctx.errors import printable, shortened
from longctx.system import expanded

MOST_CHARACTERS = 300
"""Longest name or text."""


def hub_id(name: str | None) -> str | None:
    """Returns the name if a hub could know it; None for a folder or file of this machine."""
    if not name or os.path.exists(expanded(name)) or name.startswith((".", "/", "~")):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def public(name: str) -> str:
    """Returns a path's last name, in visible characters; any other text as it is."""
    if name.startswith(("/", "~", ".")) or os.path.exists(name):
        name = os.path.basename(os.path.abspath(expanded(name)))
    return printable(name)


def public_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: public_value(x) for name, x in value.items()}
    if isinstance(value, list):
        return [public_value(x) for x in value]
    return public(value) if isinstance(value, str) else value


def as_text(text: str) -> str:
    """Returns text in which Markdown and HTML have no say."""
    return re.sub(r"([\\`*_\[\]<>&|#])", r"\\\1", shortened(printable(text), MOST_CHARACTERS))


def as_code(text: str) -> str:
    """Returns the text as inline code, also in a cell of a table."""
    text = shortened(printable(str(text)), MOST_CHARACTERS).replace("|", r"\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"
