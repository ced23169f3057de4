"""manifest.json: which files a published folder holds, their sizes and checksums, and of which run.

    {"format": 1, "run": {"seed": 42, ...}, "files": {"model.safetensors": [bytes, xxh3], ...},
     "xxh3": of all the rest}

It is written last, before the rename that publishes the folder. `run` is definition.py's. Checksums
find damage, not malice: a forged manifest can have them right, so types and names are checked too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from longctx.errors import UserError
from longctx.train.output import MANIFEST
from longctx.train.safety.checksum import checksums
from longctx.train.safety.strange_files import odd_entry, read_json

FORMAT = 1


class Damaged(UserError):
    """The folder is not what its manifest says; the message is a short reason."""


def write_manifest(folder: Path, run: Mapping[str, Any] | None = None) -> int:
    """Describes every file in the folder; returns their size in bytes. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = [path.relative_to(folder).as_posix() for path in paths]
    sizes_bytes = [path.stat().st_size for path in paths]
    sums = checksums(paths, "Checksums")
    files = dict(zip(names, zip(sizes_bytes, sums, strict=True), strict=True))
    content: dict[str, Any] = {"format": FORMAT, "run": run, "files": files}
    text = json.dumps(content | {"xxh3": _digest(content)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return sum(sizes_bytes)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Reads the manifest of a folder; None if another program wrote the folder. Raises Damaged."""
    try:
        content = read_json(folder / MANIFEST)
        if not isinstance(content, dict):
            raise ValueError(content)
        if content.pop("xxh3", None) != _digest(content) or content["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} is damaged, or of another version")
    except FileNotFoundError as error:
        if (folder / MANIFEST).is_symlink():
            raise Damaged(f"{MANIFEST} links to nothing") from error
        return None
    except (OSError, ValueError, LookupError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is unreadable") from error
    run, files = content.get("run"), content.get("files")
    if not (run is None or isinstance(run, dict)) or not isinstance(files, dict):
        raise Damaged(f"{MANIFEST} is forged: it lists no files, or no run's options")
    for name, entry in files.items():
        if not (_inside(name) and _is_entry(entry)):
            raise Damaged(f"{MANIFEST} is forged: no file of the folder is {name!r}, {entry!r}")
    return content


def _inside(name: str) -> bool:
    """Whether a name leads to something in the folder, and nothing else can be meant by it."""
    path = PurePosixPath(name)
    plain = "\0" not in name and not path.is_absolute() and ".." not in path.parts
    return plain and name not in ("", ".", MANIFEST) and path.as_posix() == name


def _is_entry(entry: Any) -> bool:
    """Whether it is [bytes, checksum]."""
    if not (isinstance(entry, list) and len(entry) == 2):
        return False
    size_bytes, checksum = entry
    return type(size_bytes) is int and size_bytes >= 0 and isinstance(checksum, str)


def check_files(folder: Path, *, contents: bool = True) -> int | None:
    """Compares every file with the manifest, by size and (`contents`) by checksum; how many there
    are, None without a manifest. Raises Damaged with the first that differs, and for what is
    neither file nor folder."""
    if odd := odd_entry(folder):
        raise Damaged(f"{odd} is not a regular file")
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    files: dict[str, list[Any]] = manifest["files"]
    for name, (size_bytes, _) in files.items():
        try:
            found_bytes = (folder / name).stat().st_size
        except (OSError, UnicodeEncodeError):
            found_bytes = None
        if found_bytes is None or not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        if found_bytes != size_bytes:
            raise Damaged(f"{name} has {found_bytes} of {size_bytes} bytes")
    if contents:
        try:
            found = checksums([folder / name for name in files], f"Checking {folder.name}")
        except OSError as error:
            name = Path(error.filename or "a file").name
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error
        for (name, (_, expected)), checksum in zip(files.items(), found, strict=True):
            if checksum != expected:
                raise Damaged(f"{name} is damaged: its checksum is {checksum}, not {expected}")
    return len(files)


def unlisted(folder: Path) -> list[str]:
    """Returns the files of a folder that were not saved with its manifest. Raises Damaged."""
    manifest = read_manifest(folder)
    if manifest is None:
        return []
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return sorted({path.relative_to(folder).as_posix() for path in paths} - set(manifest["files"]))


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()
