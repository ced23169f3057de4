"""Prints the test files that reach what has changed, by imports: the nearest first.

    python scripts/tests_for.py           what differs from the last commit
    python scripts/tests_for.py main      what differs from another one
    pytest $(python scripts/tests_for.py | head -5)

The house that a change reaches, the library or the program, is said first, on stderr: a change of
the program alone needs no test of the library (`pytest -m program`).

A file reaches what it imports (rooms.py), and modules that its strings name, as a command's module
or the target of a monkeypatch. A test also reaches its folder's conftest.py. Tests of whole runs
reach nearly everything, so the order says more than the list. Files that Python does not import, as
docs and templates, are reached by no test here.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from rooms import ROOT, Imports, house, imported, modules

FOLDERS = ("longctx", "kernels", "tests", "profiling", "scripts")
SEEN_FROM = (
    *("tests.families.", "tests.images.", "tests.patching.", "tests.runtime."),
    *("tests.", "scripts."),
)
"""The folders whose modules are imported without the folder's name (pyproject.toml)."""


def reading(root: Path) -> tuple[dict[str, Path], Imports]:
    """Module -> its file, and module -> the modules that it reaches at once."""
    files = modules(root, FOLDERS)
    public = {
        alias.asname: node.module
        for node in ast.walk(ast.parse((root / "longctx/__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    short = {name.removeprefix(folder): name for folder in SEEN_FROM for name in files}
    graph: Imports = {}
    for name, path in files.items():
        found = imported(path, {*files, *short})
        if name != "longctx.__init__":  # whose names are looked up where they are used
            found |= _named(path, public) & files.keys()
        graph[name] = {short.get(other, other) for other in found}
        beside = f"{name.rpartition('.')[0]}.conftest"
        if beside in files and beside != "tests.conftest":  # whose fixtures import what they patch
            graph[name].add(beside)
    return files, graph


def _named(path: Path, public: Mapping[str | None, str | None]) -> set[str | None]:
    """The modules that a file names and does not import: in strings, as
    `longctx.train.tasks.rated:KTO` or `["-m", "longctx"]`, and by public names, as `from longctx
    import patch`."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(":")[0].split(".")
            found |= {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
        elif isinstance(node, ast.List) and {"-m", "longctx"} <= {*map(_word, node.elts)}:
            found.add("longctx.__main__")
        elif isinstance(node, ast.ImportFrom) and node.module == "longctx":
            found |= {public.get(alias.name) for alias in node.names}
    return found


def _word(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def nearest_tests(changed: Iterable[Path], root: Path) -> list[str]:
    """The test files that reach one of the changed files, those of the fewest steps first."""
    files, graph = reading(root)
    users: Imports = {name: set() for name in files}
    for name, others in graph.items():
        for other in others & users.keys():
            users[other].add(name)
    paths = {path.resolve(): name for name, path in files.items()}
    steps = {paths[path.resolve()]: 0 for path in changed if path.resolve() in paths}
    queue = [*steps]
    for name in queue:  # breadth first; it grows while it is read
        for user in sorted(users[name] - steps.keys()):
            steps[user] = steps[name] + 1
            queue.append(user)
    return [
        str(files[name].relative_to(root)) for name in queue if files[name].name.startswith("test_")
    ]


def houses(changed: Iterable[Path], root: Path) -> list[str]:
    """The houses that changed files stand in: a change of the library reaches the program, too."""
    rooms = {path.resolve(): name for name, path in modules(root, ("longctx", "kernels")).items()}
    found = {house(rooms[path.resolve()]) for path in changed if path.resolve() in rooms}
    return ["library", "program"] if "library" in found else sorted(found)


def changed_files(base: str, root: Path) -> list[Path]:
    """The files that differ from a commit, and those that git does not know yet."""

    def git(*command: str) -> list[str]:
        run = ["git", "-C", str(root), *command]
        return subprocess.run(run, capture_output=True, check=True, text=True).stdout.split("\n")

    names = git("diff", "--name-only", base)
    names += git("ls-files", "--others", "--exclude-standard")
    return [root / name for name in names if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", nargs="?", default="HEAD", help="a commit; default: the last one")
    changed = changed_files(parser.parse_args().base, ROOT)
    reached = " and ".join(houses(changed, ROOT)) or "neither house"
    print(f"the change reaches {reached}", file=sys.stderr)
    print(*nearest_tests(changed, ROOT), sep="\n")


if __name__ == "__main__":
    main()
