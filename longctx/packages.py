"""Writes the `pip install` commands of advice, and finds other distributions that are imported as
`longctx`.

Advice names the packages that are missing, never an extra of longctx: it works wherever longctx
came from, an index, a wheel or a clone. Bounds of versions are those of pyproject.toml, read from
the metadata of the installed distribution.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from longctx.constants import __distribution__

EXTRAS = ("", "deepspeed", "fa4", "mixers", "gguf", "liger", "lora", "profile", "ruler")
"""None, and those of runs. What tests and documentation need is nobody else's concern."""


def requirements() -> list[Requirement]:
    """Packages that runs use, those of extras included; none where longctx is a folder of sources
    on the path, not installed."""
    try:
        needed = map(Requirement, metadata.requires(__distribution__) or [])
    except metadata.PackageNotFoundError:
        return []
    return [
        line
        for line in needed
        if line.marker is None or any(line.marker.evaluate({"extra": name}) for name in EXTRAS)
    ]


def pip_install(*names: str) -> str:
    """The command that installs these packages, in versions that longctx takes."""
    takes = {line.name: str(line.specifier) for line in requirements()}
    words = [f"{name}{takes.get(name, '')}" for name in names]
    quoted = (f"'{word}'" if set(word) & set("<>") else word for word in words)
    return " ".join(["pip install", *quoted])


class Namesake(NamedTuple):
    """Another installed distribution whose package is imported as `longctx`, too.

    Both write into one folder where both are installed as files: the one that was installed last
    has overwritten the other's, and removing either removes files of both."""

    distribution: str
    version: str
    folder: Path
    """The package that runs."""
    overwritten: int
    """How many files of our distribution have other contents than it installed."""


def namesakes() -> list[Namesake]:
    """The other distributions of this environment that are imported as `longctx`."""
    folder = Path(__file__).resolve().parent
    found = {canonicalize_name(n) for n in metadata.packages_distributions().get("longctx", [])}
    others = sorted(found - {__distribution__})
    changed = _overwritten() if others else 0
    return [Namesake(name, metadata.version(name), folder, changed) for name in others]


def _overwritten() -> int:
    try:
        files = metadata.files(__distribution__) or []
    except metadata.PackageNotFoundError:
        return 0
    return sum(1 for file in files if file.parts[0] == "longctx" and not _as_installed(file))


def _as_installed(file: metadata.PackagePath) -> bool:
    """Whether a file still has the hash that pip recorded; what has none was not installed."""
    if file.hash is None:
        return True
    path = Path(str(file.locate()))
    if not path.is_file():
        return False
    digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value
