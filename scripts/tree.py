"""Writes the tree of the code into CONTRIBUTING.md, from the first sentence of each docstring.

    python scripts/tree.py

Rooms stand in the order of their floors (rooms.py), the highest first, so that a room's line is
above those of the rooms that it imports. tests/test_rooms.py compares the page with the code.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rooms import ROOT, read_imports, room_floors

PAGE = ROOT / "CONTRIBUTING.md"
WIDTH, COLUMN = 120, 26
BLOCK = re.compile(r"(?<=```\n)longctx/\n.*?(?=```\n)", re.S)
"""The block of the page that holds the tree."""


def tree(root: Path) -> str:
    """The package's folders and files, a line or two each."""
    floors = room_floors(read_imports(root))
    rooms = sorted(
        (path.parent for path in (root / "longctx").glob("*/__init__.py")),
        key=lambda path: (-floors[path.name], path.name),
    )
    lines = ["longctx/", *_files(root / "longctx", "  ")]
    for room in rooms:
        lines += _folder(room, "  ")
    lines += ["kernels/", *_files(root / "kernels", "  ")]
    return "\n".join(lines) + "\n"


def _folder(folder: Path, indent: str) -> Iterator[str]:
    yield from _line(f"{indent}{folder.name}/", first_sentence(folder / "__init__.py"))
    yield from _files(folder, f"{indent}  ")
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _folder(inner, f"{indent}  ")


def _files(folder: Path, indent: str) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py" or folder.name == "longctx":
            yield from _line(f"{indent}{path.name}", first_sentence(path))


def _line(name: str, says: str) -> Iterator[str]:
    first, *others = textwrap.wrap(says, WIDTH - COLUMN)
    yield f"{name:{COLUMN - 2}}  {first}"
    yield from (f"{'':{COLUMN}}{line}" for line in others)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring. Raises ValueError where there is none."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not said:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(said.split("\n\n")[0].split())
    return re.split(r"(?<!\bal)(?<!\.)\.(?: |$)", paragraph)[0].rstrip(":")


def with_tree(page: str, root: Path) -> str:
    """The page, with the tree of the code under `root`."""
    text, found = BLOCK.subn(lambda _: tree(root), page)
    if found != 1:
        raise ValueError(f"{PAGE.name} has {found} blocks that begin with `longctx/`, not one")
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    PAGE.write_text(with_tree(PAGE.read_text(encoding="utf-8"), ROOT), encoding="utf-8")
