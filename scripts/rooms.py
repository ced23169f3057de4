"""Counts how the code hangs together: rooms, their files, import floors and arrows between rooms.

    python scripts/rooms.py              this tree
    python scripts/rooms.py 55ff973      the tree of a commit

A *floor* is a file's height over the files that import nothing of ours. A *room* is a folder of the
library, longctx/, or of the program, longctx/train/, which the library never imports. The files
beside the rooms of a house (errors.py, train/cli.py, ...) are one room, called `longctx` or
`train`. Every import statement counts, those inside functions too; what the public doors
(__init__.py, __main__.py, train/cli.py) import by name when it is asked for, or for type checkers
alone, does not. tests/test_rooms.py holds the tree to this count.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Imports = dict[str, set[str]]
"""Module -> the modules of ours that it imports, both as `room.file`."""


def read_imports(root: Path) -> Imports:
    """The imports among the files of root/longctx and root/kernels."""
    files = modules(root, ("longctx", "kernels"))
    return {name: imported(path, set(files)) - {name} for name, path in files.items()}


def modules(root: Path, folders: Iterable[str]) -> dict[str, Path]:
    """Module -> its file. `longctx.kernels`, a link, is `kernels`."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        if path.parts[len(root.parts) :][:2] != ("longctx", "kernels")
    }


def imported(path: Path, names: set[str]) -> set[str]:
    """The modules that a file imports, of these."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.parent.name == "longctx" and path.name == "__init__.py":  # TYPE_CHECKING: its names
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {_file(alias.name, names) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {_file(f"{node.module}.{alias.name}", names) for alias in node.names}
            found |= inside & names or {_file(node.module, names)}
    return found & names


def _file(module: str, names: set[str]) -> str:
    """The file of a module; `longctx.kernels` is a link to `kernels`."""
    if module.startswith("longctx.kernels"):
        module = module.removeprefix("longctx.")
    return module if module in names else f"{module}.__init__"


def room(module: str) -> str:
    """The room of a module: `cost`, `train/plan`."""
    first, *folders = module.split(".")[:-1] or [""]
    if first == "kernels":
        return "kernels"
    return "/".join(folders[: 2 if folders[:1] == ["train"] else 1]) or "longctx"


def house(module: str) -> str:
    """`program` for a module of longctx/train, else `library`."""
    return "program" if module.startswith("longctx.train.") else "library"


def floors(imports: Imports) -> dict[str, int]:
    """Height of each module. Raises ValueError for a circle, naming it."""
    path: list[str] = []

    @cache
    def height(name: str) -> int:
        if name in path:
            raise ValueError("a circle: " + " -> ".join([*path[path.index(name) :], name]))
        path.append(name)
        floor = max((1 + height(other) for other in imports[name]), default=0)
        path.pop()
        return floor

    return {name: height(name) for name in imports}


BESIDE = ("longctx", "train")
"""The files beside the rooms: some stand under them (errors.py), some over them (train/cli.py)."""


def room_floors(imports: Imports) -> dict[str, int]:
    """The height of each room, by the arrows between rooms. Raises ValueError for a circle."""
    by_room: Imports = {room(name): set() for name in imports if room(name) not in BESIDE}
    for start, end in arrows(imports):
        if not {start, end} & {*BESIDE}:
            by_room[start].add(end)
    return floors(by_room)


def arrows(imports: Imports) -> Counter[tuple[str, str]]:
    """(room, room it imports) -> by how many imports."""
    pairs = ((room(a), room(b)) for a, others in imports.items() for b in others)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def sizes(imports: Imports) -> dict[str, int]:
    """Files in each room."""
    return dict(Counter(map(room, imports)))


def show(root: Path) -> None:
    imports = read_imports(root)
    heights = floors(imports)
    print(f"{len(imports)} files, {max(heights.values()) + 1} floors of files", end=", ")
    print(f"{sum(map(len, imports.values()))} imports of each other")
    between = arrows(imports)
    try:
        print(f"{max(room_floors(imports).values()) + 1} floors of rooms")
    except ValueError as error:
        print(error)
    to: dict[str, list[str]] = defaultdict(list)
    for (start, end), count in sorted(between.items()):
        to[start].append(f"{end} {count}")
    for name, count in sorted(sizes(imports).items(), key=lambda item: -item[1]):
        print(f"  {name:14} {count:3} files  -> {', '.join(to[name]) or 'nothing'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", nargs="?", help="instead of the working tree")
    commit = parser.parse_args().commit
    if commit is None:
        show(ROOT)
        return
    command = ["git", "-C", str(ROOT), "archive", commit, "longctx", "kernels"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        show(Path(folder))


if __name__ == "__main__":
    main()
