"""Prints the tree of the code, with the first sentence of each docstring.

    python scripts/tree.py

The program's rooms come first, then the library's, each house in the order of its floors
(rooms.py), the highest first, so that a room's line is above those of the rooms that it imports.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rooms import ROOT, read_imports, room_floors

WIDTH, COLUMN = 120, 26


def tree(root: Path) -> str:
    """The folders and files of both houses, a line or two each."""
    heights = room_floors(read_imports(root))
    lines = []
    for house, name in ((root / "longctx/train", "longctx/train/"), (root / "longctx", "longctx/")):
        lines += [name, *_files(house, "  ")]
        rooms = sorted(
            (path.parent for path in house.glob("*/__init__.py") if path.parent.name != "train"),
            key=lambda path: (-heights[_room(path)], path.name),
        )
        for folder in rooms:
            lines += _folder(folder, "  ")
    lines += ["kernels/", *_files(root / "kernels", "  ")]
    return "\n".join(lines) + "\n"


def _room(folder: Path) -> str:
    return f"train/{folder.name}" if folder.parent.name == "train" else folder.name


def _folder(folder: Path, indent: str) -> Iterator[str]:
    yield from _line(f"{indent}{folder.name}/", first_sentence(folder / "__init__.py"))
    yield from _files(folder, f"{indent}  ")
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from _folder(inner, f"{indent}  ")


def _files(folder: Path, indent: str) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py" or folder.name in ("longctx", "train"):
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


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print(tree(ROOT), end="")
