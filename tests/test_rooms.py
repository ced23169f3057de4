"""The tree as docs/ and the rooms' docstrings describe it: arrows one way."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT
from rooms import arrows, floors, house, read_imports, room_floors, sizes
from tests_for import houses, nearest_tests
from tree import tree

GROUND = {"longctx", "train", "train/options", "train/safety"}
"""What the rooms may import beside those below: the files beside the library's rooms, and for the
program its own and two rooms."""
LIBRARY = {
    "patching": {"any_model", "forwards", "runtime", "mixers", "families", "head", "kernels"},
    "loop": {"any_model", "runtime", "images", "families", "memory", "cost"},
    "any_model": {
        *("forwards", "runtime", "mixers", "calls", "families", "head", "layer", "attention"),
        *("memory", "cost", "kernels"),
    },
    "forwards": {
        *("runtime", "images", "mixers", "calls", "families", "head", "layer", "attention"),
        "memory",
    },
    "runtime": {
        *("mixers", "calls", "families", "head", "layer", "attention", "memory", "cost"),
        "kernels",
    },
    "losses": {"patching", "head"},
    "images": {"calls", "families", "attention", "memory", "cost"},
    "mixers": {"families", "layer", "kernels"},
    "calls": {"families", "layer", "attention", "kernels"},
    "families": {"layer", "memory", "kernels"},
    "head": {"layer", "cost", "kernels"},
    "layer": {"attention", "memory", "cost", "kernels"},
    "attention": {"kernels"},
    "memory": {"cost", "kernels"},
    "cost": set(),
    "kernels": set(),
}
"""Room of the library -> rooms it may import beside the ground."""
PROGRAM = {
    "commands": {"report", "start", "trainer", "tasks", "output", "engines", "loading", "data"},
    "report": {"start", "trainer", "plan", "output", "engines", "loading", "data"},
    "start": {"trainer", "lora", "tasks", "output", "engines", "loading", "data"},
    "trainer": {"plan", "lora", "tasks", "output", "engines", "loading", "data"},
    "plan": {"lora", "engines", "loading"},
    "lora": {"output", "loading", "data"},
    "tasks": {"data"},
    "output": set(),
    "engines": set(),
    "loading": set(),
    "data": set(),
}
"""Room of the program -> rooms of the program that it may import beside the ground; it may import
the library."""


@pytest.fixture(scope="module")
def imports():
    return read_imports(ROOT)


def test_no_file_and_no_room_imports_in_a_circle(imports) -> None:
    floors(imports)
    heights = room_floors(imports)
    assert heights["train/trainer"] > heights["train/engines"] > heights["loop"]


def test_the_library_never_imports_the_program(imports) -> None:
    """`python -m longctx` is a door of the program."""
    doors = {"longctx.__main__"}
    for name, others in imports.items():
        if house(name) == "library" and name not in doors:
            assert not [other for other in others if house(other) == "program"], name


def test_arrows_go_one_way(imports) -> None:
    found = {(start, end) for start, end in arrows(imports) if end not in GROUND}
    allowed = {(start, end) for start, ends in LIBRARY.items() for end in ends}
    for start, ends in PROGRAM.items():
        allowed |= {(f"train/{start}", f"train/{end}") for end in ends}
    across = {(start, end) for start, end in found if house_of(start) != house_of(end)}
    assert found - across <= allowed


def house_of(room: str) -> str:
    return room.partition("/")[0] if room.startswith("train") else "library"


def test_every_room_is_known(imports) -> None:
    program = {f"train/{name}" for name in PROGRAM}
    assert sizes(imports).keys() == {*LIBRARY, *program, *GROUND}


def test_no_room_of_the_library_is_too_large(imports) -> None:
    """The rooms that the path of a batch goes through have at most 15 files."""
    path = {"patching", "forwards", "runtime", "calls", "families", "mixers", "images", "any_model"}
    counted = {name: count - 1 for name, count in sizes(imports).items()}  # __init__.py
    assert {name: counted[name] for name in path if counted[name] > 15} == {}


DATA = ("reading", "images", "chat", "pack", "text")
"""The folders of longctx/train/data: each may import itself and those before it."""


def test_the_folders_of_data_go_one_way(imports) -> None:
    def floor(name: str) -> int:
        parts = name.split(".")
        return DATA.index(parts[3]) if len(parts) > 4 else len(DATA)

    inside = {name for name in imports if name.startswith("longctx.train.data.")}
    for name in inside:
        for other in imports[name] & inside:
            assert floor(other) <= floor(name), f"{name} imports {other}"


def test_a_circle_is_found() -> None:
    with pytest.raises(ValueError, match="a circle: a -> b -> a"):
        floors({"a": {"b"}, "b": {"a"}})


def test_only_engines_know_their_names() -> None:
    """Elsewhere an engine is asked, not recognised."""
    names = {"plain", "deepspeed", "fsdp", "Plain", "DeepSpeed", "FSDP2"}
    for path in (ROOT / "longctx").rglob("*.py"):
        if "engines" in path.parts or "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                words = {w.value for w in ast.walk(node) if isinstance(w, ast.Constant)}
                words |= {w.id for w in ast.walk(node) if isinstance(w, ast.Name)}
                assert not words & names, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {w.id for w in ast.walk(node.args[1]) if isinstance(w, ast.Name)}
                assert not asked & names, f"{path}:{node.lineno}"


def test_every_file_says_what_it_is() -> None:
    """`python scripts/tree.py` prints the first sentence of each docstring."""
    found = tree(ROOT)
    assert "  trainer/ " in found and "  cost/ " in found and found.count(".py") > 300


def test_a_change_reaches_one_house_or_both() -> None:
    assert houses([ROOT / "longctx/train/cli.py", ROOT / "README.md"], ROOT) == ["program"]
    assert houses([ROOT / "kernels/norm.py"], ROOT) == ["library", "program"]
    assert houses([ROOT / "README.md"], ROOT) == []


def test_a_change_is_reached_by_imports_and_by_names_in_strings(tmp_path) -> None:
    for name, text in {
        "longctx/__init__.py": "if 1:\n    from longctx.deep.patch import patch as patch",
        "longctx/train/__init__.py": "",
        "longctx/train/cli.py": "COMMANDS = {'go': 'longctx.deep.go'}",
        "longctx/deep/__init__.py": "",
        "longctx/deep/patch.py": "",
        "longctx/deep/go.py": "import longctx.deep.patch",
        "tests/helper.py": "from longctx import patch",
        "tests/test_near.py": "import helper",
        "tests/test_far.py": "from longctx.train import cli",
        "tests/test_other.py": "import longctx",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    reached = {"patch": ["near", "far"], "go": ["far"]}
    for name, tests in reached.items():
        changed = [tmp_path / f"longctx/deep/{name}.py"]
        assert nearest_tests(changed, tmp_path) == [f"tests/test_{test}.py" for test in tests]
