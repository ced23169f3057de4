"""Writes the `pip install` commands of advice, and finds other distributions that are imported as
`longctx`.

Advice names the missing packages, never an extra of longctx, so that it works however longctx was
installed: from an index, a wheel or a clone. Bounds of versions are those of pyproject.toml, read
from the metadata of the installed distribution.
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
"""The extras whose packages runs use, and none (""). Tests and documentation have further ones."""


def requirements() -> list[Requirement]:
    """Returns the packages that runs use, those of extras included; none if longctx is not
    installed but a folder of sources on the path."""
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
    """Returns the command that installs these packages, in versions that longctx supports."""
    takes = {line.name: str(line.specifier) for line in requirements()}
    words = [f"{name}{takes.get(name, '')}" for name in names]
    quoted = (f"'{word}'" if set(word) & set("<>") else word for word in words)
    return " ".join(["pip install", *quoted])


class Namesake(NamedTuple):
    """Another installed distribution whose package is also imported as `longctx`.

    If both are installed as files, they share a folder: the one that was installed last has
    overwritten the other's files, and removing either removes files of both.
    """

    distribution: str
    version: str
    folder: Path
    """The package that is imported."""
    overwritten: int
    """The number of our files whose contents differ from what was installed."""


def namesakes() -> list[Namesake]:
    """Returns the other distributions of this environment that are imported as `longctx`."""
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
    """Whether a file still has the hash that pip recorded; a file without a hash passes."""
    if file.hash is None:
        return True
    path = Path(str(file.locate()))
    if not path.is_file():
        return False
    digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value
