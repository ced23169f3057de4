"""The tree as docs/ and the rooms' docstrings describe it: arrows one way."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT
from rooms import arrows, floors, read_imports, room_floors, sizes
from tests_for import nearest_tests
from tree import PAGE, with_tree

GROUND = {"longctx", "options", "safety"}
"""What all rooms may import: the files beside the rooms, and two rooms."""
ALLOWED = {
    "commands": {"report", "run", "tasks", "output", "engines", "loading", "model", "data"},
    "report": {
        *("run", "plan", "output", "engines", "loading", "model", "attention", "data", "memory"),
        *("cost", "kernels"),
    },
    "run": {
        *("plan", "lora", "tasks", "output", "engines", "loading", "model", "head"),
        *("layer", "attention", "data", "memory", "cost", "kernels"),
    },
    "plan": {"lora", "loading", "engines", "model", "attention", "memory", "cost"},
    "lora": {"output", "loading", "model", "data", "memory"},
    "tasks": {"losses", "model", "head", "attention", "data"},
    "losses": {"model", "head"},
    "output": {"memory", "cost"},
    "engines": {"memory", "cost"},
    "loading": {"model"},
    "model": {"head", "layer", "attention", "memory", "cost", "kernels"},
    "head": {"layer", "cost", "kernels"},
    "layer": {"attention", "memory", "cost", "kernels"},
    "attention": {"kernels"},
    "data": set(),
    "memory": {"cost", "kernels"},
    "cost": set(),
    "kernels": set(),
}
"""Room -> rooms it may import beside those."""


@pytest.fixture(scope="module")
def imports():
    return read_imports(ROOT)


def test_no_file_and_no_room_imports_in_a_circle(imports) -> None:
    floors(imports)
    assert room_floors(imports)["run"] > room_floors(imports)["engines"]


def test_arrows_go_one_way(imports) -> None:
    found = {(start, end) for start, end in arrows(imports) if end not in GROUND}
    assert found <= {(start, end) for start, ends in ALLOWED.items() for end in ends}


def test_every_room_is_known(imports) -> None:
    assert sizes(imports).keys() == {*ALLOWED, *GROUND}


DATA = ("reading", "pictures", "chat", "pack", "text")
"""The folders of longctx/train/data: each may import itself and those before it."""


def test_the_folders_of_data_go_one_way(imports) -> None:
    def floor(name: str) -> int:
        parts = name.split(".")
        return DATA.index(parts[2]) if len(parts) > 3 else len(DATA)

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


def test_the_tree_on_the_page_is_that_of_the_docstrings() -> None:
    page = PAGE.read_text()
    assert page == with_tree(page, ROOT), "run python scripts/tree.py"


def test_a_change_is_reached_by_imports_and_by_names_in_strings(tmp_path) -> None:
    for name, text in {
        "longctx/__init__.py": "if 1:\n    from longctx.deep.patch import patch as patch",
        "longctx/train/cli.py": "COMMANDS = {'go': 'longctx.deep.go'}",
        "longctx/deep/__init__.py": "",
        "longctx/deep/patch.py": "",
        "longctx/deep/go.py": "import longctx.deep.patch",
        "tests/helper.py": "from longctx import patch",
        "tests/test_near.py": "import helper",
        "tests/test_far.py": "from longctx import cli",
        "tests/test_other.py": "import longctx",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    reached = {"patch": ["near", "far"], "go": ["far"]}
    for name, tests in reached.items():
        changed = [tmp_path / f"longctx/deep/{name}.py"]
        assert nearest_tests(changed, tmp_path) == [f"tests/test_{test}.py" for test in tests]
